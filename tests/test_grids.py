"""A thinned grid still holds every pair of values of any two of its parameters."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, product

import pytest

pytest_plugins = ["pytester"]
GRID = """
import pytest

@pytest.mark.grid{once}
@pytest.mark.parametrize("a", range(4))
@pytest.mark.parametrize(("b", "c"), [(0, 5), (1, 6), (2, 7)])
@pytest.mark.parametrize("d", ["x", "y"])
def test_cell(a, b, c, d, record_property):
    print(f"cell {{a}} {{b}} {{d}}")
"""


EVERYTHING = set(product("0123", "012", ("x", "y")))


@pytest.fixture
def cells(pytester: pytest.Pytester, request: pytest.FixtureRequest) -> Callable[..., set[tuple[str, ...]]]:
    """Which cells of the grid run, with a marker and flags."""

    def run(once: str = "", *flags: str) -> set[tuple[str, ...]]:
        pytester.makeconftest((request.config.rootpath / "tests" / "conftest.py").read_text())
        pytester.makepyfile(GRID.format(once=once))
        result = pytester.runpytest_inprocess("-s", "-p", "no:cacheprovider", *flags)
        lines = [line[line.index("cell ") :] for line in result.outlines if "cell " in line]
        found = {tuple(line.split()[1:]) for line in lines}
        assert found <= EVERYTHING
        return found

    return run


@pytest.mark.parametrize("flags", [(), ("--whole-grids",)], ids=["thinned", "whole"])
def test_grids_are_thinned_to_a_pairwise_cover(cells: Callable[..., set[tuple[str, ...]]], flags: tuple[str, ...]) -> None:
    found = cells("", *flags)
    assert len(found) == (24 if flags else 12)
    for first, second in combinations(range(3), 2):
        assert {(cell[first], cell[second]) for cell in found} == {(cell[first], cell[second]) for cell in EVERYTHING}


def test_quick_grids_hold_each_value_once(cells: Callable[..., set[tuple[str, ...]]]) -> None:
    found = cells("", "--quick-grids")
    assert len(found) == 4
    for place in range(3):
        assert {cell[place] for cell in found} == {cell[place] for cell in EVERYTHING}


def test_values_of_some_parameters_need_to_occur_only_once(cells: Callable[..., set[tuple[str, ...]]]) -> None:
    found = cells('(once=["a"])')
    assert len(found) == 6
    assert {(cell[1], cell[2]) for cell in found} == set(product("012", "xy"))
    assert {cell[0] for cell in found} == set("0123")
