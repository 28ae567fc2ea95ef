"""Choices on the device with every parameter equal the reference, at every node and beside any neighbours.

These run in Triton's interpreter too (TRITON_INTERPRET=1), on small sizes.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.config import EngineConfig
from outrider.control import FixedLength
from outrider.core import Batch, Request, Sequence, Tree
from outrider.engine.engine import Engine
from outrider.sampling import SamplingParams, choose, rows_of
from tests.support import NoDrafter, Oracle, random_decoder, write_family

INTERPRETED = True
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCABS = (24, 9001, 128_256) if DEVICE == "cuda" else (24, 9001)  # most of 24 tokens are penalised, and every filter cuts often

DraftedSequence = tuple[Sequence, list[int], list[int]]  # a sequence with the tokens and parents of its draft


def random_params(rng: random.Random, vocab: int) -> SamplingParams:
    """Any mixture of the parameters that the device supports."""
    some = lambda *values: rng.choice(values)  # noqa: E731
    return SamplingParams(
        temperature=some(0.0, 0.6, 1.0, 1.0, 1.7),
        top_k=some(0, 0, 1, 3, 12, vocab - 1, vocab, 10 * vocab),
        top_p=some(1.0, 1.0, 0.9, 0.5, 0.02),
        min_p=some(0.0, 0.0, 0.05, 0.5, 1.0),
        repetition_penalty=some(1.0, 1.0, 1.3, 0.8),
        presence_penalty=some(0.0, 0.0, 0.7, -1.5),
        frequency_penalty=some(0.0, 0.0, 0.4, -0.9),
        logit_bias=some(None, None, {3: 5.0, 17: -100.0, vocab - 1: 2.5}),
        min_tokens=some(0, 0, 3, 9),
        max_tokens=64,
    )


def random_tree(rng: random.Random, vocab: int) -> tuple[list[int], list[int]]:
    nodes = rng.choice((0, 0, 1, 4, 9))
    tokens = [rng.choice((3, 5, rng.randrange(vocab))) for _ in range(nodes)]
    return tokens, [rng.randrange(-1, i) for i in range(nodes)]


def random_sequence(rng: random.Random, vocab: int, name: int) -> DraftedSequence:
    params = random_params(rng, vocab)
    stops = frozenset({3, 8, vocab - 2})
    prompt = tuple(rng.choice((3, 4, 5, rng.randrange(vocab))) for _ in range(rng.randrange(1, 30)))
    seq = Sequence(Request(f"r{name}", prompt, params, rng.randrange(1 << 40), stops, 64, rng.randrange(3)))
    seq.tokens += [rng.choice((3, 5, 6, rng.randrange(vocab))) for _ in range(rng.choice((0, 2, 12)))]
    return seq, *random_tree(rng, vocab)


def on_device(logits: torch.Tensor, batch: list[DraftedSequence], sampling: Any = None) -> list[int]:
    """The choices of all roots and nodes, by the runner's steps."""
    from outrider.model.cuda_inputs import GraphInputs
    from outrider.model.cuda_sampling_metadata import SamplingMetadata

    device = torch.device(DEVICE)
    sampling = sampling or SamplingMetadata(device)
    counts = [1 + len(tokens) for _, tokens, _ in batch]
    inputs = GraphInputs(sum(counts), 1, 1, device, 1)
    trees = [Tree(tokens, parents, [1.0] * len(tokens)) for _, tokens, parents in batch]
    roots = [sum(counts[:b]) for b in range(len(batch))]
    assert not sampling.fill(inputs, Batch([seq for seq, _, _ in batch], [1] * len(batch)), trees, roots)
    inputs.fields[2] = [row.position - 1 for seq, tokens, parents in batch for row in rows_of(seq, tokens, parents)]
    inputs.send()
    return sampling.table.choose(logits.to(DEVICE), inputs.meta).tolist()  # type: ignore[no-any-return]


def as_defined(logits: torch.Tensor, batch: list[DraftedSequence]) -> list[int]:
    return choose(logits, [row for seq, tokens, parents in batch for row in rows_of(seq, tokens, parents)])


def made_up(batch: list[DraftedSequence], vocab: int, kind: str, seed: int = 0) -> torch.Tensor:
    """Random logits, or rounded ones of which most are tied."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(sum(1 + len(tokens) for _, tokens, _ in batch), vocab, generator=generator)
    return logits.round() if kind == "tied" else logits * (1 if vocab < 100 else 3)


@pytest.mark.parametrize("kind", ["smooth", "tied"])
@pytest.mark.parametrize("vocab", VOCABS)
def test_choices_apply_every_parameter(vocab: int, kind: str) -> None:
    rng = random.Random(vocab)
    batch = [random_sequence(rng, vocab, i) for i in range((160 if DEVICE == "cuda" else 60) if vocab < 100 else 10)]
    logits = made_up(batch, vocab, kind)
    assert on_device(logits, batch) == as_defined(logits, batch)


def test_a_growing_text_is_counted_once() -> None:
    """Counts of earlier rounds plus those of a new round equal the counts of the whole text."""
    from outrider.model.cuda_sampling_metadata import SamplingMetadata

    rng, vocab, sampling = random.Random(2), 24, SamplingMetadata(torch.device(DEVICE))
    batch = [random_sequence(rng, vocab, i) for i in range(24)]
    for turn in range(4):
        present = [drafted for i, drafted in enumerate(batch) if (i + turn) % 5]  # some sit a round out
        logits = made_up(present, vocab, "smooth", turn)
        assert on_device(logits, present, sampling) == as_defined(logits, present)
        for seq, _, _ in batch:
            seq.tokens += [rng.randrange(vocab) for _ in range(turn)]


def test_a_choice_does_not_depend_on_neighbouring_rows() -> None:
    rng, vocab = random.Random(3), VOCABS[-1] if DEVICE == "cuda" else 2500
    batch = [random_sequence(rng, vocab, i) for i in range(12)]
    logits = made_up(batch, vocab, "smooth")
    together = on_device(logits, batch)
    rng.shuffle(order := list(range(len(batch))))
    first = [0]
    for _, tokens, _ in batch:
        first.append(first[-1] + 1 + len(tokens))
    for group in ([i] for i in order), (order[:5], order[5:]):
        for some in group:
            rows = [row for i in some for row in range(first[i], first[i + 1])]
            assert on_device(logits[rows], [batch[i] for i in some]) == [together[row] for row in rows]


def test_rows_without_a_choice_are_marked() -> None:
    filtered = SamplingParams(temperature=0.8, top_k=4, top_p=0.9, presence_penalty=0.5, max_tokens=64)
    batch: list[DraftedSequence] = [(Sequence(Request(f"r{i}", (1, 2), filtered, i, frozenset(), 64)), [], []) for i in range(4)]
    logits = made_up(batch, 199, "smooth")
    logits[0, 17], logits[1], logits[2, 5] = float("nan"), float("-inf"), float("inf")
    got = on_device(logits, batch)
    assert got == as_defined(logits, batch)
    assert got[:3] == [-1, -1, -1]


def test_an_engine_chooses_alike_with_and_without_drafts(tmp_path: Path) -> None:
    """Prompts in chunks, decoding, chains and trees give the same tokens, and each choice equals the reference. The host
    makes some of the choices.
    """
    from outrider.model.cuda_runner import CudaRunner

    decoder = random_decoder(write_family(tmp_path, "llama2", hidden_size=64, num_key_value_heads=2))
    rng, vocab = random.Random(4), decoder.spec.vocab
    params = [random_params(rng, vocab) for _ in range(6)]
    params.append(SamplingParams(temperature=0.9, top_p=0.8, allowed_token_ids=tuple(range(0, vocab, 2)), max_tokens=10))
    params.append(SamplingParams(temperature=0.9, repetition_penalty=1.2, logprobs=2, max_tokens=10))
    to_submit = [
        Request(f"r{i}", tuple(rng.randrange(vocab) for _ in range(3 + 5 * i)), p, i, frozenset({3}), 10)
        for i, p in enumerate(params)
    ]
    runner = CudaRunner(decoder, 60, 64, DEVICE)
    score = runner.score

    def checked(batch: Any, drafts: Any, taps: tuple[int, ...] = ()) -> Any:
        scores, trees = score(batch, drafts, taps), drafts.per_sequence
        rows = [
            row
            for seq, tree, root in zip(batch.sequences, trees, scores.roots, strict=True)
            if root >= 0
            for row in rows_of(seq, tree.tokens, tree.parents)
        ]
        assert (scores.choices or []) == (choose(scores.logits.cpu(), rows) if rows else [])
        return scores

    runner.score = checked  # type: ignore[method-assign]

    def texts(drafter: Any, length: int, together: int) -> dict[str, list[int]]:
        config = EngineConfig(page_size=64, max_num_seqs=together, max_batch_rows=24, prefix_cache=False)
        engine = Engine(runner, None, drafter, FixedLength(length), config)
        writers = [engine.submit(request, "test") for request in to_submit]
        while engine.has_work:
            engine.round()
        assert all(writer.seq.finish_reason in ("length", "stop") for writer in writers)
        return {writer.seq.request.id: writer.seq.tokens for writer in writers}

    plain = texts(NoDrafter(), 0, 1)
    assert texts(Oracle(plain, 5, branches=2, seed=1), 6, 8) == plain
