"""Medusa heads on disk, with the keys of the published code or those of vLLM.

Files without output matrices use the target's; files with one per head keep them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from outrider.checks import shown
from outrider.heads.borrowed import Borrowed
from outrider.heads.fit import TRAINED_FOR, require_target, target_record
from outrider.heads.medusa import MedusaConfig, MedusaHeads
from outrider.heads.stored import SaveOptions, Stored, StoredHead, collect, require_layout, write
from outrider.model import Decoder, LoadOptions, ModelSpec
from outrider.model.families import Place
from outrider.model.fields import Fields
from outrider.model.load import DTYPES, served_dtype

__all__ = ["load_medusa", "save_medusa"]

_MAX_HEADS, _MAX_BLOCKS = 64, 16


def load_medusa(directory: Path, target: Decoder, options: LoadOptions = LoadOptions()) -> MedusaHeads:  # noqa: B008 (frozen)
    """Medusa heads for a target, ready for inference."""
    stored = StoredHead.read(directory)
    require_target(stored.data, target, str(directory / "config.json"))
    stored = replace(stored, tensors={name.removeprefix("medusa_heads."): value for name, value in stored.tensors.items()})
    vllm = any(name.startswith("blocks.") for name in stored.tensors)
    config = _medusa_config(stored.fields, stored.tensors, target.spec)
    name = served_dtype(options.dtype, stored.fields.word("dtype", stored.fields.word("torch_dtype", "bfloat16")))
    dtype = DTYPES.get(name, torch.bfloat16)  # the heads are small beside the output matrix: no int8
    biased = not vllm or any(name.endswith(".bias") for name in stored.tensors)
    places, borrowed = _medusa_names(config, vllm, biased), Borrowed.of(target, not config.own_output)
    return stored.fill(lambda dtype: MedusaHeads(config, borrowed, dtype), places, dtype, options.widen)


def _medusa_config(fields: Fields, stored: Mapping[str, Stored], target: ModelSpec) -> MedusaConfig:
    count = "medusa_num_heads" if "medusa_num_heads" in fields or "num_heads" not in fields else "num_heads"
    numbers = {name.removeprefix("blocks.").partition(".")[0] for name in stored}
    held = sum(str(head) in numbers for head in range(_MAX_HEADS))  # some files hold more heads than their config.json says
    heads = max(fields.integer(count, 1, _MAX_HEADS), held)
    layers = "medusa_num_layers" if "medusa_num_layers" in fields else "num_hidden_layers"
    blocks = fields.integer(layers, 1, _MAX_BLOCKS, 1)
    owns_output = any(name.startswith("lm_heads.") or name == f"0.{blocks}.weight" for name in stored)
    choices = _choices(fields, heads, target.vocab)
    return MedusaConfig(target.hidden, target.vocab, target.depth, heads, blocks, owns_output, choices)


def _choices(fields: Fields, heads: int, vocab: int) -> tuple[tuple[int, ...], ...]:
    """The static tree: paths of ranks, each below one before it."""
    paths: dict[tuple[int, ...], None] = {(): None}
    for path in fields.items("medusa_choices"):
        ranks = tuple(path) if isinstance(path, list) else ()
        valid = all(isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank < vocab for rank in ranks)
        if not valid or not 1 <= len(ranks) <= heads or ranks[:-1] not in paths or ranks in paths:
            rule = f"paths of 1 to {heads} ranks, each once and after the path it extends"
            raise fields.error(f"medusa_choices must be {rule}, got {shown(path)}")
        paths[ranks] = None
    return tuple(paths)[1:]


def save_medusa(heads: MedusaHeads, directory: Path, options: SaveOptions = SaveOptions(layout="medusa")) -> None:  # noqa: B008
    """Write Medusa heads as "medusa" or "vllm-medusa"."""
    require_layout(options.layout, ("medusa", "vllm-medusa"))
    config, vllm = heads.config, options.layout == "vllm-medusa"
    tensors = collect(heads, _medusa_names(config, vllm, True), options.int8)
    if options.standalone and not config.own_output:
        tensors |= {_output_name(config, vllm, h): heads.output.detach().cpu().clone() for h in range(config.heads)}
    data = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "medusa_num_heads": config.heads,
        "medusa_num_layers": config.blocks,
        "num_heads": config.heads,
        "num_hidden_layers": config.blocks,
        "hidden_size": config.hidden,
        "vocab_size": config.vocab,
        "medusa_fc_bias": True,
        "medusa_choices": [list(path) for path in config.choices],
        "base_model_name_or_path": options.target,
        "dtype": "bfloat16",
        TRAINED_FOR: target_record(heads.target, heads.target_norm),
    }
    write(directory, tensors, data)


def _medusa_names(config: MedusaConfig, vllm: bool, biased: bool) -> dict[str, Place]:
    """Stored name -> its place in the heads."""
    places: dict[str, Place] = {}
    for h in range(config.heads):
        for block in range(config.blocks):
            index, stem = h * config.blocks + block, f"blocks.{h}.layers.{block}" if vllm else f"{h}.{block}.linear"
            places[f"{stem}.weight"] = Place(f"weights.{index}")
            if biased:
                places[f"{stem}.bias"] = Place(f"biases.{index}")
        if config.own_output:
            places[_output_name(config, vllm, h)] = Place("output", slice(h, h + 1))
    return places


def _output_name(config: MedusaConfig, vllm: bool, head: int) -> str:
    return f"lm_heads.{head}.weight" if vllm else f"{head}.{config.blocks}.weight"
