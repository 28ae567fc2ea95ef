"""Row counts at which torch's products give a row the same bits.

Matrix libraries pick kernels by shape. Products of 1, 2 or 16 rows may add in different orders, and which of them do
depends on the library, the processor and the number of threads. So each shape is tried once, on random rows, and only row
counts that agree with a block of BLOCK rows, at every place, are used. A batch is cut and padded to such counts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import lru_cache
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["BLOCK", "Counts", "agreeing_counts", "attention_counts", "cancelling", "fitting", "in_counts", "page_products"]

BLOCK = 16  # rows of the product that all others must agree with; attention takes at most as many at once
_COUNTS = (1, 2, 4, 8, BLOCK, 32, 64)
_WEIGHTS = 16  # different columns of a trial's matrix, repeated: columns do not influence each other
_PAGES = (1, 3)  # of a trial

Counts = tuple[int, ...]


def in_counts(x: Tensor, counts: Counts, product: Callable[[Tensor], Tensor]) -> Tensor:
    """The product of all rows, cut and padded so that each call has one of the counts."""
    rows = x.shape[0]
    if rows in counts:
        return product(x)
    largest = counts[-1]
    if rows < largest:
        return product(F.pad(x, (0, 0, 0, fitting(rows, counts) - rows)))[:rows]
    return torch.cat([in_counts(part, counts, product) for part in torch.split(x, largest)])


def fitting(rows: int, counts: Counts) -> int:
    """The smallest of the counts that is at least `rows`; more rows than the largest are left as many."""
    place = bisect_left(counts, rows)
    return counts[place] if place < len(counts) else rows


def cancelling(inner: int) -> tuple[Tensor, Tensor]:
    """Rows and columns of a trial whose inner products are zero up to rounding. Another order of additions then changes the
    whole number, not only a last bit that rounding to bf16 would hide.
    """
    generator = torch.Generator().manual_seed(0)
    half = inner // 2
    places = torch.randperm(inner, generator=generator)[: 2 * half].view(2, half)
    rows, columns = torch.zeros(_COUNTS[-1], inner), torch.zeros(_WEIGHTS, inner)
    sizes = torch.randint(0, 16, (half,), generator=generator).float().exp2() * torch.randn(len(rows), half, generator=generator)
    for sign, place in zip((1.0, -1.0), places, strict=True):
        rows[:, place] = sign * sizes
    halves = torch.randn(_WEIGHTS, half, generator=generator)
    for place in places:
        columns[:, place] = halves
    return rows, columns


@lru_cache(maxsize=256)
def attention_counts(kv_heads: int, group: int, width: int, page: int, threads: int) -> Counts:
    """Row counts for the two products of attention, with `group` queries of a row for each head of keys."""
    del threads
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(_PAGES[-1], kv_heads, page, width, generator=generator) for _ in range(2))
    rows = torch.randn(BLOCK, kv_heads * group, width, generator=generator)

    def product(q: Tensor) -> Tensor:
        parts = (_scores_and_mix(q, keys[:pages], values[:pages]) for pages in _PAGES)
        return torch.cat([part.reshape(len(q), -1) for part in chain.from_iterable(parts)], 1)

    return agreeing_counts(rows, product, tuple(count for count in _COUNTS if count <= BLOCK))


def page_products(a: Tensor, b: Tensor) -> Tensor:
    """Products of matrices, one for each page and head: (matrices, rows, inner) times (matrices, inner, columns).

    A single one is doubled. Libraries give it to other kernels than several, and a page may come alone or among others.
    """
    if a.shape[0] > 1:
        return torch.bmm(a, b)
    return torch.bmm(a.expand(2, -1, -1), b.expand(2, -1, -1))[:1]  # views: another layout would be another kernel too


def _scores_and_mix(q: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Both products of attention over whole pages, by row; for trials. Scores serve as the weights of the values."""
    rows, width = q.shape[0], q.shape[-1]
    pages, kv_heads = keys.shape[:2]
    group = q.shape[1] // kv_heads
    block = q.view(rows, kv_heads, group, width).transpose(0, 1).reshape(kv_heads, rows * group, width)
    queries = block.expand(pages, *block.shape).reshape(pages * kv_heads, rows * group, width)
    scores = page_products(queries, keys.flatten(0, 1).mT)
    mixed = page_products(scores, values.flatten(0, 1))
    by_row = (pages, kv_heads, rows, group, -1)
    return scores.view(by_row).movedim(2, 0), mixed.view(by_row).movedim(2, 0)


def agreeing_counts(x: Tensor, product: Callable[[Tensor], Tensor], counts: Counts = _COUNTS) -> Counts:
    """The counts at which every row, at every place, has the bits it has among BLOCK rows.

    Where a library treats the rows of one block differently, only single rows are left, which have no neighbours.
    """
    block = product(x[:BLOCK])
    turned = product(x[:BLOCK].roll(5, 0)).roll(-5, 0)
    alike = product(x[:1].expand_as(x[:BLOCK]).contiguous())
    if not torch.equal(block, turned) or not torch.equal(alike, block[:1].expand_as(alike)):
        return (1,)
    want = torch.cat([product(part) for part in torch.split(x, BLOCK)])
    return tuple(
        count for count in counts if all(torch.equal(product(part), expected) for part, expected in _parts(x, want, count))
    )


def _parts(x: Tensor, want: Tensor, count: int) -> list[tuple[Tensor, Tensor]]:
    """A few runs of `count` rows, and the expected products of each."""
    firsts = {0, min(3, len(x) - count), len(x) - count}
    return [(x[first : first + count], want[first : first + count]) for first in firsts]
