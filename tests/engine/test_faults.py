"""A drafter that breaks costs speed only, and says so once."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from outrider.core import Batch, Drafts, Plan, Tree
from outrider.draft.deadline import Deadline
from outrider.model import Decoder
from outrider.sampling import SamplingParams
from tests.support import VOCAB, Oracle, make_engine, make_request, random_decoder, run, write_family

pytestmark = pytest.mark.usefixtures("both_paths")

PARAMS = SamplingParams(temperature=0.8, seed=4, max_tokens=30)
REQUESTS = [make_request([1, 2, 3], PARAMS, "r0"), make_request([7] * 40, PARAMS, "r1")]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return random_decoder(write_family(tmp_path_factory.mktemp("m"), "llama2"))


@pytest.fixture(scope="module")
def answers(decoder: Decoder) -> list[list[int]]:
    return [run(make_engine(decoder), [request])[0].seq.tokens for request in REQUESTS]


SPOILED: dict[str, Callable[[Tree], tuple[object, object, object]]] = {  # of a good tree, the fields of a bad one
    "too few parents": lambda tree: (tree.tokens, tree.parents[1:], tree.survival),
    "too few chances": lambda tree: (tree.tokens, tree.parents, tree.survival[1:]),
    "too many": lambda tree: (tree.tokens * 9, [-1] * 9 * len(tree.tokens), [1.0] * 9 * len(tree.tokens)),
    "id too large": lambda tree: ([token + VOCAB for token in tree.tokens], tree.parents, tree.survival),
    "negative id": lambda tree: ([token - VOCAB for token in tree.tokens], tree.parents, tree.survival),
    "forward parent": lambda tree: (tree.tokens, [parent + 1 for parent in tree.parents], tree.survival),
    "parent below the root": lambda tree: (tree.tokens, [parent - 1 for parent in tree.parents], tree.survival),
    "float tokens": lambda tree: (list(map(float, tree.tokens)), tree.parents, tree.survival),
    "float parents": lambda tree: (tree.tokens, list(map(float, tree.parents)), tree.survival),
    "nan survival": lambda tree: (tree.tokens, tree.parents, [math.nan] * len(tree.tokens)),
    "tensors": lambda tree: (torch.tensor(tree.tokens), torch.tensor(tree.parents), torch.tensor(tree.survival)),
}


def spoil(drafts: Drafts, kind: str) -> Drafts:
    """Break a good draft in one way."""
    if kind == "wrong batch":
        return replace(drafts, per_sequence=drafts.per_sequence * 2)
    if kind.endswith(" q"):
        value = {"nan": math.nan, "negative": -1.0, "integer": 1, "complex": 1j}[kind.removesuffix(" q")]
        return replace(drafts, q=torch.full((len(drafts.counts), max(drafts.counts), VOCAB), value))
    if kind == "q too short":
        return replace(drafts, q=torch.full((len(drafts.counts), max(drafts.counts) - 1, VOCAB), 1 / VOCAB))
    if kind in SPOILED:
        return Drafts([Tree(*SPOILED[kind](tree)) for tree in drafts.per_sequence])  # type: ignore[arg-type]
    if kind in NONSENSE:
        return NONSENSE[kind]  # type: ignore[return-value]
    raise RuntimeError("boom")


NONSENSE: dict[str, object] = {
    "list": [[1, 2]],
    "empty list": [],
    "tuple": ([1], [-1]),
    "string": "drafts",
    "integer": 7,
    "zero": 0,
    "None": None,
    "class": Drafts,
    "unmade": Drafts.__new__(Drafts),
}


class Faulty(Oracle):
    """Right for some rounds, then broken in the chosen way and verb."""

    kind = "raises"
    verb = "propose"
    after = 2
    calls = 0

    def propose(self, batch: Batch, plan: Plan) -> Drafts:
        self.calls += 1
        drafts = super().propose(batch, plan)
        return spoil(drafts, self.kind) if self.verb == "propose" and self.calls > self.after else drafts

    def begin(self, seq) -> None:  # type: ignore[no-untyped-def]
        if self.verb == "begin":
            raise RuntimeError("boom")

    def commit(self, *args) -> None:  # type: ignore[no-untyped-def]
        if self.verb == "commit" and self.calls > self.after:
            raise RuntimeError("boom")

    def end(self, seq) -> None:  # type: ignore[no-untyped-def]
        if self.verb == "end":
            raise RuntimeError("boom")


KINDS = ["raises", "wrong batch", "nan q", "negative q", "integer q", "complex q", "q too short", *SPOILED, *NONSENSE]


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_broken_drafts_change_nothing(decoder, answers, caplog, kind: str, after: int) -> None:  # type: ignore[no-untyped-def]
    drafter = Faulty({r.id: tokens for r, tokens in zip(REQUESTS, answers, strict=True)}, 4)
    drafter.kind, drafter.after = kind, after
    engine = make_engine(decoder, drafter, 4)
    with caplog.at_level(logging.WARNING, "outrider"):
        writers = run(engine, REQUESTS)
    assert [w.seq.tokens for w in writers] == answers
    assert all(w.output().speculation["fallback_reason"] for w in writers)
    assert len(caplog.records) == 1
    assert engine.pages.used == 0


@pytest.mark.parametrize("behind", [False, True])
def test_a_fault_is_logged_once_with_the_drafter_s_class_and_a_traceback(decoder, answers, caplog, behind: bool) -> None:  # type: ignore[no-untyped-def]
    drafter = Faulty({r.id: tokens for r, tokens in zip(REQUESTS, answers, strict=True)}, 4)
    engine = make_engine(decoder, Deadline(drafter) if behind else drafter, 4)
    with caplog.at_level(logging.WARNING, "outrider"):
        run(engine, REQUESTS)
        run(engine, [replace(REQUESTS[0], id="r1"), REQUESTS[1]])
    (record,) = (r for r in caplog.records if "rests" not in r.getMessage())
    assert "Faulty.propose: RuntimeError: boom" in record.getMessage()
    assert "in spoil" in caplog.text


def test_a_stranger_cannot_change_its_draft_after_the_check(decoder, answers) -> None:  # type: ignore[no-untyped-def]
    """A drafter's thread goes on, and what it still writes to is a list that nobody reads."""

    class Late(Oracle):
        def propose(self, batch: Batch, plan: Plan) -> Drafts:
            texts = [
                self.answers[seq.request.id][len(seq.tokens) :][:n] for seq, n in zip(batch.sequences, plan.lengths, strict=True)
            ]
            self.right, self.drafts = texts, Drafts.chains([[(token + 1) % VOCAB for token in text] for text in texts])
            return self.drafts

    late = Late({r.id: tokens for r, tokens in zip(REQUESTS, answers, strict=True)}, 4)
    engine = make_engine(decoder, Deadline(late), 4)
    score = engine.runner.score

    def meanwhile(batch: Batch, drafts: Drafts, taps: tuple[int, ...] = ()):  # type: ignore[no-untyped-def]
        found = score(batch, drafts, taps)
        for tree, right in (
            zip(late.drafts.per_sequence, late.right, strict=True) if any(batch.feeds) and hasattr(late, "right") else ()
        ):
            tree.tokens[:] = right
        return found

    engine.runner.score = meanwhile  # type: ignore[method-assign,assignment]
    assert [w.seq.tokens for w in run(engine, REQUESTS)] == answers


@pytest.mark.parametrize("verb", ["begin", "commit", "end"])
def test_every_verb_may_raise(decoder, answers, caplog, verb: str) -> None:  # type: ignore[no-untyped-def]
    drafter = Faulty({r.id: tokens for r, tokens in zip(REQUESTS, answers, strict=True)}, 4)
    drafter.verb = verb
    engine = make_engine(decoder, drafter, 4)
    with caplog.at_level(logging.WARNING, "outrider"):
        writers = run(engine, REQUESTS)
    assert [w.seq.tokens for w in writers] == answers
    assert len(caplog.records) == 1
    assert engine.pages.used == 0


def test_a_broken_drafter_is_not_asked_again_for_the_same_sequence(decoder, answers) -> None:  # type: ignore[no-untyped-def]
    drafter = Faulty({r.id: tokens for r, tokens in zip(REQUESTS, answers, strict=True)}, 4)
    run(make_engine(decoder, drafter, 4), REQUESTS[:1])
    assert drafter.calls == drafter.after + 1


def test_nan_logits_fail_their_request_alone(decoder: Decoder) -> None:
    """The sequence ends with an error, its pages are wiped, and the others go on as ever."""
    poison = 99
    original = decoder.embedding[poison].clone()
    try:
        decoder.embedding[poison] = float("nan")
        engine = make_engine(decoder)
        good = make_request(
            [1, 2, 3], SamplingParams(temperature=0.8, seed=4, max_tokens=12, logit_bias={poison: -100.0}), "good"
        )
        bad = make_request([4, poison], SamplingParams(temperature=0.8, seed=4, max_tokens=12), "bad")
        writers = run(engine, [bad, good])
        alone = run(make_engine(decoder), [good])[0]
    finally:
        decoder.embedding[poison] = original
    assert writers[0].seq.finish_reason == "error"
    assert "not finite" in str(writers[0].seq.stop_reason)
    assert writers[1].seq.tokens == alone.seq.tokens
    assert engine.pages.used == 0
    assert bool(engine.runner.pool.keys[:, :-1].isfinite().all())


def test_ratio_rules_refuse_trees(decoder, answers) -> None:  # type: ignore[no-untyped-def]
    drafter = Oracle({r.id: tokens for r, tokens in zip(REQUESTS, answers, strict=True)}, 4, branches=3)
    writers = run(make_engine(decoder, drafter, 7, rule="rejection"), REQUESTS)
    assert any("chains" in (w.seq.stats.fallback_reason or "") for w in writers)


class Moody(Oracle):
    """Raises in chosen calls of propose."""

    broken: frozenset[int] = frozenset()
    calls = 0

    def propose(self, batch: Batch, plan: Plan) -> Drafts:
        self.calls += 1
        if self.calls in self.broken:
            raise RuntimeError("boom")
        return super().propose(batch, plan)


def test_the_breaker_opens_after_repeated_faults_and_probes_again(decoder, answers, caplog) -> None:  # type: ignore[no-untyped-def]
    drafter = Moody({"r0": answers[0]}, 4)
    drafter.broken = frozenset({1, 2, 3, 5})
    engine = make_engine(decoder, drafter, 4)
    request = replace(REQUESTS[0], params=replace(PARAMS, max_tokens=30))
    with caplog.at_level(logging.WARNING, "outrider"):
        outcomes = []
        for _ in range(14):
            writer = run(engine, [request])[0]
            assert writer.seq.tokens == answers[0]
            outcomes.append((writer.seq.stats.fallback_reason or "drafted").split(":")[0])
    rest = "the drafter rests after repeated faults"
    assert outcomes[:3] == ["Moody.propose"] * 3
    assert outcomes[3:5] == [rest] * 2  # 64 rounds: the rest of the third request, the fourth, some of the fifth
    assert "drafted" in outcomes[5:]
    assert drafter.calls > 5
    assert [r.getMessage() for r in caplog.records if "rests for 64 rounds" in r.getMessage()]


class Flaky:
    """A runner's score that raises in chosen calls, or whenever a chosen sequence takes part."""

    def __init__(self, score, calls: set[int], victim: str | None = None) -> None:  # type: ignore[no-untyped-def]
        self.score, self.calls, self.victim, self.count = score, calls, victim, 0

    def __call__(self, batch: Batch, *rest):  # type: ignore[no-untyped-def]
        self.count += 1
        if self.count in self.calls or any(seq.request.id == self.victim for seq in batch.sequences):
            raise RuntimeError("boom")
        return self.score(batch, *rest)


@pytest.mark.parametrize("calls", [{1}, {2}, {4, 7}, {3, 9}])
def test_a_forward_that_raises_once_fails_nobody(decoder, answers, calls: set[int]) -> None:  # type: ignore[no-untyped-def]
    drafter = Oracle({r.id: tokens for r, tokens in zip(REQUESTS, answers, strict=True)}, 4, branches=1)
    engine = make_engine(decoder, drafter, 5)
    engine.runner.score = Flaky(engine.runner.score, calls)  # type: ignore[method-assign]
    writers = run(engine, REQUESTS)
    assert [w.seq.tokens for w in writers] == answers
    assert max(drafter.accepted) > 1, "drafting went on"
    assert engine.pages.used == 0


def test_a_forward_that_keeps_failing_fails_the_culprit_alone(decoder, answers) -> None:  # type: ignore[no-untyped-def]
    engine = make_engine(decoder)
    engine.runner.score = Flaky(engine.runner.score, set(), "bad")  # type: ignore[method-assign]
    bad = make_request([4, 5], PARAMS, "bad")
    writers = run(engine, [REQUESTS[0], bad, REQUESTS[1]])
    assert [writers[0].seq.tokens, writers[2].seq.tokens] == answers
    assert writers[1].seq.finish_reason == "error"
    assert "boom" in str(writers[1].seq.stop_reason)
    assert engine.pages.used == 0


class Small:
    """A runner's score that has memory for so many rows."""

    def __init__(self, score, rows: int) -> None:  # type: ignore[no-untyped-def]
        self.score, self.rows, self.refused = score, rows, 0

    def __call__(self, batch: Batch, drafts: Drafts, *rest):  # type: ignore[no-untyped-def]
        if len(batch.sequences) > self.rows:
            self.refused += 1
            raise torch.OutOfMemoryError("no memory")
        return self.score(batch, drafts, *rest)


def test_rounds_without_memory_run_fewer_sequences_and_fail_nobody(decoder, answers) -> None:  # type: ignore[no-untyped-def]
    engine = make_engine(decoder, Oracle({r.id: tokens for r, tokens in zip(REQUESTS, answers, strict=True)}, 4, branches=1), 3)
    engine.runner.score = small = Small(engine.runner.score, 1)  # type: ignore[method-assign]
    writers = run(engine, REQUESTS)
    assert [w.seq.tokens for w in writers] == answers
    assert 0 < small.refused < len(REQUESTS) + 2
    assert engine.pages.used == 0


def test_a_request_that_has_no_memory_alone_fails_alone(decoder, answers) -> None:  # type: ignore[no-untyped-def]
    engine = make_engine(decoder)
    score = engine.runner.score

    def without_memory(batch: Batch, *rest):  # type: ignore[no-untyped-def]
        if any(seq.request.id == REQUESTS[0].id for seq in batch.sequences):
            raise torch.OutOfMemoryError("no memory")
        return score(batch, *rest)

    engine.runner.score = without_memory  # type: ignore[method-assign]
    writers = run(engine, REQUESTS)
    assert [w.seq.finish_reason for w in writers] == ["error", *["length"] * (len(REQUESTS) - 1)]
    assert [w.seq.tokens for w in writers[1:]] == answers[1:]
