"""The native core called from several threads, and after a fork."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from outrider.bench.feature_specs import FEATURE_SPECS, random_decoder
from outrider.model import Feed, ModelSpec
from outrider.model.stack import lay_out_rows
from outrider.ops import PackedLinear, Stack, StackSpan, find_core
from outrider.sampling.noise import token_words_at
from tests.support.native import make_decoder, make_runner

CORE = find_core()[0]
pytestmark = pytest.mark.skipif(CORE is None, reason=find_core()[1])


def test_calls_from_several_threads_do_not_mix() -> None:
    """A drafter that missed its deadline may still be calling while the engine runs its next round."""
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
        Feed([0], 5, [1], first_key=6),
        Feed([0], 5, [1], first_key=2**31 - 1),
        Feed([0], 5, [1], first_key=-1),
        Feed([0], 2**31 - 1, [1, 1]),
        Feed([0], -1, [1]),
        Feed([0], 5, [1], [1], [-1], known=-1),
        Feed([0], 5, [1], [], [], known=3),
        Feed([0], 5, [], [1], [-1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 11),
    ],
    ids=[
        "token",
        "negative token",
        "page",
        "slot",
        "slots of a draft",
        "parent",
        "position",
        "first key",
        "far first key",
        "negative first key",
        "far start",
        "negative start",
        "negative known",
        "known of nothing",
        "slots of known nodes",
    ],
)
def test_rows_over_memory_that_is_not_there_are_refused(feed: Feed) -> None:
    assert CORE is not None
    runner = make_runner(CORE, make_decoder("float32", context=40))
    before = runner.pool.keys.clone()
    with pytest.raises(IndexError, match="out of range"):
        runner.forward([Feed([1], 0, [5]), feed])
    assert torch.equal(runner.pool.keys, before)


ROTARY, LEARNED = FEATURE_SPECS["Llama"], FEATURE_SPECS["learned positions with an offset, relu"]


@pytest.mark.parametrize(
    ("spec", "start", "rotary_start"),
    [(ROTARY, 60, 0), (LEARNED, 60, 0), (ROTARY, 0, -1), (ROTARY, 0, 60), (ROTARY, 0, 2**31 - 1)],
    ids=["position", "learned position", "negative variant", "variant", "far variant"],
)
def test_rows_beyond_a_table_are_refused(spec: ModelSpec, start: int, rotary_start: int) -> None:
    assert CORE is not None
    positions = None if spec.positions is None else replace(spec.positions, rows=64 + spec.positions.offset)
    runner = make_runner(CORE, random_decoder(replace(spec, context=64, positions=positions)))
    assert bool(runner.forward([Feed(range(14), 59, [1] * 5)]).last.isfinite().all()), "the last row of the table"
    with pytest.raises(IndexError, match="out of range"):
        runner.forward([Feed(range(14), start, [1] * 5, rotary_start=rotary_start)])


@pytest.mark.parametrize("wanted", [[3], [-1]])
def test_logits_of_rows_that_are_not_there_are_refused(wanted: list[int]) -> None:
    assert CORE is not None
    with pytest.raises(IndexError, match="out of range"):
        make_runner(CORE, make_decoder("float32")).forward([Feed([0], 0, [1, 2, 3])], wanted=wanted)


def test_a_span_of_layers_that_are_not_there_is_refused() -> None:
    assert CORE is not None
    runner = make_runner(CORE, make_decoder("float32"))
    assert runner.stack is not None
    for span in (StackSpan(0, 3), StackSpan(-1, 1), StackSpan(2, 1), StackSpan(rotary_lag=-1)):
        with pytest.raises(IndexError, match="out of range"):
            runner.stack.forward(lay_out_rows([Feed([0], 0, [1])]), span=span)


def test_rows_of_another_shape_or_dtype_are_refused() -> None:
    assert CORE is not None
    runner, rows = make_runner(CORE, make_decoder("float32")), lay_out_rows([Feed([0], 0, [1, 2])])
    assert runner.stack is not None
    for features in (torch.zeros(1, 48), torch.zeros(2, 47), torch.zeros(2, 48, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match="float32"):
            runner.stack.forward(rows, features=features)
    product = PackedLinear(CORE, "float32", torch.randn(8, 32))
    for x in (torch.zeros(1, 31), torch.zeros(1, 32, dtype=torch.float64)):
        with pytest.raises(ValueError, match="float32"):
            product(x)
    with pytest.raises(ValueError, match="rows of logits"):
        CORE.draw(torch.zeros(2, 9), [(0.0, 0.0, 1.0, 0.0)], [0, 0], token_words_at(9))


@pytest.mark.parametrize("changes", [{"heads": 4, "kv_heads": 3}, {"heads": 1, "kv_heads": 2}, {"head_dim": 8}, {"ffn": 64}])
def test_weights_of_another_shape_are_refused(changes: dict[str, int]) -> None:
    """Before anything is computed: the core would divide by a group of no queries, or read past a matrix."""
    assert CORE is not None
    runner = make_runner(CORE, make_decoder("float32"))
    assert runner.stack is not None
    pool = runner.pool
    with pytest.raises(ValueError, match=r"heads|needs|values"):
        Stack(CORE, runner.stack._weights._replace(**changes), pool.keys, pool.values, pool.page_size)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_stays_in_its_row(kind: str, value: float) -> None:
    """Rows before it, in a chain, in a tree and in other sequences, keep their bits; those that see it are not finite."""
    assert CORE is not None
    decoder = make_decoder(kind)
    decoder.embedding[5, 2] = value
    text, tree = [7, 8, 9, 10, 11], ([5, 12, 5, 13], [-1, -1, 1, 1])
    runner = make_runner(CORE, decoder)
    want = runner.forward([Feed([0], 0, [*text, 12, 13])], wanted=range(7)).logits
    other = runner.forward([Feed([1], 0, [1, 2])], wanted=range(2)).logits
    assert want is not None
    assert other is not None
    got = runner.forward([Feed([2], 0, text, *tree), Feed([3], 0, [1, 2])], wanted=range(11)).logits
    assert got is not None
    assert torch.equal(got[[0, 1, 2, 3, 4, 6, 8, 9, 10]], torch.cat((want, other)))
    assert not bool(got[[5, 7]].isfinite().any())
    chain = runner.forward([Feed([4], 0, [*text, 5, 12])], wanted=range(7)).logits
    assert chain is not None
    assert torch.equal(chain[:5], want[:5])
    assert not bool(chain[5:].isfinite().any()), "what sees it is not finite"
    repeated = runner.forward([Feed([4], 0, [*text, 12, 13])], wanted=range(7)).logits
    assert repeated is not None
    assert torch.equal(repeated, want), "in a page that held it"
