"""The suffix array answers what a suffix automaton of the same text answers."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.draft.automaton import Match, Searched, SuffixAutomaton
from outrider.draft.suffix_array import SEPARATOR, SuffixArray, suffix_order

documents = st.lists(st.lists(st.integers(0, 2), max_size=15), max_size=4)
probes = st.lists(st.integers(0, 3), max_size=12)
Counts = dict[int, tuple[int, int]]  # token -> times, latest place


def both(texts: list[list[int]], reach: int) -> tuple[SuffixAutomaton, SuffixArray]:
    """The same documents in both, each with a number below 0 before it."""
    joined = [token for text in texts for token in (SEPARATOR, *text)]
    automaton = SuffixAutomaton(reach)
    for place, token in enumerate(joined):
        automaton.extend([-1 - place if token == SEPARATOR else token])
    return automaton, SuffixArray.of(joined[1:], reach)


def counts(text: Searched, match: Match) -> Counts:
    return {one.token: (one.times, one.latest) for one in text.after(match)}


@given(texts=documents, probe=probes, reach=st.integers(2, 9))
def test_it_finds_counts_steps_and_shortens_as_the_automaton_does(texts: list[list[int]], probe: list[int], reach: int) -> None:
    automaton, array = both(texts or [[]], reach)
    a, b = automaton.find(probe), array.find(probe)
    assert a.length == b.length
    while a.length:
        assert counts(automaton, a) == counts(array, b)
        for token in counts(automaton, a):
            after_a, after_b = automaton.step(a, token), array.step(b, token)
            assert after_a.length == after_b.length
            if after_a.length:
                assert counts(automaton, after_a) == counts(array, after_b)
        a, b = automaton.shorter(a), array.shorter(b)
        assert a.length == b.length
    assert automaton.latest(probe) == array.latest(probe)
    place, _ = array.latest(probe)
    assert automaton.read(place, 5) == array.read(place, 5)


@given(texts=documents, probe=st.lists(st.integers(0, 3), max_size=40), cuts=st.lists(st.integers(0, 5), max_size=20))
def test_a_reader_finds_from_search_to_search_what_one_search_finds(
    texts: list[list[int]], probe: list[int], cuts: list[int]
) -> None:
    _, array = both(texts or [[]], 6)
    reader, end = array.reader(), 0
    for cut in cuts:
        end += cut
        window = probe[max(end - 5, 0) : end]
        assert reader.find(window) == array.find(window)


@given(text=st.lists(st.integers(-1, 3), min_size=1, max_size=80), reach=st.sampled_from([2, 3, 4, 8, 16]))
def test_places_are_ordered_by_as_many_tokens_as_the_reach(text: list[int], reach: int) -> None:
    order = suffix_order(np.array(text, np.int32), reach).tolist()
    assert sorted(order) == list(range(len(text)))
    suffixes = [text[place : place + reach] for place in order]
    assert suffixes == sorted(suffixes)


@pytest.mark.parametrize("period", [1, 3])
def test_long_repeats_are_settled(period: int) -> None:
    text = [i % period for i in range(300)]
    array = SuffixArray.of(text, 16)
    match = array.find(text)
    assert match.length == 15
    assert sum(times for times, _ in counts(array, match).values()) == len(range(15, 300, period))


def test_a_frequent_substring_is_judged_by_a_sample_of_its_places() -> None:
    rng = random.Random(0)
    text = [token for _ in range(20_000) for token in (7, 8 if rng.random() < 0.75 else 9)]
    array = SuffixArray.of(text, 4)
    seen = counts(array, array.find([7]))
    total = sum(times for times, _ in seen.values())
    assert total == pytest.approx(20_000, rel=0.01)
    assert seen[8][0] / total == pytest.approx(text.count(8) / 20_000, abs=0.01)
    assert array.read(seen[8][1], 1) == [8]
