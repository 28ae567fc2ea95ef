"""What the engine and drafters ask of a decoder, answered for a Transformers model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from outrider.core import Guarantee
from outrider.model.hf.attention import Form
from outrider.model.hf.view import base_of, layers_of
from outrider.model.spec import Attention, FeedForward, LayerSpec, ModelSpec, Norm

__all__ = ["Facade", "context_of", "describe"]

_CONTEXT = 4096  # of a model that names no limit


@dataclass(slots=True)
class Facade:
    """Stands where a `Decoder` stands. Heads borrow its embedding, output matrix and final norm."""

    spec: ModelSpec
    guarantee: Guarantee
    view: Any
    norm: Tensor
    norm_bias: Tensor | None
    source: None = None
    _final_norm: Any = field(default=None, repr=False)

    @property
    def embedding(self) -> Tensor:
        weight: Tensor = self.view.get_input_embeddings().weight
        return weight

    @property
    def output(self) -> Tensor:
        weight: Tensor = self.view.get_output_embeddings().weight
        return weight

    @property
    def reach(self) -> int:
        """Positions that a row may have."""
        return self.spec.context

    def rotary_start(self, _max_length: int) -> int:
        """There is one rotary table."""
        return 0

    def materialise(self, *_names: str) -> Facade:
        """All weights are in memory."""
        return self

    def close(self) -> None:
        """No files are open."""

    def last(self, x: Tensor, _ops: Any) -> Tensor:
        """Rows that left a layer, after the final norm."""
        with torch.inference_mode():
            rows: Tensor = self._final_norm(x.to(self.embedding.dtype)[None])[0]
        return rows


def describe(view: Any, forms: Sequence[Form], guarantee: Guarantee) -> Facade:
    """The facade of a view. Only what the engine and heads read is filled in; layers are run by their class."""
    config, base = view.config.get_text_config(decoder=True), base_of(view)
    embedding, output = view.get_input_embeddings().weight, view.get_output_embeddings().weight
    norm_module = _final_norm(base)
    weight, bias, kind, eps = _norm_of(norm_module, output.shape[1])
    form = max(forms, key=lambda one: one.kv_heads * one.width, default=Form(1, 16))
    attention = Attention(getattr(config, "num_attention_heads", form.kv_heads), form.kv_heads, form.width, form.width**-0.5)
    mlp = FeedForward(getattr(config, "intermediate_size", None) or 4 * embedding.shape[1])
    layers = tuple(LayerSpec(attention, mlp) for _ in layers_of(base))
    spec = ModelSpec(
        family="transformers",
        architecture=type(view).__name__,
        vocab=output.shape[0],
        hidden=output.shape[1],
        context=context_of(view),
        layers=layers,
        norm=Norm(kind, eps, bias is not None),
        tied=output.data_ptr() == embedding.data_ptr(),
        embedding_scale=_embedding_scale(view),
        logit_cap=getattr(config, "final_logit_softcapping", None),
        dtype=str(view.dtype).removeprefix("torch."),
        eos_ids=_eos(view),
    )
    return Facade(spec, guarantee, view, weight, bias, None, norm_module)


def context_of(model: Any) -> int:
    """The longest text that a model reads. Some classes write -1 for no limit."""
    longest = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or _CONTEXT
    return int(longest) if longest > 0 else _CONTEXT


def _eos(view: Any) -> tuple[int, ...]:
    ids: set[int] = set()
    for source in (view.config, view.generation_config):
        eos = getattr(source, "eos_token_id", None)
        ids |= set(eos if isinstance(eos, list) else () if eos is None else (eos,))
    return tuple(sorted(ids))


def _final_norm(base: Any) -> Any:
    """The module that follows the last layer."""
    layers = layers_of(base)
    holder = next(module for module in base.modules() if any(child is layers for child in module.children()))
    norms = [child for name, child in holder.named_children() if "norm" in name.lower() or name == "ln_f"]
    norms = [norm for norm in norms if not isinstance(norm, nn.ModuleList)]  # of the layers
    return norms[-1] if norms else nn.Identity()


@torch.inference_mode()
def _norm_of(norm: Any, width: int) -> tuple[Tensor, Tensor | None, str, float]:
    """Weight, bias, kind and epsilon of a norm, by what it does to two rows."""
    eps = float(getattr(norm, "eps", getattr(norm, "variance_epsilon", 1e-5)) or 1e-5)
    parameter = next(norm.parameters(), None)
    if parameter is None:
        return torch.ones(width), None, "rms", eps
    x = torch.randn(1, width, generator=torch.Generator().manual_seed(0)).to(parameter)
    out = norm(x)[0].float()
    bias = getattr(norm, "bias", None)
    row = x[0].float()
    centred = row - row.mean() if isinstance(norm, nn.LayerNorm) else row
    unit = centred * torch.rsqrt(centred.square().mean() + eps)
    weight = (out - (0.0 if bias is None else bias.float())) / unit
    kind = "layer" if isinstance(norm, nn.LayerNorm) else "rms"
    return weight.clone(), None if bias is None else bias.detach().float(), kind, eps


@torch.inference_mode()
def _embedding_scale(view: Any) -> float:
    """The factor of an embedding module that scales its rows; 1 where it does not."""
    module = view.get_input_embeddings()
    ids = torch.arange(min(4, module.weight.shape[0]), device=module.weight.device)
    rows, stored = module(ids).float(), module.weight[ids].float()
    return float((rows * stored).sum() / stored.square().sum().clamp_min(1e-12)) if rows.shape == stored.shape else 1.0
