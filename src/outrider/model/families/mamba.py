"""What families with Mamba-2 layers share when they read a config.json."""

from __future__ import annotations

from typing import Any

from outrider.model.families.reading import Sizes
from outrider.model.families.recurrent_names import RecurrentNames
from outrider.model.fields import Fields
from outrider.model.recurrent import Recurrent

__all__ = ["MAMBA", "mamba2"]

MAMBA = RecurrentNames(read=(("mamba.in_proj", (0, 1, 2, 3, 4)),))
_MAX_HEADS, _MAX_WIDTH = 2**16, 2**17


def mamba2(sizes: Sizes, inner: int | None = None, **options: Any) -> Recurrent:
    """The mixer of a config with fields `mamba_...`. `inner` is the width of all heads, where the config says it elsewhere."""
    fields = sizes.fields
    inner = fields.integer("mamba_expand", 1, 64, 2) * sizes.hidden if inner is None else inner
    heads = fields.integer("mamba_n_heads", 1, _MAX_HEADS, 128)
    groups = fields.integer("mamba_n_groups", 1, heads, 1)
    width = inner // heads
    if fields.word_or_integer("mamba_d_head", 0) not in (0, "auto", width) or inner % heads:
        raise fields.error(f"mamba_n_heads times mamba_d_head must be {inner}, got {heads} heads")
    bias = fields.boolean("mamba_proj_bias", False)
    base: dict[str, Any] = {
        "bias": bias, "conv_bias": fields.boolean("mamba_conv_bias", True), "out_bias": bias, "norm_eps": sizes.eps(),
        "step_limit": step_limit(fields),
    }  # fmt: skip
    kernel, states = fields.integer("mamba_d_conv", 2, 64, 4), fields.integer("mamba_d_state", 1, _MAX_WIDTH, 256)
    return checked(Recurrent("Mamba-2", heads, width, kernel, groups, states, norm_groups=groups, **base | options), sizes)


def checked(mixer: Recurrent, sizes: Sizes) -> Recurrent:
    """Refuse sizes that do not fit each other, and another activation."""
    activation = sizes.fields.word("hidden_act", "silu")
    if mixer.heads % mixer.key_heads:
        raise sizes.fields.error(f"groups of Mamba-2 must divide its heads, got {mixer.key_heads} and {mixer.heads}")
    if activation not in ("silu", "swish"):
        raise sizes.fields.error(f"hidden_act {activation!r} is not supported in recurrent layers; only silu is")
    return mixer


def step_limit(fields: Fields) -> tuple[float, float]:
    """`time_step_limit`, whose upper end JSON cannot say where there is none."""
    limits = fields.items("time_step_limit") or [0.0, float("inf")]
    numbers = [float(x) if isinstance(x, int | float) else float("inf") for x in limits]
    if len(numbers) != 2 or not 0.0 <= numbers[0] < numbers[1]:
        raise fields.error(f"time_step_limit must be two rising numbers, got {numbers}")
    return numbers[0], numbers[1]
