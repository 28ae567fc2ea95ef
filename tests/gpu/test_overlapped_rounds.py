"""Plain rounds launched before the host has synchronised with the last one give the same tokens, whatever happens meanwhile.

These run in Triton's interpreter too (TRITON_INTERPRET=1).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from outrider.config import EngineConfig
from outrider.control import FixedLength, Load
from outrider.core import Request
from outrider.draft.draft_model import DraftModel
from outrider.engine.engine import Engine
from outrider.model import Decoder
from outrider.sampling import SamplingParams
from tests.support import NoDrafter, random_decoder, write_family
from tests.support.policies import SometimesDrafts

INTERPRETED = True
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE = 16
TOKENS = 48 if DEVICE == "cuda" else 18
BATCHES = (1, 4, 32) if DEVICE == "cuda" else (1, 3)  # the interpreter is slow


class Synchronised(FixedLength):
    """The host synchronises with every round before the next one starts."""

    def plan_next(self, load: Load) -> None:
        return None


class Case(NamedTuple):
    """Events during generation."""

    batch: int
    stops: bool = False
    aborts: bool = False  # in the fifth round
    joins: bool = False  # in the sixth
    pages: int = 400
    prefix_cache: bool = False


@pytest.fixture(scope="module")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, Decoder]:
    """A target, and a draft that is right now and then."""
    folder = write_family(tmp_path_factory.mktemp("family"), "llama2", hidden_size=64, num_key_value_heads=2)
    target, draft = random_decoder(folder, 0), random_decoder(folder, 0)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter += 0.3 * parameter.std(correction=0) * torch.randn_like(parameter)
    return target, draft


@pytest.fixture(scope="module")
def runners(decoders: tuple[Decoder, Decoder]) -> Any:
    """One pair for all tests, so that later tests use pages that wasted rounds have written to."""
    from outrider.model.cuda_runner import CudaRunner

    target = CudaRunner(decoders[0], 401, PAGE, DEVICE)
    return target, CudaRunner(decoders[1], 401, PAGE, DEVICE, target=target)


def requests(batch: int, stops: list[frozenset[int]]) -> list[Request]:
    made = []
    for i in range(batch):
        params = SamplingParams(temperature=(0.0, 0.9)[i % 2], max_tokens=TOKENS - 2 + i % 3)
        prompt = tuple((7 * i + 3 * j) % 199 for j in range(5 + 3 * (i % 7)))
        made.append(Request(f"r{i}", prompt, params, i, stops[i], TOKENS - 2 + i % 3))
    return made


def texts(runners: Any, policy: Any, case: Case, stops: list[frozenset[int]]) -> tuple[list[list[int]], Engine]:
    target, draft = runners
    config = EngineConfig(page_size=PAGE, max_num_seqs=32, max_batch_rows=64, prefix_cache=case.prefix_cache)
    engine = Engine(target, None, DraftModel(draft) if policy._length else NoDrafter(), policy, config)
    engine.pages.allocate(engine.pages.count - case.pages)  # taken out of use
    to_submit = requests(case.batch, stops)
    late = len(to_submit) // 2 if case.joins else len(to_submit)
    writers = [engine.submit(request, "test") for request in to_submit[:late]]
    rounds = 0
    while engine.has_work:
        engine.round()
        rounds += 1
        if rounds == 5 and case.aborts:
            engine.abort(writers[0])
        if rounds == 6:
            writers += [engine.submit(request, "test") for request in to_submit[late:]]
    return [writer.seq.tokens for writer in writers], engine


def counted(runners: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Counts of rounds and of drafts that were launched while the round before was in flight."""
    target, draft = runners
    counts = {"rounds": 0, "drafts": 0}
    launch, draw_next = target.launch, draft.draw_next

    def launched(batch: Any, *rest: Any) -> Any:
        counts["rounds"] += bool(batch.future)
        return launch(batch, *rest)

    def drawn(*args: Any) -> Any:
        counts["drafts"] += 1
        return draw_next(*args)

    monkeypatch.setattr(target, "launch", launched)
    monkeypatch.setattr(draft, "draw_next", drawn)
    return counts


CASES = [
    *[Case(batch) for batch in BATCHES],
    Case(BATCHES[-1], stops=True, prefix_cache=True),
    Case(4, aborts=True),
    Case(4, joins=True, prefix_cache=True),
    Case(4, pages=5, prefix_cache=True),
]


def name(case: Case) -> str:
    events = [event for event in ("stops", "aborts", "joins") if getattr(case, event)]
    return "-".join([f"batch_{case.batch}", *events, *(["few_pages"] if case.pages < 100 else [])])


@pytest.mark.parametrize("case", CASES, ids=name)
def test_the_next_round_is_launched_before_this_one_is_synchronised(
    runners: Any, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    stops: list[frozenset[int]] = [frozenset()] * case.batch
    if case.stops:
        unstopped, _ = texts(runners, Synchronised(0), Case(case.batch), stops)
        stops = [frozenset((tokens[-TOKENS // 3 - 5 * (i % 3)],)) if i % 3 else frozenset() for i, tokens in enumerate(unstopped)]
    want, _ = texts(runners, Synchronised(0), case, stops)
    counts = counted(runners, monkeypatch)
    got, engine = texts(runners, FixedLength(0), case, stops)
    assert got == want
    assert counts["rounds"] > TOKENS // 2 if case.pages > 100 else counts["rounds"]
    assert (engine.scheduler.preemptions > 0) == (case.pages < 100)


def test_rounds_with_and_without_drafts_follow_each_other(runners: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(BATCHES[1])
    stops: list[frozenset[int]] = [frozenset()] * case.batch
    want, _ = texts(runners, Synchronised(0), case, stops)
    counts = counted(runners, monkeypatch)
    got, engine = texts(runners, SometimesDrafts(), case, stops)
    assert got == want
    assert min(counts.values()) > 0
    assert 0 < engine.tally.accepted < engine.tally.drafted


def test_the_next_draft_is_drawn_across_the_ends_of_pages_and_of_texts(runners: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(BATCHES[1])
    stops: list[frozenset[int]] = [frozenset()] * case.batch
    want, synchronised = texts(runners, Synchronised(3), case, stops)
    counts = counted(runners, monkeypatch)
    got, engine = texts(runners, FixedLength(3), case, stops)
    assert got == want
    assert counts["drafts"] > 3
    accepted, drafted = (engine.tally.accepted, synchronised.tally.accepted), (engine.tally.drafted, synchronised.tally.drafted)
    assert accepted[0] == accepted[1]  # the drafts were the same too, but for their lengths at the ends of texts
    assert abs(drafted[0] - drafted[1]) <= 3 * case.batch


def test_penalties_and_logprobs_are_not_overlapped(runners: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A penalty depends on the token before, and log probabilities are read from logits that a launch would overwrite."""
    counts = counted(runners, monkeypatch)
    for changes in ({"repetition_penalty": 1.3}, {"logprobs": 1}):
        for drafter, length in ((NoDrafter(), 0), (DraftModel(runners[1]), 3)):
            params = SamplingParams(temperature=0.9, max_tokens=8, **changes)
            config = EngineConfig(page_size=PAGE, max_num_seqs=2, max_batch_rows=64, prefix_cache=False)
            engine = Engine(runners[0], None, drafter, FixedLength(length), config)
            engine.submit(Request("r", (3, 4, 5), params, 1, frozenset(), 8), "test")
            while engine.has_work:
                engine.round()
    assert not any(counts.values())
