"""The draft model feeds exactly what its KV lacks."""

from __future__ import annotations

import pytest

from outrider.core import Batch, Plan, Sequence
from outrider.draft.draft_model import DraftModel
from outrider.model import Runner
from outrider.sampling import SamplingParams
from tests.support import make_engine, make_pool, make_request, random_decoder, run, write_family

pytestmark = pytest.mark.usefixtures("both_paths")


class Watching(Runner):
    """Notes what is fed."""

    def forward(self, feeds, taps=()):  # type: ignore[no-untyped-def]
        self.fed = getattr(self, "fed", []) + [(feed.start, list(feed.tokens)) for feed in feeds]
        return super().forward(feeds, taps)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    return random_decoder(write_family(tmp_path_factory.mktemp("m"), "llama2"))


def test_feeds_after_full_partial_and_no_acceptance(decoder) -> None:  # type: ignore[no-untyped-def]
    runner = Watching(decoder, make_pool(decoder))
    drafter = DraftModel(runner)
    seq = Sequence(make_request([1, 2, 3], SamplingParams(temperature=0, max_tokens=50)))
    seq.pages = list(range(8))
    drafter.begin(seq)

    def propose() -> list[int]:
        runner.fed = []
        return drafter.propose(Batch([seq], [1]), Plan((3,))).on_host()[0].tokens

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
    assert not drafter._states


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
