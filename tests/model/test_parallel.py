"""A model whose layers two ranks share: the same bits on both, rows keep their bits, and it is the same model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from outrider.bench.feature_specs import FEATURE_SPECS, keeps_bits, random_decoder
from outrider.cache import KVPool
from outrider.errors import InvalidParameter
from outrider.model import Feed, Runner
from outrider.model.load import INT8
from outrider.model.shard import LACKS, check_ranks
from outrider.ops import Plain, find_core, serving_ops
from tests.support.ranks import PAGE, PAGES, Pair

SHARED = [name for name, spec in FEATURE_SPECS.items() if not LACKS & spec.features()]
TREE = Feed([1, 0, 2], 0, [i * 11 % 97 for i in range(20)], [5, 6, 7, 8, 9], [-1, 0, 0, -1, 3])
LONG = Feed([3, 4, 5, 6, 7], 0, [i * 7 % 97 for i in range(76)])  # more rows than the core takes at once


@pytest.fixture(scope="module", params=["native", "torch"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    if request.param == "native" and find_core()[0] is None:
        pytest.skip(find_core()[1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTRIDER_OPS", request.param)
        pair = Pair(request.param)
        yield pair
        pair.close()


@pytest.mark.grid(once=["name"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", SHARED)
def test_rows_keep_their_bits_and_ranks_agree(pair: Pair, name: str, dtype: str) -> None:
    runner = pair.runner(name, dtype)
    assert keeps_bits(runner, PAGES - 1, PAGE)
    for feeds in ([TREE], [LONG], [LONG, TREE]):
        first, second = runner.digests(feeds)
        assert first == second


@pytest.mark.parametrize("name", SHARED)
def test_it_is_the_same_model(pair: Pair, name: str) -> None:
    runner, spec = pair.runner(name, "float32"), FEATURE_SPECS[name]
    decoder = random_decoder(spec, "float32")
    plain = Runner(decoder, KVPool(spec.depth, PAGES, spec.kv_heads, PAGE, spec.head_dim), Plain())
    made, want = (one.forward([LONG, TREE], (1, spec.depth), range(101)) for one in (runner, plain))
    torch.testing.assert_close(made.logits, want.logits, atol=2e-4, rtol=0)
    for tap, expected in zip(made.taps, want.taps, strict=True):
        torch.testing.assert_close(tap, expected, atol=2e-4, rtol=0)
    early = runner.run(runner.prepare([TREE]), (1,), range(1)).taps[0]
    late = runner.run(runner.prepare([TREE]), (), range(1, spec.depth), early, range(25))
    assert torch.equal(late.logits, runner.forward([TREE], wanted=range(25)).logits)
    assert torch.equal(runner.logits(late.last, range(25)), late.logits)


def test_moves_and_clears_reach_both_ranks(pair: Pair) -> None:
    """A token after a path that was moved into place has the bits that it has after the path decoded in order."""
    runner = pair.runner(SHARED[0], "bfloat16")
    path = [TREE.nodes[0], TREE.nodes[2]]
    want = runner.forward([Feed([6, 7, 8], 0, [*TREE.tokens, *path, 3])], wanted=[22]).logits
    runner.forward([TREE])
    slots = runner.pool.slots(TREE.pages, [22, 21])  # node 2 lies in slot 22, and its place is 21
    runner.pool.move(slots[:1], slots[1:])
    made = runner.forward([Feed(TREE.pages, 22, [3])], wanted=[0]).logits
    assert torch.equal(made, want)
    runner.pool.clear([0, 1, 2])
    cleared, unused = (runner.forward([Feed(pages, 22, [3])], wanted=[0]).logits for pages in ([0, 1, 2], [3, 4, 5]))
    assert torch.equal(cleared, unused)
    assert not torch.equal(cleared, want)


@pytest.mark.grid(once=["name"])
@pytest.mark.parametrize("name", SHARED)
def test_int8_rows_keep_their_bits_and_ranks_agree(pair: Pair, name: str) -> None:
    if serving_ops().core is None:
        pytest.skip("int8 runs in the native core alone")
    runner = pair.runner(name, INT8)
    assert keeps_bits(runner, PAGES - 1, PAGE)
    assert len(set(runner.digests([LONG, TREE]))) == 1


@pytest.mark.parametrize("name", [name for name in FEATURE_SPECS if name not in SHARED])
def test_what_ranks_cannot_share_is_named(name: str) -> None:
    lacking = ", ".join(sorted(LACKS & FEATURE_SPECS[name].features()))
    with pytest.raises(InvalidParameter, match=f"tensor_parallel_size: tensor parallel does not serve {lacking} yet"):
        check_ranks(FEATURE_SPECS[name], 2)


def test_uneven_shares_are_refused_with_those_that_fit() -> None:
    spec = FEATURE_SPECS[SHARED[0]]
    with pytest.raises(InvalidParameter, match="4 ranks cannot share 6 attention heads evenly; this model takes 1, 2$"):
        check_ranks(spec, 4)
    with pytest.raises(InvalidParameter, match="3 ranks cannot share 2 heads of keys evenly"):
        check_ranks(spec, 3)
