"""An exit adapter: makes of the rows that leave one of the target's layers what its last norm and output matrix expect.

x + W_down (silu(W_gate n) * W_up n) with n = norm(x), row by row, so it needs no memory of the text. Kangaroo's adapter
(2404.18911) is an attention; a row that leaves several layers has read the text already.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from outrider.heads.borrowed import Borrowed
from outrider.heads.fit import TRAINED_FOR, require_target, target_record
from outrider.heads.stored import SaveOptions, StoredHead, collect, write
from outrider.model import Decoder, LoadOptions
from outrider.model.decoder import finished_logits, normed
from outrider.model.families import Place
from outrider.model.load import DTYPES, served_dtype
from outrider.ops import Ops

__all__ = ["ExitAdapter", "ExitConfig", "load_exit", "save_exit"]

_KIND = "early_exit"
_PLACES = {
    "norm.weight": Place("norm"),
    "gate_up.weight": Place("gate_up"),
    "down.weight": Place("down"),
}


@dataclass(frozen=True, slots=True)
class ExitConfig:
    """Where the adapter reads, and how large it is."""

    layer: int  # it reads the rows that leave this many layers
    hidden: int
    ffn: int
    agreement: float = 0.0  # of its choices with the target's on held-out text; 0: not measured


class ExitAdapter(nn.Module):
    """The adapter and, borrowed, the target's last norm and output matrix."""

    output: Tensor
    target_norm: Tensor
    target_norm_bias: Tensor | None

    def __init__(self, config: ExitConfig, borrowed: Borrowed, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = config
        self.norm = nn.Parameter(torch.ones(config.hidden))
        self.gate_up = nn.Parameter(torch.empty(2 * config.ffn, config.hidden, dtype=dtype))
        self.down = nn.Parameter(torch.zeros(config.hidden, config.ffn, dtype=dtype))
        self.target = borrowed.spec
        self.register_buffer("output", borrowed.output, persistent=False)
        self.register_buffer("target_norm", borrowed.norm, persistent=False)
        self.register_buffer("target_norm_bias", borrowed.norm_bias, persistent=False)

    def forward(self, x: Tensor, ops: Ops) -> Tensor:
        """Rows (N, hidden) of the exit, adapted; the target's last norm comes next."""
        read = ops.rms_norm(x, self.norm, self.target.norm.eps)
        return x.float() + ops.linear(ops.activate(ops.linear(read, self.gate_up), "silu", gated=True), self.down).float()

    def logits(self, adapted: Tensor, ops: Ops) -> Tensor:
        """(N, V) float32."""
        last = normed(adapted, self.target.norm, self.target_norm, self.target_norm_bias, ops)
        return finished_logits(ops.linear(last, self.output).float(), self.target)


def load_exit(directory: Path, target: Decoder, options: LoadOptions = LoadOptions()) -> ExitAdapter:  # noqa: B008 (frozen)
    """An exit adapter for a target, ready for inference."""
    stored = StoredHead.read(directory)
    fields = stored.fields
    if fields.word("model_type", _KIND) != _KIND:
        raise fields.error(f"model_type must be {_KIND!r}; `outrider train early-exit` makes exit adapters")
    require_target(stored.data, target, str(directory / "config.json"))
    hidden = fields.integer("hidden_size", target.spec.hidden, target.spec.hidden)
    layer, ffn = fields.integer("exit_layer", 1, target.spec.depth - 1), fields.integer("intermediate_size", 1, 2**20)
    config = ExitConfig(layer, hidden, ffn, fields.real("agreement", 0.0, 1.0, 0.0))
    dtype = DTYPES.get(served_dtype(options.dtype, fields.word("dtype", "bfloat16")), torch.float32)
    borrowed = Borrowed.of(target)
    return stored.fill(lambda dtype: ExitAdapter(config, borrowed, dtype), _PLACES, dtype, options.widen)


def save_exit(adapter: ExitAdapter, directory: Path, options: SaveOptions = SaveOptions(_KIND)) -> None:  # noqa: B008 (frozen)
    """Write an exit adapter."""
    config = adapter.config
    data = {
        "model_type": _KIND,
        "exit_layer": config.layer,
        "hidden_size": config.hidden,
        "intermediate_size": config.ffn,
        "dtype": "bfloat16",
        TRAINED_FOR: target_record(adapter.target, adapter.target_norm),
    }
    measured = {"agreement": agreement} if (agreement := round(config.agreement, 4)) else {}
    write(directory, collect(adapter, _PLACES, options.int8), data | measured)
