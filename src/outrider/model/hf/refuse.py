"""Models that cannot be a target: what is wrong with them, and what to do."""

from __future__ import annotations

from typing import Any

from torch import nn

from outrider.errors import InvalidParameter, ModelError

__all__ = ["check_causal"]

_HOW = "load a decoder with AutoModelForCausalLM.from_pretrained"


def check_causal(model: Any, name: str = "model") -> None:
    """Fail unless this is a Transformers decoder whose weights are all in the memory of one device."""
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise InvalidParameter(name, f"must be a model that Transformers has loaded, got {type(model).__name__}; {_HOW}")
    kind = type(model).__name__
    if model.config.is_encoder_decoder:
        raise InvalidParameter(name, f"{kind} has an encoder; only decoders are served: {_HOW}")
    if not isinstance(model.get_output_embeddings(), nn.Module) or not model.can_generate():
        raise InvalidParameter(name, f"{kind} has no output matrix and cannot generate; {_HOW}")
    if missing := [key for key, tensor in model.named_parameters() if tensor.is_meta]:
        raise ModelError(
            f"{kind}: {len(missing)} weights are not in memory (meta device, or offloaded to disk), first {missing[0]!r}; "
            "load the model without offloading: device_map={'': 'cpu'} or {'': 0}"
        )
    places = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    places |= {str(tensor.device) for tensor in model.parameters()} if len(places) < 2 else set()
    if "disk" in places or len(_devices(places)) > 1:
        raise InvalidParameter(
            name,
            f"{kind} is spread over {', '.join(sorted(places))}; one device is served: "
            "load it with device_map={'': 'cpu'} or {'': 0}",
        )
    if not getattr(model.config, "use_cache", True) and not hasattr(model.config, "max_position_embeddings"):
        raise ModelError(f"{kind} keeps no KV cache, without which every token costs the whole text again; choose another model")


def _devices(places: set[str]) -> set[str]:
    """Device names with numbers as torch spells them: 0 and cuda:0 are one."""
    return {f"cuda:{place}" if place.isdigit() else "cuda:0" if place == "cuda" else place for place in places}
