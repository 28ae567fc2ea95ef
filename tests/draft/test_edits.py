"""Copies with edits: where they go on, against texts that were edited by hand and at random."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.draft.edits import CopyCursor

FILE = list(range(10, 60))
NEW = 7  # a token that the file lacks


def copying(output: list[int], source: list[int] = FILE) -> CopyCursor:
    """A cursor that has followed an output from its first token on."""
    cursor = CopyCursor()
    cursor.jump(source, 0, 0, [])
    for size in range(1, len(output) + 1):
        cursor.advance(output[:size])
        cursor.guess(output[:size], 8)
    return cursor


def guessed(output: list[int], nodes: int = 4, source: list[int] = FILE) -> list[int]:
    copied = copying(output, source).guess(output, nodes)
    return [] if copied is None else copied.tokens


@pytest.mark.parametrize(
    ("output", "follows"),
    [
        ([10, 11, 12], [13, 14, 15, 16]),
        ([10, 11, 12, NEW], [14, 15, 16, 17]),  # one token was changed
        ([10, 11, 12, NEW, NEW, 15], [16, 17, 18, 19]),
        ([10, 11, 12, NEW, NEW, NEW, 13, 14], [15, 16, 17, 18]),  # three were inserted
        ([10, 11, 12, 20, 21], [22, 23, 24, 25]),  # seven were left out
        ([*FILE[:30], 5, 6, 11, 12], [13, 14, 15, 16]),  # it goes on before the edit
        (FILE, []),
    ],
)
def test_it_goes_on_where_the_latest_tokens_stand(output: list[int], follows: list[int]) -> None:
    assert guessed(output) == follows


def test_nothing_is_guessed_inside_a_long_edit() -> None:
    assert guessed([10, 11, *[NEW] * 5]) == []
    assert copying([10, 11, *[NEW] * 200]).source is None


def test_the_nearest_place_behind_an_edit_wins_among_equals() -> None:
    line = [1, 2, 3]
    source = [*line, 30, 31, *line, 40, 41, *line, 50, 51]
    assert guessed([1, 2, 3, 30, NEW, NEW, NEW, 3], 2, source) == [40, 41]
    assert guessed([1, 2, 3, 30, 31, 1, 2, 3, NEW, NEW, NEW, 3], 2, source) == [40, 41]  # lines were inserted
    assert guessed([1, 2, 3, 30, 31, 1, 2, 3, 40, NEW, NEW, NEW, 3], 2, source) == [50, 51]


def test_a_replacement_is_made_again() -> None:
    source = [1, 2, 90, 91, 3, 4, 5, 6, 90, 91, 7, 8, 9, 90, 91, 10]
    renamed = [1, 2, 80, 3, 4, 5, 6]
    assert guessed(renamed, 9, source) == [80, 7, 8, 9, 80, 10]
    cursor = copying([*renamed, 80, 7, 8, 9], source)
    assert cursor.follows
    assert cursor.matched >= 8


def test_a_replacement_that_is_not_made_is_forgotten() -> None:
    source = [1, 2, 90, 3, 4, 5, 6, 90, 7, 8, 9, 90, 10]
    assert guessed([1, 2, 80, 3, 4, 5, 6], 2, source) == [80, 7]
    assert guessed([1, 2, 80, 3, 4, 5, 6, 90, 7, 8, 9], 2, source) == [90, 10]


def test_a_copy_ends_where_another_text_begins() -> None:
    assert guessed([10, 11], 8, [10, 11, 12, 13, -2, 14]) == [12, 13]


def test_a_copy_of_the_prompt_does_not_go_on_in_the_output() -> None:
    prompt = [10, 11, 12, 13, 14]
    text = [*prompt, 10, 11, NEW]
    cursor = CopyCursor(len(prompt))
    cursor.jump(text, 0, 0, prompt)
    cursor.advance(text)
    copied = cursor.guess(text, 4)
    assert copied is not None
    assert copied.tokens[:2] == [13, 14]


@given(
    source=st.lists(st.integers(0, 9), min_size=1, max_size=60),
    output=st.lists(st.integers(0, 11), max_size=60),
    nodes=st.integers(1, 9),
)
def test_guesses_are_tokens_of_the_source_or_of_the_output(source: list[int], output: list[int], nodes: int) -> None:
    cursor = CopyCursor()
    cursor.jump(source, 0, 0, [])
    for size in range(1, len(output) + 1):
        cursor.advance(output[:size])
        copied = cursor.guess(output[:size], nodes)
        assert copied is None or (len(copied.tokens) <= nodes and set(copied.tokens) <= {*source, *output[:size]})


@given(at=st.integers(5, 30), length=st.integers(0, 6), inserted=st.lists(st.integers(100, 200), max_size=12))
def test_behind_any_single_edit_the_whole_rest_is_guessed(at: int, length: int, inserted: list[int]) -> None:
    rest = FILE[at + length :]
    output = [*FILE[:at], *inserted, *rest[:4]]
    assert guessed(output, 64) == rest[4:]
