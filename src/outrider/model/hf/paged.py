"""A Transformers model over paged KV: the rows of all sequences and drafts as one flat row of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from outrider.core import Resume
from outrider.model.decoder import Hidden
from outrider.model.hf.attention import NAME, Pages, attach
from outrider.model.hf.facade import Facade
from outrider.model.hf.rows import FixedRows
from outrider.model.hf.view import HeadOfView, base_of, layers_of, use_interfaces, with_layers
from outrider.model.runner import Rows, Runner
from outrider.ops import Blocked

__all__ = ["PagedRunner", "Taps"]


class Taps:
    """Keeps the hidden rows between layers, of the layers that are asked for."""

    def __init__(self, layers: nn.ModuleList) -> None:
        self._kept: dict[int, Tensor] = {}
        self._wanted: frozenset[int] = frozenset()
        for i, layer in enumerate(layers):
            if i == 0:
                layer.register_forward_pre_hook(self._before_all, with_kwargs=True)
            layer.register_forward_hook(lambda _, __, out, i=i: self._keep(i + 1, out))

    def want(self, taps: tuple[int, ...]) -> None:
        """Keep rows that enter these layers, in the next forward."""
        self._wanted = frozenset(taps)
        self._kept.clear()

    def taken(self, taps: tuple[int, ...]) -> list[Tensor]:
        """What was kept, in order."""
        return [self._kept[tap].float() for tap in taps]

    def _before_all(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if 0 in self._wanted:
            self._keep(0, args[0] if args else kwargs["hidden_states"])

    def _keep(self, tap: int, out: Any) -> None:
        if tap in self._wanted:
            rows = out if isinstance(out, Tensor) else out[0]
            self._kept[tap] = rows[0] if rows.dim() == 3 else rows


class PagedRunner(Runner):
    """Runs a view whose attention goes through the pages of `pool`."""

    partial_runs = "first"

    def __init__(self, view: Any, facade: Facade, pool: Pages, ops: Blocked, intercept: bool = False) -> None:
        self.decoder = facade  # type: ignore[assignment]
        self.pool = pool  # type: ignore[assignment]
        self.ops, self.stack = ops, None
        self.guarantee = facade.guarantee
        self._distinct_windows = frozenset(form.window for form in pool.forms)
        self._view, self._base, self._head = view, base_of(view), HeadOfView(view)
        self._layers, self.dtype = layers_of(self._base), view.dtype
        self._taps: Taps | None = None
        self._mode: AbstractContextManager[Any] = FixedRows(ops) if intercept else nullcontext()
        self._first_layers = lru_cache(maxsize=4)(lambda count: with_layers(self._base, self._layers, count))
        use_interfaces(view, NAME, NAME)
        attach(view, pool)

    @torch.inference_mode()
    def _run_torch(self, rows: Rows, taps: tuple[int, ...], layers: range | None, x: Tensor | None, wanted: Any) -> Hidden:
        base = self._base
        if layers is not None and layers != range(len(self._layers)):
            assert layers.start == 0, "partial_runs is 'first'"
            assert x is None, "a class begins with its embedding"
            base = self._first_layers(layers.stop)
        if taps and self._taps is None:
            self._taps = Taps(self._layers)
        if self._taps is not None:
            self._taps.want(taps)
        pool: Pages = self.pool  # type: ignore[assignment]
        with pool.running(rows), self._mode:
            out = base(input_ids=rows.tokens[None], position_ids=rows.positions[None], use_cache=False)
        last = out.last_hidden_state[0]
        return Hidden(last, self._taps.taken(taps) if taps and self._taps else [], None, self._logits_by_torch(last, wanted))

    @torch.inference_mode()
    def _logits_by_torch(self, last: Tensor, rows: Any) -> Tensor:
        if not rows:
            return torch.empty(0, self.decoder.spec.vocab)
        with self._mode:
            return self._head(last if len(rows) == len(last) else last[list(rows)]).float()

    def resume(self, layer: int, hidden: Tensor, counts: Sequence[int]) -> Resume:
        """Rows that are not kept: a class cannot begin in the middle, so verification runs all layers."""
        return Resume(layer, hidden, counts)
