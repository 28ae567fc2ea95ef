"""The book of pages names the text a page was filled for."""

from __future__ import annotations

import torch

from outrider.core import Sequence
from outrider.draft.reader import Held, PageBook
from outrider.sampling import SamplingParams
from tests.support import make_request

SIZE = 4


def sequence(tokens: list[int], pages: list[int], cached: int = 0) -> Sequence:
    seq = Sequence(make_request(tokens, SamplingParams()))
    seq.pages, seq.cached = pages, cached
    return seq


def filled(tokens: list[int], pages: list[int]) -> PageBook:
    book = PageBook(SIZE)
    seq = sequence(tokens, pages)
    assert book.begin(seq) == Held()
    book.fill(seq, 0, len(tokens), torch.arange(len(tokens))[:, None] // SIZE * 1.0)
    book.end(seq)
    assert not book._hashes
    return book


TEXT = [1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_leading_pages_of_the_same_text_are_held() -> None:
    book = filled(TEXT, [7, 3, 5])
    held = book.begin(sequence([*TEXT[:8], 50], [7, 3], 8))
    assert (held.tokens, held.feature) == (8, torch.tensor([1.0]))
    assert book.begin(sequence([*TEXT[:8], 50], [7, 3], 7)).tokens == 4, "only whole pages that are cached"
    assert book.begin(sequence(TEXT, [], 0)) == Held()


def test_another_text_or_another_page_is_not() -> None:
    book = filled(TEXT, [7, 3, 5])
    assert book.begin(sequence([1, 2, 3, 9, *TEXT[4:]], [7, 3], 8)) == Held()
    assert book.begin(sequence([*TEXT[:4], 9, 9, 9, 9, 1], [7, 3], 8)).tokens == 4
    assert book.begin(sequence([*TEXT[4:8], *TEXT[4:8], 1], [3, 3], 8)) == Held(), "the same tokens after another text"
    assert book.begin(sequence(TEXT, [8, 3], 8)) == Held()


def test_pages_written_to_are_forgotten() -> None:
    book = filled(TEXT, [7, 3, 5])
    book.overwrite([7, 3], 5)
    assert book.begin(sequence(TEXT, [7, 3], 8)).tokens == 4
    book.overwrite([7], 0)
    assert book.begin(sequence(TEXT, [7, 3], 8)) == Held()
