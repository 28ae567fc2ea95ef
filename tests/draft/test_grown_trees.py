"""Trees that the native core grows in one call are those of `grow`, the definition, node by node."""

from __future__ import annotations

import random

import pytest
import torch

from outrider.cache import KVPool
from outrider.core import ROOT, Batch, Plan, Sequence, Tree
from outrider.draft.draft_temperature import DraftTemperature
from outrider.draft.eagle import EagleDrafter
from outrider.draft.growth import TreeShape
from outrider.heads import EagleHead
from outrider.heads.runners import EagleRunner
from outrider.model import Decoder, Feed, Growth
from outrider.ops import find_core, serving_ops
from outrider.sampling import Row, SamplingParams
from tests.support import VOCAB, make_engine, make_request, random_decoder, run, write_family
from tests.support.eagle import FORMS, random_head

pytestmark = pytest.mark.skipif(find_core()[0] is None, reason=find_core()[1])

SHAPES = {
    "chain": TreeShape(),
    "tree": TreeShape(beam=3, branch=3, depth=4),
    "wide": TreeShape(beam=2, branch=6, depth=3),
    "one path with leaves": TreeShape(beam=1, branch=4),
    "more nodes than are kept": TreeShape(beam=8, branch=8, depth=6),
}


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return random_decoder(write_family(tmp_path_factory.mktemp("m"), "llama2", request.param, num_hidden_layers=3))


def drafter_of(head: EagleHead, shape: TreeShape, grows_trees: bool) -> EagleDrafter:
    c = head.config.shape
    pool, ops = KVPool(1, 160, c.kv_heads, 16, c.head_dim), serving_ops()
    network = EagleRunner(head, pool, ops)
    network.grows_trees = grows_trees
    return EagleDrafter(head, pool, ops, shape, network)


def drafts_in(decoder: Decoder, drafter: EagleDrafter, seed: str) -> list[Tree]:
    """Every tree that is drafted while some requests run together."""
    rng, trees, propose = random.Random(seed), list[Tree](), drafter.propose

    def watching(batch: Batch, plan: Plan):  # type: ignore[no-untyped-def]
        drafts = propose(batch, plan)
        trees.extend(drafts.per_sequence)
        return drafts

    drafter.propose = watching  # type: ignore[method-assign]
    params = [
        SamplingParams(temperature=0.0, max_tokens=24),
        SamplingParams(temperature=0.7, seed=5, max_tokens=24),
        SamplingParams(temperature=1.2, seed=6, top_k=7, max_tokens=24),
        SamplingParams(temperature=0.9, seed=7, top_p=0.8, min_p=0.02, max_tokens=24),
    ]
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(2, 45))] for _ in params]
    run(
        make_engine(decoder, drafter, 11),
        [make_request(p, q, f"r{i}") for i, (p, q) in enumerate(zip(prompts, params, strict=True))],
    )
    return trees


@pytest.mark.grid
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FORMS)
def test_trees_are_those_of_the_definition(decoder: Decoder, form: str, shape: str) -> None:
    head = random_head(decoder, form)
    grown, defined = (drafts_in(decoder, drafter_of(head, SHAPES[shape], native), f"{form} {shape}") for native in (True, False))
    assert [tree[:2] for tree in grown] == [tree[:2] for tree in defined]
    assert sum(len(tree.tokens) for tree in grown) > 50
    for one, other in zip(grown, defined, strict=True):
        assert one.survival == pytest.approx(other.survival, rel=1e-4)


def test_logits_behind_a_draft_are_known_by_path(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft temperature learns from the logits after every kept node that was run, over the target's tokens."""
    head, commit = random_head(decoder, "eagle3 reduced"), DraftTemperature.commit
    paths = [(), *((first,) for first in range(VOCAB)), (1, 2, 3, 4, 5, 6)]
    known: list[list[dict[tuple[int, ...], torch.Tensor]]] = []

    def watching(self, batch, verdicts, scores):  # type: ignore[no-untyped-def]
        for logits_at in self.last.values():
            drafts = {path: logits_at(path) for path in paths}
            known[-1].append({path: draft.logits.clone() for path, draft in drafts.items() if draft is not None})
        commit(self, batch, verdicts, scores)

    monkeypatch.setattr(DraftTemperature, "commit", watching)
    for native in (True, False):
        known.append([])
        drafts_in(decoder, drafter_of(head, TreeShape(beam=2, branch=3, depth=4), native), "paths")
    assert len(known[0]) == len(known[1]) > 10
    for grown, defined in zip(*known, strict=True):
        assert () in grown
        assert all(torch.equal(logits, defined[path]) for path, logits in grown.items())
    assert sum(map(len, known[0])) > 2 * len(known[0])


def test_a_path_finds_its_node() -> None:
    tree = Tree([5, 6, 7, 6, 6], [ROOT, ROOT, 0, 0, 2], [1.0] * 5)
    assert [tree.find(path) for path in ([], [5], [6], [5, 7], [5, 6], [5, 7, 6])] == [ROOT, 0, 1, 2, 3, 4]
    assert [tree.find(path) for path in ([7], [6, 6], [5, 7, 6, 6])] == [None] * 3


def test_penalties_and_biases_are_applied_while_drafting(decoder: Decoder) -> None:
    """The core knows neither: such requests are drafted for level by level, and no forbidden token is guessed."""
    drafter, trees = drafter_of(random_head(decoder, "eagle3"), SHAPES["tree"], True), list[Tree]()
    propose = drafter.propose

    def watching(batch: Batch, plan: Plan):  # type: ignore[no-untyped-def]
        drafts = propose(batch, plan)
        trees.extend(drafts.per_sequence)
        return drafts

    drafter.propose = watching  # type: ignore[method-assign]
    few = tuple(range(10, 20))
    run(
        make_engine(decoder, drafter, 9),
        [make_request([1, 2, 3], SamplingParams(temperature=0, allowed_token_ids=few, max_tokens=20))],
    )
    assert {token for tree in trees for token in tree.tokens} <= set(few)
    assert any(tree.tokens for tree in trees)


class Grown:
    """One call of a head's runner."""

    def __init__(self, decoder: Decoder, pages: int = 3) -> None:
        self.head = random_head(decoder, "eagle3")
        c = self.head.config.shape
        self.runner = EagleRunner(self.head, KVPool(1, pages, c.kv_heads, 16, c.head_dim), serving_ops())

    def __call__(self, feed: Feed, room: int, growth: Growth, factor: float = 1.0):  # type: ignore[no-untyped-def]
        taps = (
            torch.randn(len(feed.tokens) + len(feed.nodes), self.head.fc.shape[1], generator=torch.Generator().manual_seed(1))
            * factor
        )
        row = Row.at(Sequence(make_request([1] * (feed.start + len(feed.tokens)), SamplingParams(temperature=0.8, seed=2))))
        return self.runner.grow([feed], [taps], [row], [room], [1.0], growth)


def test_growth_ends_where_no_node_is_likely_enough(decoder: Decoder) -> None:
    grow, feed = Grown(decoder), Feed([0, 1, 2], 1, [5, 6, 7])
    (whole,), _ = grow(feed, 12, Growth(8, 2, 3))
    floor = sorted(whole.survival)[len(whole.survival) // 2]
    (less,), _ = grow(feed, 12, Growth(8, 2, 3, floor))
    (none,), _ = grow(feed, 12, Growth(8, 2, 3, 1.0))
    assert len(none.tokens) == 3, "the root's children are known before anything is judged"
    ran = [sum(place >= 0 for place in tree.places) for tree in (none, less, whole)]
    assert ran == sorted(set(ran))


@pytest.mark.parametrize(
    ("feed", "room"),
    [(Feed([0], 1, [5, 6, 7]), 14), (Feed([7], 1, [5]), 2), (Feed([0], 1, [VOCAB]), 2), (Feed([0, 1], 1, [], [5], [-1]), 2)],
    ids=["too few slots", "no such page", "no such token", "nothing fed"],
)
def test_a_call_that_does_not_fit_is_refused(decoder: Decoder, feed: Feed, room: int) -> None:
    with pytest.raises(IndexError, match="out of range"):
        Grown(decoder)(feed, room, Growth(16, 1, 1))


def test_sizes_that_contradict_each_other_are_refused(decoder: Decoder) -> None:
    with pytest.raises(ValueError, match="trees of"):
        Grown(decoder)(Feed([0], 1, [5]), 0, Growth(2, 2, 2))


def test_logits_that_are_not_finite_are_a_fault(decoder: Decoder) -> None:
    grow, feed = Grown(decoder), Feed([0, 1, 2], 1, [5, 6, 7])
    assert grow(feed, 6, Growth(3, 2, 2), float("nan"))[0] == []
    drafter = drafter_of(random_head(decoder, "eagle3"), SHAPES["tree"], True)
    drafter._head.fc.fill_(float("nan"))
    broken = drafter_of(drafter._head, SHAPES["tree"], True)
    (done,) = run(make_engine(decoder, broken, 9), [make_request([1, 2, 3], SamplingParams(temperature=0, max_tokens=20))])
    assert "not finite" in str(done.seq.stats.fallback_reason)
    plain = run(make_engine(decoder), [make_request([1, 2, 3], SamplingParams(temperature=0, max_tokens=20))])
    assert done.seq.tokens == plain[0].seq.tokens
