"""Places in a device's memory: taken, shared, and free again when nobody refers to them."""

from __future__ import annotations

from outrider.cache import Place, Places, StateCache, StoredRows


def test_a_place_is_free_again_when_nobody_refers_to_it() -> None:
    places = Places(2)
    first, second = places.take(), places.take()
    assert first is not None
    assert second is not None
    assert {first.number, second.number} == {0, 1}
    assert places.take() is None
    again = first
    del first
    assert places.take() is None, "another reference is left"
    del again
    assert places.free == 1


def test_room_is_made_while_something_can_be_dropped() -> None:
    kept: list[Place | None] = []
    places = Places(3, lambda: bool(kept and (kept.pop(0) or True)))
    kept += [places.take() for _ in range(3)]
    shared = kept[0]
    assert places.take() is not None, "the first is still referred to, so the second goes too"
    assert shared is not None
    assert len(kept) == 1


def test_rows_are_kept_by_those_that_refer_to_them() -> None:
    places = Places(5)
    rows = StoredRows([place for place in (places.take() for _ in range(5)) if place is not None])
    path = rows[[0, 2, 3]]
    assert (len(path), path.numbers) == (3, [rows[i].number for i in (0, 2, 3)])
    begun = path[:2]
    del rows
    assert places.free == 2
    del path
    assert (places.free, len(begun)) == (3, 2)


def test_drafts_are_cut_to_the_places_that_are_free() -> None:
    places = Places(6)
    held = places.take()
    cache = StateCache(0, places)
    assert cache.fitting((2, 3)) == (2, 3)
    assert cache.fitting((2, 0, 4, 1)) == (2, 0, 3, 0)
    assert StateCache().fitting((200, 300)) == (200, 300)
    assert held is not None
