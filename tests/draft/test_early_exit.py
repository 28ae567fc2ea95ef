"""Early exit: resuming is bit-equal to running every layer, and the exit that pays is the one taken."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from outrider.core import Batch, Drafts, Plan, Resume, Sequence
from outrider.draft import check_drafts
from outrider.draft.deadline import Deadline
from outrider.draft.early_exit import EarlyExit, EarlyExitOptions, LayerCosts, best_length, measure_costs
from outrider.draft.ngram import NGramDrafter, NGramOptions
from outrider.engine.engine import Engine
from outrider.errors import DrafterFault, InvalidParameter
from outrider.model import Decoder, Feed, Rows, Runner
from outrider.sampling import SamplingParams
from tests.support import VOCAB, make_engine, make_pool, make_request, random_decoder, run, write_family
from tests.support.engines import random_params

LAYERS = 4


@pytest.fixture(scope="module", params=["llama2", "mistral", "qwen3"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def decoder(request: pytest.FixtureRequest, family: str, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return random_decoder(write_family(tmp_path_factory.mktemp("m"), family, request.param, num_hidden_layers=LAYERS))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return random_decoder(write_family(tmp_path_factory.mktemp("m"), "llama2", num_hidden_layers=LAYERS))


def early_exit_engine(decoder: Decoder, length: int, exit_layer: int | None, tail: int = 0, **sizes: int) -> Engine:
    engine = make_engine(decoder, None, length, **sizes)
    engine.drafter.drafter = EarlyExit(engine.runner, EarlyExitOptions(exit_layer, tail), LayerCosts(1.0, 0.01))
    return engine


@pytest.mark.grid
@pytest.mark.parametrize(("exit_layer", "tail"), [(1, 0), (3, 0), (1, 2), (2, 1), (None, 0)])
def test_same_tokens(decoder: Decoder, exit_layer: int | None, tail: int) -> None:
    rng = random.Random(f"{exit_layer} {tail}")
    requests = [
        make_request([rng.randrange(VOCAB) for _ in range(rng.randint(1, 45))], random_params(rng, 25), f"r{i}") for i in range(6)
    ]
    plain = [run(make_engine(decoder), [request])[0] for request in requests]
    engine = early_exit_engine(decoder, 5, exit_layer, tail, max_num_seqs=4)
    fast = run(engine, requests)
    assert [w.seq.tokens for w in fast] == [w.seq.tokens for w in plain]
    assert [w.logprobs for w in fast] == [w.logprobs for w in plain]
    assert [w.seq.stats.fallback_reason for w in fast] == [None] * 6
    assert engine.pages.used == 0
    if exit_layer is not None:
        assert all(w.seq.stats.drafted > 0 for w in fast)


@pytest.mark.grid
@pytest.mark.parametrize("exit_layer", [1, 2, 3])
def test_resumed_logits_and_kv_are_the_same_bits(both_paths: str, decoder: Decoder, exit_layer: int) -> None:
    """Beside a sequence that reads its prompt and one that has no draft."""
    results = []
    for resumed in (True, False):
        runner = Runner(decoder, make_pool(decoder))
        prompts = [[5, 6, 7] * 7, [9] * 30, [1, 2]]
        sequences = [Sequence(make_request(prompt, SamplingParams(temperature=0.8, seed=4))) for prompt in prompts]
        for i, seq in enumerate(sequences):
            seq.pages = list(range(10 * i, 10 * i + 8))
        runner.forward([Feed(seq.pages, 0, seq.tokens[:-1]) for seq in (sequences[0], sequences[2])])
        sequences[0].cached, sequences[2].cached = 20, 1
        batch = Batch(sequences, [1, 30, 1])
        drafts = EarlyExit(runner, EarlyExitOptions(exit_layer)).propose(batch, Plan((4, 0, 0)))
        assert drafts.resume is not None
        assert list(drafts.resume.counts) == [4, 0, 0]
        scores = runner.score(batch, drafts if resumed else replace(drafts, resume=None), (exit_layer, LAYERS))
        assert scores.taps is not None
        used = [page for seq in sequences for page in seq.pages]
        results.append((scores.logits, scores.taps[: 1 + 4 + 30 + 1], runner.pool.keys[:, used], runner.pool.values[:, used]))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def _count(rows: Rows | array[int]) -> int:
    """Rows that are not padding."""
    return rows[1] if isinstance(rows, array) else sum(unit.rows.stop - unit.rows.start for unit in rows.plan.units)


def test_verification_leaves_the_first_layers_out(both_paths: str, small: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = early_exit_engine(small, 4, 3)
    ran: list[tuple[int, int, int]] = []  # (first layer, last layer, rows that are not padding)
    forward = type(engine.runner).run

    def watching(self, rows, taps=(), layers=None, x=None, wanted=()):  # type: ignore[no-untyped-def]
        span = range(LAYERS) if layers is None else layers
        ran.append((span.start, span.stop, _count(rows)))
        return forward(self, rows, taps, layers, x, wanted)

    monkeypatch.setattr(type(engine.runner), "run", watching)
    engine.submit(make_request([1, 2, 3], SamplingParams(temperature=0, max_tokens=30)), "t")
    engine.round()
    assert ran == [(0, LAYERS, 3)]
    ran.clear()
    engine.round()
    assert ran == [(0, 3, 1)] * 4 + [(0, 3, 1), (3, LAYERS, 5)], "four guesses, the last node's first layers, the rest for all"


def test_wrong_rows_would_change_the_text(small: Decoder) -> None:
    """What the equality above rests on is used: other hidden rows give other logits."""
    runner = Runner(small, make_pool(small))
    seq = Sequence(make_request([5, 6, 7], SamplingParams(temperature=0)))
    seq.pages, seq.cached = list(range(4)), 2
    runner.forward([Feed(seq.pages, 0, seq.tokens[:-1])])
    drafts = EarlyExit(runner, EarlyExitOptions(2)).propose(Batch([seq], [1]), Plan((3,)))
    assert drafts.resume is not None
    good = runner.score(Batch([seq], [1]), drafts).logits
    hidden = drafts.resume.hidden + 0.5

    def wrong(hidden: Tensor) -> Drafts:
        return replace(drafts, resume=runner.resume(2, hidden, [3]))

    assert not torch.equal(runner.score(Batch([seq], [1]), wrong(hidden)).logits, good)
    # where a tap lies below the exit, or the rows do not fit the model, every layer is run
    assert torch.equal(runner.score(Batch([seq], [1]), wrong(hidden), (1,)).logits, good)
    shorter = replace(wrong(hidden), per_sequence=drafts.subset([[0]]).per_sequence)  # pruned after it was proposed
    assert torch.equal(runner.score(Batch([seq], [1]), shorter).logits, good[:2])
    assert torch.equal(runner.score(Batch([seq], [1]), wrong(hidden[:, :-1])).logits, good)


def test_rows_of_another_s_making_are_not_taken(both_paths: str, small: Decoder) -> None:
    """A drafter that hands over rows for the target's layers changes no token, behind a deadline or not."""

    class Forger(NGramDrafter):
        forged = 0

        def propose(self, batch: Batch, plan: Plan) -> Drafts:
            tree = [([1] * n, range(-1, n - 1)) for n in plan.lengths]
            counts = [1 + n if n and fed == 1 else 0 for n, fed in zip(plan.lengths, batch.feeds, strict=True)]
            self.forged += sum(counts)
            return replace(Drafts.trees(tree), resume=Resume(2, torch.randn(sum(counts), small.spec.hidden), counts))

    request = make_request([5, 6, 7], SamplingParams(temperature=0.8, seed=3, max_tokens=20))
    plain = run(make_engine(small), [request])[0]
    for drafter in (Forger(NGramOptions(1, 3)), Deadline(Forger(NGramOptions(1, 3)))):
        engine = make_engine(small, drafter, 3)
        forged = run(engine, [request])[0]
        assert forged.seq.tokens == plain.seq.tokens
        assert forged.seq.stats.drafted > 0


def test_rows_to_resume_from_are_checked() -> None:
    drafts, plan = Drafts.chains([[1, 2], []]), Plan((3, 3))
    check_drafts(replace(drafts, resume=Resume(1, torch.zeros(3, 4), [3, 0])), plan, VOCAB)
    for resume in (
        Resume(1, torch.zeros(4, 4), [4, 0]),
        Resume(1, torch.zeros(3, 4), [2, 2]),
        Resume(1, torch.zeros(3, 4), [3]),
        Resume(1, torch.zeros(2, 4), [3, 0]),
        Resume(1, torch.full((3, 4), float("nan")), [3, 0]),
    ):
        with pytest.raises(DrafterFault, match="resume"):
            check_drafts(replace(drafts, resume=resume), plan, VOCAB)


def silenced(decoder: Decoder, layers: range) -> Decoder:
    """Layers that add nothing."""
    for i in layers:
        for matrix in (decoder.layers[i].out, decoder.layers[i].down):
            matrix.zero_()
    return decoder


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_exit_that_pays_is_taken(tmp_path: Path, temperature: float) -> None:
    """Where the layers from the third on add nothing, two layers know the choice; the cheapest such exit wins."""
    decoder = silenced(random_decoder(write_family(tmp_path, "llama2", num_hidden_layers=8)), range(2, 8))
    decoder.layers[1].down *= 16.0  # and one layer does not
    assert decoder.output is not None
    decoder.output *= 20.0  # else the noise would choose alone
    engine = early_exit_engine(decoder, 4, None)
    drafter = engine.drafter.drafter
    assert isinstance(drafter, EarlyExit)
    assert drafter.exit_layer is None
    assert drafter.needs.taps
    params = SamplingParams(temperature=temperature, seed=2, max_tokens=120)
    request = make_request(list(range(40)), params)
    writer = run(engine, [request])[0]
    assert drafter.exit_layer == 2
    assert not drafter.needs.taps, "once chosen, nothing more is asked of the target"
    assert writer.seq.stats.accepted == writer.seq.stats.drafted > 20
    assert writer.seq.tokens == run(make_engine(decoder), [request])[0].seq.tokens


def test_where_no_exit_pays_nothing_is_drafted(tmp_path: Path) -> None:
    decoder = random_decoder(write_family(tmp_path, "llama2", num_hidden_layers=8))
    for layer in decoder.layers:
        layer.down *= 8.0  # every layer has much to say
    engine = early_exit_engine(decoder, 4, None)
    writer = run(engine, [make_request(list(range(40)), SamplingParams(temperature=0, max_tokens=120))])[0]
    assert isinstance(engine.drafter.drafter, EarlyExit)
    assert engine.drafter.drafter.exit_layer is None
    assert not engine.drafter.drafter.needs.taps
    assert writer.seq.stats.drafted == 0
    assert writer.seq.stats.fallback_reason is None


@pytest.mark.parametrize("agreement", [0.0, 0.3, 0.6, 0.9, 1.0])
def test_best_length_is_the_best(agreement: float) -> None:
    costs, exit_layer, tail, layers = LayerCosts(1.0, 2.0), 2, 1, 12
    speeds = []
    for n in range(9):
        tokens = sum(agreement**i for i in range(n + 1))
        speeds.append(tokens / (n * ((exit_layer + tail) * costs.layer + costs.head) + layers * costs.layer + costs.head))
    found = best_length(costs, (exit_layer, tail, layers), agreement, 8)
    assert found.speed == pytest.approx(max(speeds))
    assert speeds[found.length] == pytest.approx(max(speeds))


def test_costs_are_measured(small: Decoder) -> None:
    runner = Runner(small, make_pool(small))
    costs = measure_costs(runner)
    assert costs.layer > 0
    assert costs.head > 0
    assert not runner.pool.keys[:, :-1].any(), "only the page of padding is written"


@pytest.mark.parametrize("settings", [{"exit_layer": 0}, {"exit_layer": 4}, {"exit_layer": 3, "tail": 2}, {"tail": -1}])
def test_settings_are_checked(small: Decoder, settings: dict[str, int]) -> None:
    with pytest.raises(InvalidParameter, match=next(iter(set(settings) - ({"exit_layer"} if "tail" in settings else set())))):
        EarlyExit(Runner(small, make_pool(small)), EarlyExitOptions(**settings))
