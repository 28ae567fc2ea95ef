"""Packed rows: every token once per epoch, documents whole, batches a function of the step."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from outrider.errors import InvalidParameter, ModelError
from outrider.train.data import TokenStore, TrainingRows, write_store

LENGTHS = [7, 1, 12, 30, 3, 9, 21]


@pytest.fixture
def store(tmp_path: Path) -> TokenStore:
    """Document i is i * 100, i * 100 + 1, ..., then 0."""
    documents = [np.array([*range(i * 100 + 1, i * 100 + n + 1), 0], dtype=np.uint32) for i, n in enumerate(LENGTHS)]
    return write_store(tmp_path, "train", documents, [f"p{i}" for i in range(len(documents))], 1000)


@pytest.mark.usefixtures("store")
def test_a_store_reads_back(tmp_path: Path) -> None:
    again = TokenStore.open(tmp_path, "train")
    assert again.ids.dtype == np.uint16
    assert again.tokens == sum(LENGTHS) + len(LENGTHS)
    assert again.ids[again.starts[2] : again.starts[3]].tolist() == [*range(201, 213), 0]
    assert again.groups == [f"p{i}" for i in range(7)]


def test_wide_vocabularies_take_wide_ids(tmp_path: Path) -> None:
    wide = write_store(tmp_path, "wide", [np.array([100_000, 0])], ["p"], 128_000)
    assert wide.ids.tolist() == [100_000, 0]


def test_an_epoch_reads_every_position_once(store: TokenStore) -> None:
    rows = TrainingRows(store, 8, seed=3)
    inputs = np.concatenate([rows.batch(i, 1)[0, :-1] for i in range(rows.per_epoch)])
    words = inputs[inputs != 0]
    assert len(set(words.tolist())) == words.size
    assert inputs.size == rows.per_epoch * 8 >= store.tokens - 8


def test_boundaries_hold(store: TokenStore) -> None:
    """Within a row a token is followed by its successor in the document, or by the end of it."""
    rows = TrainingRows(store, 8, seed=1)
    ends = {i * 100 + n for i, n in enumerate(LENGTHS)}
    for row in rows.batch(0, rows.per_epoch):
        for left, right in pairwise(row.tolist()):
            if left == 0:
                assert right % 100 == 1
            elif right == 0:
                assert left in ends
            else:
                assert right == left + 1


def test_batches_are_a_function_of_seed_and_step(store: TokenStore) -> None:
    first, second = TrainingRows(store, 8, seed=5), TrainingRows(store, 8, seed=5)
    later = [second.batch(step, 4) for step in range(6)]
    assert np.array_equal(first.batch(5, 4), later[5])  # without the steps before it
    assert np.array_equal(first.batch(0, 4), later[0])
    assert not np.array_equal(TrainingRows(store, 8, seed=6).batch(0, 4), later[0])
    epoch = first.per_epoch
    assert not np.array_equal(first.batch(0, epoch), first.batch(1, epoch))


def test_a_corpus_too_small_is_refused(store: TokenStore) -> None:
    with pytest.raises(InvalidParameter, match="90 tokens to train on, one batch needs 1025"):
        TrainingRows(store, 64, seed=0).require(16)


def test_a_missing_store_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="read the text again"):
        TokenStore.open(tmp_path, "train")
