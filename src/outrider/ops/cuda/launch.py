"""Calls of the kernels from torch tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import triton
from torch import Tensor

from outrider.ops.cuda import choice, kernels
from outrider.ops.cuda.attention_launch import AttentionKernels
from outrider.ops.cuda.tiles import MAX_SPLIT_K_ROWS, Tile, split_tile_for, tile_for

__all__ = ["AttentionMetadata", "Kernels", "Shape", "pair_qkv", "pair_rows", "supported"]

_SPLIT_K = 4  # parts of every inner dimension, summed in order
_NODES = 16  # nodes of the longest chain


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a model that its kernels share."""

    hidden: int
    heads: int
    kv_heads: int
    head: int
    page: int
    eps: float


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
    work: dict[tuple[int, int | None], tuple[Tensor, Tensor, Tensor]] | None = None  # of attention, for layers that share it

    def for_forward(self) -> AttentionMetadata:
        """A copy for the layers of one forward, which list the work of attention once. The rows must not change meanwhile."""
        return replace(self, work={})

    def rows(self, rows: slice) -> AttentionMetadata:
        """Some of the rows."""
        return AttentionMetadata(
            self.tokens[rows], self.sequences[rows], self.positions[rows], self.roots[rows], self.firsts[rows], self.slots[rows],
            self.table, self.ancestors[rows], self.temperatures[rows], self.prefixes[rows],
            None if self.param_rows is None else self.param_rows[rows],
        )  # fmt: skip


def pair_rows(weight: Tensor, groups: int) -> Tensor:
    """Rows i and i + half of every group side by side."""
    if weight.dim() == 1:
        return weight.view(groups, 2, -1).transpose(1, 2).reshape(-1).contiguous()
    return weight.view(groups, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape).contiguous()


def pair_qkv(fused: Tensor, turned_heads: int, head: int) -> Tensor:
    """Rows of q and k, whose heads are rotated, in pairs; rows of v as they are."""
    turned = turned_heads * head
    return torch.cat((pair_rows(fused[:turned], turned_heads), fused[turned:]))


def supported(head: int, group: int) -> bool:
    """Whether the kernels support heads of this size in groups of this many query heads per KV head."""
    return head in (16, 32, 64, 128, 256) and group in (1, 2, 4, 8, 16)


class Kernels:
    """The kernels of one model."""

    def __init__(self, shape: Shape, dtype: torch.dtype, future_tokens: Tensor | None = None) -> None:
        self.shape = shape
        self.dtype = dtype
        self._future_tokens = future_tokens  # tokens that rows may name before the host knows them
        self._precision = "ieee" if dtype == torch.float32 else "tf32"
        self._attention = AttentionKernels(shape, dtype)
        self.chunk_tokens = self._attention.chunk_tokens  # of one program of `attend_chunks`
        kv = shape.kv_heads * shape.head
        self._section = kv & -kv  # the widest tile that q, k and v are whole numbers of
        self._norm_warps = 4 if shape.hidden <= 1024 else 16 if shape.hidden <= 2048 else 32
        self._order: dict[int, Tensor] = {}  # 0, 1, ... by count

    def embed(self, meta: AttentionMetadata, embedding: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The stream (N, hidden) float32 of every row, and its norm."""
        rows, width = len(meta.tokens), self.shape.hidden
        stream = torch.empty(rows, width, device=embedding.device)
        normed = torch.empty(rows, width, device=embedding.device, dtype=self.dtype)
        future_tokens = meta.tokens if self._future_tokens is None else self._future_tokens
        kernels.embed_norm[(rows,)](
            meta.tokens, future_tokens, embedding, weight, stream, normed, len(embedding), self.shape.eps, width, _power(width),
            num_warps=self._norm_warps,
        )  # fmt: skip
        return stream, normed

    def norm(self, stream: Tensor, weight: Tensor) -> Tensor:
        rows, width = stream.shape
        normed = torch.empty(rows, width, device=stream.device, dtype=self.dtype)
        kernels.norm[(rows,)](stream, weight, normed, self.shape.eps, width, _power(width), num_warps=self._norm_warps)
        return normed

    def add_norm(
        self, x: Tensor, w: Tensor, bias: Tensor | None, stream: Tensor, weight: Tensor, tile: Tile | None = None
    ) -> Tensor:
        """stream += x times w transposed, and its norm. For few rows split-K programs compute the product in parts."""
        rows, (columns, inner) = len(x), w.shape
        if rows > MAX_SPLIT_K_ROWS or inner % 64:
            self.linear(x, w, bias, stream, "add", tile)
            return self.norm(stream, weight)
        partials = torch.empty(_SPLIT_K, rows, columns, device=x.device)
        self._product(x, w, None, partials, "split_k", tile or split_tile_for(rows, columns, inner), (partials,) * 6)
        normed = torch.empty(rows, columns, device=x.device, dtype=self.dtype)
        kernels.add_norm[(rows,)](
            partials, weight if bias is None else bias, stream, weight, normed, rows, self.shape.eps, columns, _power(columns),
            SPLIT_K=_SPLIT_K, HAS_BIAS=bias is not None, num_warps=self._norm_warps,
        )  # fmt: skip
        return normed

    def linear(self, x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor, form: str, tile: Tile | None = None) -> None:
        """out = x times w transposed ("store"), added to out ("add"), or silu of its pairs ("silu")."""
        self._product(x, w, bias, out, form, tile or tile_for(len(x), w.shape[0], w.shape[1]), (out,) * 6)

    def qkv(
        self, x: Tensor, w: Tensor, bias: Tensor | None, q: Tensor, pool: tuple[Tensor, Tensor], meta: AttentionMetadata,
        turns: tuple[Tensor, Tensor], tile: Tile | None = None,
    ) -> None:  # fmt: skip
        """Rotated q into `q`, rotated k and v into one layer of the pool."""
        placed = (*pool, meta.slots, meta.positions, *turns)
        self._product(x, w, bias, q, "qkv", tile or tile_for(len(x), w.shape[0], w.shape[1], self._section), placed)

    def _product(
        self, x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor, form: str, tile: Tile, placed: tuple[Tensor, ...]
    ) -> None:
        rows, (columns, inner), s = len(x), w.shape, self.shape
        grid = (triton.cdiv(rows, tile.rows), triton.cdiv(columns, tile.columns), _SPLIT_K if form == "split_k" else 1)
        kernels.linear[grid](
            x, w, w if bias is None else bias, out, *placed, rows, columns,
            INNER=inner, BM=tile.rows, BN=tile.columns, BK=tile.inner, FORM=form, HAS_BIAS=bias is not None,
            HEADS=s.heads, KV_HEADS=s.kv_heads, HEAD=s.head, PAGE=s.page, PRECISION=self._precision,
            SPLIT_K=_SPLIT_K if inner % 64 == 0 else 1, IN_REGISTER=tile.rows <= 16,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip

    def place(
        self, fused: Tensor, q: Tensor, pool: tuple[Tensor, Tensor], meta: AttentionMetadata, turns: tuple[Tensor, Tensor]
    ) -> None:
        """Rotate and store the result of a q, k and v product that was computed elsewhere."""
        s, rows = self.shape, len(fused)
        kernels.rope_store[(triton.cdiv(rows, 16), fused.shape[1] // s.head)](
            fused, q, *pool, meta.slots, meta.positions, *turns, rows, s.head, s.heads, s.kv_heads, s.head, s.page,
        )  # fmt: skip

    def silu(self, fused: Tensor) -> Tensor:
        """silu(gate) * up of a product that was computed elsewhere."""
        rows, columns = len(fused), fused.shape[1] // 2
        out = torch.empty(rows, columns, device=fused.device, dtype=self.dtype)
        kernels.silu_pairs[(rows, triton.cdiv(columns, 1024))](fused, out, columns, 1024)
        return out

    def attend_rows(
        self, q: Tensor, pool: tuple[Tensor, Tensor], meta: AttentionMetadata, out: Tensor, window: int | None,
        soft_cap: float | None = None,
    ) -> None:  # fmt: skip
        """Attention of single rows, draft nodes among them."""
        self._attention.rows(q, pool, meta, out, window, soft_cap)

    def attend_chunks(
        self, q: Tensor, pool: tuple[Tensor, Tensor], table: Tensor, chunks: Tensor, out: Tensor, window: int | None,
        soft_cap: float | None = None,
    ) -> None:  # fmt: skip
        """Attention of runs of tokens; `chunks` as attend_chunks reads them, at most `chunk_tokens` each."""
        self._attention.chunks(q, pool, table, chunks, out, window, soft_cap)

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
            pool, moves, count, pool.stride(0), s.kv_heads, s.head, s.page, max(_power(count), 2)
        )


@lru_cache(maxsize=256)
def _power(size: int) -> int:
    return int(triton.next_power_of_2(size))
