"""Promise one with sliding windows: window, tree shape and page size in every combination, and drafts that are not finite.

A window may be shorter than a draft is deep: then a node no longer sees the root, nor its nearest ancestors. A token
that is only ever drafted may have an embedding that is NaN or infinite: nothing of it may reach the text.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from outrider.core import Batch, Drafts, Plan, Sequence, Tree
from outrider.engine import engine as engine_module
from outrider.engine.commit import OutputProcessor, advance
from outrider.engine.engine import Engine
from outrider.model import Decoder
from outrider.sampling import SamplingParams
from tests.support import VOCAB, Oracle, make_engine, make_request, random_decoder, run, write_family

pytestmark = pytest.mark.usefixtures("both_paths")
SPOILED = VOCAB - 1  # no plain text holds it
Bits = dict[str, list[torch.Tensor]]


class Shapes(Oracle):
    """Trees of one shape that hold the plain text on one branch and wrong guesses on the others."""

    shape = "chain"

    def _draft(self, seq: Sequence, room: int) -> tuple[list[int], list[int]]:
        if room == 0:
            return [], []
        parents = tree_of(self.shape, room)
        depths: list[int] = []
        for parent in parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        answer, at = self.answers[seq.request.id], len(seq.tokens)
        last = max(range(room), key=lambda node: (depths[node], node))
        trunk = set()
        while last >= 0:
            trunk.add(last)
            last = parents[last]
        right = self._random.randint(0, max(depths) + 1)
        tokens = []
        for node, depth in enumerate(depths):
            truth = answer[at + depth] if at + depth < len(answer) else 0
            tokens.append(truth if node in trunk and depth < right else self._wrong(truth))
        return tokens, parents


class Spoiled(Oracle):
    """Trees whose wrong guesses are all the spoiled token."""

    def _wrong(self, token: int) -> int:
        return SPOILED

    def propose(self, batch: Batch, plan: Plan) -> Drafts:
        drafts = super().propose(batch, plan)
        answers = [self.answers[seq.request.id][len(seq.tokens) :] for seq in batch.sequences]
        return Drafts.trees([_only_truth(tree, answer) for tree, answer in zip(drafts.per_sequence, answers, strict=True)])


def _only_truth(tree: Tree, answer: list[int]) -> tuple[list[int], list[int]]:
    """The tree with the spoiled token wherever a guess is not the text's."""
    right = [depth < len(answer) and token == answer[depth] for token, depth in zip(tree.tokens, tree.depths, strict=True)]
    return [token if fits else SPOILED for token, fits in zip(tree.tokens, right, strict=True)], tree.parents


def tree_of(shape: str, nodes: int) -> list[int]:
    """Parents of a tree with so many nodes."""
    if shape == "chain":
        return list(range(-1, nodes - 1))
    if shape == "two chains":  # side by side, their nodes in turn
        return [max(node - 2, -1) for node in range(nodes)]
    if shape == "comb":  # a trunk with a leaf at every joint
        return [-1 if node < 2 else node - 1 - node % 2 for node in range(nodes)]
    if shape == "late":  # siblings first, then one deep chain
        return [-1] * (nodes // 3) + [-1 if node == nodes // 3 else node - 1 for node in range(nodes // 3, nodes)]
    return [(node - 1) // 3 if node > 2 else -1 for node in range(nodes)]  # bushy


@lru_cache(maxsize=32)
def windowed_decoder(root: Path, window: int, dtype: str) -> Decoder:
    return random_decoder(write_family(root / f"window-{window}-{dtype}", "mistral", dtype, sliding_window=window), window)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def run_recorded(engine: Engine, requests: list) -> tuple[list[OutputProcessor], Bits]:  # type: ignore[type-arg]
    """The writers, and the raw logits behind every token they emitted."""
    seen: Bits = defaultdict(list)

    def recording(writer, emitted, rows, scores):  # type: ignore[no-untyped-def]
        settled = advance(writer, emitted, rows, scores)
        seen[writer.seq.request.id] += [scores.logits[row].clone() for row in rows[: settled.kept]]
        return settled

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "advance", recording)
        writers = run(engine, requests)
    return writers, seen


def assert_same_bits(plain: tuple[list[OutputProcessor], Bits], fast: tuple[list[OutputProcessor], Bits]) -> None:
    for a, b in zip(plain[0], fast[0], strict=True):
        assert b.seq.tokens == a.seq.tokens
        assert b.seq.finish_reason == a.seq.finish_reason == "length"
        assert b.seq.stats.fallback_reason is None
        name = a.seq.request.id
        assert all(torch.equal(x, y) for x, y in zip(plain[1][name], fast[1][name], strict=True))


SHAPES = ("chain", "two chains", "comb", "late", "bushy")
CASES = {
    "window": st.sampled_from([1, 2, 3, 4, 7, 15, 16, 17, 33]),
    "page_size": st.sampled_from([1, 2, 3, 8, 10, 16, 64]),
    "shape": st.sampled_from(SHAPES),
    "nodes": st.sampled_from([1, 2, 5, 16, 23, 63]),
    "dtype": st.sampled_from(["float32", "bfloat16"]),
    "prompt": st.integers(1, 40),
}


@settings(max_examples=30)
@given(**CASES)
@example(window=4, page_size=16, shape="chain", nodes=63, dtype="bfloat16", prompt=9)
@example(window=4, page_size=16, shape="two chains", nodes=63, dtype="bfloat16", prompt=9)
@example(window=1, page_size=2, shape="comb", nodes=63, dtype="bfloat16", prompt=31)
@example(window=3, page_size=8, shape="late", nodes=63, dtype="float32", prompt=15)
@example(window=2, page_size=1, shape="bushy", nodes=23, dtype="bfloat16", prompt=5)
def test_windows_trees_and_pages(  # type: ignore[no-untyped-def]
    root: Path, window: int, page_size: int, shape: str, nodes: int, dtype: str, prompt: int
) -> None:
    decoder = windowed_decoder(root, window, dtype)
    rng = random.Random(f"{window} {page_size} {shape} {nodes} {dtype} {prompt}")
    params = [SamplingParams(temperature=heat, seed=7, max_tokens=24) for heat in (0.0, 0.9)]
    requests = [make_request([rng.randrange(VOCAB) for _ in range(prompt + i)], one, f"r{i}") for i, one in enumerate(params)]
    sizes = {"page_size": page_size, "pages": max(16, 4 * (prompt + 96) // page_size)}
    plain = [run_recorded(make_engine(decoder, **sizes), [request]) for request in requests]
    answers = [writers[0].seq.tokens for writers, _ in plain]
    oracle = Shapes({request.id: answer for request, answer in zip(requests, answers, strict=True)}, nodes)
    oracle.shape = shape
    fast = run_recorded(make_engine(decoder, oracle, nodes, **sizes), requests)
    assert_same_bits(([result[0][0] for result in plain], {k: v for result in plain for k, v in result[1].items()}), fast)


@lru_cache(maxsize=16)
def spoiled_decoder(root: Path, window: int, dtype: str, value: float) -> Decoder:
    """A decoder with one token whose embedding is not finite, and which no text chooses."""
    decoder = windowed_decoder(root, window, dtype)
    spoiled = Decoder(replace(decoder.config), getattr(torch, dtype)).requires_grad_(False).eval()
    spoiled.load_state_dict(decoder.state_dict())
    spoiled.embedding[SPOILED, 3:9] = value
    return spoiled


@settings(max_examples=20)
@given(
    **{name: CASES[name] for name in ("window", "page_size", "dtype", "prompt")},
    value=st.sampled_from([float("nan"), float("inf"), float("-inf")]),
    branches=st.sampled_from([0, 4]),
)
@example(window=33, page_size=16, dtype="float32", prompt=9, value=float("nan"), branches=0)
@example(window=33, page_size=16, dtype="bfloat16", prompt=9, value=float("nan"), branches=4)
@example(window=4, page_size=2, dtype="bfloat16", prompt=20, value=float("inf"), branches=0)
def test_a_drafted_token_that_is_not_finite_changes_nothing(  # type: ignore[no-untyped-def]
    root: Path, window: int, page_size: int, dtype: str, prompt: int, value: float, branches: int
) -> None:
    """Drafts in later requests lie in pages that earlier ones have spoiled."""
    decoder = spoiled_decoder(root, window, dtype, value)
    rng = random.Random(f"{window} {page_size} {dtype} {prompt} {value} {branches}")
    bias = {SPOILED: -100.0}
    params = [SamplingParams(temperature=heat, seed=7, max_tokens=20, logit_bias=bias) for heat in (0.0, 0.9)]
    requests = [make_request([rng.randrange(SPOILED) for _ in range(prompt + i)], one, f"r{i}") for i, one in enumerate(params)]
    sizes = {"page_size": page_size, "pages": max(16, 2 * (prompt + 48) // page_size)}
    plain = [run_recorded(make_engine(decoder, **sizes), [request]) for request in requests]
    answers = {request.id: writers[0].seq.tokens for request, (writers, _) in zip(requests, plain, strict=True)}
    engine = make_engine(decoder, Spoiled(answers, 6, branches), 6 + branches, **sizes)
    for _ in range(2):
        fast = run_recorded(engine, requests)
        assert_same_bits(([result[0][0] for result in plain], {k: v for result in plain for k, v in result[1].items()}), fast)
