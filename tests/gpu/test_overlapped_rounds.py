"""Plain rounds launched before the host has synchronised with the last one give the same tokens, whatever happens meanwhile.

These run in Triton's interpreter too (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest
import torch

from outrider.config import EngineConfig
from outrider.control import FixedLength, Load
from outrider.core import Plan, Request
from outrider.draft.draft_model import DraftModel
from outrider.engine.engine import Engine
from outrider.model import Decoder
from outrider.sampling import SamplingParams
from tests.support import NoDrafter, random_decoder, write_family

INTERPRETED = True
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE = 16
TOKENS = 48 if DEVICE == "cuda" else 18
BATCHES = (1, 4, 32) if DEVICE == "cuda" else (1, 3)  # the interpreter is slow


class Synchronised(FixedLength):
    """The host synchronises with every round before the next one starts."""

    def plan(self, load: Load) -> Plan:
        return super().plan(load)._replace(may_overlap=False)


class SometimesDrafts(FixedLength):
    """Drafts in random rounds, and allows overlap in all of them or in none."""

    def __init__(self, overlap: bool) -> None:
        super().__init__(3)
        self._overlap = overlap
        self._random = random.Random(5)

    def plan(self, load: Load) -> Plan:
        plan = super().plan(load)._replace(may_overlap=self._overlap)
        return plan if self._random.random() < 0.5 else plan._replace(lengths=(0,) * len(plan.lengths))


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


def counted(runner: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Counts of overlapped rounds and of those that were wasted."""
    plain, counts = runner._plain, {"overlapped": 0, "dropped": 0}
    launch, drop = plain._launch_next, plain.drop

    def launched(*args: Any) -> Any:
        in_flight = launch(*args)
        counts["overlapped"] += in_flight is not None
        return in_flight

    def dropped(batch: Any) -> None:
        counts["dropped"] += plain._overlapped is not None
        drop(batch)

    monkeypatch.setattr(plain, "_launch_next", launched)
    monkeypatch.setattr(plain, "drop", dropped)
    monkeypatch.setattr("outrider.model.cuda_decode._PAUSE", 2)
    monkeypatch.setattr("outrider.model.cuda_chains._PAUSE", 0)
    plain._pause = 0
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
    counts = counted(runners[0], monkeypatch)
    got, engine = texts(runners, FixedLength(0), case, stops)
    assert got == want
    assert counts["overlapped"] > TOKENS // 2 if case.pages > 100 else counts["overlapped"]
    assert (engine.scheduler.preemptions > 0) == (case.pages < 100)
    assert (counts["dropped"] > 0) == case.joins


def test_a_draft_discards_the_overlapped_round(runners: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(BATCHES[1])
    stops: list[frozenset[int]] = [frozenset()] * case.batch
    want, synchronised = texts(runners, SometimesDrafts(overlap=False), case, stops)
    counts = counted(runners[0], monkeypatch)
    got, engine = texts(runners, SometimesDrafts(overlap=True), case, stops)
    assert got == want
    assert min(counts.values()) > 0
    assert 0 < engine.tally.accepted < engine.tally.drafted
    assert engine.tally.by_source == synchronised.tally.by_source  # the drafts were the same too


def test_the_next_draft_fits_what_is_left_and_keeps_its_pages(runners: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first draft is launched on request; all others are overlapped, across the ends of pages and of texts."""
    case, chains = Case(BATCHES[1]), runners[1].chains
    stops: list[frozenset[int]] = [frozenset()] * case.batch
    want, synchronised = texts(runners, Synchronised(3), case, stops)
    drawn = [tuple(chains.graph(batch, length).drawn.shape) for batch in (1, 2, 4) for length in (1, 2, 3)]
    seen: list[tuple[int, ...]] = []
    launched: list[int] = []
    replay, launch = chains._replay, chains._launch
    monkeypatch.setattr(chains, "_replay", lambda chain: seen.append(tuple(chain.drawn.shape)) or replay(chain))
    monkeypatch.setattr(chains, "_launch", lambda *args: launched.append(len(args[0])) or launch(*args))
    chains._pause = 0
    got, engine = texts(runners, FixedLength(3), case, stops)
    assert got == want
    assert engine.tally.by_source == synchronised.tally.by_source
    assert launched == [case.batch]
    assert len(set(seen)) > 2
    assert set(seen) <= set(drawn)


def test_penalties_and_logprobs_are_not_overlapped(runners: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A penalty depends on the token before, and log probabilities are read from logits that a launch would overwrite."""
    counts, next_drafts = counted(runners[0], monkeypatch), []
    monkeypatch.setattr(runners[1].chains, "launch_next_draft", next_drafts.append)
    for changes in ({"repetition_penalty": 1.3}, {"logprobs": 1}):
        for drafter, length in ((NoDrafter(), 0), (DraftModel(runners[1]), 3)):
            params = SamplingParams(temperature=0.9, max_tokens=8, **changes)
            config = EngineConfig(page_size=PAGE, max_num_seqs=2, max_batch_rows=64, prefix_cache=False)
            engine = Engine(runners[0], None, drafter, FixedLength(length), config)
            engine.submit(Request("r", (3, 4, 5), params, 1, frozenset(), 8), "test")
            while engine.has_work:
                engine.round()
    assert counts["overlapped"] == 0
    assert not next_drafts
