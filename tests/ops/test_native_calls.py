"""The native core called from several threads, and after a fork."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from outrider.model import Feed
from outrider.ops import PackedLinear, find_core
from tests.ops.test_native import make_decoder, make_runner

CORE = find_core()[0]
pytestmark = pytest.mark.skipif(CORE is None, reason=find_core()[1])


def test_calls_from_several_threads_do_not_mix() -> None:
    """A drafter that missed its deadline may still be calling when the engine goes on."""
    assert CORE is not None
    runner = make_runner(CORE, make_decoder("bfloat16"))
    feeds = [Feed([page], 0, [(page * 7 + i) % 97 for i in range(16)]) for page in range(8)]
    want = [runner.forward([feed]).last.clone() for feed in feeds]
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda feed: runner.forward([feed]).last, feeds * 20))
    assert all(torch.equal(last, want[i % 8]) for i, last in enumerate(got))


def test_a_forked_child_has_threads_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CORE is not None
    monkeypatch.setattr(CORE, "threads", 2)
    product, x = PackedLinear(CORE, "float32", torch.randn(64, 32)), torch.randn(3, 32)
    want = product(x)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(product(x), want) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize(
    "feed",
    [
        Feed([0], 0, [97]),
        Feed([0], 0, [-1]),
        Feed([14], 0, [1]),
        Feed([0], 16, [1]),
        Feed([0], 10, [1] * 5, [1, 1], [-1, 0]),
        Feed([0], 0, [1], [1, 1], [1, 0]),
        Feed(list(range(14)), 400, [1]),
    ],
    ids=["token", "negative token", "page", "slot", "slots of a draft", "parent", "position"],
)
def test_rows_over_memory_that_is_not_there_are_refused(feed: Feed) -> None:
    assert CORE is not None
    runner = make_runner(CORE, make_decoder("float32", context=40))
    before = runner.pool.keys.clone()
    with pytest.raises(IndexError, match="out of range"):
        runner.forward([Feed([1], 0, [5]), feed])
    assert torch.equal(runner.pool.keys, before)


@pytest.mark.parametrize("wanted", [[3], [-1]])
def test_logits_of_rows_that_are_not_there_are_refused(wanted: list[int]) -> None:
    assert CORE is not None
    with pytest.raises(IndexError, match="out of range"):
        make_runner(CORE, make_decoder("float32")).forward([Feed([0], 0, [1, 2, 3])], wanted=wanted)
