"""Logits of rounds with more rows than the device can hold: computed in parts, and again where somebody reads them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.model.cuda_stack import CudaStack
from outrider.model.placement import LOGIT_ROWS
from outrider.ops.cuda.launch import AttentionMetadata
from outrider.ops.cuda.penalties import PenaltyTable

__all__ = ["RowLogits", "choose_in_parts"]


class RowLogits:
    """The logits (N, V) of rows, in place of a tensor: those that are read are computed then.

    Under the rule `match` few are read: the choices are known. What reads more than rows gets all of them, on the host.
    """

    def __init__(self, stack: CudaStack, last: Tensor) -> None:
        self._stack, self._last = stack, last
        self._whole: Tensor | None = None

    @torch.inference_mode()
    def __getitem__(self, rows: Any) -> Tensor:
        """One row (V,), or several (rows, V)."""
        if isinstance(rows, int):
            return self._stack.logits(self._last[rows : rows + 1] if rows >= 0 else self._last[rows:][:1])[0]
        return self._stack.logits(self._last[rows])

    def __len__(self) -> int:
        return len(self._last)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if self._whole is None:
            parts = torch.split(self._last, LOGIT_ROWS)
            self._whole = torch.cat([self._stack.logits(part).cpu() for part in parts])
        return getattr(self._whole, name)


def choose_in_parts(stack: CudaStack, last: Tensor, meta: AttentionMetadata, table: PenaltyTable) -> list[int]:
    """The choices of rows, whose logits are computed some at a time."""
    chosen = torch.empty(len(last), dtype=torch.int32, device=last.device)
    for first in range(0, len(last), LOGIT_ROWS):
        part = slice(first, min(first + LOGIT_ROWS, len(last)))
        table.choose(stack.logits(last[part]), meta.rows(part), chosen[part])
    choices: list[int] = chosen.tolist()
    return choices
