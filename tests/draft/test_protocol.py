"""What every drafter that needs no weights of its own must keep, whatever it guesses."""

from __future__ import annotations

import functools
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.core import Batch, Drafts, Plan, Scores, Sequence, Verdict
from outrider.draft import Drafter, check_drafts
from outrider.draft.cascade import CascadeDrafter, ModelLevel
from outrider.draft.lookahead import LookaheadDrafter, LookaheadOptions
from outrider.draft.mixture import Member, MixtureDrafter, MixtureOptions
from outrider.draft.ngram import NGramDrafter, NGramOptions
from outrider.draft.none import NoDrafter
from outrider.draft.recycle import RecycleDrafter, RecycleOptions
from outrider.draft.suffix import SuffixDrafter, SuffixOptions
from outrider.engine.engine import Engine
from outrider.errors import DrafterFault
from outrider.model import Decoder, Runner
from outrider.sampling import SamplingParams
from tests.support import VOCAB, make_engine, make_pool, make_request, random_decoder, run, write_family
from tests.support.drafters import held

Make = Callable[[], Drafter]


@functools.cache
def small_model() -> Decoder:
    with tempfile.TemporaryDirectory() as directory:
        return random_decoder(write_family(Path(directory) / "small", "llama2"), seed=3)


def cascade() -> Drafter:
    return CascadeDrafter([ModelLevel(Runner(small_model(), make_pool(small_model())))], NGramDrafter(NGramOptions(1, 3)))


def mixture(**options: bool | float) -> Drafter:
    members = [
        Member(NGramDrafter(NGramOptions(1, 3))),
        Member(SuffixDrafter(), 8),
        Member(RecycleDrafter()),
        Member(LookaheadDrafter()),
    ]
    return MixtureDrafter(members, MixtureOptions(**options))  # type: ignore[arg-type]


DRAFTERS: dict[str, Make] = {
    "none": NoDrafter,
    "ngram": lambda: NGramDrafter(NGramOptions(1, 3)),
    "suffix": SuffixDrafter,
    "suffix tree": lambda: SuffixDrafter(SuffixOptions(min_prob=0.0, branch=3)),
    "suffix shared": lambda: SuffixDrafter(SuffixOptions(shared_tokens=64)),
    "suffix edits": lambda: SuffixDrafter(SuffixOptions(shared_tokens=64, shared_prompts=True, edits=True)),
    "recycle": RecycleDrafter,
    "recycle shared": lambda: RecycleDrafter(RecycleOptions(shared=True)),
    "lookahead": LookaheadDrafter,
    "cascade": cascade,
    "mixture": mixture,
    "mixture winner": lambda: mixture(merge=False),
    "mixture frugal": lambda: mixture(enough=2.0),
    "mixture with a model": lambda: MixtureDrafter([Member(SuffixDrafter()), Member(cascade(), 3)]),
    "lookahead small": lambda: LookaheadDrafter(LookaheadOptions(window=2, ngram=2, pool_tokens=40)),
}
GUESSING = [name for name in DRAFTERS if name not in ("none", "cascade")]
_decoders: dict[str, Decoder] = {}


@pytest.fixture(params=DRAFTERS)
def make(request: pytest.FixtureRequest) -> Make:
    return DRAFTERS[request.param]


@pytest.fixture(scope="module")
def decoder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Decoder]:
    root = tmp_path_factory.mktemp("models")

    def get(dtype: str) -> Decoder:
        if dtype not in _decoders:
            _decoders[dtype] = random_decoder(write_family(root / dtype, "qwen3", dtype))
        return _decoders[dtype]

    return get


def sequence(tokens: list[int], name: str = "r") -> Sequence:
    seq = Sequence(make_request(tokens, SamplingParams(), name, tenant="all"))
    seq.pages = list(range(100))  # for drafters with KV; what lies there matters to their guesses alone
    return seq


def few_symbols(rng: random.Random, most: int = 40) -> list[int]:
    return [rng.randrange(6) for _ in range(rng.randint(1, most))]


def proposed(drafter: Drafter, sequences: list[Sequence], lengths: list[int], rule: str = "match") -> Drafts:
    plan = Plan(tuple(lengths), rule)
    return check_drafts(drafter.propose(Batch(sequences, [1] * len(sequences)), plan), plan, VOCAB)


def guesses(drafts: Drafts) -> list[tuple[list[int], list[int]]]:
    """Tokens and parents. The confidence of a lookup may differ: it is learnt from every text that the drafter saw."""
    return [(tree.tokens, tree.parents) for tree in drafts.per_sequence]


def judged(drafter: Drafter, sequences: list[Sequence], drafts: Drafts, rng: random.Random, reject: bool) -> None:
    """What the engine does with a draft: accept a random path, or nothing, and emit one token more."""
    roots, verdicts, total = [], [], 0
    for seq, tree in zip(sequences, drafts.per_sequence, strict=True):
        path: list[int] = []
        while not reject:
            below = [i for i, parent in enumerate(tree.parents) if parent == (path[-1] if path else -1)]
            if not below or rng.random() < 0.3:
                break
            path.append(rng.choice(below))
        taken = {tree.tokens[i] for i, parent in enumerate(tree.parents) if parent == (path[-1] if path else -1)}
        tokens = [tree.tokens[node] for node in path] + [rng.choice([t for t in range(12) if t not in taken])]
        roots.append(total)
        total += 1 + len(tree.tokens)
        verdicts.append(Verdict(path, tokens))
        seq.tokens += tokens
        seq.cached = len(seq.tokens) - 1
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    scores = Scores(torch.randn(total, VOCAB, generator=generator), roots)
    drafter.commit(Batch(sequences, [1] * len(sequences)), drafts, verdicts, scores)


@pytest.mark.parametrize(
    ("trees", "survival", "said"),
    [
        ([([1, 2], [-1, 0])], [[0.9, 0.8]], "of 1 sequences, not of 2"),
        ([([1, 2, 3, 4], [-1, 0, 1, 2]), ([], [])], [[0.9] * 4, []], "4 nodes were drafted where 3"),
        ([([], []), ([1], [-1])], [[], [0.9]], "1 nodes were drafted where 0"),
        ([([1, 2], [-1]), ([], [])], [[0.9, 0.8], []], "1 parents"),
        ([([1, 2], [-1, 0]), ([], [])], [[0.9], []], "1 chances"),
        ([([1, VOCAB], [-1, 0]), ([], [])], [[0.9, 0.8], []], "outside the vocabulary"),
        ([([1, 2], [-1, 1]), ([], [])], [[0.9, 0.8], []], "node 1 has parent 1"),
        ([([1, 2], [-1, 0]), ([], [])], [[0.9, float("inf")], []], "survival inf"),
    ],
)
def test_lists_that_break_the_contract_are_refused(trees: Any, survival: Any, said: str) -> None:
    """As arrays do: tests/engine/test_faults.py."""
    plan = Plan((3, 0))
    check_drafts(Drafts.trees([([1, 2], [-1, 0]), ([], [])], survival=[[0.9, 0.8], []]), plan, VOCAB)
    with pytest.raises(DrafterFault, match=said):
        check_drafts(Drafts.trees(trees, survival=survival), plan, VOCAB)


@pytest.mark.parametrize("rule", ["match", "rejection"])
@pytest.mark.parametrize("case", range(6))
def test_many_sequences_with_ragged_plans(make: Make, case: int, rule: str) -> None:
    """Never more than planned, nothing where nothing was planned, valid at every round."""
    rng = random.Random(f"ragged {case}")
    drafter = make()
    running: list[Sequence] = []
    for turn in range(25):
        if len(running) < 8 and rng.random() < 0.6:
            running.append(sequence(few_symbols(rng), f"r{turn}"))
            drafter.begin(running[-1])
        playing = rng.sample(running, rng.randint(1, len(running))) if running else []
        if not playing:
            continue
        lengths = [rng.choice([0, 0, 1, 2, 5, 17]) for _ in playing]
        drafts = proposed(drafter, playing, lengths, rule)
        for seq, tree, length in zip(playing, drafts.per_sequence, lengths, strict=True):
            assert len(tree.tokens) <= length
            places = list(zip(tree.parents, tree.tokens, strict=True))
            assert len(set(places)) == len(places), "equal siblings waste rows"
            assert seq in running
        judged(drafter, playing, drafts, rng, reject=turn % 5 == 0)
        if rng.random() < 0.2:
            drafter.end(running.pop(rng.randrange(len(running))))


def test_no_plan_no_draft(make: Make) -> None:
    drafter = make()
    sequences = [sequence([1, 2, 1, 2, 1]), sequence([3])]
    for seq in sequences:
        drafter.begin(seq)
    drafts = proposed(drafter, sequences, [0, 0])
    assert drafts.counts == [0, 0]


@pytest.mark.parametrize("name", GUESSING)
def test_the_suite_is_not_about_empty_drafts(name: str) -> None:
    drafter = DRAFTERS[name]()
    seq = sequence([1, 2, 3, 1, 2, 3, 1])
    drafter.begin(seq)
    assert proposed(drafter, [seq], [4]).per_sequence[0].tokens[:2] == [2, 3]


@pytest.mark.parametrize("name", GUESSING)
def test_survival_never_grows_towards_the_leaves(name: str) -> None:
    drafter = DRAFTERS[name]()
    seq = sequence([1, 2, 3, 1, 2, 4, 1, 2, 3, 1])
    drafter.begin(seq)
    drafts = proposed(drafter, [seq], [9])
    survival = drafts.survival[0]
    for i, parent in enumerate(drafts.per_sequence[0].parents):
        assert 0 < survival[i] <= (survival[parent] if parent >= 0 else 1.0)


def test_one_token_prompts(make: Make) -> None:
    drafter = make()
    rng = random.Random(1)
    sequences = [sequence([token]) for token in (0, 5, VOCAB - 1)]
    for seq in sequences:
        drafter.begin(seq)
    for _ in range(10):
        judged(drafter, sequences, proposed(drafter, sequences, [3, 1, 8]), rng, reject=False)


def test_total_rejection_is_survived(make: Make) -> None:
    """Round after round of nothing accepted, and the text that did come is still learnt from."""
    drafter = make()
    rng = random.Random(2)
    seq = sequence([1, 2, 3, 1, 2])
    drafter.begin(seq)
    for _ in range(30):
        before = len(seq.tokens)
        judged(drafter, [seq], proposed(drafter, [seq], [6]), rng, reject=True)
        assert len(seq.tokens) == before + 1


@pytest.mark.parametrize("name", ["ngram", "suffix", "suffix tree"])
def test_rounds_sat_out_make_no_difference(name: str) -> None:
    """Asked at every round or only at the last, the guesses are the same: they come from the text alone."""
    rng = random.Random(3)
    steady, late = DRAFTERS[name](), DRAFTERS[name]()
    seq = sequence(few_symbols(rng))
    steady.begin(seq)
    late.begin(seq)
    for _ in range(20):
        judged(steady, [seq], proposed(steady, [seq], [5]), rng, reject=False)
    assert guesses(proposed(late, [seq], [7])) == guesses(proposed(steady, [seq], [7]))


def test_a_sequence_may_sit_out(make: Make) -> None:
    drafter = make()
    rng = random.Random(4)
    a, b = sequence([1, 2, 1, 2]), sequence([3, 4, 3, 4])
    drafter.begin(a)
    drafter.begin(b)
    for lengths in ([4, 0], [0, 4], [0, 0], [4, 4]):
        drafts = proposed(drafter, [a, b], lengths)
        assert [bool(n) or not c for n, c in zip(lengths, drafts.counts, strict=True)] == [True, True]
        judged(drafter, [a, b], drafts, rng, reject=False)
    proposed(drafter, [b], [4])


def test_held_looks_inside() -> None:
    for name in ("ngram", "cascade", "mixture"):
        drafter = DRAFTERS[name]()
        drafter.begin(sequence([1, 2]))
        assert held(drafter)


def test_begin_and_end_leave_nothing(make: Make) -> None:
    drafter = make()
    rng = random.Random(5)
    for i in range(10):
        sequences = [sequence(few_symbols(rng), f"{i} {j}") for j in range(3)]
        for seq in sequences:
            drafter.begin(seq)
        for _ in range(3):
            judged(drafter, sequences, proposed(drafter, sequences, [4, 0, 9]), rng, reject=False)
        for seq in sequences:
            drafter.end(seq)
        assert not held(drafter)


def test_ending_what_never_began_is_harmless(make: Make) -> None:
    drafter = make()
    drafter.end(sequence([1, 2]))
    assert not held(drafter)


@pytest.mark.parametrize("name", ["ngram", "suffix", "suffix tree", "recycle"])
def test_a_sequence_begun_anew_drafts_as_the_first_time(name: str) -> None:
    drafter = DRAFTERS[name]()
    rng = random.Random(6)
    seq = sequence([1, 2, 3, 1, 2, 4, 1])
    drafter.begin(seq)
    first = guesses(proposed(drafter, [seq], [6]))
    judged(drafter, [seq], proposed(drafter, [seq], [6]), rng, reject=False)
    drafter.end(seq)
    again = sequence([1, 2, 3, 1, 2, 4, 1])
    drafter.begin(again)
    assert guesses(proposed(drafter, [again], [6])) == first


@pytest.mark.grid
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_same_tokens_as_plain_decoding(make: Make, decoder_of, dtype: str, temperature: float) -> None:  # type: ignore[no-untyped-def]
    decoder = decoder_of(dtype)
    rng = random.Random(f"{dtype} {temperature}")
    requests = [
        make_request(
            few_symbols(rng),
            SamplingParams(
                temperature=temperature, seed=rng.randrange(2**40), max_tokens=40, frequency_penalty=penalty, top_k=20
            ),
            f"r{i}",
            tenant="all",
        )
        for i, penalty in enumerate([0.0, 0.0, 0.0, 0.3, 0.0, 0.0])
    ]
    plain = [run(make_engine(decoder), [request])[0].seq.tokens for request in requests]
    drafter = make()
    engine: Engine = make_engine(decoder, drafter, 9, max_num_seqs=4)
    fast = run(engine, requests)
    assert [writer.seq.tokens for writer in fast] == plain
    assert not any(writer.seq.stats.fallback_reason for writer in fast)
    assert engine.pages.used == 0
    assert not held(drafter)
    if not isinstance(drafter, NoDrafter):
        assert sum(writer.seq.stats.drafted for writer in fast) > 0


def test_aborted_requests_leave_nothing(make: Make, decoder_of: Callable[[str], Decoder], tmp_path: Path) -> None:
    drafter = make()
    engine = make_engine(decoder_of("float32"), drafter, 5)
    writers = [engine.submit(make_request([1, 2, 1, 2, i], SamplingParams(max_tokens=50), f"r{i}"), "t") for i in range(3)]
    for _ in range(4):
        engine.round()
    for writer in writers:
        engine.abort(writer)
    assert not engine.has_work
    assert not held(drafter)
