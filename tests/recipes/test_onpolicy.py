"""Stubs in source, and rows of what the target writes after them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.engine.acceptance import loops
from outrider.errors import InvalidParameter
from outrider.model import load_decoder
from outrider.train.corpus import TokenCorpus, encode_documents, load_tokenizer
from outrider.train.data import TokenStore, TrainingRows
from outrider.train.generate import write_text
from recipes.pyrite.lm import greedy
from recipes.pyrite.onpolicy import StubWriting, looping, with_windows, write_after_stubs, written_after
from recipes.pyrite.stubs import Stubs, find_stubs

STUBS = (
    'def load_table(value, table=(1, (2, 3))):\n    """Load a table."""\n',
    '    def store_page(self) -> dict[str, int]:\n        """Store.\n\n        More.\n        """\n',
    'async def sort_record(item):\n    r"""Sort."""\n',
)
SOURCE = "".join(
    ("import table\n\n", STUBS[0], "    return value\n\nclass Page:\n", STUBS[1], "        pass\n", STUBS[2], "    x = 1\n")
)
OTHERS = 'def bare(value):\n    return value\n\ndef one(value): """Not a line of its own."""\nx = """def no(): """\n'


@pytest.fixture
def source(prepared: TokenCorpus) -> TokenStore:
    """A document without stubs, and one with three."""
    ids = encode_documents([OTHERS, SOURCE], prepared.directory, prepared.eos)
    return TokenStore(np.concatenate(ids), np.cumsum([0, *map(len, ids)]), ["a", "b"])


def stub_texts(store: TokenStore, stubs: Stubs, prepared: TokenCorpus) -> set[str]:
    tokenizer = load_tokenizer(prepared.directory)
    pairs = zip(stubs.starts, stubs.lengths, strict=True)
    return {tokenizer.decode(store.ids[start : start + length].tolist()) for start, length in pairs}


def test_stubs_are_signature_and_docstring(source: TokenStore, prepared: TokenCorpus) -> None:
    tokenizer = load_tokenizer(prepared.directory)
    stubs = find_stubs(source, tokenizer, 1, 1000)
    assert stub_texts(source, stubs, prepared) == set(STUBS)
    assert list(stubs.lengths) == sorted(stubs.lengths)
    limited = find_stubs(source, tokenizer, 1, int(stubs.lengths[1]))
    assert len(limited.starts) == 2
    prompts, lengths = stubs.cut(source, 1, 3, more=2)
    assert prompts.shape == (2, lengths.max())
    for row, length, start in zip(prompts, lengths, stubs.starts[1:], strict=True):
        np.testing.assert_array_equal(row[:length], source.ids[start : start + length])
    np.testing.assert_array_equal(lengths, stubs.lengths[1:] + 2)
    led, sizes = stubs.cut(source, 0, 3, more=1, lead=4)
    before = np.minimum(4, stubs.lengths.max() - stubs.lengths)
    first = source.starts[1]  # of the document that holds the stubs
    for row, size, start, length, lead in zip(led, sizes, stubs.starts, stubs.lengths, before, strict=True):
        np.testing.assert_array_equal(row[:size], source.ids[max(start - lead, first) : start + length + 1])


def test_loops_are_those_that_served_figures_leave_out() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 50, (64, 60), generator=generator)
    for i, row in enumerate(rows):
        times, period = i % 5, 8 + i % 4
        row[: times * period] = row[:period].repeat(times) if times else row[:0]
    flags = looping(rows).tolist()
    assert flags == [loops(row) for row in rows.tolist()]
    assert 5 < sum(flags) < 40
    assert not looping(rows[:, :10]).any()


def test_prompts_of_different_lengths_are_continued_as_they_are_alone(target: Path) -> None:
    wide = load_decoder(target).float()
    prompts = [[5, 9, 11, 300, 7, 8], [40, 41, 42], [100, 3, 5, 9]]
    rows = torch.tensor([prompt + [0] * (6 - len(prompt)) for prompt in prompts])
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    written = write_text(wide, rows, 8, torch.zeros(3), seed=0, lengths=lengths)
    assert written.prompt == 6
    for row, prompt in zip(written.tokens.tolist(), prompts, strict=True):
        expected = greedy(wide, prompt, 14 - len(prompt))
        assert row[: len(prompt) + len(expected)] == prompt + expected


def test_a_row_is_one_text(target: Path, source: TokenStore, prepared: TokenCorpus) -> None:
    decoder = load_decoder(target).float()
    short = TokenStore(source.ids, source.starts, source.groups)
    stubs = Stubs(np.arange(12), np.full(12, 6))
    writing = StubWriting(length=32, seconds=0.0, rows=12, temperatures=(1.0,), max_body=4)
    texts_after_stubs = write_after_stubs(decoder, short, stubs, writing)
    assert set(np.diff(texts_after_stubs.starts)) == {32}
    begins = {tuple(short.ids[i : i + 6].tolist()) for i in range(12)}
    assert all(tuple(texts_after_stubs.ids[start : start + 6].tolist()) in begins for start in texts_after_stubs.starts[:-1])
    mixed = with_windows(texts_after_stubs, prepared.store("train"), 0.5, seed=0)
    assert mixed.documents == 2 * texts_after_stubs.documents
    rows = TrainingRows(mixed, 32, seed=3)
    texts = {tuple(text) for text in mixed.ids.reshape(-1, 32).tolist()}
    assert all(tuple(row[:-1].tolist()) in texts for row in rows.batch(0, rows.per_epoch))
    assert with_windows(texts_after_stubs, prepared.store("train"), 1.0, seed=0).documents == texts_after_stubs.documents


def test_written_texts_keep_their_noise(target: Path, source: TokenStore) -> None:
    decoder = load_decoder(target).float()
    stubs = Stubs(np.array([0, 3, 8]), np.array([4, 5, 7]))
    written = written_after(decoder, source, stubs, slice(0, 3), 24, 0.8, seed=1)
    assert written.prompt == 7
    assert written.noise is not None
    assert written.noise.shape[:2] == (3, 17)
    assert written_after(decoder, source, stubs, slice(0, 2), 24, 0.0, seed=1).noise is None


def test_text_without_functions_is_refused(target: Path, source: TokenStore) -> None:
    nothing = Stubs(np.zeros(0, np.int64), np.zeros(0, np.int64))
    with pytest.raises(InvalidParameter, match="no documented functions"):
        write_after_stubs(load_decoder(target), source, nothing, StubWriting(length=32))
