"""What every drafter must keep through the real engine: ragged plans, preemption, prefix-cache hits, nothing left behind.

Preemption is played by hand on the real scheduler and page table: a preempted sequence loses its pages and
begins anew with all of its tokens. Prefix-cache hits are the engine's own.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from outrider.cache import KVPool
from outrider.control import Load, RoundStats
from outrider.core import Batch, Drafts, Plan, Request, Sequence, Tree
from outrider.draft import Drafter
from outrider.draft.cascade import CascadeDrafter, ModelLevel
from outrider.draft.dflash import BlockDrafter
from outrider.draft.draft_model import DraftModel
from outrider.draft.eagle import EagleDrafter
from outrider.draft.early_exit import EarlyExit, EarlyExitOptions
from outrider.draft.growth import TreeShape
from outrider.draft.lookahead import LookaheadDrafter
from outrider.draft.medusa import MedusaDrafter
from outrider.draft.mixture import Member, MixtureDrafter
from outrider.draft.ngram import NGramDrafter, NGramOptions
from outrider.draft.recycle import RecycleDrafter
from outrider.draft.suffix import SuffixDrafter, SuffixOptions
from outrider.engine.commit import OutputProcessor
from outrider.engine.engine import Engine
from outrider.heads import Borrowed, MedusaConfig, MedusaHeads
from outrider.model import Decoder, Runner
from outrider.ops import Blocked
from outrider.sampling import SamplingParams
from tests.support import make_engine, make_pool, make_request, random_decoder, run, write_family
from tests.support.blocks import random_block
from tests.support.drafters import held
from tests.support.eagle import random_head, reference_chain
from tests.support.engines import random_params

PAGE = 16
TREE = TreeShape(beam=3, branch=3, depth=4)
Make = Callable[[Engine, Decoder], Drafter]


def eagle(engine: Engine, form: str, shape: TreeShape) -> EagleDrafter:
    head = random_head(engine.runner.decoder, form)
    c = head.config.shape
    return EagleDrafter(head, KVPool(1, 160, c.kv_heads, PAGE, c.head_dim), Blocked(), shape)


def medusa(engine: Engine, dynamic: bool) -> MedusaDrafter:
    decoder = engine.runner.decoder
    c = decoder.spec
    heads = MedusaHeads(MedusaConfig(c.hidden, c.vocab, c.depth, heads=3), Borrowed.of(decoder)).requires_grad_(False)
    for parameter in heads.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.2)
    return MedusaDrafter(heads.eval(), Blocked(), dynamic, PAGE)


def dflash(engine: Engine, kind: str) -> BlockDrafter:
    head = random_block(engine.runner.decoder, kind)
    c = head.config.shape
    return BlockDrafter(head, KVPool(c.depth, 160, c.kv_heads, PAGE, c.head_dim), Blocked())


DRAFTERS: dict[str, Make] = {
    "ngram": lambda _e, _d: NGramDrafter(NGramOptions(1, 3)),
    "suffix": lambda _e, _d: SuffixDrafter(SuffixOptions(min_prob=0.0, branch=2)),
    "recycle": lambda _e, _d: RecycleDrafter(),
    "draft_model": lambda _e, d: DraftModel(Runner(d, make_pool(d))),
    "draft_model tree": lambda _e, d: DraftModel(Runner(d, make_pool(d)), TREE),
    "draft_model perfect": lambda e, _d: DraftModel(Runner(e.runner.decoder, make_pool(e.runner.decoder))),
    "eagle": lambda e, _d: eagle(e, "eagle3", TreeShape()),
    "eagle tree": lambda e, _d: eagle(e, "eagle3", TREE),
    "eagle1": lambda e, _d: eagle(e, "eagle1", TreeShape()),
    "medusa": lambda e, _d: medusa(e, True),
    "medusa static": lambda e, _d: medusa(e, False),
    "dflash": lambda e, _d: dflash(e, "dflash"),
    "dflash dspark": lambda e, _d: dflash(e, "dspark"),
    "early_exit": lambda e, _d: EarlyExit(e.runner, EarlyExitOptions(2)),
    "early_exit tail": lambda e, _d: EarlyExit(e.runner, EarlyExitOptions(1, 1)),
    "lookahead": lambda _e, _d: LookaheadDrafter(),
    "cascade": lambda _e, d: CascadeDrafter([ModelLevel(Runner(d, make_pool(d)), 4)], NGramDrafter(NGramOptions(1, 3)), 4),
    "mixture": lambda e, _d: MixtureDrafter([Member(SuffixDrafter(SuffixOptions())), Member(eagle(e, "eagle3", TREE))]),
}
# guesses of these depend on nothing but the text, and they are wrong often enough for rounds to meet again
FROM_TEXT = [name for name in DRAFTERS if name not in ("recycle", "draft_model perfect", "lookahead", "mixture")]
WITH_MEMORY = [name for name in FROM_TEXT if name.startswith(("draft_model", "eagle", "medusa", "dflash"))]


@pytest.fixture(scope="module")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, Decoder]:
    root = tmp_path_factory.mktemp("models")
    target = random_decoder(write_family(root / "target", "llama2", num_hidden_layers=3))
    return target, random_decoder(write_family(root / "draft", "qwen3"), seed=5)


class Ragged:
    """Random lengths, now and then nothing at all."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)

    def plan(self, load: Load) -> Plan:
        return Plan(tuple(min(room, self._random.choice([0, 1, 3, 9])) for room in load.room))

    def select(self, drafts: Drafts, load: Load) -> Drafts:
        return drafts

    def observe(self, stats: RoundStats) -> None: ...

    def forget(self, key: object) -> None: ...

    def arms_named(self, method: str) -> list[int]:
        return [0]


def engine_with(name: str, decoders: tuple[Decoder, Decoder], length: int = 4, **sizes: Any) -> Engine:
    engine = make_engine(decoders[0], None, length, **sizes)
    engine.drafter.drafter = DRAFTERS[name](engine, decoders[1])
    return engine


def preempt(engine: Engine, seq: Sequence) -> None:
    """Take a running sequence's pages away; it begins anew and reads all of its tokens again."""
    engine.drafter.end(seq)
    engine.pages.release(seq.pages)
    seq.pages = []
    seq.cached = seq.named = 0
    engine.drafter.begin(seq)


def hits(engine: Engine) -> int:
    """Tokens found in the prefix cache so far."""
    return engine.scheduler.prefix_hits


def watch(engine: Engine) -> dict[tuple[int, ...], Tree]:
    """What is proposed after which text, without its confidence: a lookup learns that from every text it saw."""
    seen: dict[tuple[int, ...], Tree] = {}
    propose = engine.drafter.drafter.propose

    def watching(batch: Batch, plan: Plan) -> Drafts:
        drafts = propose(batch, plan)
        for seq, tree, planned in zip(batch.sequences, drafts.per_sequence, plan.lengths, strict=True):
            if planned:
                seen[tuple(seq.tokens)] = tree._replace(survival=[])
        return drafts

    engine.drafter.drafter.propose = watching  # type: ignore[method-assign]
    return seen


def requests(seed: str, count: int, tokens: int = 30) -> list[Request]:
    rng = random.Random(seed)
    return [
        make_request([rng.randrange(6) for _ in range(rng.randint(1, 45))], random_params(rng, tokens), f"r{i}")
        for i in range(count)
    ]


def greedy(prompt: list[int], name: str = "r", tokens: int = 30) -> Request:
    return make_request(prompt, SamplingParams(temperature=0.0, max_tokens=tokens), name)


def plainly(decoders: tuple[Decoder, Decoder], wanted: list[Request]) -> list[list[int]]:
    return [run(make_engine(decoders[0]), [request])[0].seq.tokens for request in wanted]


def check_crowd(engine: Engine, writers: list[OutputProcessor], answers: list[list[int]]) -> None:
    """The tokens of plain decoding, by drafting, and nothing left behind."""
    assert [w.seq.tokens for w in writers] == answers
    assert [w.seq.stats.fallback_reason for w in writers] == [None] * len(answers)
    assert sum(w.seq.stats.drafted for w in writers) > 0
    assert engine.pages.used == 0
    assert not held(engine.drafter.drafter)


@pytest.mark.parametrize("name", DRAFTERS)
def test_ragged_plans_and_many_sequences(name: str, decoders: tuple[Decoder, Decoder]) -> None:
    wanted = requests(name, 9)
    engine = engine_with(name, decoders, max_num_seqs=5)
    engine.policy = Ragged(name)
    writers = run(engine, wanted)
    check_crowd(engine, writers, plainly(decoders, wanted))


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("seed", range(3))
def test_preemption_changes_nothing(name: str, seed: int, decoders: tuple[Decoder, Decoder]) -> None:
    """Anyone may lose its pages after any round: while reading its prompt, while decoding, while reading again."""
    wanted, rng = requests(f"{name} {seed}", 5), random.Random(seed)
    engine = engine_with(name, decoders, max_batch_rows=24)
    writers = [engine.submit(request, "t") for request in wanted]
    lost = 0
    while engine.has_work:
        engine.round()
        if engine.scheduler.running and lost < 12 and rng.random() < 0.5:
            preempt(engine, rng.choice(engine.scheduler.running))
            lost += 1
    assert lost > 2
    check_crowd(engine, writers, plainly(decoders, wanted))


@pytest.mark.parametrize("name", FROM_TEXT)
def test_drafts_after_preemption_are_those_without(name: str, decoders: tuple[Decoder, Decoder]) -> None:
    request = greedy([1, 2, 3, 4] * 9)
    steady, broken = engine_with(name, decoders), engine_with(name, decoders)
    expected, seen = watch(steady), watch(broken)
    run(steady, [request])
    writer, due = broken.submit(request, "t"), [5, 6, 14]
    while broken.has_work:
        broken.round()
        if due and writer.seq.output_len >= due[0] and writer.seq.finish_reason is None:
            preempt(broken, writer.seq)
            del due[0]
    common = [text for text in seen if text in expected]
    assert len(common) >= 3
    assert {text: seen[text] for text in common} == {text: expected[text] for text in common}


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("more", [1, 7, 20])
def test_a_prefix_hit_changes_nothing(name: str, more: int, decoders: tuple[Decoder, Decoder]) -> None:
    """Pages that another sequence filled serve a new one, which may have one token to read or many."""
    prefix = [1, 2, 3, 4, 5, 1, 2, 6] * 6
    first, second = greedy(prefix[:40], "a", 40), greedy([*prefix[:32], *range(7, 7 + more)], "b")
    engine = engine_with(name, decoders)
    writer = engine.submit(first, "t")
    while writer.seq.output_len < 20:
        engine.round()
    fresh = engine_with(name, decoders)
    expected, seen = watch(fresh), watch(engine)
    run(fresh, [second])
    again = run(engine, [second])[0]
    assert hits(engine) == 32
    assert [writer.seq.tokens, again.seq.tokens] == plainly(decoders, [first, second])
    assert again.seq.stats.fallback_reason is None
    assert again.seq.stats.drafted > 0
    assert engine.pages.used == 0
    assert not held(engine.drafter.drafter)
    if name in FROM_TEXT:
        common = [text for text in expected if text in seen]
        assert len(common) >= 3
        assert {text: seen[text] for text in common} == {text: expected[text] for text in common}
    if more == 1 and name in WITH_MEMORY:
        assert seen[tuple(second.prompt_ids)].tokens, "one token to read: the draft begins in the first round"


@pytest.mark.parametrize("name", [*WITH_MEMORY, "early_exit"])
def test_a_hit_drafts_at_once_what_it_would_have_drafted(name: str, decoders: tuple[Decoder, Decoder]) -> None:
    """With one token left to read, the feature kept with the last page is all there is to draft from."""
    prefix = [1, 2, 3, 4, 5, 1, 2, 6] * 4
    engine, fresh = engine_with(name, decoders), engine_with(name, decoders)
    expected, seen = watch(fresh), watch(engine)
    emitted = run(fresh, [greedy(prefix)])[0].seq.tokens[: len(prefix) + 1]
    writer = engine.submit(greedy([*prefix, 9, 9], "a", 40), "t")
    while writer.seq.output_len < 6:
        engine.round()
    run(engine, [greedy(emitted, "b", 5)])
    assert hits(engine) == len(prefix)
    assert seen[tuple(emitted)].tokens
    assert seen[tuple(emitted)].tokens[:2] == expected[tuple(emitted)].tokens[:2]


@pytest.mark.parametrize("name", WITH_MEMORY)
def test_a_hit_is_not_read_again(name: str, decoders: tuple[Decoder, Decoder], monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the target nor the drafter feeds what the pages hold."""
    from outrider.heads import runners as heads_module
    from outrider.model import runner as runner_module

    prefix = [1, 2, 3, 4, 5, 1, 2, 6] * 4
    engine = engine_with(name, decoders)
    writer = engine.submit(greedy(prefix, "a", 40), "t")
    while writer.seq.output_len < 6:
        engine.round()
    engine.abort(engine.submit(greedy([9], "c"), "t"))
    starts: list[int] = []

    def watched(lay_out: Any) -> Any:
        def watching(feeds: Any, *rest: Any) -> Any:
            starts.extend(feed.start for feed in feeds if feed.pages and feed.pages[:2] == writer.seq.pages[:2])
            return lay_out(feeds, *rest)

        return watching

    for module in (runner_module, heads_module):
        for way in ("lay_out", "lay_out_rows"):
            monkeypatch.setattr(module, way, watched(getattr(module, way)))
    run(engine, [greedy([*prefix, 7, 8], "b", 5)])
    assert starts
    assert min(starts) >= len(prefix)


@pytest.mark.parametrize("name", ["eagle", "eagle tree", "eagle1", "medusa", "dflash", "draft_model"])
def test_a_hit_on_pages_the_drafter_never_saw(name: str, decoders: tuple[Decoder, Decoder]) -> None:
    """It reads them, or goes on without; it does not fail, and it drafts."""
    prefix = [1, 2, 3, 4, 5, 1, 2, 6] * 4
    engine = engine_with(name, decoders)
    drafter, engine.drafter.drafter = engine.drafter.drafter, NGramDrafter(NGramOptions(1, 3))
    writer = engine.submit(greedy(prefix, "a", 40), "t")
    while writer.seq.output_len < 6:
        engine.round()
    engine.abort(writer)
    engine.drafter.drafter = drafter
    second = greedy([*prefix, 7, 8, 9], "b")
    seen = watch(engine)
    again = run(engine, [second])[0]
    assert [again.seq.tokens] == plainly(decoders, [second])
    assert again.seq.stats.fallback_reason is None
    assert again.seq.stats.drafted > 0
    assert hits(engine) == len(prefix)
    assert engine.pages.used == 0
    if isinstance(drafter, EagleDrafter) and name != "eagle tree":  # a tree of rejected nodes has no definition so short
        for text, tree in seen.items():
            assert tree.tokens == reference_chain(decoders[0], drafter._head, list(text), len(tree.tokens), len(prefix))


@pytest.mark.parametrize("name", WITH_MEMORY)
def test_pages_given_to_another_text_are_not_taken_for_the_first(name: str, decoders: tuple[Decoder, Decoder]) -> None:
    """The book names the text a page was filled for; the same page with another text is read anew."""
    first, other = [1, 2, 3, 4] * 9, [5, 4, 3, 2] * 9
    engine = engine_with(name, decoders)
    run(engine, [greedy(first, "a", 6), greedy(other, "b", 6)])
    for page in range(engine.pages.count):
        engine.pages.forget(page)
    run(engine, [greedy(other, "c", 6)])  # where the first one's pages were
    writer = engine.submit(greedy(other[:20], "d", 30), "t")
    while writer.seq.output_len < 20:
        engine.round()
    second = greedy([*writer.seq.tokens[:16], 9, 9], "e", 20)
    fresh = engine_with(name, decoders)
    expected, seen = watch(fresh), watch(engine)
    run(fresh, [second])
    run(engine, [second])
    common = [text for text in expected if text in seen and text[: len(second.prompt_ids)] == second.prompt_ids]
    assert len(common) >= 3
    assert {text: seen[text] for text in common} == {text: expected[text] for text in common}


@pytest.mark.parametrize("name", DRAFTERS)
def test_aborted_requests_leave_nothing(name: str, decoders: tuple[Decoder, Decoder]) -> None:
    engine = engine_with(name, decoders)
    writers = [engine.submit(greedy([1, 2, 1, 2, i], f"r{i}"), "t") for i in range(3)]
    for _ in range(4):
        engine.round()
    for writer in writers:
        engine.abort(writer)
    assert not engine.has_work
    assert engine.pages.used == 0
    assert not held(engine.drafter.drafter)
