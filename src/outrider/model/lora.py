"""LoRA adapters as PEFT stores them: adapter_config.json and adapter_model.safetensors, checked against their base model.

Everything is checked from the headers, before any weight is read: kinds of adapters that change more than the linears of the
layers are refused by name.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.checks import shown
from outrider.errors import ModelError
from outrider.model.decoder import Decoder
from outrider.model.families import Place, names_of, places_of
from outrider.model.fields import Fields, read_json
from outrider.model.files import FLOATS, opened
from outrider.model.weights import known_name
from outrider.ops.adapters import PARTS, LowRank

__all__ = ["LoraParts", "read_lora"]

LoraParts = Mapping[tuple[int, str], tuple[LowRank, ...]]  # by layer and product

_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"
# settings that change the model in another way than LoRA on linears does, and what they are
_REFUSED = {
    "use_dora": "DoRA (use_dora)",
    "modules_to_save": "whole modules beside the adapter (modules_to_save)",
    "lora_bias": "biases (lora_bias)",
    "trainable_token_indices": "trained token embeddings (trainable_token_indices)",
    "layer_replication": "replicated layers (layer_replication)",
    "target_parameters": "adapters of parameters that are no linears (target_parameters)",
    "alora_invocation_tokens": "activated LoRA (alora_invocation_tokens)",
    "use_qalora": "QALoRA (use_qalora)",
    "use_bdlora": "block-diagonal LoRA (use_bdlora)",
    "arrow_config": "Arrow routing (arrow_config)",
    "kasa_config": "KaSA (kasa_config)",
    "monteclora_config": "MonteCLoRA (monteclora_config)",
}
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga", "mica")  # ways to begin that change the base model's weights
_MERGE = "merge it into its base model with peft (merge_and_unload, then save_pretrained) and serve that folder"
_MAX_PATTERN, _MAX_REPEATS = 200, 3
_logger = logging.getLogger(__name__)


class _Pair(NamedTuple):
    """A and B of one module."""

    module: str
    place: Place
    rank: int


@dataclass(frozen=True, slots=True)
class _Scales:
    """The factor of each module: alpha / rank, or alpha / sqrt(rank) with rsLoRA, alpha by the first pattern that fits."""

    alpha: float
    patterns: Mapping[str, float]
    by_root: bool

    def of(self, module: str, rank: int) -> float:
        fitting = (alpha for pattern, alpha in self.patterns.items() if re.match(rf"(.*\.)?({pattern})$", module))
        return next(fitting, self.alpha) / (math.sqrt(rank) if self.by_root else rank)


def read_lora(directory: Path, decoder: Decoder, dtype: torch.dtype, max_rank: int, base: str = "") -> LoraParts:
    """What the adapter in a folder adds to the products of a decoder, in a dtype. `base` is the model's name or path."""
    scales = _read_config(directory, base)
    path = _weights_file(directory)
    with opened(path) as file:
        headers = {name: file.get_slice(name) for name in sorted(file.keys())}
        shapes = {name: tuple(header.get_shape()) for name, header in headers.items()}
        for name, header in headers.items():
            if header.get_dtype() not in FLOATS:
                raise ModelError(f"{path}: {name!r} is stored as {header.get_dtype()}; known: {', '.join(FLOATS.values())}")
        pairs = _pairs(path, shapes, decoder, max_rank)
        parts: dict[tuple[int, str], tuple[LowRank, ...]] = {}
        for prefix, pair in pairs.items():
            down, up = (_finite(path, prefix + ending, file.get_tensor(prefix + ending).to(dtype)) for ending in (_DOWN, _UP))
            _, layer, product = pair.place.parameter.split(".")
            low_rank = LowRank(pair.place.rows, down, _arranged(up, pair.place), scales.of(pair.module, pair.rank))
            parts[int(layer), product] = (*parts.get((int(layer), product), ()), low_rank)
    stored = {FLOATS[header.get_dtype()] for header in headers.values()}
    if wider := stored - {str(dtype).removeprefix("torch."), "bfloat16"}:
        _logger.info("%s is stored as %s, served as %s", directory, ", ".join(sorted(wider)), dtype)
    return parts


def _read_config(directory: Path, base: str) -> _Scales:
    path = directory / "adapter_config.json"
    data = read_json(path, "a LoRA adapter's folder holds adapter_config.json and adapter_model.safetensors")
    fields = Fields(data, str(path))
    if (kind := fields.word("peft_type", "?")).upper() != "LORA":
        raise fields.error(f"peft_type is {shown(kind)}; only LORA adapters are served")
    _refuse_others(fields, data)
    name = data.get("base_model_name_or_path")
    if isinstance(name, str) and name and base and Path(name).name.lower() != Path(base).name.lower():
        _logger.warning("%s was trained for %s and is served with %s", directory, shown(name), base)
    alphas = {_checked(pattern, fields): value for pattern, value in fields.mapping("alpha_pattern").items()}
    patterns = Fields(alphas, f"{path}: alpha_pattern")
    return _Scales(
        fields.real("lora_alpha", -1e6, 1e6, 8.0),
        {pattern: patterns.real(pattern, -1e6, 1e6, 8.0) for pattern in alphas},
        fields.boolean("use_rslora", False),
    )


def _refuse_others(fields: Fields, data: Mapping[str, Any]) -> None:
    for key, what in _REFUSED.items():
        if data.get(key):
            raise fields.error(f"{what} are not served: adapters are low-rank changes of linears; {_MERGE}")
    if (bias := data.get("bias") or "none") != "none":
        raise fields.error(f"bias is {shown(bias)}: trained biases are not served; {_MERGE}")
    begins = data.get("init_lora_weights")
    if isinstance(begins, str) and begins.lower().startswith(_CHANGES_BASE):
        raise fields.error(
            f"init_lora_weights is {shown(begins)}, which changes the base model's weights; convert the adapter to plain LoRA "
            "with peft (save_pretrained with path_initial_model_for_weight_conversion)"
        )


def _checked(pattern: str, fields: Fields) -> str:
    """A pattern of module names as PEFT has them, if it takes little time: an adapter may come from anybody."""
    repeats = len(re.findall(r"[*+?{]", pattern))
    if len(pattern) > _MAX_PATTERN or repeats > _MAX_REPEATS or re.search(r"\)[*+?{]|\\\d|\(\?", pattern):
        raise fields.error(f"alpha_pattern {shown(pattern)} is too elaborate a pattern; name the modules")
    try:
        re.compile(pattern)
    except re.error as error:
        raise fields.error(f"alpha_pattern {shown(pattern)} is no pattern: {error}") from None
    return pattern


def _weights_file(directory: Path) -> Path:
    path = directory / _WEIGHTS
    if path.exists():
        return path
    pickled = sorted([*directory.glob("adapter_model*.bin"), *directory.glob("*.pt"), *directory.glob("*.pth")])
    cure = f"`outrider convert {directory} OUT` writes its tensors as safetensors"
    why = f" ({pickled[0].name} is a pickle, which can run code; {cure})" if pickled else ""
    raise ModelError(f"{directory} holds no {_WEIGHTS}{why}")


def _pairs(path: Path, shapes: Mapping[str, tuple[int, ...]], decoder: Decoder, max_rank: int) -> dict[str, _Pair]:
    """The modules that have an adapter, by what begins their stored names. Every tensor has a place, or is refused."""
    places, pairs = places_of(decoder.spec), dict[str, _Pair]()
    for name in shapes:
        ending = next((ending for ending in (_DOWN, _UP) if name.endswith(ending)), None)
        if ending is None:
            raise ModelError(f"{path}: {name!r} is no low-rank matrix of a linear; {_MERGE}")
        prefix = name.removesuffix(ending)
        module = prefix.removeprefix(_PREFIX)
        place = places.get(known_name(f"{module}.weight", decoder.spec))
        if place is None or not place.parameter.startswith("layers."):
            raise ModelError(f"{path}: {name!r} {_no_place(module, place is not None, decoder)}")
        for other in (prefix + _DOWN, prefix + _UP):
            if other not in shapes:
                raise ModelError(f"{path} holds {name!r} but lacks {other!r}")
        _, layer, product = place.parameter.split(".", 2)
        if product.startswith("recurrent."):
            raise ModelError(f"{path}: {name!r} is an adapter of a recurrent layer, which is not served; {_MERGE}")
        if product not in PARTS or (product not in ("qkv", "out") and decoder.spec.layers[int(layer)].mlp.router is not None):
            raise ModelError(f"{path}: {name!r} is an adapter of experts or their router, which is not served; {_MERGE}")
        pairs[prefix] = _Pair(module, place, shapes[prefix + _DOWN][0] if shapes[prefix + _DOWN] else 0)
        _check_shapes(path, prefix, shapes, decoder.get_parameter(place.parameter), pairs[prefix], max_rank)
    if not pairs:
        raise ModelError(f"{path} holds no adapter: no tensor ends in {_DOWN}")
    return pairs


def _no_place(module: str, is_around: bool, decoder: Decoder) -> str:
    names = names_of(decoder.spec)
    if is_around or module.endswith((names.output, names.embedding.rpartition(".")[2])):
        return f"is an adapter of an embedding or output matrix, which is not served; {_MERGE}"
    return f"is of a module that {decoder.spec.architecture} does not have; the adapter is of another base model"


def _check_shapes(
    path: Path, prefix: str, shapes: Mapping[str, tuple[int, ...]], matrix: Tensor, pair: _Pair, max_rank: int
) -> None:
    stored = pair.place.shape(matrix)
    columns, inner = stored[::-1] if pair.place.transposed else stored
    if not 1 <= pair.rank <= max_rank:
        raise ModelError(
            f"{path}: {prefix + _DOWN!r} has rank {pair.rank}; ranks from 1 to {max_rank} are served (max_lora_rank)"
        )
    for name, expected in ((prefix + _DOWN, (pair.rank, inner)), (prefix + _UP, (columns, pair.rank))):
        if shapes[name] != expected:
            raise ModelError(
                f"{path}: {name!r} has shape {shapes[name]}, this model needs {expected}; the adapter is of another base model"
            )


def _finite(path: Path, name: str, matrix: Tensor) -> Tensor:
    if not matrix.isfinite().all():
        raise ModelError(f"{path}: {name!r} holds values that are not finite as {matrix.dtype}; the adapter is damaged")
    return matrix


def _arranged(up: Tensor, place: Place) -> Tensor:
    """B with its rows as the decoder holds those of the module's matrix."""
    return up if place.order is None else up[place.order()]
