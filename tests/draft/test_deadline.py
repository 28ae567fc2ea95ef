"""A stranger's drafter that hangs is left behind; the text goes on."""

from __future__ import annotations

import threading

import pytest

from outrider.core import Batch, Drafts, Needs, Plan, Sequence
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
    assert drafter.propose(Batch([], []), plan).counts.tolist() == [2]
    with pytest.raises(RuntimeError, match="boom"):
        drafter.propose(Batch([], []), plan)
    for _ in range(2):
        with pytest.raises(DrafterFault, match=r"Sleepy.propose took more than 0.05 s"):
            drafter.propose(Batch([], []), plan)
