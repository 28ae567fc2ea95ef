"""Lookahead: the window is an ordinary tree, and what the target says anywhere is remembered."""

from __future__ import annotations

from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.core import Batch, Drafts, Plan, Scores, Sequence, Tree, Verdict
from outrider.draft.lookahead import LookaheadDrafter, LookaheadOptions, NGramPool
from outrider.sampling import SamplingParams
from tests.support import make_engine, make_request, random_decoder, run, write_family

VOCAB = 50


def started(drafter: LookaheadDrafter, tokens: list[int]) -> Sequence:
    seq = Sequence(make_request(tokens, SamplingParams()))
    drafter.begin(seq)
    return seq


def proposed(drafter: LookaheadDrafter, seq: Sequence, nodes: int, rule: str = "match") -> Drafts:
    return drafter.propose(Batch([seq], [1]), Plan((nodes,), rule))


def paths_of(tree: Tree) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        paths.append(((paths[parent]) if parent >= 0 else ()) + (token,))
    return paths


def said(path: tuple[int, ...], salt: int = 0) -> int:
    """A target: its choice is a function of the last two tokens."""
    return (sum(path[-2:]) * 7 + len(path[-2:]) + salt) % VOCAB


def judged(drafter: LookaheadDrafter, seq: Sequence, drafts: Drafts) -> Verdict:
    """Verify by the target above, and commit."""
    tree = drafts.per_sequence[0]
    text = tuple(seq.tokens)
    paths = [(), *paths_of(tree)]
    choices = [said(text + path) for path in paths]
    path: list[int] = []
    here = -1
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        if parent == here and token == choices[here + 1]:
            path.append(node)
            here = node
    verdict = Verdict(path, [choices[0], *(choices[1 + node] for node in path)], choices)
    seq.tokens += verdict.tokens
    drafter.commit(Batch([seq], [1]), drafts, [verdict], Scores(torch.empty(0), [0]))
    return verdict


def test_the_window_is_a_trunk_with_a_column_below_each_token() -> None:
    drafter = LookaheadDrafter(LookaheadOptions(window=4, ngram=4, from_prompt=0))
    seq = started(drafter, [1, 2, 3])
    tree = proposed(drafter, seq, 40).per_sequence[0]
    levels = drafter._states[seq].levels
    assert [len(level) for level in levels] == [4, 4, 4]
    paths = set(paths_of(tree))
    for column in range(4):
        trunk = tuple(levels[0][: column + 1])
        assert trunk in paths
        assert (*trunk, levels[1][column], levels[2][column]) in paths  # position = depth: column + level


def test_the_window_iterates() -> None:
    """The newest level holds the target's choices below the columns' ends; the older levels move up."""
    drafter = LookaheadDrafter(LookaheadOptions(window=5, ngram=4, from_prompt=0))
    seq = started(drafter, [1, 2, 3])
    for _ in range(12):
        drafts = proposed(drafter, seq, 40)
        text, before = tuple(seq.tokens), [list(level) for level in drafter._states[seq].levels]
        emitted = len(judged(drafter, seq, drafts).tokens)
        after = drafter._states[seq].levels
        ends = [(*before[0][: c + 1], *(level[c] for level in before[1:])) for c in range(5)]
        assert after[-1] == [said(text + end) for end in ends][emitted - 1 :]
        assert after[:-1] == [level[emitted - 1 :] for level in before[1:]]


def test_what_was_said_at_rejected_nodes_is_drafted_later() -> None:
    drafter = LookaheadDrafter(LookaheadOptions(window=2, ngram=3, from_prompt=0))
    seq = started(drafter, [1, 2])
    drafts = Drafts.trees([([30, 31], [-1, 0])])
    verdict = Verdict([], [9], [9, 31, 32])
    seq.tokens += [9]
    drafter.commit(Batch([seq], [1]), drafts, [verdict], Scores(torch.empty(0), [0]))
    seq.tokens.append(30)
    assert proposed(drafter, seq, 10).per_sequence[0].tokens[:2] == [31, 32]


def test_what_is_not_said_is_not_learnt() -> None:
    """Choices that do not exist (spoilt logits) and rules that make none."""
    drafter = LookaheadDrafter(LookaheadOptions(ngram=3, from_prompt=0))
    seq = started(drafter, [1, 2])
    seq.tokens += [3]
    drafter.commit(Batch([seq], [1]), Drafts.chains([[7]]), [Verdict([], [3], [3, -1])], Scores(torch.empty(0), [0]))
    assert list(drafter._states[seq].pool.after([7])) == []
    seq.tokens += [4]
    drafter.commit(Batch([seq], [1]), Drafts.chains([[7]]), [Verdict([], [4])], Scores(torch.empty(0), [0]))
    assert [tokens for _, tokens in drafter._states[seq].pool.after([3])] == [(4,)]
    assert [tokens for _, tokens in drafter._states[seq].pool.after([2])] == [(3, 4)]


def test_other_rules_get_chains() -> None:
    drafter = LookaheadDrafter()
    seq = started(drafter, [1, 2, 3, 1, 2, 4, 1, 2])
    assert proposed(drafter, seq, 12, "block").per_sequence[0].parents == list(range(-1, 11))


def test_longer_contexts_and_later_ones_come_first() -> None:
    pool = NGramPool(3, 100)
    for gram in ([1, 2, 3], [1, 2, 4], [9, 2, 5], [2, 6, 7]):
        pool.add(gram)
    assert list(pool.after([1, 2])) == [(2, (4,)), (2, (3,)), (1, (6, 7)), (1, (5,)), (1, (4,)), (1, (3,))]
    assert list(pool.after([8, 8])) == []


@given(st.lists(st.lists(st.integers(0, 5), min_size=2, max_size=4), max_size=60), st.integers(1, 30))
def test_the_pool_stays_small(grams: list[list[int]], limit: int) -> None:
    pool = NGramPool(4, limit)
    for gram in grams:
        pool.add(gram)
        assert pool.size == sum(map(len, pool._after.values())) <= max(limit, pool._EACH)
        assert any(tokens[: len(gram) - 1] == tuple(gram[1:]) for _, tokens in pool.after(gram[:1])) or limit < 2 * pool._EACH


def test_guesses_are_accepted(tmp_path: Path) -> None:
    decoder = random_decoder(write_family(tmp_path, "llama2"))
    request = make_request([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=200, logit_bias={7: 30.0}))
    stats = run(make_engine(decoder, LookaheadDrafter(), 20), [request])[0].seq.stats
    assert stats.tokens_per_round > 2
