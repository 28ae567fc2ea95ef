"""Shared fixtures. Torch runs on one thread so that two test workers fit two cores."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path

import outrider  # noqa: F401  (first: it makes bf16 safe before torch is used)
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

TESTS = Path(__file__).parent
SLOW_FOLDERS = ("bench", "benchmarks", "examples", "recipes", "serve", "train")  # servers, measurements, training

# No shrinking by default: a failing example of a whole engine run is shown as found, at once.
settings.register_profile(
    "outrider",
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile("whole", settings.get_profile("outrider"))
settings.register_profile("quick", settings.get_profile("outrider"))
settings.load_profile("outrider")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--whole-grids",
        action="store_true",
        help="Run every combination of a grid's parameters, the exhaustive tests, and every example of the random ones.",
    )
    parser.addoption(
        "--quick-grids",
        action="store_true",
        help="Run each value of a grid's parameters once, few examples of the random tests, and leave out the slow tests.",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "grid(once=()): a grid of parameters; by default a pairwise cover of it runs")
    config.addinivalue_line("markers", "exhaustive: left out unless every grid is run whole")
    config.addinivalue_line("markers", "slow: left out by `make test-fast`; so are the tests in SLOW_FOLDERS")
    for level in ("whole", "quick"):
        if config.getoption(f"--{level}-grids"):
            settings.load_profile(level)
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # started in the background: tests of Ctrl-C need it heard
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.relative_to(TESTS).parts[0] in SLOW_FOLDERS:
            item.add_marker("slow")
    if config.getoption("--whole-grids"):
        return
    quick = config.getoption("--quick-grids")
    names = ("exhaustive", "slow") if quick else ("exhaustive",)
    left_out = {id(item) for item in items for name in names if item.get_closest_marker(name) is not None}
    grids: dict[tuple[str, str], list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("grid") is not None and id(item) not in left_out:
            assert item.parent is not None
            grids.setdefault((item.parent.nodeid, item.originalname), []).append(item)
    kept = {id(item) for grid in grids.values() for item in cover(grid, pairs=not quick)}
    left_out |= {id(item) for grid in grids.values() for item in grid} - kept
    config.hook.pytest_deselected(items=[item for item in items if id(item) in left_out])
    items[:] = [item for item in items if id(item) not in left_out]


def cover(grid: Sequence[pytest.Function], pairs: bool = True) -> list[pytest.Function]:
    """Items of a grid that together hold every pair of values of any two parameters: the greedy choice, in order.

    Pairs with a parameter named in the marker's `once` are not needed: each of its values occurs at least once. Without
    `pairs` that holds for all parameters.
    """
    marker = grid[0].get_closest_marker("grid")
    once = marker.kwargs.get("once", ()) if marker is not None else ()
    needed: dict[pytest.Function, set[object]] = {}
    for item in grid:
        values = [(name, id(value)) for name, value in item.callspec.params.items()]
        paired = [value for value in values if pairs and value[0] not in once]
        needed[item] = {*values, *combinations(paired, 2)}
    missing = set().union(*needed.values())
    chosen: list[pytest.Function] = []
    while missing:
        best = max(grid, key=lambda item: len(needed[item] & missing))
        chosen.append(best)
        missing -= needed[best]
    return chosen


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Costs measured by tests are kept away from the user's, and the user's from tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTRIDER_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(params=["torch", "native"])
def both_paths(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test on the torch path and on the native core."""
    from outrider.ops import find_core

    if request.param == "native" and find_core()[0] is None:
        pytest.skip(find_core()[1])
    monkeypatch.setenv("OUTRIDER_OPS", request.param)
    return str(request.param)
