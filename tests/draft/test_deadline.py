"""A user's drafter that hangs is left behind, and one that changes what it is shown changes nothing; the text goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from outrider.core import Batch, Drafts, Needs, Plan, Scores, Sequence, Tree, Verdict
from outrider.draft.deadline import Deadline
from outrider.errors import DrafterFault
from outrider.model import Decoder
from outrider.sampling import SamplingParams
from tests.support import make_engine, make_request, random_decoder, run, write_family


class Sleepy:
    """Answers at once until the chosen call, which waits for the test to be over."""

    needs = Needs()

    def __init__(self, asleep_at: int) -> None:
        self.calls = 0
        self.asleep_at = asleep_at
        self.morning = threading.Event()

    def begin(self, seq: Sequence) -> None: ...

    def commit(self, *what: object) -> None: ...

    def end(self, seq: Sequence) -> None: ...

    def propose(self, batch: Batch, plan: Plan) -> Drafts:
        self.calls += 1
        if self.calls == self.asleep_at:
            self.morning.wait(30)
        if self.calls == 2:
            raise RuntimeError("boom")
        return Drafts.chains([[1] * n for n in plan.lengths])


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return random_decoder(write_family(tmp_path_factory.mktemp("m"), "llama2"))


def test_a_drafter_that_hangs_is_quarantined(decoder: Decoder) -> None:
    params = SamplingParams(temperature=0.8, seed=4, max_tokens=12)
    wanted = [make_request([1, 2, 3], params, "a"), make_request([4, 5], params, "b")]
    answers = [run(make_engine(decoder), [request])[0].seq.tokens for request in wanted]
    drafter = Sleepy(asleep_at=1)
    engine = make_engine(decoder, Deadline(drafter, 0.05), 3)
    for _ in range(2):
        writers = run(engine, wanted)
        assert [writer.seq.tokens for writer in writers] == answers
        assert all("not asked again" in str(writer.seq.stats.fallback_reason) for writer in writers)
    assert drafter.calls == 1, "one deadline was waited for, not one a call"
    drafter.morning.set()


def test_answers_and_exceptions_pass_through() -> None:
    drafter = Deadline(Sleepy(asleep_at=3), 0.05)
    plan = Plan((2,))
    assert drafter.propose(Batch([], []), plan).counts == [2]
    with pytest.raises(RuntimeError, match="boom"):
        drafter.propose(Batch([], []), plan)
    for _ in range(2):
        with pytest.raises(DrafterFault, match=r"Sleepy.propose took more than 0.05 s"):
            drafter.propose(Batch([], []), plan)


class Rude:
    """Guesses the last token again, and changes what it is shown in one of its calls."""

    needs = Needs(scores=True)

    def __init__(self, verb: str, change: Callable[..., object]) -> None:
        self._verb, self._change = verb, change
        self.known: list[Sequence] = []

    def _do(self, verb: str, *shown: Any) -> None:
        if verb == self._verb:
            self._change(*shown)

    def begin(self, seq: Sequence) -> None:
        self.known.append(seq)
        self._do("begin", seq)

    def propose(self, batch: Batch, plan: Plan) -> Drafts:
        assert all(any(seq is copy for copy in self.known) for seq in batch.sequences), "a sequence is one object all its life"
        drafts = Drafts.chains([[seq.tokens[-1]] * n for seq, n in zip(batch.sequences, plan.lengths, strict=True)])
        self._do("propose", batch, drafts)
        return drafts

    def commit(self, batch: Batch, drafts: Drafts, verdicts: list[Verdict], scores: Scores) -> None:
        self._do("commit", batch, drafts, verdicts, scores)

    def end(self, seq: Sequence) -> None:
        self.known.remove(seq)
        self._do("end", seq)


def grow(seq: Sequence) -> None:
    """As a loop that collects its guesses behind the text does."""
    seq.tokens.extend([seq.tokens[-1]] * 3)


def forget(seq: Sequence) -> None:
    seq.tokens.pop()
    seq.pages.clear()
    seq.cached, seq.finish_reason = 0, "stop"
    seq.stats.rounds = seq.stats.drafted = -1
    seq.stats.drafted_by_position.clear()


def fill_empty(size: int) -> None:
    """As if a draft without nodes were a new one to fill."""
    tree = Drafts.empty(size).per_sequence[0]
    tree.tokens.append(3)
    tree.parents.append(-1)


CHANGES: dict[str, tuple[str, Callable[..., object]]] = {
    "begin grows": ("begin", grow),
    "begin forgets": ("begin", forget),
    "propose grows": ("propose", lambda batch, _: [grow(seq) for seq in batch.sequences]),
    "propose forgets": ("propose", lambda batch, _: [forget(seq) for seq in batch.sequences]),
    "propose reorders": ("propose", lambda batch, _: (batch.sequences.reverse(), batch.feeds.clear())),
    "propose fills what is empty": ("propose", lambda batch, _: fill_empty(len(batch.sequences))),
    "commit grows": ("commit", lambda batch, *_: [grow(seq) for seq in batch.sequences]),
    "commit forgets": ("commit", lambda batch, *_: [forget(seq) for seq in batch.sequences]),
    "commit clears verdicts": (
        "commit",
        lambda _b, _d, verdicts, _s: ([verdict.tokens.clear() for verdict in verdicts], verdicts.pop()),
    ),
    "commit clears drafts": ("commit", lambda _b, drafts, *_: [tree.tokens.clear() for tree in drafts.per_sequence]),
    "commit clears scores": ("commit", lambda *shown: (shown[3].logits.fill_(7.0), shown[3].roots.clear())),
    "end grows": ("end", grow),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_drafter_is_shown_is_a_copy(decoder: Decoder, name: str) -> None:
    params = [SamplingParams(temperature=heat, seed=4, max_tokens=20, logprobs=1) for heat in (0.0, 0.8)]
    wanted = [make_request([1, 2, 3], params[0], "a"), make_request([4, 5], params[1], "b")]
    plain = [run(make_engine(decoder), [request])[0] for request in wanted]
    drafter = Rude(*CHANGES[name])
    engine = make_engine(decoder, Deadline(drafter, 30.0), 3)
    for _ in range(2):
        writers = run(engine, wanted)
        assert [writer.seq.tokens for writer in writers] == [writer.seq.tokens for writer in plain]
        assert [writer.logprobs for writer in writers] == [writer.logprobs for writer in plain]
        assert all(writer.seq.stats.rounds > 0 and writer.seq.stats.drafted > 0 for writer in writers)
    assert engine.pages.used == 0
    assert not drafter.known
    assert not engine.drafter.drafter._copies, "nothing is kept of a sequence that has ended"  # type: ignore[attr-defined]
    assert run(make_engine(decoder), [wanted[0]])[0].seq.tokens == plain[0].seq.tokens, "nor is plain decoding changed"


def test_a_call_that_was_left_behind_reaches_no_text(decoder: Decoder) -> None:
    params = SamplingParams(temperature=0.8, seed=4, max_tokens=30)
    request = make_request([1, 2, 3], params, "a")
    answer = run(make_engine(decoder), [request])[0].seq.tokens
    late, done = threading.Event(), threading.Event()

    def linger(batch: Batch, _: Drafts) -> None:
        late.wait(30)
        for seq in batch.sequences:
            grow(seq)
        done.set()

    engine = make_engine(decoder, Deadline(Rude("propose", linger), 0.05), 3)
    writer = engine.submit(request, "test")
    for _ in range(4):
        engine.round()
    late.set()
    assert done.wait(30)
    while engine.has_work:
        engine.round()
    assert writer.seq.tokens == answer


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_whatever_it_raises_stays_in_its_call(decoder: Decoder, error: type[BaseException]) -> None:
    """The drafter's thread lives on, and nobody waits for the deadline."""

    def leave(*_: object) -> None:
        raise error("gone")

    request = make_request([1, 2, 3], SamplingParams(temperature=0.8, seed=4, max_tokens=8), "a")
    engine = make_engine(decoder, Deadline(Rude("propose", leave), 3600.0), 3)
    seq = run(engine, [request])[0].seq
    assert seq.tokens == run(make_engine(decoder), [request])[0].seq.tokens
    assert f"{error.__name__}: gone" in str(seq.stats.fallback_reason)


class Endless(list[Tree]):
    """Trees that take for ever to read."""

    def __iter__(self) -> Iterator[Tree]:
        time.sleep(30)
        return super().__iter__()


def test_drafts_are_read_before_the_deadline_too() -> None:
    rude = Rude("propose", lambda *_: None)
    rude.propose = lambda batch, plan: Drafts(Endless())  # type: ignore[method-assign]
    with pytest.raises(DrafterFault, match=r"Rude.propose took more than"):
        Deadline(rude, 0.05).propose(Batch([], []), Plan(()))
