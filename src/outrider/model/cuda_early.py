"""Early exit on a GPU: chains that some of the target's own layers draw, in one graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.core import FutureTokens
from outrider.model.cuda_chains import CHAIN_LENGTHS
from outrider.model.cuda_inputs import GRAPH_ROWS, bucket
from outrider.model.cuda_layer import CudaRows
from outrider.model.cuda_readback import Readback
from outrider.model.runner import Chances, Feed, PendingChains, Tokens
from outrider.ops.cuda.launch import AttentionMetadata, Kernels
from outrider.ops.cuda.tree_launch import rank_rows
from outrider.sampling import Row

if TYPE_CHECKING:
    from outrider.model.cuda_runner import CudaRunner

__all__ = ["EarlyExits", "draw_chain"]

Layers = tuple[int, ...]
Adapt = Callable[[Tensor], Tensor]  # what an adapter makes of the stream leaving an exit
_Key = tuple[int, int, Layers, Adapt | None]  # sequences, tokens, layers


class EarlyExits:
    """Drafts of the first layers of a runner, and perhaps its last ones, over the target's own pages.

    The forward that verifies a draft writes the same slots again, with all layers.
    """

    def __init__(self, runner: CudaRunner) -> None:
        self._runner = runner
        self._graphs: dict[_Key, tuple[Callable[..., None], list[Tensor]]] = {}
        self._hosts: dict[_Key, Readback] = {}

    def launch(
        self, feeds: Sequence[Feed], rows: Sequence[Row], length: int, layers: Layers, adapt: Adapt | None
    ) -> PendingChains:  # fmt: skip
        """Draft a chain after each feed, which is a newest token. The target may read the tokens before the host does."""
        runner, count = self._runner, len(feeds)
        key = bucket(count, GRAPH_ROWS), bucket(length, CHAIN_LENGTHS), layers, adapt
        if key not in self._graphs:
            self._graphs[key] = self._capture(*key)
        run, outputs = self._graphs[key]
        run(feeds, rows)
        if key not in self._hosts:
            self._hosts[key] = Readback(outputs[0])
        wait = self._hosts[key].start(outputs[0])
        drawn = runner.drawn = object()

        def resolve() -> tuple[Tokens, Chances]:
            tokens, chances = wait()[:, :length, :count]
            return tokens.T.long().tolist(), chances.T.double().tolist()

        return PendingChains([FutureTokens(b, length, key[0]) for b in range(count)], resolve, lambda: runner.drawn is drawn)

    def _capture(self, batch: int, length: int, layers: Layers, adapt: Adapt | None) -> tuple[Callable[..., None], list[Tensor]]:
        runner, outputs = self._runner, list[Tensor]()

        def work(meta: AttentionMetadata) -> None:
            drawn = runner.future_tokens[: length * batch].view(length, batch)
            outputs[:] = [draw_chain(runner.cuda.kernels, meta, drawn, partial(self._logits, layers, adapt))]

        return runner.capture_rows(f"early exit after {len(layers)} layers, draft of {length}", batch, work), outputs

    def _logits(self, layers: Layers, adapt: Adapt | None, rows: AttentionMetadata) -> Tensor:
        stack = self._runner.cuda
        stream, last = stack.run_some(CudaRows(rows), self._runner.pool, layers)
        return stack.logits(last if adapt is None else stack.kernels.norm(adapt(stream).contiguous(), stack.norm))


def draw_chain(
    kernels: Kernels, meta: AttentionMetadata, drawn: Tensor, logits_after: Callable[[AttentionMetadata], Tensor],
    ids: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Draw chains by temperature and noise into `drawn` (length, batch); returns tokens and chances (2, length, batch).

    `meta` begins with the newest token of each sequence. `logits_after` gives logits (batch, outputs) after those of its rows,
    and `ids` are the tokens of the outputs where they are not the same numbers.
    """
    (length, batch), device = drawn.shape, drawn.device
    tokens, sequences, positions, roots, slots, ancestors = torch.empty(6, batch, dtype=torch.int32, device=device).unbind()
    temperatures, prefixes = torch.empty(batch, device=device), torch.empty(batch, dtype=torch.int64, device=device)
    after = AttentionMetadata(
        tokens, sequences, positions, roots, meta.firsts[:batch].clone(), slots, meta.table, ancestors[:, None], temperatures,
        prefixes, None, meta.starts,
    )  # fmt: skip
    before, probs = meta, torch.empty(length, batch, device=device)
    for step in range(length):
        sampling = before.temperatures[:batch], before.prefixes[:batch], before.positions[:batch]
        chosen, chances = rank_rows(logits_after(before), ids, sampling, 1)
        kernels.next_rows((chosen.view(-1), chances.view(-1)), before, after, (drawn, probs), step)
        before = after
    return torch.stack((drawn.float(), probs))  # ids below 2^24 are exact
