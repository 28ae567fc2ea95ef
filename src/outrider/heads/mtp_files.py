"""MTP modules: in a folder in the speculators layout, or among the tensors of a model's own checkpoint.

Checkpoints hold them as one more layer (DeepSeek, GLM) or under `mtp.` (Qwen3-Next). Embedding and output matrix are the
target's, also where a checkpoint stores them a second time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from outrider.errors import ModelError, UnknownMethod
from outrider.heads.borrowed import Borrowed
from outrider.heads.eagle import MTP, EagleConfig, EagleHead
from outrider.heads.fit import TRAINED_FOR, require_target, target_record
from outrider.heads.stored import SaveOptions, Stored, StoredHead, collect, require_layout, speculators_data, write
from outrider.model import Decoder, LoadOptions, ModelSpec, compile_spec, read_spec
from outrider.model.families import Place, names_of, places_of
from outrider.model.families.llama import hf_config
from outrider.model.fields import Fields, read_json
from outrider.model.files import FLOATS
from outrider.model.load import DTYPES, served_dtype
from outrider.model.source import open_source

__all__ = ["drafts_by_mtp", "holds_mtp", "load_mtp", "save_mtp"]

_SHARED = ("embed_tokens.weight", "shared_head.head.weight")  # copies of the target's matrices
_SAVED_STEPS = 3


@dataclass(frozen=True, slots=True)
class _Layout:
    """Stored names of a module, without ".weight"; its decoder layer's begin with `block`."""

    block: str
    fc: str
    norm_embedding: str
    norm_feature: str
    norm: str

    @property
    def prefixes(self) -> tuple[str, ...]:
        """What all stored names begin with."""
        return self.block, self.fc, self.norm_embedding, self.norm_feature, self.norm

    def places(self, shape: ModelSpec, stored: Collection[str] = ()) -> dict[str, Place]:
        """Stored name -> its place in the head. What is `stored` decides between layouts of experts."""
        names = names_of(shape)
        inner = names.layer.format(0)
        held = [inner + name.removeprefix(self.block) for name in stored if name.startswith(self.block)]
        places = {
            self.block + name.removeprefix(inner): place._replace(parameter=place.parameter.replace("layers.0.", "layer."))
            for name, place in places_of(shape, held).items()
            if name.startswith(inner)
        }
        for part in ("norm_embedding", "norm_feature", "norm"):
            places[f"{getattr(self, part)}.weight"] = Place(part, add=names.norm_offset)
        return places | {f"{self.fc}.weight": Place("fc")}


_SPECULATORS = _Layout(
    "mtp_layers.0.", "mtp_layers.0.input_proj", "mtp_layers.0.token_layernorm", "mtp_layers.0.hidden_layernorm",
    "mtp_layers.0.final_layernorm",
)  # fmt: skip
_UNDER_MTP = _Layout("mtp.layers.0.", "mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")


class _Module(NamedTuple):
    """A stored module, how its tensors are named, and what its layer is."""

    stored: StoredHead
    layout: _Layout
    shape: ModelSpec


def load_mtp(directory: Path, target: Decoder, options: LoadOptions = LoadOptions()) -> EagleHead:  # noqa: B008 (frozen)
    """The MTP module in a folder, or the first one in the checkpoint of a model, ready for inference."""
    data = read_json(directory / "config.json", "an MTP module's folder holds config.json and *.safetensors")
    module = _from_folder(directory) if "speculators_model_type" in data else _from_checkpoint(directory)
    require_target(data, target, str(directory / "config.json"))
    fields = Fields(data, str(directory / "config.json"))
    _check(module.shape, target.spec, fields)
    name = served_dtype(options.dtype, module.shape.dtype)
    shape, dtype = replace(module.shape, dtype=name), DTYPES.get(name, torch.float32)
    config, borrowed = EagleConfig(shape, target.spec.hidden, (target.spec.depth,), MTP, norm_output=True), Borrowed.of(target)
    places = module.layout.places(shape, module.stored.tensors)
    return module.stored.fill(lambda dtype: EagleHead(config, borrowed, dtype), places, dtype, options.widen)


def holds_mtp(directory: Path) -> bool:
    """Whether the checkpoint of a model holds an MTP module."""
    with contextlib.suppress(ModelError):
        spec = read_spec(directory)
        source = open_source(directory, spec)
        source.close()
        return _layout_in(source.headers(), spec) is not None
    return False


def drafts_by_mtp(directory: Path) -> bool:
    """Whether the checkpoint of a model holds an MTP module that heads run."""
    return holds_mtp(directory) and not _unfit(_of_last_layer(read_spec(directory)))


def save_mtp(head: EagleHead, directory: Path, options: SaveOptions = SaveOptions("speculators")) -> None:  # noqa: B008 (frozen)
    """Write a module whose layer is like a Llama's or Qwen's in the speculators layout."""
    require_layout(options.layout, ("speculators",))
    shape = head.config.shape
    architecture = {"architectures": ["MTPDraftModel"], "num_nextn_predict_layers": 1}
    data: dict[str, Any] = architecture | speculators_data("mtp", hf_config(shape) | {"dtype": "bfloat16"}, options, _SAVED_STEPS)
    data |= {TRAINED_FOR: target_record(head.target, head.target_norm)}
    write(directory, collect(head, _SPECULATORS.places(shape), options.int8), data)


def _from_folder(directory: Path) -> _Module:
    """A module in the speculators layout."""
    stored = StoredHead.read(directory)
    kind = stored.data["speculators_model_type"]
    if kind != "mtp":
        raise UnknownMethod("speculators_model_type", str(kind), ["mtp"])
    layer, verifier = dict(stored.fields.mapping("transformer_layer_config")), stored.fields.nested("speculators_config")
    architectures = layer.get("architectures") or verifier.nested("verifier").items("architectures")
    one_layer = {"architectures": architectures, "num_hidden_layers": 1, "layer_types": None, "first_k_dense_replace": 0}
    dtype = {"dtype": stored.data["dtype"]} if "dtype" in stored.data else {}
    shape = compile_spec(layer | one_layer | dtype, f"{stored.directory / 'config.json'}: transformer_layer_config")
    return _Module(stored, _SPECULATORS, shape)


def _from_checkpoint(directory: Path) -> _Module:
    """The first module in a model's checkpoint."""
    spec = read_spec(directory)
    source = open_source(directory, spec)
    headers = source.headers()
    layout = _layout_in(headers, spec)
    if layout is None:
        raise ModelError(
            f"{directory} holds no MTP module: neither {_appended(spec).fc!r} nor {_UNDER_MTP.fc!r} is stored; "
            "pass the folder of one with --draft-model, or train one with `outrider train mtp`"
        )
    names = [name for name in headers if name.startswith(layout.prefixes) and not name.endswith(_SHARED)]
    floats = FLOATS.values()
    kinds = {name: getattr(torch, headers[name].dtype) if headers[name].dtype in floats else torch.float32 for name in names}
    tensors = {name: Stored(source.tensor(name, kind), headers[name].file) for name, kind in kinds.items()}
    return _Module(StoredHead(directory, {}, tensors), layout, _of_last_layer(spec))


def _of_last_layer(spec: ModelSpec) -> ModelSpec:
    """What a module in the checkpoint of a model is: a layer like the model's last with attention."""
    last = spec.kv_layers[-1]
    return replace(spec, layers=spec.layers[last : last + 1])


def _layout_in(names: Iterable[str], spec: ModelSpec) -> _Layout | None:
    held = set(names)
    return next((layout for layout in (_appended(spec), _UNDER_MTP) if f"{layout.fc}.weight" in held), None)


def _appended(spec: ModelSpec) -> _Layout:
    """The module as a layer after the last one."""
    layer = names_of(spec).layer.format(spec.depth)
    return _Layout(layer, f"{layer}eh_proj", f"{layer}enorm", f"{layer}hnorm", f"{layer}shared_head.norm")


def _check(shape: ModelSpec, target: ModelSpec, fields: Fields) -> None:
    """Refuse a module of another model, and layers that heads do not run."""
    for name, own, wanted in (("hidden_size", shape.hidden, target.hidden), ("vocab_size", shape.vocab, target.vocab)):
        if own != wanted:
            raise fields.error(f"{name} must be the target's, got {own} and {wanted}")
    if named := _unfit(shape):
        raise fields.error(f"{', '.join(named)} in the layer of an MTP module is not supported")


def _unfit(shape: ModelSpec) -> list[str]:
    """What the layer of a module has that heads do not run."""
    a = shape.attention
    unfit = {
        "no rotary": a.rope is None,
        "several rotary tables": a.rope is not None and a.rope.has_variants,
        "sliding window": a.window is not None,
        "attention soft cap": a.soft_cap is not None,
        "attention sinks": a.sinks,
        "layer norm": shape.norm.kind != "rms",
    }
    return [name for name, present in unfit.items() if present]
