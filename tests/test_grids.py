"""A thinned grid still holds every pair of values of any two of its parameters."""

from __future__ import annotations

from itertools import combinations, product

import pytest

pytest_plugins = ["pytester"]
GRID = """
import pytest

@pytest.mark.grid
@pytest.mark.parametrize("a", range(4))
@pytest.mark.parametrize(("b", "c"), [(0, 5), (1, 6), (2, 7)])
@pytest.mark.parametrize("d", ["x", "y"])
def test_cell(a, b, c, d, record_property):
    print(f"cell {a} {b} {d}")
"""


@pytest.mark.parametrize("whole", [False, True])
def test_grids_are_thinned_to_a_pairwise_cover(pytester: pytest.Pytester, request: pytest.FixtureRequest, whole: bool) -> None:
    pytester.makeconftest((request.config.rootpath / "tests" / "conftest.py").read_text())
    pytester.makepyfile(GRID)
    result = pytester.runpytest_inprocess("-s", "-p", "no:cacheprovider", *(["--whole-grids"] if whole else []))
    cells = {tuple(line.split()[1:]) for line in result.outlines if "cell " in line for line in [line[line.index("cell ") :]]}
    everything = set(product("0123", "012", ("x", "y")))
    assert cells <= everything
    assert len(cells) == (24 if whole else 12)
    for first, second in combinations(range(3), 2):
        assert {(cell[first], cell[second]) for cell in cells} == {(cell[first], cell[second]) for cell in everything}
