"""Admission places, thread pools and incremental JSON, without a server."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.serve.fairness import LARGE_BYTES, Admission, Completions, FairPool, Places, client_of
from outrider.serve.streaming import LazyRows, json_parts, next_block


@pytest.mark.parametrize(
    ("scope", "client"),
    [
        ({"outrider.client": "team", "client": ("10.0.0.1", 5)}, "key team"),
        ({"outrider.client": None, "client": ("10.0.0.1", 5)}, "address 10.0.0.1"),
        ({"client": ("2001:db8:1:2:3::4", 5)}, "address 2001:db8:1:2::/64"),
        ({"client": ("testclient", 5)}, "address testclient"),
        ({"client": None}, "address "),
        ({}, "address "),
    ],
)
def test_a_client_is_a_key_or_else_an_address(scope: dict[str, Any], client: str) -> None:
    assert client_of(scope) == client


def test_one_client_may_fill_all_places_and_another_still_gets_its_share() -> None:
    places = Places(10)
    assert places.take("a", 10)
    assert not places.take("a")
    assert places.take("b", 5)
    assert not places.take("b"), "a half is its share"
    assert places.take("c", 3)
    assert not places.take("d", 3), "twice as many as there are is the end of it"
    places.release("a", 10)
    assert places.take("b", 2)


@given(st.lists(st.tuples(st.sampled_from("abcde"), st.integers(0, 6), st.booleans()), max_size=60), st.integers(1, 12))
def test_places_are_conserved_and_bounded(moves: list[tuple[str, int, bool]], capacity: int) -> None:
    places, held = Places(capacity), dict.fromkeys("abcde", 0)
    for client, count, takes in moves:
        if takes:
            taken = places.take(client, count)
            assert taken or places.total + count > capacity
            held[client] += count * taken
        else:
            places.release(client, min(count, held[client]))
            held[client] -= min(count, held[client])
        assert places.total == sum(held.values()) <= 2 * capacity
        assert len(places._held) == sum(count > 0 for count in held.values())


def test_an_admission_gives_back_what_it_holds_once() -> None:
    places, room = Places(10), Places(100)
    admission = Admission("a", places, room)
    assert admission.take(4)
    assert admission.hold(50)
    assert not admission.hold(60)
    admission.ended()
    admission.ended(2)
    admission.answered()
    admission.answered()
    assert (places.total, room.total) == (1, 0)
    admission.abandon()
    assert (places.total, room.total) == (0, 0)


def test_retry_after_follows_the_queue() -> None:
    now = [0.0]
    done = Completions(lambda: now[0])
    assert done.retry_after(100) == 5
    for _ in range(20):
        now[0] += 0.5
        done.add()
    now[0] += 0.5
    assert done.retry_after(10) == 5
    assert done.retry_after(40) == 20
    assert done.retry_after(1) == 1
    assert done.retry_after(10**6) == 60
    now[0] += 1000
    assert done.retry_after(40) == 5, "old completions are ignored"


async def started(pool: FairPool, gate: threading.Event, *jobs: tuple[str, str, int]) -> tuple[list[str], list[Any]]:
    """Queue jobs in order. Their names are recorded as they run, after the gate is open."""
    ran: list[str] = []

    def work(name: str) -> None:
        assert gate.wait(30), "the test waits for a job that waits for the test"
        ran.append(name)

    tasks = []
    for name, client, size in jobs:
        tasks.append(asyncio.ensure_future(pool.run(lambda name=name: work(name), client, size)))
        await asyncio.sleep(0.01)
    return ran, tasks


def test_clients_take_turns_in_the_pool() -> None:
    async def play() -> list[str]:
        pool, gate = FairPool("t", threads=2), threading.Event()
        large = LARGE_BYTES
        ran, tasks = await started(
            pool, gate, ("a1", "a", large), ("a2", "a", large), ("a3", "a", large), ("b1", "b", large), ("c1", "c", large)
        )
        gate.set()
        await asyncio.gather(*tasks)
        pool.close()
        return ran

    ran = asyncio.run(play())
    assert ran[0] == "a1"
    assert ran.index("b1") < ran.index("a3")
    assert ran.index("c1") < ran.index("a3")


def test_small_jobs_do_not_wait_for_large_ones() -> None:
    async def play() -> list[str]:
        pool, gate = FairPool("t", threads=2), threading.Event()
        ran, tasks = await started(pool, gate, *((f"a{i}", "a", LARGE_BYTES) for i in range(4)))
        assert await pool.run(lambda: "small", "b", 10) == "small"
        assert ran == []
        gate.set()
        await asyncio.gather(*tasks)
        pool.close()
        return ran

    assert len(asyncio.run(play())) == 4


def test_a_client_does_not_occupy_every_thread() -> None:
    async def play() -> None:
        pool, gate = FairPool("t", threads=4), threading.Event()
        sizes = [0, LARGE_BYTES] * 4
        _, tasks = await started(pool, gate, *((f"a{size}", "a", size) for size in sizes))
        assert await pool.run(lambda: 7, "b", 0) == 7
        gate.set()
        await asyncio.gather(*tasks)
        pool.close()

    asyncio.run(play())


def test_failed_or_cancelled_jobs_do_not_block_the_pool() -> None:
    async def play() -> None:
        pool, gate = FairPool("t", threads=1), threading.Event()
        ran, tasks = await started(pool, gate, ("a1", "a", 0), ("a2", "a", 0), ("a3", "a", 0))
        tasks[1].cancel()
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert ran == ["a1", "a3"]
        with pytest.raises(ZeroDivisionError):
            await pool.run(lambda: 1 // 0, "a")
        assert await pool.run(lambda: 1, "a") == 1
        pool.close()
        with pytest.raises(RuntimeError, match="closed"):
            await pool.run(lambda: 1, "a")

    asyncio.run(play())


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=30,
)


@given(json_values, st.integers(0, 200))
def test_incremental_json_equals_json_dumps(value: Any, count: int) -> None:
    lazy = {"rows": LazyRows({"i": i} for i in range(count)), "value": value, "choices": [{"more": LazyRows(range(count))}]}
    parts = json_parts(lazy)
    blocks = []
    while block := next_block(parts):
        blocks.append(block)
    assert json.loads(b"".join(blocks)) == {
        "rows": [{"i": i} for i in range(count)],
        "value": value,
        "choices": [{"more": list(range(count))}],
    }


def test_rows_are_created_while_they_are_written() -> None:
    made: list[int] = []
    parts = json_parts({"rows": LazyRows(made.append(i) or "x" * 4000 for i in range(1000))})
    next_block(parts)
    assert 0 < len(made) < 200
