"""EAGLE heads on disk: EAGLE-3 as published (`midlayer.*` or `layers.0.*`), the speculators layout, and EAGLE-1.

A file that has no embedding or output matrix uses the target's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.checks import shown
from outrider.errors import InvalidParameter, ModelError, UnknownMethod
from outrider.heads.borrowed import Borrowed
from outrider.heads.eagle import EAGLE1, EAGLE3, EagleConfig, EagleHead, default_taps
from outrider.heads.stored import (
    Place,
    SaveOptions,
    Stored,
    check,
    collect,
    fill,
    read_config,
    read_stored,
    require_layout,
    write,
)
from outrider.model import Decoder, LoadOptions, ModelConfig
from outrider.model.fields import Fields
from outrider.model.load import DTYPES, names, served_dtype

__all__ = ["load_eagle", "save_eagle"]

_TAPS = "eagle_aux_hidden_state_layer_ids"


def load_eagle(directory: Path, target: Decoder, options: LoadOptions = LoadOptions()) -> EagleHead:  # noqa: B008 (frozen)
    """An EAGLE head for a target, ready for inference."""
    data, stored = read_config(directory), read_stored(directory)
    config = _eagle_config(data, stored, target.config, str(directory / "config.json"))
    name = served_dtype(options.dtype, config.shape.dtype)
    config, dtype = replace(config, shape=replace(config.shape, dtype=name)), DTYPES.get(name, torch.float32)
    prefix = "midlayer" if any(name.startswith("midlayer.") for name in stored) else "layers.0"
    places, borrowed = _eagle_names(config, prefix), Borrowed.of(target)
    with torch.device("meta"):  # takes no memory before the shapes are checked
        check(EagleHead(config, borrowed, dtype), stored, places, directory)
    head = EagleHead(config, borrowed, torch.float32 if options.widen else dtype)
    head.requires_grad_(False)
    _take_vocabulary(head, stored, directory)
    fill(head, stored, places, dtype)
    return head.eval()


def save_eagle(head: EagleHead, directory: Path, options: SaveOptions = SaveOptions()) -> None:  # noqa: B008 (frozen)
    """Write an EAGLE head as "eagle" or "speculators"."""
    require_layout(options.layout, ("eagle", "speculators"))
    config = head.config
    if options.layout == "speculators" and not config.wide:
        raise InvalidParameter("layout", "the speculators layout holds EAGLE-3 heads; write EAGLE-1 as 'eagle'")
    prefix = "midlayer" if config.wide and options.layout == "eagle" else "layers.0"
    tensors = collect(head, _eagle_names(config, prefix), options.int8)
    if options.standalone:
        tensors |= _borrowed_tensors(head)
    ids = head.vocab_ids
    if ids is None and options.standalone and config.wide:
        ids = torch.arange(config.shape.vocab)
    if ids is not None:
        tensors |= _vocabulary(ids.cpu(), config.shape.vocab)
    write(directory, tensors, _eagle_data(config, options))


def _eagle_names(config: EagleConfig, prefix: str) -> dict[str, Place]:
    """Stored name -> its place in the head."""
    all_rows, inner = slice(None), "model.layers.0."
    places = {
        f"{prefix}.{name.removeprefix(inner)}": Place(place.parameter.replace("layers.0.", "layer."), place.rows)
        for name, place in names(config.shape).items()
        if name.startswith(inner) and (config.wide or not name.endswith("input_layernorm.weight"))
    }
    places["fc.weight"] = Place("fc", all_rows)
    if config.wide:
        places |= {f"{prefix}.hidden_norm.weight": Place("layer.norm_hidden", all_rows), "norm.weight": Place("norm", all_rows)}
    optional = {
        "fc.bias": Place("fc_bias", all_rows) if config.fc_bias else None,
        "input_norm.weight": Place("input_norm", all_rows) if config.norm_before_fc else None,
        "embed_tokens.weight": Place("embedding", all_rows) if config.own_embedding else None,
        "lm_head.weight": Place("output", all_rows) if config.own_output else None,
    }
    places |= {name: place for name, place in optional.items() if place is not None}
    if config.fc_norm:
        places |= {f"fc_norm.{i}.weight": Place(f"fc_norms.{i}", all_rows) for i in range(len(config.taps))}
    return places


def _eagle_config(data: Mapping[str, Any], stored: Mapping[str, Stored], target: ModelConfig, where: str) -> EagleConfig:
    """The head's configuration, from the names of the stored tensors and the fields of config.json."""
    fields = Fields(data, where)
    nested = data.get("speculators_model_type")
    if nested not in (None, "eagle3"):
        raise UnknownMethod("speculators_model_type", str(nested), ["eagle3"])
    layer = dict(fields.mapping("transformer_layer_config") if nested else data)
    if layer.get("num_hidden_layers", 1) != 1:
        raise ModelError(f"{where}: {layer['num_hidden_layers']} layers; EAGLE heads of one layer are supported")
    llama = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "layer_types": None}
    shape = ModelConfig.from_hf(layer | llama, where)
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
        taps=_taps(fields, inner, target.layers) if wide else (target.layers,),
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


def _check_borrowed(config: EagleConfig, target: ModelConfig, fields: Fields) -> None:
    """Check that the width is the target's where the head uses tensors of the target."""
    narrow = not config.wide or not (config.own_embedding and config.own_output)
    if narrow and config.shape.hidden != target.hidden:
        raise fields.error(f"hidden_size must be the target's, got {config.shape.hidden} and {target.hidden}")
    if not config.own_output and config.outputs != target.vocab:
        raise fields.error(f"draft_vocab_size is {config.outputs} of {target.vocab} tokens, but no 'lm_head.weight' is stored")


def _eagle_data(config: EagleConfig, options: SaveOptions) -> dict[str, Any]:
    """config.json of a head."""
    s = config.shape
    layer: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": s.vocab,
        "hidden_size": s.hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "intermediate_size": s.ffn,
        "max_position_embeddings": s.context,
        "rms_norm_eps": s.norm_eps,
        "attention_bias": s.attention_bias,
        "hidden_act": "silu",
        "dtype": "bfloat16",
    }
    layer |= _rope_data(s)
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
        named = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "eagle_config": eagle_config,
            "num_aux_hidden_states": len(config.taps),
        }
        return layer | flags | named
    proposal = {"proposal_type": "greedy", "speculative_tokens": 5}
    return flags | {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": options.target, "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": layer,
        _TAPS: list(config.taps),
    }


def _rope_data(shape: ModelConfig) -> dict[str, Any]:
    rope = shape.rope
    if rope.kind == "default":
        return {"rope_theta": rope.theta}
    scaling: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind == "llama3":
        scaling |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
        scaling["original_max_position_embeddings"] = rope.original_context
    return {"rope_theta": rope.theta, "rope_scaling": scaling}


def _take_vocabulary(head: EagleHead, stored: dict[str, Stored], directory: Path) -> None:
    """Read d2t (offsets: target id = draft id + d2t[draft id]) and check t2d against it."""
    offsets, known = stored.pop("d2t", None), stored.pop("t2d", None)
    if head.vocab_ids is None:
        return
    if offsets is None:
        raise ModelError(f"{directory} drafts {head.config.outputs} of {head.config.shape.vocab} tokens but has no 'd2t'")
    if tuple(offsets.tensor.shape) != tuple(head.vocab_ids.shape):
        shape = tuple(offsets.tensor.shape)
        raise ModelError(f"{offsets.file}: 'd2t' has shape {shape}, config.json asks for ({head.config.outputs},)")
    ids = torch.arange(head.config.outputs) + offsets.tensor.long()
    if int(ids.min()) < 0 or int(ids.max()) >= head.config.shape.vocab or len(set(ids.tolist())) != len(ids):
        raise ModelError(f"{offsets.file}: 'd2t' gives ids outside the vocabulary of {head.config.shape.vocab}, or one twice")
    if known is not None and not torch.equal(known.tensor.nonzero().flatten(), ids.sort().values):
        raise ModelError(f"{known.file}: 't2d' marks other tokens than 'd2t'")
    head.vocab_ids.copy_(ids)


def _vocabulary(ids: Tensor, vocab: int) -> dict[str, Tensor]:
    known = torch.zeros(vocab, dtype=torch.bool)
    known[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": known}


def _borrowed_tensors(head: EagleHead) -> dict[str, Tensor]:
    """Embedding and, under EAGLE-3, output matrix, where they are the target's."""
    tensors: dict[str, Tensor] = {}
    if not head.config.own_embedding:
        tensors["embed_tokens.weight"] = head.embedding.detach().cpu().to(torch.bfloat16)
    if not head.config.own_output and head.config.wide:
        tensors["lm_head.weight"] = head.output.detach().cpu().to(torch.bfloat16).clone()
    return tensors
