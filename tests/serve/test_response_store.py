"""The store of answers: what it keeps, for whom, and what it forgets first."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from outrider.serve.response_store import Owner, ResponseStore, StoredResponse
from outrider.serve.settings import Limits
from tests.support.examples import examples

ALICE, BOB = Owner("alice"), Owner("bob")


def store_of(count: int = 4, size: int = 100) -> ResponseStore:
    return ResponseStore(replace(Limits(), responses=count, responses_bytes=size))


def answer(size: int = 10) -> StoredResponse:
    return StoredResponse(b"x" * size, ())


def test_the_least_recently_used_answer_is_forgotten_first() -> None:
    store = store_of(count=3)
    for name in "abc":
        store.put(ALICE, name, answer())
    assert store.get(ALICE, "a") is not None
    store.put(ALICE, "d", answer())
    assert [store.get(ALICE, name) is not None for name in "abcd"] == [True, False, True, True]


def test_who_holds_most_forgets_first() -> None:
    store = store_of(count=4)
    store.put(BOB, "b", answer())
    for name in "123456":
        store.put(ALICE, name, answer())
    assert store.get(BOB, "b") is not None
    large = store_of(size=100)
    large.put(BOB, "b", answer(20))
    for name in "123":
        large.put(Owner("alice", f"salt {name}"), name, answer(40))
    assert large.get(BOB, "b") is not None, "more tenants do not bring a larger share"


def test_an_answer_beyond_the_whole_store_is_not_kept() -> None:
    store = store_of(size=100)
    store.put(ALICE, "a", answer(60))
    store.put(ALICE, "b", answer(101))
    assert store.get(ALICE, "a") is not None
    assert store.get(ALICE, "b") is None


def test_earlier_turns_count() -> None:
    store = store_of(size=100)
    store.put(ALICE, "a", StoredResponse(b"x" * 10, (b"y" * 30, b"z" * 40)))
    assert store.bytes == 80


@examples(100)
@given(st.lists(st.tuples(st.sampled_from("pgd"), st.sampled_from("abc"), st.sampled_from("12345"), st.integers(0, 60))))
def test_the_bounds_always_hold(steps: list[tuple[str, str, str, int]]) -> None:
    store = store_of(count=5, size=120)
    kept: dict[tuple[str, str], int] = {}
    for action, client, name, size in steps:
        if action == "p":
            store.put(Owner(client), name, answer(size))
            kept[client, name] = size
        elif action == "g":
            found = store.get(Owner(client), name)
            assert found is None or found.size == kept[client, name]
        else:
            assert store.drop(Owner(client), name) <= ((client, name) in kept)
            assert store.get(Owner(client), name) is None
        alive = [key for key in kept if store.get(Owner(key[0]), key[1]) is not None]
        assert store.count == len(alive) <= 5
        assert store.bytes == sum(kept[key] for key in alive) <= 120
