"""Calls of the kernels from torch tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from outrider.ops.cuda import choice, kernels
from outrider.ops.cuda.attention_launch import AttentionKernels
from outrider.ops.cuda.matrix import Epilogue, Matrix, RowForm, Rows, matrix_of, pair_qkv, pair_rows
from outrider.ops.cuda.place import place
from outrider.ops.cuda.quantised_tiles import QuantisedTile
from outrider.ops.cuda.tiles import Tile

__all__ = ["AttentionMetadata", "HeadForm", "Kernels", "RowNorm", "Shape", "Turns", "pair_qkv", "pair_rows"]

_NODES = 16  # nodes of the longest chain


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a model that its kernels share."""

    heads: int
    kv_heads: int
    head: int
    page: int


class RowNorm(NamedTuple):
    """A norm with its weights on the device."""

    kind: str  # "rms" or "layer"
    eps: float
    weight: Tensor
    bias: Tensor | None = None


class Turns(NamedTuple):
    """Rotary tables on the device."""

    cos: Tensor  # (rows, head / 2)
    sin: Tensor
    growth: Tensor | None = None  # (rows,) factors of queries
    variants: bool = False  # whether sequences begin at different rows; see AttentionMetadata.starts


class HeadForm(NamedTuple):
    """What befalls queries and keys between their product and attention."""

    turns: Turns | None
    norms: tuple[RowNorm, RowNorm] | None = None  # of queries and of keys
    wide: bool = False  # the norm is over all heads together
    shared: bool = True  # one weight for all heads
    scale: float = 1.0  # of queries

    @property
    def only_turns(self) -> bool:
        """Whether the product's own kernel does it."""
        t = self.turns
        return t is not None and self.norms is None and self.scale == 1.0 and t.growth is None and not t.variants


@dataclass(slots=True)
class AttentionMetadata:
    """Attention and sampling metadata of the rows of a forward, on the device; int32 unless noted."""

    tokens: Tensor  # (N,)
    sequences: Tensor  # (N,) row of the page table
    positions: Tensor  # (N,) logical
    roots: Tensor  # (N,) the last position that lies where the page table says
    firsts: Tensor  # (N,) the first position that holds something
    slots: Tensor  # (N,) where the row's KV goes
    table: Tensor  # (sequences, pages)
    ancestors: Tensor  # (N, depth) slots of the positions after the root
    temperatures: Tensor  # (N,) float32, 0 for greedy
    prefixes: Tensor  # (N,) int64, of the noise key: everything but the position
    param_rows: Tensor | None = None  # (N,) the row's parameters in the PenaltyTable, -1 where it has none
    starts: Tensor | None = None  # (sequences,) the first row of each sequence's rotary table, where it has several
    work: dict[tuple[int, int | None], tuple[Tensor, Tensor, Tensor]] | None = None  # of attention, for layers that share it

    def for_forward(self) -> AttentionMetadata:
        """A copy for the layers of one forward, which list the work of attention once. The rows must not change meanwhile."""
        return replace(self, work={})

    def rows(self, rows: slice) -> AttentionMetadata:
        """Some of the rows."""
        return AttentionMetadata(
            self.tokens[rows], self.sequences[rows], self.positions[rows], self.roots[rows], self.firsts[rows], self.slots[rows],
            self.table, self.ancestors[rows], self.temperatures[rows], self.prefixes[rows],
            None if self.param_rows is None else self.param_rows[rows], self.starts,
        )  # fmt: skip


class Kernels:
    """The kernels of one model. With `exact` all products are row-invariant, otherwise they are cuBLAS's."""

    def __init__(self, shape: Shape, dtype: torch.dtype, future_tokens: Tensor | None = None, exact: bool = True) -> None:
        self.shape = shape
        self.dtype = dtype
        self.exact = exact
        self._future_tokens = future_tokens  # tokens that rows may name before the host knows them
        self._attention = AttentionKernels(shape, dtype)
        self.chunk_tokens = self._attention.chunk_tokens  # of one program of `attend_chunks`
        kv, self._padded = shape.kv_heads * shape.head, max(_power(shape.head), 16)
        self._section = kv & -kv  # the widest tile that q, k and v are whole numbers of
        self._order: dict[int, Tensor] = {}  # 0, 1, ... by count

    # --- rows ---------------------------------------------------------------------------------------------------------

    def embed(
        self, meta: AttentionMetadata, embedding: Tensor, norm: RowNorm | None, scale: float = 1.0,
        learned: tuple[Tensor, int] | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The stream (N, hidden) float32 of every row, and its norm. `learned` are position embeddings and their offset."""
        rows, width = len(meta.tokens), embedding.shape[1]
        device = meta.tokens.device  # the embedding may lie in pinned host memory
        stream = torch.empty(rows, width, device=device)
        read = torch.empty(rows, width, device=device, dtype=self.dtype)
        future_tokens = meta.tokens if self._future_tokens is None else self._future_tokens
        table, offset = learned or (embedding, 0)
        weight, bias, eps, form = _norm_arguments(norm, stream)
        kernels.embed[(rows,)](
            meta.tokens, future_tokens, embedding, meta.positions, table, weight, bias, stream, read, len(embedding), scale, eps,
            len(table), offset, width, _power(width), learned is not None, *form, num_warps=_norm_warps(width),
        )  # fmt: skip
        return stream, read

    def norm(self, stream: Tensor, norm: RowNorm | None) -> Tensor:
        """Float32 rows after a norm, in the weights' dtype."""
        return self.finish(None, None, stream, norm)

    def finish(
        self, parts: Tensor | None, bias: Tensor | None, stream: Tensor, norm: RowNorm | None, post: RowNorm | None = None,
        scale: float = 1.0,
    ) -> Tensor:  # fmt: skip
        """stream += scale * post norm of (parts in order + bias); returns the norm of the stream."""
        read = self.finish_as(None, parts, bias, stream, norm, post, scale)
        assert isinstance(read, Tensor)
        return read

    def finish_as(
        self, reads: RowForm | None, parts: Tensor | None, bias: Tensor | None, stream: Tensor, norm: RowNorm | None,
        post: RowNorm | None = None, scale: float = 1.0,
    ) -> Rows:  # fmt: skip
        """The same, with the norm in the form that the next product reads."""
        rows, width = stream.shape
        made = None if reads is None else reads.empty(rows, stream.device)
        read = torch.empty(rows, width, device=stream.device, dtype=self.dtype) if made is None else made.codes
        weight, norm_bias, eps, form = _norm_arguments(norm, stream)
        post_weight, post_bias, post_eps, post_form = _norm_arguments(post, stream)
        kernels.finish[(rows,)](
            stream if parts is None else parts, stream if bias is None else bias, post_weight, post_bias, stream, weight,
            norm_bias, read, stream if made is None else made.scale, rows, post_eps, scale, eps, width,
            _power(width) if reads is None else reads.padded, 0 if parts is None else len(parts), bias is not None,
            *post_form, *form, *((0, 0, 0.0) if reads is None else (reads.width, reads.block, reads.limit)),
            num_warps=_norm_warps(width),
        )  # fmt: skip
        return read if made is None else made

    # --- products -----------------------------------------------------------------------------------------------------

    def parts(self, x: Rows, w: Tensor | Matrix, tile: Tile | QuantisedTile | None = None) -> Tensor:
        """x times w transposed, in parts to be added in order: (parts, N, columns). Few rows run split-K programs."""
        w = matrix_of(w)
        fast = None if self.exact else w.by_library(x, None)
        if fast is not None:
            return fast[None]
        split = w.splits(len(x))
        out = torch.empty(w.parts if split else 1, len(x), w.shape[0], device=x.device)
        w.multiply(x, out, Epilogue("split_k" if split else "store"), tile)
        return out

    def linear(
        self, x: Rows, w: Tensor | Matrix, bias: Tensor | None, out: Tensor,
        tile: Tile | QuantisedTile | None = None, scale: float = 1.0,
        cap: float | None = None,
    ) -> None:  # fmt: skip
        """out = scale * (x times w transposed + bias), softly capped."""
        matrix_of(w).multiply(x, out, Epilogue("store", bias, scale=scale, cap=cap or 0.0), tile)

    def activated(self, x: Rows, w: Tensor | Matrix, bias: Tensor | None, activation: str, gated: bool) -> Tensor:
        """The activation of x times w transposed, whose columns are pairs of gate and up where it is gated."""
        w = matrix_of(w)
        rows, columns = len(x), w.shape[0] // 2 if gated else w.shape[0]
        out = torch.empty(rows, columns, device=x.device, dtype=self.dtype)
        fast = None if self.exact else w.by_library(x, bias)
        if fast is None:
            w.multiply(x, out, Epilogue("gated" if gated else "ungated", bias, activation))
        else:
            grid = (rows, triton.cdiv(columns, 1024))
            kernels.activate[grid](fast, out, columns, 1024, activation, gated)
        return out

    def qkv(
        self, x: Rows, w: Tensor | Matrix, bias: Tensor | None, form: HeadForm, q: Tensor, pool: tuple[Tensor, Tensor],
        meta: AttentionMetadata,
        tile: Tile | QuantisedTile | None = None,
    ) -> None:  # fmt: skip
        """Queries into `q`, keys and values into one layer of the pool."""
        w, s = matrix_of(w), self.shape
        if not (self.exact and form.only_turns and self._section >= w.min_columns):
            return self.place(self.parts(x, w), bias, form, q, pool, meta)
        assert form.turns is not None
        placed, heads = (*pool, meta.slots, meta.positions, *form.turns[:2]), (s.heads, s.kv_heads, s.head, s.page)
        return w.multiply(x, q, Epilogue("qkv", bias, placed=placed, heads=heads, max_columns=self._section), tile)

    def place(
        self, parts: Tensor, bias: Tensor | None, form: HeadForm, q: Tensor, pool: tuple[Tensor, Tensor], meta: AttentionMetadata
    ) -> None:
        """What follows a q, k and v product: norms of heads, rotary and scale; k and v go to their slots."""
        s, rows, turns = self.shape, parts.shape[1], form.turns
        cos, sin, growth, variants = turns or (parts, parts, None, False)
        starts = meta.sequences if meta.starts is None else meta.starts
        weights, kind, eps = (parts,) * 4, ("none", False), 0.0
        if form.norms is not None:
            (q_weight, q_bias, eps, kind), (k_weight, k_bias, *_) = (_norm_arguments(norm, parts) for norm in form.norms)
            weights = (q_weight, q_bias, k_weight, k_bias)
        tile = _power(s.heads) if form.wide else 1
        grid = (rows, triton.cdiv(s.heads, tile) + 2 * triton.cdiv(s.kv_heads, tile))
        place[grid](
            parts, parts if bias is None else bias, *weights, q, *pool, meta.slots, meta.positions, meta.sequences, starts,
            cos, sin, cos if growth is None else growth, rows, form.scale, eps,
            len(parts), bias is not None, *kind, form.shared, form.wide, turns is not None, growth is not None, variants,
            s.heads, s.kv_heads, s.head, s.page, tile, self._padded, num_warps=min(max(tile * self._padded // 512, 1), 16),
        )  # fmt: skip

    # --- attention ----------------------------------------------------------------------------------------------------

    def attend_rows(
        self, q: Tensor, pool: tuple[Tensor, Tensor], meta: AttentionMetadata, out: Tensor, window: int | None,
        soft_cap: float | None = None, sinks: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Attention of single rows, draft nodes among them. Scores become soft_cap * tanh(score / soft_cap)."""
        self._attention.rows(q, pool, meta, out, window, soft_cap, sinks)

    def attend_chunks(
        self, q: Tensor, pool: tuple[Tensor, Tensor], table: Tensor, chunks: Tensor, out: Tensor, window: int | None,
        soft_cap: float | None = None, sinks: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Attention of runs of tokens; `chunks` as attend_chunks reads them, at most `chunk_tokens` each."""
        self._attention.chunks(q, pool, table, chunks, out, window, soft_cap, sinks)

    # --- drafts -------------------------------------------------------------------------------------------------------

    def choose(self, logits: Tensor, meta: AttentionMetadata) -> tuple[Tensor, Tensor]:
        """The choice (N,) int32 of every row, -1 where there is none, and its chance as a drafter sees it."""
        rows, vocab = logits.shape
        tiles = triton.cdiv(vocab, choice.VOCAB_TILE)
        tops = torch.empty(rows * tiles, device=logits.device, dtype=torch.float64)
        ids = torch.empty(rows * tiles, device=logits.device, dtype=torch.int32)
        masses = torch.empty(rows * tiles, device=logits.device)
        chosen = torch.empty(rows, device=logits.device, dtype=torch.int32)
        chances = torch.empty(rows, device=logits.device)
        choice.choose_tiles[(rows, tiles)](
            logits, meta.temperatures, meta.prefixes, meta.positions, tops, ids, masses, vocab, tiles,
            choice.VOCAB_TILE,
        )  # fmt: skip
        choice.choose_winner[(rows,)](tops, ids, masses, chosen, chances, tiles, _power(tiles))
        return chosen, chances

    def next_rows(
        self,
        chosen: tuple[Tensor, Tensor],
        before: AttentionMetadata,
        after: AttentionMetadata,
        drawn: tuple[Tensor, Tensor],
        step: int,
    ) -> None:
        """Chosen tokens become step `step` of a draft and the next rows of their sequences."""
        batch = len(after.tokens)
        if batch not in self._order:
            self._order[batch] = torch.arange(batch, device=after.tokens.device)
        choice.next_rows[(1,)](
            *chosen, self._order[batch], after.tokens, after.sequences, after.positions, after.roots,
            after.slots, after.table, *drawn, before.sequences, before.positions, before.temperatures, before.prefixes,
            after.temperatures, after.prefixes, after.table.shape[1], step, batch, self.shape.page, max(_power(batch), 2),
        )  # fmt: skip

    def after_verdict(self, meta: AttentionMetadata, batch: int) -> None:
        """Set the rows of a draft that was launched before the last draft's verdict to those that follow the verdict."""
        future_tokens = meta.tokens if self._future_tokens is None else self._future_tokens
        choice.after_verdict[(1,)](
            meta.tokens, meta.positions, meta.roots, meta.slots, meta.param_rows, future_tokens, meta.table,
            meta.table.shape[1], batch, self.shape.page, max(_power(batch), 2), _NODES,
        )  # fmt: skip

    def move(self, pool: Tensor, moves: Tensor) -> None:
        """Copy slots moves[0] to slots moves[1] in every layer and head."""
        s, count = self.shape, moves.shape[1]
        choice.move_slots[(len(pool), s.kv_heads)](
            pool, moves, count, pool.stride(0), s.kv_heads, s.head, s.page, max(_power(count), 2), self._padded
        )


def _norm_arguments(norm: RowNorm | None, unused: Tensor) -> tuple[Tensor, Tensor, float, tuple[str, bool]]:
    """Weight, bias and eps of a norm, and its kind and whether it has a bias; `unused` stands for tensors there are not."""
    if norm is None:
        return unused, unused, 0.0, ("none", False)
    return norm.weight, unused if norm.bias is None else norm.bias, norm.eps, (norm.kind, norm.bias is not None)


def _norm_warps(width: int) -> int:
    return 4 if width <= 1024 else 16 if width <= 2048 else 32


@lru_cache(maxsize=256)
def _power(size: int) -> int:
    return int(triton.next_power_of_2(size))
