"""The suffix automaton and what is drafted from it, against their definitions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core import Batch, Plan, Sequence
from outrider.draft.suffix import SharedTexts, SuffixAutomaton, SuffixDrafter, SuffixOptions
from outrider.sampling import SamplingParams
from tests.support import make_request

texts = st.lists(st.integers(0, 2), max_size=40)
Followed = dict[int, tuple[int, int]]  # token -> times, latest position


def started(drafter: SuffixDrafter, prompt: list[int], output: list[int] | None = None) -> Sequence:
    seq = Sequence(make_request(prompt, SamplingParams()))
    seq.tokens += output or []
    drafter.begin(seq)
    return seq


def draft(drafter: SuffixDrafter, seq: Sequence, length: int, rule: str = "match") -> tuple[list[int], list[int], list[float]]:
    drafts = drafter.propose(Batch([seq], [1]), Plan((length,), rule))
    tree = drafts.per_sequence[0]
    return tree.tokens, tree.parents, drafts.survival[0][: len(tree.tokens)]


def followed(text: list[int], part: list[int]) -> Followed:
    """Scan: what came after each occurrence of the part."""
    out: Followed = {}
    for end in range(len(part), len(text)):
        if text[end - len(part) : end] == part:
            out[text[end]] = (out.get(text[end], (0, 0))[0] + 1, end)
    return out


def longest_earlier(text: list[int], most: int) -> int:
    """Length of the longest suffix that occurs before its own place."""
    for n in range(min(most, len(text) - 1), 0, -1):
        if followed(text, text[len(text) - n :]):
            return n
    return 0


def in_text(text: list[int], part: list[int]) -> bool:
    return any(text[i : i + len(part)] == part for i in range(len(text) - len(part) + 1))


@given(text=texts, reach=st.integers(2, 9))
def test_the_match_is_the_longest_earlier_suffix_at_every_moment(text: list[int], reach: int) -> None:
    automaton = SuffixAutomaton(reach)
    for end, token in enumerate(text, 1):
        automaton.extend([token])
        match = automaton.match()
        assert match.length == longest_earlier(text[:end], reach - 1)
        if match.length:
            seen = {after.token: (after.times, after.latest) for after in automaton.after(match)}
            assert seen == followed(text[:end], text[end - match.length : end])


@given(text=texts, probe=st.lists(st.integers(0, 2), max_size=12), reach=st.integers(2, 9))
def test_found_suffixes_and_their_counts(text: list[int], probe: list[int], reach: int) -> None:
    automaton = SuffixAutomaton(reach)
    automaton.extend(text)
    match = automaton.find(probe)
    known = [n for n in range(min(len(probe), reach - 1) + 1) if in_text(text, probe[len(probe) - n :])]
    assert match.length == max(known)
    if match.length:
        seen = {after.token: (after.times, after.latest) for after in automaton.after(match)}
        assert seen == followed(text, probe[len(probe) - match.length :])


def children(text: list[int], context: list[int], shape: SuffixOptions) -> tuple[list[int], list[tuple[int, float]]]:
    """The context actually used, and the best continuations with their chances."""
    context = context[max(len(context) - shape.max_match, 0) :]
    while len(context) >= shape.min_match and not followed(text, context):
        context = context[1:]
    if len(context) < shape.min_match:
        return context, []
    seen = followed(text, context)
    total = sum(times for times, _ in seen.values()) + 1 / len(context)
    best = sorted(((*seen[token], token) for token in seen), reverse=True)[: shape.branch]
    return context, [(token, times / total) for times, _, token in best]


def every_node(text: list[int], shape: SuffixOptions, deepest: int) -> dict[tuple[int, ...], float]:
    """Survival of every path that could be drafted."""
    matched = longest_earlier(text, shape.max_match)
    nodes: dict[tuple[int, ...], float] = {}
    if matched < shape.min_match:
        return nodes
    todo: list[tuple[tuple[int, ...], list[int], float]] = [((), text[len(text) - matched :], 1.0)]
    while todo:
        path, context, survival = todo.pop()
        if len(path) == min(deepest, int(shape.factor * matched + shape.offset)):
            continue
        context, following = children(text, context, shape)
        for token, chance in following:
            if survival * chance >= shape.min_prob:
                nodes[(*path, token)] = survival * chance
                todo.append(((*path, token), [*context, token], survival * chance))
    return nodes


@given(
    text=st.lists(st.integers(0, 2), min_size=1, max_size=30),
    grow=st.lists(st.integers(0, 2), max_size=6),
    sizes=st.tuples(st.integers(1, 2), st.integers(0, 4)),
    follow=st.tuples(st.sampled_from([0.0, 1.0, 2.0]), st.sampled_from([1.0, 3.0])),
    min_prob=st.sampled_from([0.0, 0.1, 0.3]),
    branch=st.integers(1, 3),
    nodes=st.integers(1, 6),
)
def test_drafts_are_the_definition(text, grow, sizes, follow, min_prob, branch, nodes) -> None:  # type: ignore[no-untyped-def]
    shape = SuffixOptions(sizes[0], sum(sizes), *follow, min_prob, branch)
    drafter = SuffixDrafter(shape)
    seq = started(drafter, text)
    for token in [None, *grow]:
        seq.tokens += [] if token is None else [token]
        tokens, parents, survival = draft(drafter, seq, nodes)
        paths: list[tuple[int, ...]] = []
        for drafted, parent in zip(tokens, parents, strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), drafted))
        worth = every_node(seq.tokens, shape, nodes)
        assert len(set(paths)) == len(paths)
        assert survival == pytest.approx([worth[path] for path in paths])
        assert survival == pytest.approx(sorted(worth.values(), reverse=True)[:nodes])
        if branch == 1:
            assert parents == list(range(-1, len(tokens) - 1))


def test_counts_decide_and_the_latest_among_equals() -> None:
    drafter = SuffixDrafter()
    assert draft(drafter, started(drafter, [1, 2, 9, 1, 2, 9, 1, 2, 8, 1, 2]), 1)[0] == [9]
    assert draft(drafter, started(drafter, [1, 2, 9, 1, 2, 8, 1, 2]), 1)[0] == [8]
    assert draft(drafter, started(drafter, [1, 2, 8, 1, 2, 9, 1, 2]), 1)[0] == [9]


def test_loops_are_drafted_whole() -> None:
    drafter = SuffixDrafter(SuffixOptions(min_prob=0.0))
    assert draft(drafter, started(drafter, [7, 8, 9, 1, 2, 3, 1, 2, 3]), 10)[0] == [1, 2, 3, 1, 2, 3, 1, 2, 3, 1]


def test_longer_matches_earn_longer_drafts() -> None:
    drafter = SuffixDrafter(SuffixOptions(factor=1.0, offset=0.0, min_prob=0.0))
    text = list(range(10, 40))
    for matched in (1, 3, 5):
        seq = started(drafter, [*text, *text[2 : 2 + matched]])
        assert draft(drafter, seq, 20)[0] == text[2 + matched : 2 + 2 * matched]


def test_other_rules_get_chains() -> None:
    drafter = SuffixDrafter(SuffixOptions(min_prob=0.0, branch=3))
    seq = started(drafter, [1, 2, 1, 3, 1, 4, 1])
    assert draft(drafter, seq, 6)[1].count(-1) == 3
    assert draft(drafter, seq, 6, "rejection")[1] == [-1, 0, 1, 2, 3, 4]


def of_tenant(name: str, tokens: list[int]) -> Sequence:
    """A sequence whose tenant is the request's name before the dash."""
    return Sequence(make_request(tokens, SamplingParams(), name, tenant=name.partition("-")[0] or None))


def finished(drafter: SuffixDrafter, name: str, output: list[int]) -> None:
    seq = of_tenant(name, [99])
    drafter.begin(seq)
    seq.tokens += output
    seq.finish_reason = "stop"
    drafter.end(seq)


def guess_for(drafter: SuffixDrafter, name: str, tokens: list[int], length: int = 4) -> list[int]:
    seq = of_tenant(name, tokens)
    drafter.begin(seq)
    return draft(drafter, seq, length)[0]


def test_outputs_are_shared_within_a_tenant_alone() -> None:
    drafter = SuffixDrafter(SuffixOptions(shared_tokens=100))
    finished(drafter, "a-1", [1, 2, 3, 4, 5, 6])
    assert guess_for(drafter, "a-2", [9, 2, 3]) == [4, 5, 6]
    assert guess_for(drafter, "b-1", [9, 2, 3]) == []
    assert guess_for(drafter, "-1", [9, 2, 3]) == []  # no tenant key, nothing shared


def test_nothing_is_shared_by_default() -> None:
    for drafter, tenant in ((SuffixDrafter(), "a"), (SuffixDrafter(SuffixOptions(shared_tokens=100)), "")):
        finished(drafter, f"{tenant}-1", [1, 2, 3, 4])
        assert guess_for(drafter, f"{tenant}-2", [9, 1, 2]) == []
        assert drafter._shared.size == 0


def test_no_match_runs_across_two_outputs() -> None:
    drafter = SuffixDrafter(SuffixOptions(shared_tokens=100))
    finished(drafter, "a-1", [1, 2, 3])
    finished(drafter, "a-2", [4, 5, 6])
    assert guess_for(drafter, "a-3", [9, 2, 3]) == []
    assert guess_for(drafter, "a-3", [9, 3, 4]) == [5, 6]


def test_the_better_expected_draft_wins() -> None:
    drafter = SuffixDrafter(SuffixOptions(shared_tokens=100))
    finished(drafter, "a-1", [1, 2, 3, 4, 5])
    assert guess_for(drafter, "a-2", [3, 7, 1, 2, 3], 2) == [4, 5]  # three tokens matched there, one here
    assert guess_for(drafter, "a-2", [2, 3, 7, 7, 2, 3, 7, 7, 2, 3], 2) == [7, 7]


@given(
    limit=st.integers(0, 30),
    added=st.lists(st.tuples(st.sampled_from("abc"), st.lists(st.integers(0, 2), max_size=20)), max_size=20),
)
def test_shared_texts_stay_small_apart_and_fresh(limit: int, added: list[tuple[str, list[int]]]) -> None:
    shared = SharedTexts(limit, 5)
    for tenant, text in added:
        base = 100 * (ord(tenant) - ord("a"))
        shared.add(tenant, [base + token for token in text])
        held = [automaton for name in "abc" for automaton in shared.of(name)]
        assert shared.size == sum(automaton.size for automaton in held) <= limit
        for name in "abc":
            seen = {token for automaton in shared.of(name) for state in automaton._next for token in state if token >= 0}
            assert all(token // 100 == ord(name) - ord("a") for token in seen)
        newest = text[-1:] if limit >= 4 else []
        assert not newest or any(automaton.find([base + newest[0]]).length for automaton in shared.of(tenant))


def test_the_oldest_output_goes_first() -> None:
    drafter = SuffixDrafter(SuffixOptions(shared_tokens=12))
    for i in range(4):
        finished(drafter, f"a-{i}", [10 * i, 10 * i + 1, 10 * i + 2])
    assert [guess_for(drafter, "a-x", [9, 10 * i]) for i in range(4)] == [[], [11, 12], [21, 22], [31, 32]]
