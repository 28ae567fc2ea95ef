"""Matrices of small integers in groups: their products against float64, their rows against themselves, on every build."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outrider.bench.doctor import rows_keep_bits
from outrider.ops import Core, Epilogue, Grouped, PackedLinear, find_core
from outrider.ops.groups import packed
from outrider.ops.native import NormWeights

pytestmark = pytest.mark.skipif(find_core()[0] is None, reason=find_core()[1])


@pytest.fixture(autouse=True)
def _same_values_in_every_run() -> None:
    torch.manual_seed(0)


SHAPES = [(16, 64), (1, 1), (33, 77), (100, 500), (257, 128), (48, 1090)]  # columns, inner


def random_matrix(shape: tuple[int, int], size: int, bits: int, least: bool, seed: int = 0) -> Grouped:
    generator = torch.Generator().manual_seed(seed)
    groups = -(-shape[1] // size)
    codes = torch.randint(0, 2**bits, shape, generator=generator, dtype=torch.uint8)
    scale = torch.rand(shape[0], groups, generator=generator).half().float() * 2.0 ** torch.randint(-9, 3, (shape[0], 1))
    subtracted = (scale * torch.randint(0, 2**bits, scale.shape, generator=generator)).half().float() if least else None
    return Grouped(codes, scale, subtracted, 0 if least else 2 ** (bits - 1), bits, size)


def exact(matrix: Grouped, x: Tensor) -> tuple[Tensor, Tensor]:
    """The product of the rounded rows in float64, and the sum of magnitudes that bounds its rounding."""
    scale = x.abs().amax(1, keepdim=True) / 127.0
    units = torch.where(scale > 0, 1.0 / scale, 0.0)
    rows = (x * units).round().double() * scale.double()
    values = matrix.codes.double() * matrix.scale.double().repeat_interleave(matrix.size, 1)[:, : matrix.shape[1]]
    return rows @ matrix.values().double().T, rows.abs() @ (values.abs() + matrix.values().double().abs()).T


@pytest.mark.grid
@pytest.mark.parametrize("least", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("size", [16, 32, 48, 128, 4096])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_those_of_the_values(core: Core, shape: tuple[int, int], size: int, bits: int, least: bool) -> None:
    """Group sums are exact; one rounding follows for each group, and one of each value that is subtracted."""
    matrix, bias = random_matrix(shape, size, bits, least), torch.randn(shape[0])
    x = torch.randn(19, shape[1])
    got = PackedLinear(core, "bfloat16", matrix, bias)(x)
    want, magnitude = exact(matrix, x)
    assert bool(((got - bias).double() - want).abs().le(2e-6 * magnitude + 1e-6).all())


@pytest.mark.grid
@pytest.mark.parametrize("least", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("size", [16, 32, 128])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_has_its_bits_at_every_place(core: Core, size: int, bits: int, least: bool, threads: int) -> None:
    matrix = random_matrix((100, 300), size, bits, least)
    core.threads = threads
    assert rows_keep_bits(PackedLinear(core, "bfloat16", matrix), torch.randn(70, 300), range(1, 70))
    core.threads = 1


@pytest.mark.grid
@pytest.mark.parametrize("least", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("size", [16, 48, 128])
@pytest.mark.parametrize("paired", [False, True])
def test_the_core_packs_as_torch_does(core: Core, size: int, bits: int, least: bool, paired: bool) -> None:
    matrix = random_matrix((74, 300), size, bits, least)
    matrix.scale[5], matrix.scale[6, 1] = 0.0, torch.inf
    linear = PackedLinear(core, "bfloat16", matrix, then=Epilogue(paired=paired), order=torch.randperm(74))
    weights, power = packed(matrix, linear.columns_in_panels())
    assert torch.equal(linear._packed.weights, weights)
    assert torch.equal(linear._packed.scale.nan_to_num(-1.0), power.nan_to_num(-1.0))


@pytest.mark.grid
@pytest.mark.parametrize("least", [False, True])
@pytest.mark.parametrize("size", [16, 64])
@pytest.mark.parametrize("layer_norm", [False, True])
def test_inputs_in_another_order(core: Core, size: int, least: bool, layer_norm: bool) -> None:
    """As act-order leaves them: the bits of rows whose values were put in order before, with the norm or without."""
    order, x = torch.randperm(200), torch.randn(21, 200)
    matrix = random_matrix((50, 200), size, 4, least)
    ordered = PackedLinear(core, "bfloat16", matrix._replace(inputs=order))
    assert torch.equal(ordered(x), PackedLinear(core, "bfloat16", matrix)(x[:, order]))
    assert torch.equal(matrix._replace(inputs=order).values()[:, order], matrix.values())
    assert rows_keep_bits(ordered, x, range(1, 21))
    norm = NormWeights(torch.rand(200) + 0.5, torch.randn(200) if layer_norm else None, layer_norm, 1e-5)
    normed = PackedLinear(core, "float32", torch.eye(200))(x, norm)
    assert torch.equal(ordered(x, norm), PackedLinear(core, "bfloat16", matrix)(normed[:, order]))


@pytest.mark.parametrize("least", [False, True])
def test_columns_in_another_order_and_gates(core: Core, least: bool) -> None:
    matrix, x, order = random_matrix((92, 96), 32, 4, least), torch.randn(9, 96), torch.randperm(92)
    bias = torch.randn(92)
    plain = PackedLinear(core, "bfloat16", matrix, bias)(x)
    assert torch.equal(PackedLinear(core, "bfloat16", matrix, bias, order=order)(x), plain[:, order])
    gated = PackedLinear(core, "bfloat16", matrix, bias, Epilogue("silu", paired=True))(x)
    torch.testing.assert_close(gated, torch.nn.functional.silu(plain[:, :46]) * plain[:, 46:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bits", [4, 8])
def test_rounding_is_to_the_nearest(bits: int) -> None:
    weight = torch.randn(30, 100)
    matrix = Grouped.of(weight, 32, bits)
    step = matrix.scale.repeat_interleave(32, 1)[:, :100]
    assert bool(((matrix.values() - weight).abs() <= step * 0.51 + weight.abs().amax() * 2**-10).all())
    assert torch.equal(Grouped.of(torch.full((3, 40), 0.25), 32).values(), torch.full((3, 40), 0.25))


def test_small_scales_keep_their_bits_beside_large_ones(core: Core) -> None:
    """Of one column: a group of scale 1 and one of 2^-17, each alone in what its rows see."""
    matrix = random_matrix((16, 64), 32, 8, True)
    matrix.scale[:], matrix.least[:] = torch.tensor([1.0, 2.0**-17 * (1 + 2**-9)]), torch.tensor([255.0, 2.0**-16])  # type: ignore[index]
    x = torch.zeros(3, 64)
    x[:, 32:] = torch.randn(3, 32)
    want, magnitude = exact(matrix, x)
    got = PackedLinear(core, "bfloat16", matrix)(x)
    assert bool((got.double() - want).abs().le(2e-6 * magnitude).all())


def test_matrices_with_different_groups_are_joined() -> None:
    """As of queries, keys and values in a file where the values have more bits."""
    parts = [
        random_matrix((20, 96), 32, 4, True),
        random_matrix((12, 96), 16, 8, False, 1),
        random_matrix((8, 96), 48, 4, False, 2),
    ]
    joined = Grouped.joined(parts)
    assert joined is not None
    assert (joined.bits, joined.size) == (8, 16)
    torch.testing.assert_close(joined.values(), torch.cat([part.values() for part in parts]), rtol=1e-6, atol=1e-6)
    same = Grouped.joined([parts[1], parts[2]])
    assert same is not None
    assert same.least is None
    torch.testing.assert_close(same.values(), torch.cat([parts[1].values(), parts[2].values()]), rtol=1e-6, atol=1e-6)
    assert Grouped.joined([random_matrix((4, 96), 32, 4, True), random_matrix((4, 96), 48, 4, True)]) is None
    order = torch.randperm(96)
    ordered = Grouped.joined([part._replace(inputs=order) for part in parts])
    assert ordered is not None
    assert torch.equal(ordered.values()[:, order], joined.values())
    assert Grouped.joined([parts[0]._replace(inputs=order), parts[1]]) is None


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_values_that_are_not_finite_stay_in_their_row_and_column(core: Core, wrong: float) -> None:
    matrix, x = random_matrix((40, 64), 32, 4, True), torch.randn(6, 64)
    clean = PackedLinear(core, "bfloat16", matrix)(x)
    x[2, 5] = wrong
    matrix.scale[7, 1] = wrong
    got = PackedLinear(core, "bfloat16", matrix)(x)
    assert bool(got[2].isnan().all() and got[:, 7].isnan().all())
    rows, columns = [0, 1, 3, 4, 5], [i for i in range(40) if i != 7]
    assert torch.equal(got[rows][:, columns], clean[rows][:, columns])
