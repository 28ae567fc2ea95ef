"""Whether a head fits its target: what its files record of the model it was trained for, and the tokenizer beside them.

The record holds the depth, the widths and a digest of the last norm. Vectors keep their values when matrices are quantised, so a
head goes on fitting a model that is served in fewer bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.checks import shown
from outrider.errors import ModelError
from outrider.model import Decoder, ModelSpec
from outrider.text import Tokenizer

__all__ = ["TRAINED_FOR", "require_same_tokenizer", "require_target", "target_record"]

_ADDED = 0.01  # of the tokens may differ: control tokens that were added later
TRAINED_FOR = "trained_for"  # the field of config.json


def target_record(spec: ModelSpec, norm: Tensor) -> dict[str, Any]:
    """What a head records of its target; `norm` is the weight of the last norm, empty where the head knows of none."""
    sizes = {"num_hidden_layers": spec.depth, "hidden_size": spec.hidden, "vocab_size": spec.vocab}
    if not norm.numel():
        return sizes
    bits = norm.detach().cpu().to(torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes()
    return sizes | {"norm_sha256": hashlib.sha256(bits).hexdigest()[:16]}


def require_target(data: Mapping[str, Any], target: Decoder, where: str) -> None:
    """Refuse a head whose config.json records another target; most published ones record none."""
    recorded = data.get(TRAINED_FOR)
    if recorded is None:
        return
    if not isinstance(recorded, Mapping):
        raise ModelError(f"{where}: {TRAINED_FOR} must be an object, got {shown(recorded)}")
    expected = target_record(target.spec, target.norm)
    differing = {name: value for name, value in expected.items() if name in recorded and recorded[name] != value}
    if differing:
        name = next(iter(differing))
        what = "its last norm has other values" if name == "norm_sha256" else f"{name} is {differing[name]}"
        raise ModelError(
            f"{where}: the head was trained for another model ({shown(recorded.get(name))} is recorded as {name}; of this target "
            f"{what}); pass a head for this target, or train one with `outrider train`"
        )


def require_same_tokenizer(directory: Path, tokenizer: Tokenizer | None) -> None:
    """Refuse a head in whose folder lies another tokenizer than the target's; most folders hold none."""
    own = None if tokenizer is None else Tokenizer.load(directory)
    if tokenizer is None or own is None:
        return
    ours, theirs = tokenizer.table(), own.table()
    differing = sorted(token for token, i in theirs.items() if ours.get(token) != i)
    if len(differing) > _ADDED * len(theirs):
        token = differing[0]
        raise ModelError(
            f"{directory} was made for another tokenizer: {len(differing)} of its {len(theirs)} tokens are not the target's "
            f"(token {shown(token)} is {theirs[token]} there and {ours.get(token, 'unknown')} in the target); pass a head for "
            "this target"
        )
