"""Calls of the kernels from torch tensors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
from torch import Tensor

from outrider.ops.cuda import choice, kernels
from outrider.ops.cuda.tiles import MOST_SPLIT_ROWS, Tile, split_tile_for, tile_for

__all__ = ["BLOCK", "Kernels", "Paged", "Shape", "pair_rows"]

BLOCK = kernels.BLOCK
_PARTS = 4  # of every inner dimension, summed in order
_NODES = 16  # of the longest chain
LANES = 16  # programs that share the blocks of one row and head


@dataclass(frozen=True, slots=True)
class Shape:
    """What the kernels of a model have in common."""

    hidden: int
    heads: int
    kv_heads: int
    head: int
    page: int
    eps: float


@dataclass(slots=True)
class Paged:
    """Where the rows of a forward lie; all int32 on the device but the last two."""

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
    shaped: Tensor | None = None  # (N,) place of the row's head in Shaping, -1: it has none

    def rows(self, rows: slice) -> Paged:
        """Some of the rows."""
        return Paged(
            self.tokens[rows], self.sequences[rows], self.positions[rows], self.roots[rows], self.firsts[rows], self.slots[rows],
            self.table, self.ancestors[rows], self.temperatures[rows], self.prefixes[rows],
            None if self.shaped is None else self.shaped[rows],
        )  # fmt: skip


def pair_rows(weight: Tensor, groups: int) -> Tensor:
    """Rows i and i + half of every group side by side."""
    if weight.dim() == 1:
        return weight.view(groups, 2, -1).transpose(1, 2).reshape(-1).contiguous()
    return weight.view(groups, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape).contiguous()


class Kernels:
    """The kernels of one model."""

    def __init__(self, shape: Shape, dtype: torch.dtype, promised: Tensor | None = None) -> None:
        self.shape = shape
        self.dtype = dtype
        self._promised = promised  # tokens that rows may name before the host knows them
        self._precision = "ieee" if dtype == torch.float32 else "tf32"
        self._zeros: dict[int, Tensor] = {}
        self._order: dict[int, Tensor] = {}  # 0, 1, ... by count

    def embed(self, paged: Paged, embedding: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The stream (N, hidden) float32 of every row, and its norm."""
        rows, width = len(paged.tokens), self.shape.hidden
        stream = torch.empty(rows, width, device=embedding.device)
        normed = torch.empty(rows, width, device=embedding.device, dtype=self.dtype)
        promised = paged.tokens if self._promised is None else self._promised
        kernels.embed_norm[(rows,)](
            paged.tokens, promised, embedding, weight, stream, normed, len(embedding), self.shape.eps, width, _power(width),
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
        """stream += x times w transposed, and its norm. Few rows take the product in parts, which the norm's kernel adds."""
        rows, (columns, inner) = len(x), w.shape
        if rows > MOST_SPLIT_ROWS or inner % 64:
            self.linear(x, w, bias, stream, "add", tile)
            return self.norm(stream, weight)
        parts = torch.empty(_PARTS, rows, columns, device=x.device)
        self._product(x, w, None, parts, "parts", tile or split_tile_for(rows, columns, inner), (parts,) * 6)
        normed = torch.empty(rows, columns, device=x.device, dtype=self.dtype)
        kernels.add_norm[(rows,)](
            parts, weight if bias is None else bias, stream, weight, normed, rows, self.shape.eps, columns, _power(columns),
            PARTS=_PARTS, HAS_BIAS=bias is not None, num_warps=self._norm_warps,
        )  # fmt: skip
        return normed

    @property
    def _norm_warps(self) -> int:
        return 4 if self.shape.hidden <= 1024 else 16 if self.shape.hidden <= 2048 else 32

    def linear(self, x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor, form: str, tile: Tile | None = None) -> None:
        """out = x times w transposed ("store"), added to out ("add"), or silu of its pairs ("silu")."""
        self._product(x, w, bias, out, form, tile or tile_for(len(x), w.shape[0], w.shape[1]), (out,) * 6)

    def qkv(
        self, x: Tensor, w: Tensor, bias: Tensor | None, q: Tensor, pool: tuple[Tensor, Tensor], paged: Paged,
        turns: tuple[Tensor, Tensor], tile: Tile | None = None,
    ) -> None:  # fmt: skip
        """Rotated q into `q`, rotated k and v into one layer of the pool."""
        placed = (*pool, paged.slots, paged.positions, *turns)
        self._product(x, w, bias, q, "qkv", tile or tile_for(len(x), w.shape[0], w.shape[1], self._section), placed)

    def _product(
        self, x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor, form: str, tile: Tile, placed: tuple[Tensor, ...]
    ) -> None:
        rows, (columns, inner), s = len(x), w.shape, self.shape
        grid = (triton.cdiv(rows, tile.rows), triton.cdiv(columns, tile.columns), _PARTS if form == "parts" else 1)
        kernels.linear[grid](
            x, w, w if bias is None else bias, out, *placed, rows, columns,
            INNER=inner, BM=tile.rows, BN=tile.columns, BK=tile.inner, FORM=form, HAS_BIAS=bias is not None,
            HEADS=s.heads, KV_HEADS=s.kv_heads, HEAD=s.head, PAGE=s.page, PRECISION=self._precision,
            PARTS=_PARTS if inner % 64 == 0 else 1, ABREAST=tile.rows <= 16,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip

    def place(self, fused: Tensor, q: Tensor, pool: tuple[Tensor, Tensor], paged: Paged, turns: tuple[Tensor, Tensor]) -> None:
        """What `qkv` does after its product, for one made elsewhere."""
        s, rows = self.shape, len(fused)
        kernels.rope_store[(triton.cdiv(rows, 16), fused.shape[1] // s.head)](
            fused, q, *pool, paged.slots, paged.positions, *turns, rows, s.head, s.heads, s.kv_heads, s.head, s.page,
        )  # fmt: skip

    def silu(self, fused: Tensor) -> Tensor:
        """What the form "silu" does after its product, for one made elsewhere."""
        rows, columns = len(fused), fused.shape[1] // 2
        out = torch.empty(rows, columns, device=fused.device, dtype=self.dtype)
        kernels.silu_pairs[(rows, triton.cdiv(columns, 1024))](fused, out, columns, 1024)
        return out

    def attend_rows(self, q: Tensor, pool: tuple[Tensor, Tensor], paged: Paged, out: Tensor, window: int | None) -> None:
        """Attention of single rows, draft nodes among them."""
        s, rows = self.shape, len(q)
        width, depth = paged.table.shape[1], paged.ancestors.shape[1]
        most = triton.cdiv(width * s.page, BLOCK)
        parts = rows * s.heads * most
        tops, totals = (torch.empty(parts, device=q.device) for _ in range(2))
        mixes = torch.empty(parts, s.head, device=q.device)
        kernels.attend_rows[(rows, s.kv_heads, min(most, LANES))](
            q, *pool, paged.table, paged.sequences, paged.positions, paged.roots, paged.firsts, paged.ancestors,
            tops, totals, mixes, self._counters(rows * s.kv_heads, q.device), out, width, most, self._scale,
            LANES=min(most, LANES), KV_HEADS=s.kv_heads, GROUP=s.heads // s.kv_heads, HEAD=s.head, PAGE=s.page, BLOCK=BLOCK,
            TREE=depth, WINDOW=window or 0, PRECISION=self._precision, num_warps=4,
        )  # fmt: skip

    def _counters(self, count: int, device: torch.device) -> Tensor:
        """Zeros that kernels count in and set back; graphs keep using what they were captured with."""
        size = _power(count)
        if size not in self._zeros:
            self._zeros[size] = torch.zeros(size, dtype=torch.int32, device=device)
        return self._zeros[size]

    def attend_chunks(
        self, q: Tensor, pool: tuple[Tensor, Tensor], table: Tensor, chunks: Tensor, out: Tensor, window: int | None
    ) -> None:
        """Attention of runs of tokens; `chunks` as attend_chunks reads them, at most `chunk_tokens` each."""
        s = self.shape
        kernels.attend_chunks[(len(chunks), s.kv_heads)](
            q, *pool, table, chunks, out, table.shape[1], self._scale,
            TILE=self.chunk_tokens * s.heads // s.kv_heads, KV_HEADS=s.kv_heads, GROUP=s.heads // s.kv_heads, HEAD=s.head,
            PAGE=s.page, BLOCK=BLOCK, WINDOW=window or 0, PRECISION=self._precision, num_warps=4 if s.head <= 128 else 8,
            num_stages=self._ahead,
        )  # fmt: skip

    @property
    def _section(self) -> int:
        """The widest tile that q, k and v are whole numbers of."""
        kv = self.shape.kv_heads * self.shape.head
        return kv & -kv

    @property
    def chunk_tokens(self) -> int:
        """Tokens of one program of `attend_chunks`."""
        return 64 // (self.shape.heads // self.shape.kv_heads)

    @property
    def _ahead(self) -> int:
        """Blocks of keys and values in flight, as far as shared memory holds them."""
        return 3 if self.shape.head <= 128 and self.dtype == torch.bfloat16 else 1

    @property
    def _scale(self) -> float:
        return float(self.shape.head**-0.5 * 1.4426950408889634)  # weights are powers of two

    def choose(self, logits: Tensor, paged: Paged) -> tuple[Tensor, Tensor]:
        """The choice (N,) int32 of every row, -1 where there is none, and its chance as a drafter sees it."""
        rows, vocab = logits.shape
        tiles = triton.cdiv(vocab, choice.VOCAB_TILE)
        tops = torch.empty(rows * tiles, device=logits.device, dtype=torch.float64)
        ids = torch.empty(rows * tiles, device=logits.device, dtype=torch.int32)
        masses = torch.empty(rows * tiles, device=logits.device)
        chosen = torch.empty(rows, device=logits.device, dtype=torch.int32)
        chances = torch.empty(rows, device=logits.device)
        choice.choose_tiles[(rows, tiles)](
            logits, paged.temperatures, paged.prefixes, paged.positions, tops, ids, masses, vocab, tiles,
            choice.VOCAB_TILE,
        )  # fmt: skip
        choice.choose_winner[(rows,)](tops, ids, masses, chosen, chances, tiles, _power(tiles))
        return chosen, chances

    def next_rows(
        self, found: tuple[Tensor, Tensor], before: Paged, after: Paged, drawn: tuple[Tensor, Tensor], step: int
    ) -> None:
        """Chosen tokens become step `step` of a draft and the next rows of their sequences."""
        batch = len(after.tokens)
        if batch not in self._order:
            self._order[batch] = torch.arange(batch, device=after.tokens.device)
        choice.next_rows[(1,)](
            *found, self._order[batch], after.tokens, after.sequences, after.positions, after.roots,
            after.slots, after.table, *drawn, before.sequences, before.positions, before.temperatures, before.prefixes,
            after.temperatures, after.prefixes, after.table.shape[1], step, batch, self.shape.page, max(_power(batch), 2),
        )  # fmt: skip

    def after_verdict(self, paged: Paged, batch: int) -> None:
        """Rows of a draft that was launched before the last one's verdict become those that follow it."""
        promised = paged.tokens if self._promised is None else self._promised
        choice.after_verdict[(1,)](
            paged.tokens, paged.positions, paged.roots, paged.slots, paged.shaped, promised, paged.table,
            paged.table.shape[1], batch, self.shape.page, max(_power(batch), 2), _NODES,
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
