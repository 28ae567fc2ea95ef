"""A cascade drafts exactly what its last model would alone, in fewer forwards."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.core import Batch, Drafts, Plan, Sequence, Tree
from outrider.draft.cascade import CascadeDrafter, ModelLevel
from outrider.draft.draft_model import DraftModel
from outrider.draft.ngram import NGramDrafter, NGramOptions
from outrider.draft.recycle import RecycleDrafter
from outrider.draft.suffix import SuffixDrafter
from outrider.errors import InvalidParameter
from outrider.model import Decoder, Runner
from outrider.sampling import SamplingParams
from tests.support import VOCAB, make_engine, make_pool, make_request, random_decoder, run, write_family
from tests.support.engines import random_params

LOOKUPS = {
    "none": lambda: None,
    "ngram": lambda: NGramDrafter(NGramOptions(1, 3)),
    "suffix": SuffixDrafter,
    "recycle": RecycleDrafter,
}


class Counting(Runner):
    """Counts forwards."""

    calls = 0

    def forward(self, feeds, taps=()):  # type: ignore[no-untyped-def]
        self.calls += 1
        return super().forward(feeds, taps)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Decoder]:
    root = tmp_path_factory.mktemp("models")
    return [
        random_decoder(write_family(root / str(i), "qwen3", num_hidden_layers=layers), i) for i, layers in enumerate((3, 2, 1))
    ]


def level(decoder: Decoder, draft_tokens: int = 256) -> tuple[ModelLevel, Counting]:
    runner = Counting(decoder, make_pool(decoder))
    return ModelLevel(runner, draft_tokens), runner


def watched(drafter: Any, seen: list[list[list[int]]]) -> Any:
    propose = drafter.propose

    def watching(batch: Batch, plan: Plan) -> Drafts:
        drafts: Drafts = propose(batch, plan)
        seen.append([tree.tokens for tree in drafts.per_sequence])
        return drafts

    drafter.propose = watching
    return drafter


def requests(seed: str, count: int = 5) -> list[Any]:
    rng = random.Random(seed)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 12))] * rng.randint(1, 4) for _ in range(count)]
    return [make_request(prompt, random_params(rng, 25), f"r{i}") for i, prompt in enumerate(prompts)]


@pytest.mark.parametrize("lookup", LOOKUPS)
def test_what_lies_below_changes_no_draft(models: list[Decoder], lookup: str) -> None:
    """Round by round the same guesses as the model alone, and the text of plain decoding."""
    wanted = requests(f"cascade {lookup}")
    plain = [run(make_engine(models[0]), [request])[0].seq.tokens for request in wanted]
    alone: list[list[list[int]]] = []
    below: list[list[list[int]]] = []
    for seen, lowest in ((alone, None), (below, LOOKUPS[lookup]())):
        model, _ = level(models[1])
        fast = run(make_engine(models[0], watched(CascadeDrafter([model], lowest), seen), 6), wanted)
        assert [writer.seq.tokens for writer in fast] == plain
        assert not any(writer.seq.stats.fallback_reason for writer in fast)
        assert not model.reader._states
    assert alone == below
    assert any(tokens for drafts in alone for tokens in drafts)


def test_a_draft_is_the_models_own_continuation(models: list[Decoder]) -> None:
    """By definition: the model, started afresh on the text so far, writes what was drafted."""
    seen: list[tuple[list[int], list[int]]] = []
    drafter = CascadeDrafter([level(models[2], 2)[0], level(models[1])[0]], NGramDrafter(NGramOptions(1, 3)))
    propose = drafter.propose

    def watching(batch: Batch, plan: Plan) -> Drafts:
        drafts = propose(batch, plan)
        seen.extend((list(seq.tokens), tree.tokens) for seq, tree in zip(batch.sequences, drafts.per_sequence, strict=True))
        return drafts

    drafter.propose = watching  # type: ignore[method-assign]
    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    run(make_engine(models[0], drafter, 4), [make_request([5, 9, 2] * 5, greedy, "a"), make_request([3, 3], greedy, "b")])
    drafted = [(text, draft) for text, draft in seen if draft]
    assert len(drafted) > 10
    for text, draft in drafted:
        params = SamplingParams(temperature=0.0, max_tokens=len(draft))
        assert run(make_engine(models[1]), [make_request(text, params)])[0].seq.tokens == text + draft


def test_text_that_others_drafted_is_read_first(models: list[Decoder]) -> None:
    """The text went on differently, and by several tokens, since this drafter was asked."""
    drafter = CascadeDrafter([level(models[1])[0]], NGramDrafter(NGramOptions(1, 3)))
    seq = Sequence(make_request([5, 9, 2, 5, 9], SamplingParams(temperature=0.0)))
    seq.pages = list(range(20))
    drafter.begin(seq)
    for new in ([], [7, 8, 1, 5], [9], [2, 2, 2, 2, 2, 2, 2]):
        seq.tokens += new
        draft = drafter.propose(Batch([seq], [1]), Plan((5,))).per_sequence[0].tokens
        request = make_request(seq.tokens, SamplingParams(temperature=0.0, max_tokens=5))
        assert run(make_engine(models[1]), [request])[0].seq.tokens == seq.tokens + draft


def test_levels_of_models(models: list[Decoder]) -> None:
    wanted = requests("levels")
    plain = [run(make_engine(models[0]), [request])[0].seq.tokens for request in wanted]
    alone: list[list[list[int]]] = []
    deep: list[list[list[int]]] = []
    run(make_engine(models[0], watched(CascadeDrafter([level(models[1])[0]]), alone), 7), wanted)
    drafter = CascadeDrafter([level(models[2], 3)[0], level(models[1])[0]], NGramDrafter(NGramOptions(1, 3)), 2)
    fast = run(make_engine(models[0], watched(drafter, deep), 7), wanted)
    assert [writer.seq.tokens for writer in fast] == plain
    assert alone == deep


def test_one_forward_checks_a_whole_copy(models: list[Decoder]) -> None:
    """A model below itself: every guess is right, so a draft takes the forwards of one check."""
    decoder = models[0]
    seq = Sequence(make_request([5, 6, 7], SamplingParams(temperature=0.0)))
    seq.pages = list(range(20))

    class Knowing(NGramDrafter):
        def follow(self, seq, path, nodes):  # type: ignore[no-untyped-def]
            right = [41, 42, 43, 44, 45]  # replaced below by what the model says
            rest = (answer or right)[len(path) : len(path) + nodes]
            return Tree.chain(rest)

    answer: list[int] = []
    model, runner = level(decoder)
    drafter = CascadeDrafter([model], Knowing())
    drafter.begin(seq)
    answer += drafter.propose(Batch([seq], [1]), Plan((6,))).per_sequence[0].tokens
    assert len(answer) == 6
    slow, runner.calls = runner.calls, 0
    assert drafter.propose(Batch([seq], [1]), Plan((6,))).per_sequence[0].tokens == answer
    assert runner.calls == 1 < slow


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ratio_tests_get_the_draft_models_own_draws(models: list[Decoder], temperature: float) -> None:
    """Same draws and same probabilities as the draft model without a cascade."""
    seq = Sequence(make_request([5, 6, 7, 5, 6], SamplingParams(temperature=temperature, seed=3)))
    seq.pages = list(range(20))
    found = []
    for drafter in (
        DraftModel(Runner(models[1], make_pool(models[1]))),
        CascadeDrafter([level(models[1])[0]], NGramDrafter(NGramOptions(1, 3))),
    ):
        drafter.begin(seq)
        found.append(drafter.propose(Batch([seq], [1]), Plan((5,), "rejection", keep_q=True)))
    assert [tree[:2] for tree in found[0].per_sequence] == [tree[:2] for tree in found[1].per_sequence]
    assert found[0].q is not None
    assert found[1].q is not None
    assert torch.equal(found[0].q, found[1].q)


def test_the_small_models_context_is_kept(tmp_path: Path, models: list[Decoder]) -> None:
    short = random_decoder(write_family(tmp_path / "short", "llama2", max_position_embeddings=40))
    drafter = CascadeDrafter([level(short)[0]], NGramDrafter(NGramOptions(1, 3)))
    request = make_request([1, 2, 3] * 8, SamplingParams(temperature=0.0, max_tokens=40))
    fast = run(make_engine(models[0], drafter, 6), [request])[0]
    assert fast.seq.tokens == run(make_engine(models[0]), [request])[0].seq.tokens
    assert fast.seq.stats.fallback_reason is None


def test_a_cascade_needs_a_model() -> None:
    with pytest.raises(InvalidParameter, match="levels"):
        CascadeDrafter([], NGramDrafter())


def test_a_level_that_is_always_wrong_is_hardly_asked(models: list[Decoder]) -> None:
    """Guesses take as long as a forward and save none, by a clock that counts both."""
    seconds = asked = 0

    class Wrong(NGramDrafter):
        def follow(self, seq, path, nodes):  # type: ignore[no-untyped-def]
            nonlocal seconds, asked
            seconds, asked = seconds + 1, asked + 1
            return Tree.chain([VOCAB - 1] * nodes)

    def clock() -> float:
        return seconds + model.reader.runner.calls  # type: ignore[attr-defined]

    model, runner = level(models[1])
    drafter = CascadeDrafter([model], Wrong(), clock=clock)
    seq = Sequence(make_request([5, 6, 7], SamplingParams(temperature=0.0)))
    seq.pages = list(range(20))
    drafter.begin(seq)
    for _ in range(60):
        assert len(drafter.propose(Batch([seq], [1]), Plan((6,))).per_sequence[0].tokens) == 6
    assert runner.calls == 360
    assert asked < 60
