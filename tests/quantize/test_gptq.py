"""GPTQ against rounding to nearest."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outrider.quantize.gptq import corrected
from outrider.quantize.scheme import Scheme

SCHEMES = [Scheme("int4", 32), Scheme("int8"), Scheme("fp8")]


def weight_and_rows(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(512, 160, generator=generator) @ torch.randn(160, 160, generator=generator)
    return torch.randn(48, 160, generator=generator), rows


def error(scheme: Scheme, made: tuple[Tensor, Tensor], weight: Tensor, rows: Tensor) -> float:
    return float((rows @ (scheme.values(*made) - weight).T).square().mean())


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_products_are_nearer_than_those_of_rounded_matrices(scheme: Scheme) -> None:
    weight, rows = weight_and_rows()
    by_gptq = error(scheme, corrected(weight, rows.T @ rows, scheme), weight, rows)
    assert by_gptq < 0.8 * error(scheme, scheme.rounded(weight), weight, rows)


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_inputs_that_have_nothing_in_common_are_rounded_to_nearest(scheme: Scheme) -> None:
    weight, _ = weight_and_rows()
    for a, b in zip(corrected(weight, torch.eye(160) * 3.0, scheme), scheme.rounded(weight), strict=True):
        assert torch.equal(a, b)


def test_inputs_that_are_always_zero_do_no_harm() -> None:
    weight, rows = weight_and_rows()
    rows[:, 7] = 0.0
    rows[:, 9] = rows[:, 8]
    scheme = SCHEMES[0]
    made = corrected(weight, rows.T @ rows, scheme)
    assert bool(made[0].isfinite().all())
    assert error(scheme, made, weight, rows) < error(scheme, scheme.rounded(weight), weight, rows)


def test_errors_count_by_the_importance_of_their_input() -> None:
    """A large value that does not matter is clipped; one that matters is not."""
    weight, scheme, ignored = weight_and_rows()[0][:, :32].clone(), Scheme("int4", 32), torch.ones(32)
    weight[:, 3], ignored[3] = 5.0, 1e-6
    clipped, kept = scheme.scale_of(weight, ignored), scheme.scale_of(weight, 1.0 / ignored)
    assert bool((clipped < 0.85 * kept).all())
