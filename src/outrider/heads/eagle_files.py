"""EAGLE heads on disk: EAGLE-3 as published (`midlayer.*` or `layers.0.*`), the speculators layout, and EAGLE-1.

A file that has no embedding or output matrix uses the target's.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from outrider.checks import shown
from outrider.errors import InvalidParameter, ModelError, UnknownMethod
from outrider.heads.borrowed import Borrowed
from outrider.heads.eagle import EAGLE1, EAGLE3, EagleConfig, EagleHead, default_taps
from outrider.heads.fit import TRAINED_FOR, require_target, target_record
from outrider.heads.stored import (
    SaveOptions,
    StoredHead,
    collect,
    require_layout,
    speculators_data,
    stored_vocabulary,
    vocabulary_tensors,
    write,
)
from outrider.model import Decoder, LoadOptions, ModelSpec, compile_spec
from outrider.model.families import Place, places_of
from outrider.model.families.llama import hf_config
from outrider.model.fields import Fields
from outrider.model.load import DTYPES, served_dtype

__all__ = ["load_eagle", "save_eagle"]

_TAPS = "eagle_aux_hidden_state_layer_ids"


def load_eagle(directory: Path, target: Decoder, options: LoadOptions = LoadOptions()) -> EagleHead:  # noqa: B008 (frozen)
    """An EAGLE head for a target, ready for inference."""
    stored = StoredHead.read(directory)
    require_target(stored.data, target, str(directory / "config.json"))
    config = _eagle_config(stored, target.spec)
    name = served_dtype(options.dtype, config.shape.dtype)
    config, dtype = replace(config, shape=replace(config.shape, dtype=name)), DTYPES.get(name, torch.float32)
    prefix = "midlayer" if any(name.startswith("midlayer.") for name in stored.tensors) else "layers.0"
    borrowed = Borrowed.of(target, not config.own_output)
    head = stored.fill(lambda dtype: EagleHead(config, borrowed, dtype), _eagle_names(config, prefix), dtype, options.widen)
    if head.vocab_ids is not None:
        head.vocab_ids.copy_(stored_vocabulary(stored, config.shape.vocab, config.outputs))
    return head


def save_eagle(head: EagleHead, directory: Path, options: SaveOptions = SaveOptions()) -> None:  # noqa: B008 (frozen)
    """Write an EAGLE head as "eagle" or "speculators"."""
    require_layout(options.layout, ("eagle", "speculators"))
    config = head.config
    if options.layout == "speculators" and not config.wide:
        raise InvalidParameter("layout", "the speculators layout holds EAGLE-3 heads; write EAGLE-1 as 'eagle'")
    prefix = "midlayer" if config.wide and options.layout == "eagle" else "layers.0"
    tensors = collect(head, _eagle_names(config, prefix), options.int8)
    if options.standalone and not config.own_embedding:
        tensors["embed_tokens.weight"] = head.embedding.detach().cpu().to(torch.bfloat16)
    if options.standalone and not config.own_output and config.wide:
        tensors["lm_head.weight"] = head.output.detach().cpu().to(torch.bfloat16).clone()
    ids = head.vocab_ids
    if ids is None and options.standalone and config.wide:
        ids = torch.arange(config.shape.vocab)
    if ids is not None:
        tensors |= vocabulary_tensors(ids, config.shape.vocab)
    write(directory, tensors, _eagle_data(config, options) | {TRAINED_FOR: target_record(head.target, head.target_norm)})


def _eagle_names(config: EagleConfig, prefix: str) -> dict[str, Place]:
    """Stored name -> its place in the head."""
    inner = "model.layers.0."
    places = {
        f"{prefix}.{name.removeprefix(inner)}": Place(place.parameter.replace("layers.0.", "layer."), place.rows)
        for name, place in places_of(config.shape).items()
        if name.startswith(inner) and (config.wide or not name.endswith("input_layernorm.weight"))
    }
    others = {
        "fc.weight": ("fc", True),
        "fc.bias": ("fc_bias", config.fc_bias),
        f"{prefix}.hidden_norm.weight": ("layer.norm_hidden", config.wide),
        "norm.weight": ("norm", config.wide),
        "input_norm.weight": ("input_norm", config.norm_before_fc),
        "embed_tokens.weight": ("embedding", config.own_embedding),
        "lm_head.weight": ("output", config.own_output),
    } | {f"fc_norm.{i}.weight": (f"fc_norms.{i}", config.fc_norm) for i in range(len(config.taps))}
    return places | {name: Place(parameter) for name, (parameter, is_stored) in others.items() if is_stored}


def _eagle_config(head: StoredHead, target: ModelSpec) -> EagleConfig:
    """The head's configuration, from the names of the stored tensors and the fields of config.json."""
    data, stored, fields, where = head.data, head.tensors, head.fields, str(head.directory / "config.json")
    nested = data.get("speculators_model_type")
    if nested not in (None, "eagle3"):
        raise UnknownMethod("speculators_model_type", str(nested), ["eagle3"])
    layer = dict(fields.mapping("transformer_layer_config") if nested else data)
    if layer.get("num_hidden_layers", 1) != 1:
        raise fields.error(f"{layer['num_hidden_layers']} layers; EAGLE heads of one layer are supported")
    llama = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "layer_types": None}
    shape = compile_spec(layer | llama, where)
    if any(rope.has_variants for rope in shape.ropes):
        raise fields.error(f"rotary scaling {shape.ropes[0].kind!r} is not supported in an EAGLE head")
    if shape.vocab != target.vocab:
        raise fields.error(f"vocab_size must be the target's, got {shape.vocab} and {target.vocab}")
    inner = fields.nested("eagle_config")
    wide = any(name.endswith("hidden_norm.weight") for name in stored)
    if nested and "norm_before_residual" not in data:
        raise ModelError(f"{where} lacks 'norm_before_residual', on which engines differ; add it as the head was trained")
    outputs = fields.integer("draft_vocab_size", 1, shape.vocab, shape.vocab)
    config = EagleConfig(
        shape=shape,
        target_hidden=fields.integer("target_hidden_size", target.hidden, target.hidden, target.hidden),
        taps=_taps(fields, inner, target.depth) if wide else (target.depth,),
        form=EAGLE3 if wide else EAGLE1,
        draft_vocab=outputs if "d2t" in stored or outputs != shape.vocab else None,
        own_embedding="embed_tokens.weight" in stored,
        own_output="lm_head.weight" in stored,
        fc_bias="fc.bias" in stored,
        fc_norm=fields.boolean("fc_norm", False) or "fc_norm.0.weight" in stored,
        norm_before_fc=fields.boolean("norm_before_fc", False) or inner.boolean("norm_before_fc", False),
        norm_output=fields.boolean("norm_output", False),
        norm_before_residual=fields.boolean("norm_before_residual", False),
    )
    _check_borrowed(config, target, fields)
    return config


def _taps(fields: Fields, inner: Fields, layers: int) -> tuple[int, ...]:
    """The target layers whose input rows the head reads."""
    taps = fields.ids(_TAPS) or inner.ids(_TAPS) or default_taps(layers)
    if any(not 0 <= tap <= layers for tap in taps):
        raise fields.error(f"{_TAPS} must name layers in [0, {layers}], got {shown(taps)}")
    return taps


def _check_borrowed(config: EagleConfig, target: ModelSpec, fields: Fields) -> None:
    """Check that the width is the target's where the head uses tensors of the target."""
    narrow = not config.wide or not (config.own_embedding and config.own_output)
    if narrow and config.shape.hidden != target.hidden:
        raise fields.error(f"hidden_size must be the target's, got {config.shape.hidden} and {target.hidden}")
    if not config.own_output and config.outputs != target.vocab:
        raise fields.error(f"draft_vocab_size is {config.outputs} of {target.vocab} tokens, but no 'lm_head.weight' is stored")


def _eagle_data(config: EagleConfig, options: SaveOptions) -> dict[str, Any]:
    """config.json of a head."""
    unused = ("tie_word_embeddings", "eos_token_id")
    layer = {name: value for name, value in hf_config(config.shape).items() if name not in unused} | {"dtype": "bfloat16"}
    flags = {
        "draft_vocab_size": config.outputs,
        "target_hidden_size": config.target_hidden,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
    }
    if not config.wide:
        return layer | {"bias": config.fc_bias}
    if options.layout == "eagle":
        eagle_config = {_TAPS: list(config.taps), "use_aux_hidden_state": True, "norm_before_fc": config.norm_before_fc}
        aux = {"eagle_config": eagle_config, "num_aux_hidden_states": len(config.taps)}
        return layer | flags | aux | {"architectures": ["LlamaForCausalLMEagle3"]}
    speculators = speculators_data("eagle3", layer, options, 5)
    return flags | speculators | {"architectures": ["Eagle3Speculator"], _TAPS: list(config.taps)}
