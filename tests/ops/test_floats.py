"""Matrices of FP8 values: rounding, joining and reordering keep what they stand for."""

from __future__ import annotations

import torch

from outrider.ops import ScaledFloats


def stored(columns: int, inner: int, block: tuple[int, int]) -> ScaledFloats:
    scale = torch.rand(-(-columns // block[0]), -(-inner // block[1])) + 0.5
    return ScaledFloats.stored(torch.randn(columns, inner).to(torch.float8_e4m3fn), scale, block)


def test_rounding_meets_the_largest_value_of_each_column() -> None:
    weight = torch.randn(7, 33)
    weight[3] = 0.0
    values = ScaledFloats.of(weight).values()
    assert torch.equal(values.abs().argmax(1)[:3], weight.abs().argmax(1)[:3])
    assert float((values - weight).norm() / weight.norm()) < 0.04
    assert not values[3].any()


def test_joined_matrices_lie_one_below_the_other() -> None:
    for block in ((4, 16), (1, 40), (9, 40)):
        parts = [stored(9, 40, block), stored(5, 40, block)]
        joined = ScaledFloats.joined(parts)
        assert joined is not None
        assert torch.equal(joined.values(), torch.cat([part.values() for part in parts]))
    assert ScaledFloats.joined([stored(4, 40, (4, 8)), stored(4, 40, (4, 16))]) is None


def test_rows_may_be_taken_in_another_order() -> None:
    matrix, order = stored(9, 40, (4, 16)), torch.randperm(9)
    assert torch.equal(matrix.rows(order).values(), matrix.values()[order])
