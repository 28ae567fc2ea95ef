"""Medusa heads on disk, with the keys of the published code or those of vLLM.

Files without output matrices use the target's; files with one per head keep them.
"""

from __future__ import annotations

from pathlib import Path

import torch

from outrider.errors import ModelError
from outrider.heads.borrowed import Borrowed
from outrider.heads.medusa import MedusaConfig, MedusaHeads
from outrider.heads.stored import Place, SaveOptions, collect, fill, read_config, read_stored, require_layout, write
from outrider.model import Decoder, LoadOptions
from outrider.model.load import DTYPES, served_dtype

__all__ = ["load_medusa", "save_medusa"]


def load_medusa(directory: Path, target: Decoder, options: LoadOptions = LoadOptions()) -> MedusaHeads:  # noqa: B008 (frozen)
    """Medusa heads for a target, ready for inference."""
    data = read_config(directory)
    stored = {name.removeprefix("medusa_heads."): value for name, value in read_stored(directory).items()}
    vllm = any(name.startswith("blocks.") for name in stored)
    heads = int(data.get("medusa_num_heads") or data.get("num_heads") or 0)
    blocks = int(data.get("medusa_num_layers") or data.get("num_hidden_layers") or 1)
    if heads < 1:
        raise ModelError(f"{directory / 'config.json'} lacks the field 'medusa_num_heads'")
    own = any(name.startswith("lm_heads.") or name == f"0.{blocks}.weight" for name in stored)
    choices = tuple(tuple(int(rank) for rank in path) for path in data.get("medusa_choices") or ())
    config = MedusaConfig(target.config.hidden, target.config.vocab, target.config.layers, heads, blocks, own, choices)
    name = served_dtype(options.dtype, str(data.get("dtype") or data.get("torch_dtype") or "bfloat16"))
    dtype = DTYPES.get(name, torch.bfloat16)  # the heads are small beside the output matrix: no int8
    module = MedusaHeads(config, Borrowed.of(target), torch.float32 if options.widen else dtype)
    module.requires_grad_(False)
    biased = not vllm or any(name.endswith(".bias") for name in stored)
    fill(module, stored, _medusa_names(config, vllm, biased), dtype, directory)
    return module.eval()


def save_medusa(heads: MedusaHeads, directory: Path, options: SaveOptions = SaveOptions(layout="medusa")) -> None:  # noqa: B008
    """Write Medusa heads as "medusa" or "vllm-medusa"."""
    require_layout(options.layout, ("medusa", "vllm-medusa"))
    config, vllm = heads.config, options.layout == "vllm-medusa"
    tensors = collect(heads, _medusa_names(config, vllm, True), options.int8)
    if options.standalone and not config.own_output:
        key = "lm_heads.{}.weight" if vllm else "{}." + f"{config.blocks}.weight"
        tensors |= {key.format(h): heads.output.detach().cpu().clone() for h in range(config.heads)}
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
    }
    write(directory, tensors, data)


def _medusa_names(config: MedusaConfig, vllm: bool, biased: bool) -> dict[str, Place]:
    places: dict[str, Place] = {}
    for h in range(config.heads):
        for block in range(config.blocks):
            index, stem = h * config.blocks + block, f"blocks.{h}.layers.{block}" if vllm else f"{h}.{block}.linear"
            places[f"{stem}.weight"] = Place(f"weights.{index}", slice(None))
            if biased:
                places[f"{stem}.bias"] = Place(f"biases.{index}", slice(None))
        if config.own_output:
            key = f"lm_heads.{h}.weight" if vllm else f"{h}.{config.blocks}.weight"
            places[key] = Place("output", slice(h, h + 1))
    return places
