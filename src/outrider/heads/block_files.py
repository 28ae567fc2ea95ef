"""Block drafters on disk: DFlash, DFlash 2 and DSpark as published, the speculators layout, and Transformers' assistants.

A file that has no embedding or output matrix uses the target's. Published DFlash files number taps by the layer that they
leave, the speculators layout by the layer that they enter.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from outrider.checks import shown
from outrider.errors import ModelError, UnknownMethod
from outrider.heads.block import BlockConfig, BlockHead, Convolution, Selector
from outrider.heads.borrowed import Borrowed
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

__all__ = ["load_block", "save_block"]

_KINDS = ("dflash", "dspark", "dflash2")  # of the speculators layout
_WITHIN = "dflash_config"
_ASSISTANT = "encoder."  # begins names of Transformers' assistants


def load_block(directory: Path, target: Decoder, options: LoadOptions = LoadOptions()) -> BlockHead:  # noqa: B008 (frozen)
    """A block drafter for a target, ready for inference."""
    stored = StoredHead.read(directory)
    require_target(stored.data, target, str(directory / "config.json"))
    config = _Reader(stored, target.spec).config()
    name = served_dtype(options.dtype, config.shape.dtype)
    config, dtype = replace(config, shape=replace(config.shape, dtype=name)), DTYPES.get(name, torch.float32)
    borrowed = Borrowed.of(target, not config.own_output)
    head = stored.fill(
        lambda dtype: BlockHead(config, borrowed, dtype), _names(config, _ASSISTANT + "fc.weight" in stored.tensors), dtype,
        options.widen,
    )  # fmt: skip
    if head.vocab_ids is not None:
        head.vocab_ids.copy_(stored_vocabulary(stored, config.shape.vocab, config.outputs))
    return head


def save_block(head: BlockHead, directory: Path, options: SaveOptions = SaveOptions("dflash")) -> None:  # noqa: B008 (frozen)
    """Write a block drafter as "dflash" or "speculators"."""
    require_layout(options.layout, ("dflash", "speculators"))
    config = head.config
    tensors = collect(head, _names(config, False), options.int8)
    if options.standalone and not config.own_embedding:
        tensors["embed_tokens.weight"] = head.embedding.detach().cpu().to(torch.bfloat16)
    if options.standalone and not config.own_output:
        tensors["lm_head.weight"] = head.output.detach().cpu().to(torch.bfloat16).clone()
    if head.vocab_ids is not None:
        tensors |= vocabulary_tensors(head.vocab_ids, config.shape.vocab)
    data = _speculators_data(config, options) if options.layout == "speculators" else _dflash_data(config)
    write(directory, tensors, data | {TRAINED_FOR: target_record(head.target, head.target_norm)})


def _names(config: BlockConfig, of_assistant: bool) -> dict[str, Place]:
    """Stored name -> its place in the head."""
    places = {
        name.removeprefix("model."): place for name, place in places_of(config.shape).items() if name.startswith("model.layers.")
    }
    rank, pairs = config.selector, {}
    if rank is not None:
        codes = {"predecessor_codebook": "left", "successor_codebook": "right", "hidden_projection.weight": "projection"}
        pairs = {f"candidate_selector.{stored}": f"pairs.{ours}" for stored, ours in codes.items()}
    elif config.markov:
        pairs = {f"markov_head.markov_w{i}.weight": f"pairs.{ours}" for i, ours in enumerate(("left", "right"), 1)}
    parts = enumerate(("attention_conv", "mlp_conv") if config.convolution else ())
    around = {
        f"layers.{layer}.{part}.{stored}": f"convolutions.{2 * layer + i}.{ours}"
        for i, part in parts
        for layer in range(config.shape.depth)
        for stored, ours in (("base_kernel", "base"), ("kernel_projection.weight", "projection"))
    }
    confidence = {f"confidence_head.proj.{name}": f"confidence.{name}" for name in ("weight", "bias") if config.confidence}
    matrices = {"embed_tokens.weight": config.own_embedding, "lm_head.weight": config.own_output}
    others = {
        f"{_ASSISTANT if of_assistant else ''}fc.weight": "fc",
        f"{_ASSISTANT}output_norm_enc.weight" if of_assistant else "hidden_norm.weight": "hidden_norm",
        "norm.weight": "norm",
    } | {
        name: name.partition("_")[0].replace("embed", "embedding").replace("lm", "output")
        for name, own in matrices.items()
        if own
    }
    return places | {name: Place(parameter) for name, parameter in (others | pairs | around | confidence).items()}


class _Reader:
    """Reads a head's configuration from the fields of its config.json and the names of its tensors."""

    def __init__(self, head: StoredHead, target: ModelSpec) -> None:
        self.head, self.target = head, target
        self.fields, self.within = head.fields, head.fields.nested(_WITHIN)
        self.kind = head.data.get("speculators_model_type")
        if self.kind is not None and self.kind not in _KINDS:
            raise UnknownMethod("speculators_model_type", str(self.kind), list(_KINDS))

    def config(self) -> BlockConfig:
        shape, names = self._shape(), self.head.tensors
        outputs = self.fields.integer("draft_vocab_size", 1, shape.vocab, shape.vocab)
        config = BlockConfig(
            shape=shape,
            target_hidden=self.fields.integer("target_hidden_size", self.target.hidden, self.target.hidden, self.target.hidden),
            taps=self._taps(),
            block=self._integer("block_size", 2, 64),
            mask=self._integer("mask_token_id", 0, shape.vocab - 1),
            causal=self.fields.boolean("causal", False) or self.within.boolean("causal", False),
            from_anchor=self._from_anchor(),
            markov=self._markov(),
            confidence="confidence_head.proj.weight" in names,
            confidence_of_pair=self.fields.boolean("confidence_head_with_markov", False),
            convolution=self._convolution(),
            selector=self._selector(),
            draft_vocab=outputs if "d2t" in names or outputs != shape.vocab else None,
            own_embedding="embed_tokens.weight" in names,
            own_output="lm_head.weight" in names,
        )
        self._check(config)
        return config

    def _shape(self) -> ModelSpec:
        """The layers: those of Qwen3, or of Llama where queries and keys have no norms."""
        fields, where = self.fields, str(self.head.directory / "config.json")
        layer = dict(fields.mapping("transformer_layer_config") if self.kind else self.head.data)
        normed = any(name.endswith("q_norm.weight") for name in self.head.tensors)
        family = {"architectures": ["Qwen3ForCausalLM" if normed else "LlamaForCausalLM"], "dtype": self.head.data.get("dtype")}
        if (types := layer.pop("layer_types", None)) and "sliding_attention" in types:
            raise fields.error("layers with sliding windows are not supported in a block drafter yet")
        layer.pop("use_sliding_window", None)
        layer.setdefault("vocab_size", self.target.vocab)
        layer.setdefault("max_position_embeddings", self.target.context)
        shape = compile_spec({name: value for name, value in (layer | family).items() if value is not None}, where)
        if any(rope.has_variants for rope in shape.ropes):
            raise fields.error(f"rotary scaling {shape.ropes[0].kind!r} is not supported in a block drafter")
        if shape.vocab != self.target.vocab:
            raise fields.error(f"vocab_size must be the target's, got {shape.vocab} and {self.target.vocab}")
        return shape

    def _taps(self) -> tuple[int, ...]:
        """The target layers whose input rows the head reads."""
        entered = self.fields.ids("aux_hidden_state_layer_ids")
        left = self.within.ids("target_layer_ids") or self.fields.ids("target_layer_ids")
        taps = entered or tuple(layer + 1 for layer in left)
        if not taps or any(not 0 <= tap <= self.target.depth for tap in taps):
            raise self.fields.error(
                f"the layers that it reads, {shown(list(taps))}, must be named and within {self.target.depth}"
            )
        return taps

    def _integer(self, name: str, low: int, high: int) -> int:
        """A field of `dflash_config`, or beside it."""
        fields: Fields = self.within if name in self.within else self.fields
        if name not in fields:
            raise self.fields.error(f"{name!r} is missing, in it and in {_WITHIN!r}")
        return fields.integer(name, low, high)

    def _from_anchor(self) -> bool:
        default = "markov_head.markov_w1.weight" in self.head.tensors
        return self.fields.boolean("sample_from_anchor", self.within.boolean("sample_from_anchor", default))

    def _markov(self) -> int:
        kind = self.fields.word("markov_head_type", "vanilla")
        stored = self.head.tensors.get("markov_head.markov_w1.weight")
        if stored is None:
            return 0
        if kind != "vanilla":
            raise self.fields.error(f"markov_head_type {kind!r} is not supported; 'vanilla' is")
        return int(stored.tensor.shape[-1])

    def _convolution(self) -> Convolution | None:
        if not any(".attention_conv." in name for name in self.head.tensors):
            return None
        return Convolution(self._integer("conv_kernel_size", 1, 16), self._integer("conv_group_size", 1, 1024))

    def _selector(self) -> Selector | None:
        if "candidate_selector.predecessor_codebook" not in self.head.tensors:
            return None
        return Selector(self._integer("selector_rank", 1, 4096), self._integer("selector_top_k", 1, 64))

    def _check(self, config: BlockConfig) -> None:
        """Check that the widths are the target's where the head uses tensors of the target, and that parts fit each other."""
        if not (config.own_embedding and config.own_output) and config.shape.hidden != self.target.hidden:
            raise self.fields.error(f"hidden_size must be the target's, got {config.shape.hidden} and {self.target.hidden}")
        if not config.own_output and config.outputs != self.target.vocab:
            raise self.fields.error(
                f"it drafts {config.outputs} of {self.target.vocab} tokens, but no 'lm_head.weight' is stored"
            )
        if config.convolution and config.shape.hidden % config.convolution.group:
            raise self.fields.error(f"conv_group_size {config.convolution.group} does not divide {config.shape.hidden}")
        if config.confidence_of_pair and not config.markov:
            raise ModelError(f"{self.head.directory}: its confidence head reads pair scores, and it has none")


def _dflash_data(config: BlockConfig) -> dict[str, Any]:
    """config.json as DFlash, DFlash 2 and DSpark are published."""
    name = "DFlash2DraftModel" if config.selector else "Qwen3DSparkModel" if config.markov else "DFlashDraftModel"
    within: dict[str, Any] = {
        "mask_token_id": config.mask, "target_layer_ids": [tap - 1 for tap in config.taps], "causal": config.causal,
    }  # fmt: skip
    return _layer_data(config) | _extra_data(config) | {"architectures": [name], _WITHIN: within | _parts_data(config)}


def _speculators_data(config: BlockConfig, options: SaveOptions) -> dict[str, Any]:
    """config.json as the speculators package writes it."""
    kind = "dflash2" if config.selector else "dspark" if config.markov else "dflash"
    architecture = {"dflash2": "DFlash2DraftModel", "dspark": "DSparkSpeculator", "dflash": "DFlashSpeculator"}[kind]
    data = speculators_data(kind, hf_config(config.shape), options, config.guesses)
    own = {"mask_token_id": config.mask, "aux_hidden_state_layer_ids": list(config.taps), "causal": config.causal}
    layer = {"transformer_layer_config": _layer_data(config)}
    return _extra_data(config) | _parts_data(config) | data | own | layer | {"architectures": [architecture]}


def _layer_data(config: BlockConfig) -> dict[str, Any]:
    unused = ("tie_word_embeddings", "eos_token_id", "architectures")
    return {name: value for name, value in hf_config(config.shape).items() if name not in unused} | {"dtype": "bfloat16"}


def _extra_data(config: BlockConfig) -> dict[str, Any]:
    data: dict[str, Any] = {
        "block_size": config.block, "draft_vocab_size": config.outputs, "sample_from_anchor": config.from_anchor,
    }  # fmt: skip
    if config.markov and not config.selector:
        data |= {"markov_rank": config.markov, "markov_head_type": "vanilla", "enable_confidence_head": config.confidence}
        data |= {"confidence_head_with_markov": config.confidence_of_pair}
    return data


def _parts_data(config: BlockConfig) -> dict[str, Any]:
    convolution, selector = config.convolution, config.selector
    data = {} if convolution is None else {"conv_kernel_size": convolution.taps, "conv_group_size": convolution.group}
    return data if selector is None else data | {"selector_rank": selector.rank, "selector_top_k": selector.candidates}
