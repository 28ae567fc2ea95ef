"""Calls of the kernels that grow trees, and the device memory of trees while they grow."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from outrider.ops.cuda import choice, trees
from outrider.ops.cuda.launch import AttentionMetadata
from outrider.ops.cuda.tree_sizes import TreeSizes

__all__ = ["GrowingTrees", "rank_rows"]

_NODES_AT_ONCE = 64


class GrowingTrees:
    """The trees of a batch while they grow: their nodes, and the rows that expand them."""

    def __init__(self, sizes: TreeSizes, page: int, scratch: int, device: torch.device) -> None:
        """`scratch` is the slot that rows without a node write to."""
        self.sizes, self._page, self._scratch = sizes, page, scratch
        batch, rows, levels = sizes.batch, sizes.batch * sizes.beam, max(sizes.levels - 1, 1)

        def integers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self._tokens, self._parents, self._kept, self._places = integers(4, batch, sizes.nodes)
        self._survival = torch.zeros(batch, sizes.nodes, dtype=torch.float64, device=device)
        self._counters = integers(2, batch)  # slots taken, faults
        self._rows = integers(levels, 8, rows)  # see `expand`
        self._ancestors = integers(levels, rows, sizes.levels)
        self.finished = integers(batch * (3 * sizes.kept + 1))  # see `finish`

    def begin(self, roots: AttentionMetadata) -> None:
        """Start trees after the rows `roots`.

        Their first parameters are the nodes that each tree may keep, then its levels, then its root's row for `place` or -1.
        """
        batch, beam = self.sizes.batch, self.sizes.beam
        assert roots.param_rows is not None
        self._roots, self._rooms, self._limits = roots.rows(slice(0, batch)), *roots.param_rows[: 2 * batch].view(2, batch)
        self._params = roots.param_rows
        self._counters.zero_()
        self._temperatures, self._prefixes = (
            part[:, None].expand(batch, beam).flatten().contiguous() for part in (self._roots.temperatures, self._roots.prefixes)
        )

    def rows(self, level: int) -> AttentionMetadata:
        """The rows that a level expands."""
        if not level:
            return self._roots
        _, _, tokens, sequences, positions, roots, firsts, slots = self._rows[level - 1].unbind()
        return AttentionMetadata(
            tokens, sequences, positions, roots, firsts, slots, self._roots.table, self._ancestors[level - 1],
            self._temperatures, self._prefixes, None, self._roots.starts,
        )  # fmt: skip

    def add(self, level: int, logits: Tensor, ids: Tensor | None) -> None:
        """Put the likeliest tokens under the nodes of a level, by the logits (rows, outputs) after them.

        `ids` (outputs,) are the tokens of the outputs where they are not the same numbers.
        """
        branch, meta = self.sizes.branch, self.rows(level)
        ranked, tiles, padded = _rank(logits, ids, (meta.temperatures, meta.prefixes, meta.positions), branch)
        trees.add_children[(len(logits),)](
            *ranked, self._rows[max(level - 1, 0), 0], self._tokens, self._parents, self._survival, self._counters[1], tiles,
            self.sizes.nodes, self._first(level), self.sizes.beam if level else 0, branch, *padded,
        )  # fmt: skip

    def expand(self, level: int) -> Tensor:
        """Choose the nodes of the next level. Returns the row of this level that each of its rows comes from."""
        batch, levels, beam, branch = self.sizes
        count, meta = (beam if level else 1) * branch, self._roots
        frontier, sources, *fields = self._rows[level].unbind()
        trees.next_level[(batch,)](
            self._survival, self._tokens, self._rooms, self._limits, self._counters[0], meta.positions, meta.firsts,
            meta.sequences, meta.table, self._ancestors[max(level - 1, 0)], frontier, sources, *fields, self._ancestors[level],
            meta.table.shape[1], self.sizes.nodes, self._first(level), count, level + 1, self._scratch,
            beam if level else 1, beam, branch, self._page, levels, *map(_power, (beam, count, levels)), 32,
        )  # fmt: skip
        return sources

    def finish(self) -> Tensor:
        """The best nodes of every tree, in one tensor: tokens, parents and survival (batch, kept), then counts (batch,)."""
        batch, nodes, most = self.sizes.batch, self.sizes.nodes, self.sizes.kept
        tokens, parents, chances, counts = torch.split(self.finished, [batch * most] * 3 + [batch])
        grid = batch, triton.cdiv(nodes, _NODES_AT_ONCE)
        trees.keep_best[grid](self._survival, self._rooms, self._kept, nodes, _NODES_AT_ONCE, _NODES_AT_ONCE)
        trees.number_kept[(batch,)](self._kept, self._places, counts, self._counters[1], nodes, _power(nodes))
        trees.put_tree[grid](
            self._kept, self._places, self._tokens, self._parents, self._survival, tokens, parents, chances.view(torch.float32),
            nodes, most, _NODES_AT_ONCE,
        )  # fmt: skip
        return self.finished

    def place(self, rows: AttentionMetadata) -> None:
        """Lay the finished trees out over the rows of the target's forward, which were filled for chains of as many nodes."""
        batch, most = self.sizes.batch, self.sizes.kept
        tokens, parents, _, counts = torch.split(self.finished, [batch * most] * 3 + [batch])
        trees.place_tree[(batch,)](
            tokens, parents, counts, self._params, rows.tokens, rows.sequences, rows.positions, rows.roots, rows.firsts,
            rows.slots, rows.table, rows.ancestors, most, rows.table.shape[1], rows.ancestors.shape[1], self._scratch,
            self._page, self.sizes.levels, _power(most),
        )  # fmt: skip

    def read(self, finished: Tensor, count: int) -> list[tuple[list[int], list[int], list[float]]]:
        """Tokens, parents and survival of the first `count` trees, from a copy on the host; none at all after a fault."""
        batch, most = self.sizes.batch, self.sizes.kept
        tokens, parents, chances, counts = torch.split(finished, [batch * most] * 3 + [batch])
        columns = [part.view(batch, most).tolist() for part in (tokens, parents, chances.view(torch.float32))]
        sizes = counts[:count].tolist()
        if min(sizes) < 0:
            return []
        return [(t[:n], p[:n], c[:n]) for t, p, c, n in zip(*columns, sizes, strict=False)]

    def _first(self, level: int) -> int:
        """The number of the first node that a level adds."""
        return self.sizes.branch * (1 + (level - 1) * self.sizes.beam) if level else 0


def rank_rows(logits: Tensor, ids: Tensor | None, sampling: tuple[Tensor, Tensor, Tensor], count: int) -> tuple[Tensor, Tensor]:
    """The `count` best tokens (N, count) int32 of every row of logits, and their chances; -1 where a row leaves no choice.

    `sampling` are temperatures, noise prefixes and positions: the noise is that of the position after.
    """
    tokens = torch.empty(len(logits), count, device=logits.device, dtype=torch.int32)
    chances = torch.empty(len(logits), count, device=logits.device)
    ranked, tiles, padded = _rank(logits, ids, sampling, count)
    trees.put_best[(len(logits),)](*ranked, tokens, chances, tiles, count, *padded)
    return tokens, chances


def _rank(
    logits: Tensor, ids: Tensor | None, sampling: tuple[Tensor, Tensor, Tensor], count: int
) -> tuple[tuple[Tensor, Tensor, Tensor], int, tuple[int, int]]:
    """The best scores of every tile with their tokens and masses, the number of tiles, and padded sizes."""
    rows, vocab = logits.shape
    tiles, device = int(triton.cdiv(vocab, choice.VOCAB_TILE)), logits.device
    tops = torch.empty(rows * tiles * count, device=device, dtype=torch.float64)
    tokens = torch.empty(rows * tiles * count, device=device, dtype=torch.int32)
    masses = torch.empty(rows * tiles, device=device)
    trees.rank_tiles[(rows, tiles)](
        logits, tokens if ids is None else ids, *sampling, tops, tokens, masses, vocab, tiles, ids is not None, count,
        choice.VOCAB_TILE,
    )  # fmt: skip
    return (tops, tokens, masses), tiles, (int(triton.next_power_of_2(tiles)), int(triton.next_power_of_2(tiles * count)))


def _power(size: int) -> int:
    return max(int(triton.next_power_of_2(size)), 2)
