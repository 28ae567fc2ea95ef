"""The page table's reference counts and cache stay consistent under random use."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from outrider.cache import KVPool, OutOfPages, PageTable, next_key, root_key

COUNT, SIZE = 12, 4


class Books(RuleBasedStateMachine):
    """Random use against the simplest possible model: a multiset of owned pages."""

    def __init__(self) -> None:
        super().__init__()
        self.table = PageTable(COUNT, SIZE)
        self.owned: list[list[int]] = []

    @rule(tokens=st.integers(0, 30))
    def extend(self, tokens: int) -> None:
        pages: list[int] = []
        before = self.table.free
        try:
            self.table.extend(pages, tokens)
        except OutOfPages:
            assert -(-tokens // SIZE) > before
            assert self.table.free == before
            return
        assert len(pages) == -(-tokens // SIZE)
        self.owned.append(pages)

    @precondition(lambda self: self.owned)
    @rule(data=st.data(), tokens=st.integers(0, 30))
    def truncate(self, data: st.DataObject, tokens: int) -> None:
        pages = data.draw(st.sampled_from(self.owned))
        kept = pages[: -(-tokens // SIZE)]
        self.table.truncate(pages, tokens)
        assert pages == kept

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.owned) - 1))
        self.table.release(self.owned.pop(index))

    @precondition(lambda self: self.owned)
    @rule(data=st.data(), content=st.integers(0, 3))
    def name(self, data: st.DataObject, content: int) -> None:
        pages = data.draw(st.sampled_from(self.owned))
        if pages:
            self.table.name(pages[0], bytes([content]))

    @rule(contents=st.lists(st.integers(0, 3), max_size=3))
    def find(self, contents: list[int]) -> None:
        self.owned.append(self.table.find([bytes([content]) for content in contents]))

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def disown(self, data: st.DataObject) -> None:
        pages = data.draw(st.sampled_from(self.owned))
        unshared = self.table.disown(pages)
        assert all(self.table.references(page) == 1 for page in unshared)

    @invariant()
    def references_are_owners(self) -> None:
        for page in range(COUNT):
            assert self.table.references(page) == sum(pages.count(page) for pages in self.owned)
        assert self.table.used == len({page for pages in self.owned for page in pages})
        assert self.table.used + self.table.free == COUNT


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, derandomize=True)


def test_pages_come_in_order_so_that_runs_are_long() -> None:
    table = PageTable(8, 4)
    first = table.allocate(3)
    table.release(first[:1])
    assert first == [0, 1, 2]
    assert table.allocate(2) == [0, 3]


def test_named_pages_are_found_until_their_memory_is_needed() -> None:
    table = PageTable(4, 4)
    old, new = table.allocate(2), table.allocate(1)
    for page, key in zip([*old, *new], (b"a", b"b", b"c"), strict=True):
        table.name(page, key)
    table.release(old)
    table.release(new)
    assert (table.used, table.cached) == (0, 3)
    assert table.find([b"a", b"b", b"x", b"c"]) == old
    table.release(old)  # now the youngest, its end older than its beginning
    assert table.allocate(3) == [1, 2, 3]  # the free one, the oldest, and the end of old; the beginning stays
    assert table.find([b"c"]) == table.find([b"b"]) == []
    assert table.find([b"a"]) == [0]


def test_keys_tell_texts_and_tenants_apart() -> None:
    root = root_key(None)
    assert next_key(root, [1, 2]) != next_key(root, [2, 1])
    assert next_key(next_key(root, [1]), [2]) != next_key(next_key(root, [3]), [2])
    assert len({root_key(None), root_key(""), root_key("a"), root_key("b")}) == 4


def test_misuse_is_refused() -> None:
    table = PageTable(2, 4)
    page = table.allocate(1)
    table.release(page)
    with pytest.raises(ValueError, match="released more often"):
        table.release(page)
    with pytest.raises(ValueError, match="holds nothing"):
        table.name(page[0], b"a")


def test_kv_moves_read_before_they_write() -> None:
    pool = KVPool(layers=2, pages=3, kv_heads=1, page_size=4, head_dim=10)
    assert pool.keys.shape[-1] == 16, "filled up to a multiple of 16"
    every = torch.arange(12)
    for layer in range(2):
        rows = (every + 100 * layer)[:, None, None].expand(12, 1, 10).float()
        pool.write(layer, (every // 4, every % 4), rows, -rows)
    pool.move([7, 9, 8], [6, 7, 8])
    flat = pool.keys[1].transpose(1, 2).reshape(12, -1)
    assert flat[:, 0].tolist() == [100, 101, 102, 103, 104, 105, 107, 109, 108, 109, 110, 111]
    assert flat[:, 10:].abs().max() == 0
    pool.clear([1])
    assert pool.values[:, 1].abs().max() == 0
    assert pool.values[:, 2].abs().min() == 0  # the filling
    assert pool.values[0, 2, 0, 1, 0] == -9
