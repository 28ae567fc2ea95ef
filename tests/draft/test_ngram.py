"""Prompt lookup against its definition."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outrider.core import Batch, Plan, Sequence
from outrider.draft.ngram import NGramDrafter, NGramOptions
from outrider.sampling import SamplingParams
from tests.support import make_request


def expected(tokens: list[int], low: int, high: int, length: int) -> list[int]:
    """Scan everything: longest suffix first, latest earlier occurrence, copy that may run into itself."""
    for n in range(min(high, len(tokens)), low - 1, -1):
        suffix = tokens[len(tokens) - n :]
        for start in range(len(tokens) - n - 1, -1, -1):
            if tokens[start : start + n] == suffix:
                text = list(tokens)
                for i in range(length):
                    text.append(text[start + n + i])
                return text[len(tokens) :]
    return []


@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    grow=st.lists(st.integers(0, 3), max_size=20),
    low=st.integers(1, 3),
    extra=st.integers(0, 2),
    length=st.integers(1, 9),
)
def test_drafts_are_the_definition(tokens: list[int], grow: list[int], low: int, extra: int, length: int) -> None:
    drafter = NGramDrafter(NGramOptions(low, low + extra))
    seq = Sequence(make_request(tokens, SamplingParams()))
    drafter.begin(seq)
    for token in [None, *grow]:
        if token is not None:
            seq.tokens.append(token)
        drafts = drafter.propose(Batch([seq], [1]), Plan((length,)))
        assert drafts.per_sequence[0].tokens == expected(seq.tokens, low, low + extra, length)
    drafter.end(seq)
    assert not drafter._states


def test_rounds_sat_out_are_caught_up() -> None:
    drafter = NGramDrafter(NGramOptions(1, 2))
    a, b = (Sequence(make_request([1, 2, 3, 1, 2], SamplingParams())) for _ in range(2))
    drafter.begin(a)
    drafter.begin(b)
    drafts = drafter.propose(Batch([a, b], [1, 1]), Plan((2, 0)))
    assert [tree.tokens for tree in drafts.per_sequence] == [[3, 1], []]
    b.tokens += [3, 9, 1]
    assert drafter.propose(Batch([b], [1]), Plan((2,))).per_sequence[0].tokens == [2, 3]
