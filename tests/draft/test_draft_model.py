"""The draft model feeds exactly what its KV lacks."""

from __future__ import annotations

import random

import pytest
import torch

from outrider.core import Batch, Plan, Sequence
from outrider.draft.draft_model import DraftModel
from outrider.draft.growth import TreeShape
from outrider.draft.reader import Reader, Text
from outrider.model import Feed, Runner
from outrider.sampling import Row, SamplingParams, rank
from tests.support import make_engine, make_pool, make_request, random_decoder, run, write_family
from tests.support.engines import random_params

pytestmark = pytest.mark.usefixtures("both_paths")


class Watching(Runner):
    """Notes what is fed."""

    def forward(self, feeds, taps=()):  # type: ignore[no-untyped-def]
        self.fed = getattr(self, "fed", []) + [(feed.start + feed.known, [*feed.tokens, *feed.nodes]) for feed in feeds]
        return super().forward(feeds, taps)

    def draft(self, feeds, rows, lengths, sharpness, floor=0.0):  # type: ignore[no-untyped-def]
        """One sequence's chain, as if token by token."""
        found, (feed,) = super().draft(feeds, rows, lengths, sharpness, floor), feeds
        steps = [(feed.start + len(feed.tokens) + i, [int(token)]) for i, token in enumerate(found[0][0][:-1])]
        self.fed = [*getattr(self, "fed", []), (feed.start, list(feed.tokens)), *steps]
        return found


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    return random_decoder(write_family(tmp_path_factory.mktemp("m"), "llama2"))


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_chain_may_stop_where_nothing_is_likely_enough(decoder, temperature: float) -> None:  # type: ignore[no-untyped-def]
    """All of a batch draw on until the last of them is under the floor: one call draws for all."""
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=50)
    whole: list[list[tuple[list[int], list[float]]]] = []
    stopped: list[list[tuple[list[int], list[float]]]] = []
    for found in (whole, stopped):
        floor = sorted(max(says[2] for _, says in chains) for chains in whole)[6] if whole else 0.0
        drafter = DraftModel(Runner(decoder, make_pool(decoder)))
        if not drafter._is_chain:
            pytest.skip("only the native core can stop")
        for first in range(12):
            texts = [[1 + first, 2, 3], [40 + first, 5]]
            batch = Batch([Sequence(make_request(text, params, f"r{i}")) for i, text in enumerate(texts)], [1, 1])
            for i, seq in enumerate(batch.sequences):
                seq.pages = [i + 1]
                drafter.begin(seq)
            drafts = drafter.propose(batch, Plan((8, 5), confidence_threshold=floor))
            found.append([(tree.tokens, says) for tree, says in zip(drafts.per_sequence, drafts.survival, strict=True)])
            for seq in batch.sequences:
                drafter.end(seq)
    for chains, short in zip(whole, stopped, strict=True):
        steps = next((i for i in range(1, 9) if all(len(says) < i or says[i - 1] < floor for _, says in chains)), 8)
        assert short == [(tokens[:steps], says[:steps]) for tokens, says in chains]
    assert len({len(short[0][0]) for short in stopped}) > 1


def test_feeds_after_full_partial_and_no_acceptance(decoder) -> None:  # type: ignore[no-untyped-def]
    runner = Watching(decoder, make_pool(decoder))
    drafter = DraftModel(runner)
    seq = Sequence(make_request([1, 2, 3], SamplingParams(temperature=0, max_tokens=50)))
    seq.pages = list(range(8))
    drafter.begin(seq)

    def propose() -> list[int]:
        runner.fed = []
        return drafter.propose(Batch([seq], [1]), Plan((3,))).per_sequence[0].tokens

    first = propose()
    assert runner.fed == [(0, [1, 2, 3]), (3, first[:1]), (4, first[1:2])]
    seq.tokens += [*first, 50]  # all accepted: the third guess was never fed, so two tokens are due
    second = propose()
    assert runner.fed[0] == (5, [first[2], 50])
    seq.tokens += [second[0], 60]  # one accepted
    propose()
    assert runner.fed[0] == (8, [60])
    seq.tokens += [70]  # none accepted
    propose()
    assert runner.fed[0] == (9, [70])
    drafter.end(seq)
    assert not drafter._reader._states


def test_its_context_is_respected(decoder, tmp_path) -> None:  # type: ignore[no-untyped-def]
    """Past its own context the draft model stops drafting; the text goes on."""
    short = random_decoder(write_family(tmp_path, "llama2", max_position_embeddings=24))
    engine = make_engine(decoder, DraftModel(Runner(short, make_pool(short))), 4)
    request = make_request([5] * 10, SamplingParams(temperature=0, max_tokens=40))
    writer = run(engine, [request])[0]
    assert writer.seq.tokens == run(make_engine(decoder), [request])[0].seq.tokens
    assert writer.seq.stats.fallback_reason is None


def test_nan_in_the_draft_model_costs_speed_only(decoder, tmp_path) -> None:  # type: ignore[no-untyped-def]
    broken = random_decoder(write_family(tmp_path, "llama2"))
    broken.norm.fill_(float("nan"))
    request = make_request([5, 6], SamplingParams(temperature=0.8, seed=2, max_tokens=15))
    writer = run(make_engine(decoder, DraftModel(Runner(broken, make_pool(broken))), 4), [request])[0]
    assert writer.seq.tokens == run(make_engine(decoder), [request])[0].seq.tokens
    assert "not finite" in (writer.seq.stats.fallback_reason or "")


@pytest.mark.parametrize("rule", ["rejection", "block", "lossy_typical"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_published_rules_run_and_repeat(decoder, rule: str, temperature: float) -> None:  # type: ignore[no-untyped-def]
    """They keep the law, not the tokens; with the same model as draft everything is accepted."""
    request = make_request([3, 1, 4], SamplingParams(temperature=temperature, seed=8, max_tokens=25))
    runs = []
    for _ in range(2):
        engine = make_engine(decoder, DraftModel(Runner(decoder, make_pool(decoder))), 4, rule=rule)
        runs.append(run(engine, [request])[0])
        assert engine.pages.used == 0
    assert runs[0].seq.tokens == runs[1].seq.tokens
    assert runs[0].seq.stats.fallback_reason is None
    if rule != "lossy_typical":
        assert runs[0].seq.stats.accepted == runs[0].seq.stats.drafted
    if temperature == 0.0 and rule != "lossy_typical":
        assert runs[0].seq.tokens == run(make_engine(decoder), [request])[0].seq.tokens


TREES = {
    "tree": TreeShape(beam=3, branch=3, depth=4),
    "wide": TreeShape(beam=2, branch=6, depth=3),
    "deep": TreeShape(beam=2, branch=2),
}


@pytest.mark.grid
@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_trees_change_nothing(tmp_path, dtype: str, shape: str) -> None:  # type: ignore[no-untyped-def]
    target = random_decoder(write_family(tmp_path / "t", "qwen3", dtype))
    draft = random_decoder(write_family(tmp_path / "d", "llama2", dtype), seed=4)
    rng = random.Random(f"{shape} {dtype}")
    requests = [
        make_request([rng.randrange(7) for _ in range(rng.randint(1, 40))], random_params(rng, 25), f"r{i}") for i in range(5)
    ]
    plain = [run(make_engine(target), [request])[0].seq.tokens for request in requests]
    for model in (draft, target):  # a poor model and a perfect one
        drafter = DraftModel(Runner(model, make_pool(model)), TREES[shape])
        engine = make_engine(target, drafter, 9)
        fast = run(engine, requests)
        assert [w.seq.tokens for w in fast] == plain
        assert [w.seq.stats.fallback_reason for w in fast] == [None] * 5
        assert engine.pages.used == 0
        assert not drafter._reader._states
        assert not drafter._draft_temperature.last
    assert sum(w.seq.stats.accepted for w in fast) > 0


@pytest.mark.parametrize(("branch", "depth", "room"), [(4, 2, 11), (3, 3, 10), (2, 5, 7)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_tree_is_the_best_nodes_of_all(decoder, temperature: float, branch: int, depth: int, room: int) -> None:  # type: ignore[no-untyped-def]
    """Against every path, scored by the definition: softmax of log q plus the target's noise."""
    drafter = DraftModel(Runner(decoder, make_pool(decoder)), TreeShape(beam=64, branch=branch, depth=depth))
    seq = Sequence(make_request([1, 2, 3], SamplingParams(temperature=temperature, seed=3, max_tokens=50)))
    seq.pages = list(range(8))
    drafter.begin(seq)
    drafts = drafter.propose(Batch([seq], [1]), Plan((room,)))

    def children(path: list[int]) -> dict[int, float]:
        fresh = Runner(decoder, make_pool(decoder))
        text = [*seq.tokens, *path]
        logits = fresh.logits(fresh.forward([Feed(range(8), 0, text)]).last, [len(text) - 1])
        found = rank(logits, [Row.at(seq, path)], branch)
        return dict(zip(found.tokens[0].tolist(), found.chances[0].tolist(), strict=True))

    worth = {(token,): chance for token, chance in children([]).items()}
    for level in range(1, depth):
        for path in [path for path in worth if len(path) == level]:
            worth |= {(*path, token): worth[path] * chance for token, chance in children(list(path)).items()}
    best = sorted(worth.values(), reverse=True)[:room]
    tree, survival = drafts.per_sequence[0], drafts.survival[0]
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        paths.append((token,) if parent < 0 else (*paths[parent], token))
    assert len(set(paths)) == room
    assert [worth[path] for path in paths] == pytest.approx(survival, rel=1e-5)
    assert sorted(survival, reverse=True) == pytest.approx(best, rel=1e-5)


def test_accepted_branches_are_read_again(decoder) -> None:  # type: ignore[no-untyped-def]
    """Nodes that lay out of order are not taken for text: after any tree the next draft is a fresh reader's."""
    rng = random.Random(0)
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=50)
    seq = Sequence(make_request([1, 2, 3], params))
    seq.pages = list(range(8))
    drafter = DraftModel(Runner(decoder, make_pool(decoder)), TREES["tree"])
    drafter.begin(seq)
    for _ in range(8):
        tree = drafter.propose(Batch([seq], [1]), Plan((8,))).per_sequence[0]
        fresh = DraftModel(Runner(decoder, make_pool(decoder)), TREES["tree"])
        fresh.begin(seq)
        assert fresh.propose(Batch([seq], [1]), Plan((8,))).per_sequence[0] == tree
        node, path = rng.randrange(8), []
        while node >= 0:
            path, node = [tree.tokens[node], *path], tree.parents[node]
        seq.tokens += [*path, rng.randrange(50)]


def test_only_nodes_in_their_place_count_as_read(decoder) -> None:  # type: ignore[no-untyped-def]
    """A sibling lies in the slot of a next token; the node below it is in nobody's place."""
    reader = Reader(Runner(decoder, make_pool(decoder)))
    seq = Sequence(make_request([1, 2, 3], SamplingParams()))
    seq.pages = list(range(4))
    reader.begin(seq)
    reader.read([Text(seq, seq.tokens, 3)])
    reader.extend(seq, Feed(seq.pages, 3, (), [10, 11], [-1, -1], 0))
    reader.extend(seq, Feed(seq.pages, 3, (), [12], [-1, -1, 1], 2))
    assert reader._states[seq].fed == [1, 2, 3, 10]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.3])
def test_one_call_drafts_what_growing_does(decoder, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    """Ragged chains of several sequences, over several rounds, with some of the guesses wrong."""
    if not Runner(decoder, make_pool(decoder)).drafts_chains:
        pytest.skip("the native core is not in use here")
    rng = random.Random(5)
    params = SamplingParams(temperature=temperature, max_tokens=60)
    sequences = [Sequence(make_request([rng.randrange(30) for _ in range(3 + i)], params, f"r{i}")) for i in range(4)]
    for i, seq in enumerate(sequences):
        seq.pages = list(range(8 * i, 8 * i + 8))
    found = []
    for one_call in (True, False):
        monkeypatch.setattr(DraftModel, "_in_one_call", lambda self, texts, is_one_call=one_call: is_one_call)
        drafter = DraftModel(Runner(decoder, make_pool(decoder)))
        lengths, rounds = random.Random(1), []
        text = {seq: list(seq.tokens) for seq in sequences}
        for seq in sequences:
            seq.tokens[:] = text[seq]
            drafter.begin(seq)
        for _ in range(5):
            plan = Plan(tuple(lengths.randrange(6) for _ in sequences))
            drafts = drafter.propose(Batch(sequences, [1] * 4), plan)
            rounds.append(([tree[:2] for tree in drafts.per_sequence], drafts.survival))
            for seq, tree in zip(sequences, drafts.per_sequence, strict=True):
                seq.tokens += [*tree.tokens[: lengths.randrange(6)], lengths.randrange(30)]
        for seq in sequences:
            seq.tokens[:] = text[seq]
        found.append(rounds)
    for (trees, survival), (grown, grown_survival) in zip(*found, strict=True):
        assert trees == grown
        torch.testing.assert_close(survival, grown_survival, rtol=1.3e-6, atol=1e-5)  # torch's bounds for float32, which they are
