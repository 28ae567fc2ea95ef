"""Recurrences and convolutions along paths: what they compute, and that a row's bits do not depend on its neighbours."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.ops import Core
from outrider.ops.native import Threads
from outrider.ops.scan import Paths, ScanRows, convolved, native_scan, scan, softplus

HEADS, KEYS, VALUES = 3, 11, 5


def rows_of(count: int, delta: bool, seed: int = 0, sizes: tuple[int, int, int] = (HEADS, KEYS, VALUES)) -> ScanRows:
    generator, (heads, keys, values) = torch.Generator().manual_seed(seed), sizes

    def draw(*shape: int) -> Tensor:
        return torch.randn(count, heads, *shape, generator=generator)

    keyed = (draw(keys) * keys**-0.5 for _ in range(2))
    return ScanRows(*keyed, draw(values), draw().sigmoid(), draw().sigmoid() if delta else None)


def memory(seed: int, sizes: tuple[int, int, int] = (HEADS, KEYS, VALUES)) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("delta", [True, False], ids=["delta", "sum"])
def test_a_chain_is_the_recurrence(delta: bool) -> None:
    x, first = rows_of(9, delta), memory(1)
    out, saved = scan(x, [first], Paths([-1, *range(8)], 1, 4), frozenset({8}))
    state = first.double()
    for t in range(9):
        key, value = x.keys[t].double(), x.values[t].double()
        state = state * x.decay[t, :, None, None]
        if x.rate is not None:
            value = (value - torch.einsum("hkv,hk->hv", state, key)) * x.rate[t, :, None]
        state = state + key[:, :, None] * value[:, None]
        expected = torch.einsum("hkv,hk->hv", state, x.queries[t].double())
        torch.testing.assert_close(out[t].double(), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(saved[8].double(), state, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("delta", [True, False], ids=["delta", "sum"])
def test_branches_and_lanes_have_the_bits_of_chains_alone(delta: bool) -> None:
    """A tree in one lane and a chain in another: every path gives what it gives by itself."""
    x, before = rows_of(9, delta), [-1, 0, 0, 1, 3, 2, -2, 6, 7]
    firsts = [memory(1), memory(2)]
    out, saved = scan(x, firsts, Paths(before, 2, 4), frozenset(range(9)))
    for row in range(9):
        path = [row]
        while before[path[0]] >= 0:
            path.insert(0, before[path[0]])
        lane = -1 - before[path[0]]
        part = ScanRows(*(None if part is None else part[path] for part in x))
        alone, kept = scan(part, [firsts[lane]], Paths([-1, *range(len(path) - 1)], 1, 4), frozenset({len(path) - 1}))
        assert torch.equal(out[row], alone[-1])
        assert torch.equal(saved[row], kept[len(path) - 1])


@pytest.mark.parametrize("sizes", [(3, 11, 5), (2, 128, 32), (4, 1, 17), (5, 6, 48)], ids=str)
@pytest.mark.parametrize("delta", [True, False], ids=["delta", "sum"])
def test_the_native_core_has_the_bits_of_the_definition(core: Core, delta: bool, sizes: tuple[int, int, int]) -> None:
    """Chains, trees and several lanes."""
    for seed, before in enumerate(([-1, *range(40)], [-1, 0, 0, 1, 3, 2, -2, 6, 7, 6, 0], [-3, -2, -1, -2, 1, 0, 2, 2, 7])):
        x, kept = rows_of(len(before), delta, seed, sizes), frozenset(range(0, len(before), 3))
        firsts = [memory(lane, sizes) for lane in range(3)]
        want, states = scan(x, firsts, Paths(before, 3, 4), kept)
        out, saved = native_scan(core, Threads(core), x, firsts, Paths(before, 3, 4), kept)
        assert torch.equal(out, want)
        assert all(torch.equal(saved[row], states[row]) for row in kept)


def test_the_convolution_sees_the_rows_of_its_path() -> None:
    channels, kernel = 7, 4
    generator = torch.Generator().manual_seed(0)
    windows, rows = torch.randn(2 * (kernel - 1), channels, generator=generator), torch.randn(6, channels, generator=generator)
    weight, bias = torch.randn(channels, 1, kernel, generator=generator), torch.randn(channels, generator=generator)
    paths = Paths([-1, 0, 1, 1, -2, 4], 2, kernel)
    out = convolved(torch.cat((windows, rows)), paths.taps, weight, bias)
    for row, path in enumerate(([0], [0, 1], [0, 1, 2], [0, 1, 3], [4], [4, 5])):
        held = windows[: kernel - 1] if row < 4 else windows[kernel - 1 :]
        expected = F.conv1d(torch.cat((held, rows[path])).T[None], weight, bias, groups=channels)[0, :, -1]
        torch.testing.assert_close(out[row], expected)
    assert paths.window(3) == [6, 7, 9], "rows 0, 1 and 3, after six rows of windows"


def test_softplus_has_the_same_bits_at_every_place() -> None:
    x = torch.randn(1003, generator=torch.Generator().manual_seed(0)) * 20
    torch.testing.assert_close(softplus(x), F.softplus(x), atol=1e-6, rtol=1e-5)
    whole = torch.exp(-softplus(x))
    for start in range(0, 60, 7):
        for width in (1, 2, 5, 16, 33):
            assert torch.equal(torch.exp(-softplus(x[start : start + width].clone())), whole[start : start + width])
