"""LoRA adapters in the native core, on every build: against merged weights, and rows that do not know their neighbours."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outrider.bench.feature_specs import FEATURE_SPECS, random_decoder
from outrider.model import Feed, Runner
from outrider.ops import Core, find_core
from tests.support.lora import merged, random_parts
from tests.support.native import SERVED, make_decoder, make_runner

pytestmark = pytest.mark.skipif(find_core()[0] is None, reason=find_core()[1])

KINDS = ("float32", "bfloat16", "int8")
PAGES, OTHER, THIRD = [3, 9, 1, 7, 4], [12, 0, 5, 8, 6], [11, 2]
TEXT = [i * 37 % 97 for i in range(70)]
TREE = ([5, 17, 8, 31, 2, 40], [-1, -1, 0, 0, 2, 1])


def runner_of(core: Core, kind: str, **changes: object) -> Runner:
    return make_runner(core, make_decoder(kind, **changes))


def logits(runner: Runner, *feeds: Feed) -> Tensor:
    rows = sum(len(feed.tokens) + len(feed.nodes) for feed in feeds)
    return runner.logits(runner.forward(list(feeds)).last, range(rows))


def with_adapters(runner: Runner, *ranks: int) -> list[int]:
    spec, dtype = runner.decoder.spec, runner.adapters.dtype
    return [runner.adapters.add(random_parts(spec, seed, rank, dtype)) for seed, rank in enumerate(ranks)]


@pytest.mark.parametrize("name", SERVED)
def test_an_adapter_is_what_merging_makes_of_it(core: Core, name: str) -> None:
    spec = FEATURE_SPECS[name]
    text = [i * 11 % spec.vocab for i in range(40)]
    runner = make_runner(core, random_decoder(spec))
    parts = random_parts(spec, 0, 9)
    want = logits(make_runner(core, merged(random_decoder(spec), parts)), Feed(PAGES, 0, text))
    got = logits(runner, Feed(PAGES, 0, text, adapter=runner.adapters.add(parts)))
    torch.testing.assert_close(got, want, rtol=0, atol=2e-5 * float(want.abs().max()))
    assert float((want - logits(runner, Feed(PAGES, 0, text))).abs().max()) > 0.01


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_rounded_weights_have_adapters_in_bf16(core: Core, kind: str) -> None:
    """Within a few percent of the logits' norm, as without the adapter, which changes far more."""
    runner = runner_of(core, kind, hidden=128, ffn=192, heads=4, head_dim=32)
    parts = random_parts(runner.decoder.spec, 0, 16, torch.bfloat16)
    exact = make_decoder("float32", hidden=128, ffn=192, heads=4, head_dim=32)
    want = logits(make_runner(core, merged(exact, parts)), Feed(PAGES, 0, TEXT))
    plain, got = logits(runner, Feed(PAGES, 0, TEXT)), logits(runner, Feed(PAGES, 0, TEXT, adapter=runner.adapters.add(parts)))
    assert float((got - want).norm() / want.norm()) < {"bfloat16": 2e-2, "int8": 6e-2}[kind]
    assert float((plain - want).norm() / want.norm()) > 0.2


@pytest.mark.parametrize("ranks", [(16, 3), (1, 40)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_bits_of_its_adapter_alone(core: Core, kind: str, ranks: tuple[int, int]) -> None:
    """At every row count and place, beside rows of other adapters and of none, which have the bits they have without any."""
    bare, runner = runner_of(core, kind), runner_of(core, kind)
    first, second = with_adapters(runner, *ranks)
    whole = {adapter: logits(runner, Feed(PAGES, 0, TEXT, adapter=adapter)) for adapter in (0, first, second)}
    assert torch.equal(whole[0], logits(bare, Feed(PAGES, 0, TEXT)))
    assert not torch.equal(whole[first], whole[second])
    for count in [*range(1, 19), 31, 33, 48, 63, 64, 65]:
        rows = logits(
            runner,
            Feed(OTHER, 0, TEXT[:count], adapter=second),
            Feed(THIRD, 0, TEXT[:3]),
            Feed(PAGES, 0, TEXT[:5], adapter=first),
            Feed([13], 0, TEXT[:1], adapter=second),
        )
        expected = [whole[second][:count], whole[0][:3], whole[first][:5], whole[second][:1]]
        for part, want in zip(rows.split([count, 3, 5, 1]), expected, strict=True):
            assert torch.equal(part, want), count
    for size in (1, 7, 33):
        chunks = [logits(runner, Feed(PAGES, at, TEXT[at : at + size], adapter=first)) for at in range(0, len(TEXT), size)]
        assert torch.equal(torch.cat(chunks), whole[first]), f"chunks of {size}"


@pytest.mark.parametrize("kind", KINDS)
def test_tree_nodes_have_the_adapter_of_their_sequence(core: Core, kind: str) -> None:
    runner = runner_of(core, kind, head_dim=16)
    adapter, other = with_adapters(runner, 8, 4)
    whole = logits(runner, Feed(PAGES, 0, TEXT, adapter=adapter))
    beside = Feed(OTHER, 0, TEXT[:9], adapter=other)
    tree = logits(runner, beside, Feed(PAGES, 69, TEXT[69:], *TREE, adapter=adapter))[9:]
    assert torch.equal(tree[0], whole[-1])
    for node, (token, parent) in enumerate(zip(*TREE, strict=True)):
        path = [token]
        while parent >= 0:
            path.insert(0, TREE[0][parent])
            parent = TREE[1][parent]
        assert torch.equal(logits(runner, Feed(PAGES, 70, path, adapter=adapter))[-1], tree[node + 1])


@pytest.mark.parametrize("kind", KINDS)
def test_the_number_of_threads_does_not_matter(core: Core, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    for threads in (1, 2, 3):
        monkeypatch.setattr(core, "threads", threads)
        runner = runner_of(core, kind, head_dim=34, heads=8, kv_heads=2)
        first, second = with_adapters(runner, 20, 6)
        rows = [Feed(PAGES, 0, TEXT, adapter=first), Feed(OTHER, 0, TEXT[:1], adapter=second), Feed(THIRD, 0, TEXT[:2])]
        seen.append(torch.cat([logits(runner, *rows), logits(runner, rows[1]), logits(runner, rows[2])]))
    assert all(torch.equal(seen[0], other) for other in seen)


def test_values_that_are_not_finite_stay_in_their_row(core: Core) -> None:
    runner = runner_of(core, "bfloat16")
    (broken,) = with_adapters(runner, 4)
    alone = logits(runner, Feed(PAGES, 0, TEXT[:9]))
    parts = random_parts(runner.decoder.spec, 2, 4, torch.bfloat16)
    parts[0, "gate_up"][0].down[2] = torch.nan
    broken = runner.adapters.add(parts)
    rows = logits(runner, Feed(OTHER, 0, TEXT[:5], adapter=broken), Feed(PAGES, 0, TEXT[:9]))
    assert bool(rows[:5].isnan().all())
    assert torch.equal(rows[5:], alone)


def test_numbers_of_adapters_are_checked_and_used_again(core: Core) -> None:
    runner = runner_of(core, "float32")
    first, second = with_adapters(runner, 4, 5)
    want = logits(runner, Feed(PAGES, 0, TEXT[:9], adapter=second))
    runner.adapters.remove(first)
    for wrong in (first, second + 1, -1):
        with pytest.raises(IndexError):
            runner.forward([Feed(PAGES, 0, TEXT[:9], adapter=wrong)])
    assert torch.equal(logits(runner, Feed(PAGES, 0, TEXT[:9], adapter=second)), want)
    assert runner.adapters.add(random_parts(runner.decoder.spec, 1, 5)) == first
    assert torch.equal(logits(runner, Feed(PAGES, 0, TEXT[:9], adapter=first)), want)
