"""Rounds launched before the host has read the last one's tokens give the same tokens, whatever happens meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from outrider.config import EngineConfig
from outrider.control import Controller, Costs, FixedLength
from outrider.core import Arm, Request
from outrider.draft import Drafter
from outrider.draft.auto import AutoDrafter
from outrider.draft.draft_model import DraftModel
from outrider.draft.ngram import NGramDrafter, NGramOptions
from outrider.draft.suffix import SuffixDrafter
from outrider.engine.engine import Engine
from outrider.model import Decoder, Runner, load_decoder
from outrider.model.bundled import bundled_model
from outrider.sampling import SamplingParams
from outrider.text import Tokenizer
from tests.support import NoDrafter, make_pool, random_decoder, write_family
from tests.support.delayed import DelayedDraft, DelayedRunner
from tests.support.policies import SometimesDrafts

PAGE, TOKENS = 16, 24
DRAFTERS = ("none", "draft_model", "ngram", "suffix", "auto")


class Case(NamedTuple):
    """What happens during generation."""

    batch: int = 4
    stops: bool = False
    aborts: bool = False  # in the fifth round
    joins: bool = False  # in the sixth
    pages: int = 160
    prefix_cache: bool = False


CASES = {
    "alone": Case(1),
    "several": Case(),
    "stops": Case(6, stops=True, prefix_cache=True),
    "aborts": Case(aborts=True),
    "joins": Case(joins=True, prefix_cache=True),
    "few_pages": Case(pages=6, prefix_cache=True),
}


@pytest.fixture(autouse=True)
def no_round_fails(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round that raises runs again, which would hide what is wrong."""

    def blame(_: Engine, error: Exception) -> None:
        raise AssertionError("a round failed") from error

    if "fails" not in request.node.name:
        monkeypatch.setattr(Engine, "_blame", blame)


@pytest.fixture(scope="module")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, Decoder]:
    """A target, and a draft that is right now and then."""
    folder = write_family(tmp_path_factory.mktemp("family"), "llama2")
    target, draft = random_decoder(folder, 0), random_decoder(folder, 0)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter += 0.3 * parameter.std(correction=0) * torch.randn_like(parameter)
    return target, draft


def drafter_of(name: str, target: Runner, draft: Decoder) -> Drafter:
    if name in ("draft_model", "auto"):
        runner = DelayedDraft(draft, target) if isinstance(target, DelayedRunner) else Runner(draft, make_pool(draft, PAGE, 160))
        model = DraftModel(runner)
        return model if name == "draft_model" else AutoDrafter([model, SuffixDrafter()])
    return {"none": NoDrafter, "ngram": lambda: NGramDrafter(NGramOptions(ngram_min=1)), "suffix": SuffixDrafter}[name]()


def policy_of(name: str) -> Any:
    if name == "auto":
        return Controller([Arm("draft_model", 4, can_overlap=True), Arm("suffix", 4)], Costs())
    return FixedLength(0 if name == "none" else 3)


def requests(case: Case, stops: list[frozenset[int]]) -> list[Request]:
    made = []
    for i in range(case.batch):
        tokens = TOKENS - 2 + i % 3
        params = SamplingParams(temperature=(0.0, 0.9)[i % 2], top_p=(1.0, 0.8)[i % 4 == 3], max_tokens=tokens)
        prompt = tuple((7 * i + 3 * j) % 199 for j in range(5 + 3 * i))
        made.append(Request(f"r{i}", prompt, params, i, stops[i], tokens))
    return made


def texts(engine: Engine, case: Case, stops: list[frozenset[int]]) -> list[list[int]]:
    engine.pages.allocate(max(engine.pages.count - case.pages, 0))  # taken out of use
    to_submit = requests(case, stops)
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
        if rounds == 10 and case.joins:
            assert all(writer.seq.output_len for writer in writers), "nobody waits for the others to end"
    return [writer.seq.tokens for writer in writers]


def engine_on(runner: Runner, drafter: Drafter, policy: Any, prefix_cache: bool = False, tokenizer: Any = None) -> Engine:
    config = EngineConfig(page_size=PAGE, max_num_seqs=8, max_batch_rows=40, prefix_cache=prefix_cache)
    return Engine(runner, tokenizer, drafter, policy, config)


def plain_texts(target: Decoder, case: Case, stops: list[frozenset[int]]) -> list[list[int]]:
    return texts(engine_on(Runner(target, make_pool(target, PAGE, 160)), NoDrafter(), FixedLength(0)), case, stops)


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
@pytest.mark.parametrize("name", DRAFTERS)
def test_overlapped_rounds_give_the_same_tokens(decoders: tuple[Decoder, Decoder], name: str, case: Case) -> None:
    target, draft = decoders
    stops: list[frozenset[int]] = [frozenset()] * case.batch
    calm = case._replace(aborts=False, joins=False, pages=160)
    want = plain_texts(target, calm, stops)
    if case.stops:
        stops = [frozenset((tokens[-8 - 3 * (i % 3)],)) if i % 3 else frozenset() for i, tokens in enumerate(want)]
        want = plain_texts(target, calm, stops)
    runner = DelayedRunner(target)
    drafter = drafter_of(name, runner, draft)
    engine = engine_on(runner, drafter, policy_of(name), case.prefix_cache)
    got = texts(engine, case, stops)
    if case.aborts:
        assert got[0] == want[0][: len(got[0])] != want[0]
    assert got[case.aborts :] == want[case.aborts :]
    assert (engine.scheduler.preemptions > 0) == (case.pages < 100)
    if name == "none":
        assert runner.overlapped > (TOKENS // 2 if case.pages > 100 else 0)
    if name == "draft_model":
        assert drafter._reader.runner.followed > 0  # type: ignore[attr-defined]
        assert 0 < engine.tally.accepted < engine.tally.drafted
    assert engine.pages.used == max(engine.pages.count - case.pages, 0)


def test_rounds_with_and_without_drafts_follow_each_other(decoders: tuple[Decoder, Decoder]) -> None:
    target, draft = decoders
    case = Case()
    want = plain_texts(target, case, [frozenset()] * 4)
    runner = DelayedRunner(target)
    drafter = drafter_of("draft_model", runner, draft)
    engine = engine_on(runner, drafter, SometimesDrafts())
    assert texts(engine, case, [frozenset()] * 4) == want
    assert min(runner.overlapped, drafter._reader.runner.followed) > 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("changes", [{"repetition_penalty": 1.3}, {"logprobs": 1}, {"min_tokens": 3}], ids=str)
def test_what_needs_the_text_or_the_logits_is_not_overlapped(decoders: tuple[Decoder, Decoder], changes: dict[str, Any]) -> None:
    runner, tokens = DelayedRunner(decoders[0]), []
    params = SamplingParams(temperature=0.9, max_tokens=8, **changes)
    for one in (runner, Runner(decoders[0], make_pool(decoders[0], PAGE, 160))):
        engine = engine_on(one, NoDrafter(), FixedLength(0))
        writer = engine.submit(Request("r", (3, 4, 5), params, 1, frozenset({9}), 8), "test")
        while engine.has_work:
            engine.round()
        tokens.append(writer.seq.tokens)
    assert runner.overlapped == 0
    assert tokens[0] == tokens[1]


def test_two_engines_on_one_runner_do_not_read_each_others_tokens(decoders: tuple[Decoder, Decoder]) -> None:
    target, draft = decoders
    case, none = Case(2), [frozenset[int]()] * 2
    want = plain_texts(target, case, none)
    runner = DelayedRunner(target)
    first = engine_on(runner, drafter_of("draft_model", runner, draft), FixedLength(3))
    config = EngineConfig(page_size=PAGE, max_num_seqs=8, max_batch_rows=40, prefix_cache=False)
    second = Engine(runner, None, drafter_of("draft_model", runner, draft), FixedLength(3), config, first.pages)
    writers = [engine.submit(request, "test") for engine in (first, second) for request in requests(case, none)]
    while first.has_work or second.has_work:
        for engine in (first, second):
            if engine.has_work:
                engine.round()
    assert [writer.seq.tokens for writer in writers] == want * 2


@pytest.mark.parametrize("name", ["none", "draft_model"])
def test_a_round_that_fails_while_the_next_one_is_in_flight_costs_nobody_a_token(
    decoders: tuple[Decoder, Decoder], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = decoders
    case, none = Case(3), [frozenset[int]()] * 3
    want = plain_texts(target, case, none)
    runner = DelayedRunner(target)
    engine = engine_on(runner, drafter_of(name, runner, draft), policy_of(name))
    launch, calls = runner.launch, []

    def failing(*args: Any) -> Any:
        calls.append(args)
        if len(calls) in (6, 11):
            raise RuntimeError("boom")
        return launch(*args)

    monkeypatch.setattr(runner, "launch", failing)
    assert texts(engine, case, none) == want
    assert len(calls) > 12


def test_a_text_that_ends_at_a_stop_string_drops_its_row_in_flight() -> None:
    decoder, tokenizer = load_decoder(bundled_model()), Tokenizer.load(Path(bundled_model()))
    assert tokenizer is not None
    prompts = ["def add(a, b):\n    return", "import os\nimport"]
    outputs = []
    for runner in (Runner(decoder, make_pool(decoder, PAGE, 160)), DelayedRunner(decoder)):
        engine = engine_on(runner, NoDrafter(), FixedLength(0), tokenizer=tokenizer)
        writers = []
        for i, prompt in enumerate(prompts):
            params = SamplingParams(temperature=0.0, max_tokens=24, stop="\n" if i == 0 else None)
            request = Request(f"r{i}", tuple(tokenizer.encode(prompt)), params, 0, frozenset(), 24)
            writers.append(engine.submit(request, "test"))
        while engine.has_work:
            engine.round()
        outputs.append([(writer.seq.tokens, writer.text, writer.seq.finish_reason) for writer in writers])
    assert outputs[0] == outputs[1]
    assert [reason for _, _, reason in outputs[1]] == ["stop", "length"]
    assert isinstance(runner, DelayedRunner)
    assert runner.overlapped > 10
