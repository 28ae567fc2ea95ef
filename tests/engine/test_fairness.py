"""Slots and prompt rows are shared fairly between clients, tenants and requests. No model needed."""

from __future__ import annotations

import random
from collections import Counter
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core import Sequence
from outrider.engine.fairness import fair_split, shortest_first
from outrider.engine.scheduler import Scheduler, Turn
from tests.support.scheduling import SIZE, play, scheduler, sequence, submit

_names = (f"r{i}" for i in count())


def of(client: str | None, prompt: int, output: int = 4, **fields: object) -> Sequence:
    return sequence(prompt, output, next(_names), client=client, **fields)


def rounds_until(work: Scheduler, seq: Sequence, tokens: int = 1) -> int:
    """Rounds until a sequence has `tokens` output tokens."""
    for number in range(1, 500):
        play(work)
        if seq.output_len >= tokens:
            return number
    raise AssertionError("the sequence was starved")


def finish_all(work: Scheduler) -> None:
    for _ in range(5000):
        if not work.has_work:
            return
        play(work)
    raise AssertionError("a sequence was starved")


def test_a_new_client_does_not_wait_for_another_clients_long_prompts() -> None:
    work = scheduler(pages=400, seqs=4, rows=16, prefix_cache=False)
    submit(work, *(of("a", 200) for _ in range(64)))
    play(work)
    new_client = of("b", 6)
    submit(work, new_client)
    assert rounds_until(work, new_client) == 1
    finish_all(work)


def test_a_short_prompt_does_not_wait_for_long_ones_of_its_client() -> None:
    work = scheduler(pages=400, seqs=8, rows=16, prefix_cache=False)
    submit(work, *(of(None, 200) for _ in range(6)))
    play(work)
    short = of(None, 6)
    submit(work, short)
    assert rounds_until(work, short) == 1


def test_short_prompts_do_not_starve_a_long_one() -> None:
    work = scheduler(pages=400, seqs=8, rows=16, prefix_cache=False)
    long = of(None, 120)
    submit(work, long)
    for _ in range(120 // (16 // 4) + 1):
        submit(work, *(of(None, 12, 1) for _ in range(2)))
        play(work)
        if long.output_len:
            break
    assert long.output_len


def test_a_client_that_holds_every_slot_is_preempted_for_a_new_client() -> None:
    work = scheduler(pages=400, seqs=4, rows=64)
    greedy = [of("a", 5, 100) for _ in range(10)]
    submit(work, *greedy)
    for _ in range(5):
        play(work)
    new_client = of("b", 5, 4)
    submit(work, new_client)
    assert rounds_until(work, new_client) == 1
    assert work.preemptions == 1
    assert new_client.order > greedy[0].order
    finish_all(work)
    assert all(seq.output_len == 100 for seq in greedy)
    assert work.pages.used == 0


def test_slots_are_shared_evenly_without_further_preemptions() -> None:
    work = scheduler(pages=400, seqs=6, rows=64)
    submit(work, *(of("a", 5, 60) for _ in range(12)))
    play(work)
    submit(work, *(of("b", 5, 60) for _ in range(12)), *(of("c", 5, 60) for _ in range(12)))
    play(work)
    shares = Counter(seq.request.client for seq in work.running)
    assert shares == {"a": 2, "b": 2, "c": 2}
    before = work.preemptions
    for _ in range(30):
        play(work)
    assert work.preemptions == before, "a fair share is left alone"
    finish_all(work)


def test_more_clients_than_slots_take_turns() -> None:
    work = scheduler(pages=400, seqs=2, rows=64)
    submit(work, *(of(name, 5, 3) for name in "aaaabbbbcccc"))
    order = []
    while work.has_work:
        order += [seq.request.client for seq in play(work).started]
    assert sorted(order[:3]) == ["a", "b", "c"]
    assert sorted(order[3:6]) == ["a", "b", "c"]


def test_tenants_share_the_slots_of_their_client() -> None:
    work = scheduler(pages=400, seqs=4, rows=64)
    submit(work, *(of("a", 5, 50, tenant=f"t{i}") for i in range(8)), *(of("b", 5, 50) for _ in range(8)))
    play(work)
    assert Counter(seq.request.client for seq in work.running) == {"a": 2, "b": 2}, "many tenants do not make many clients"
    other = scheduler(pages=400, seqs=4, rows=64)
    submit(other, *(of("a", 5, 50, tenant="t") for _ in range(8)), of("a", 5, 50, tenant="u"))
    play(other)
    assert Counter(seq.request.tenant for seq in other.running) == {"t": 3, "u": 1}


def test_prompt_rows_are_shared_between_clients() -> None:
    work = scheduler(pages=400, seqs=8, rows=16, prefix_cache=False)
    submit(work, *(of("a", 100) for _ in range(4)), of("b", 100), of("c", 3))
    turn = work.next()
    rows: Counter[str | None] = Counter()
    for seq, fed in zip(turn.batch.sequences, turn.batch.feeds, strict=True):
        rows[seq.request.client] += fed
    assert rows == {"a": 7, "b": 6, "c": 3}


def test_pages_are_taken_from_the_client_that_runs_most() -> None:
    work = scheduler(pages=6, seqs=4, rows=64, prefix_cache=False)
    sequences = [of("a", 4, 16) for _ in range(3)]
    submit(work, *sequences)
    play(work)
    new_client = of("b", 3, 8)
    submit(work, new_client)
    while new_client.finish_reason is None:
        assert new_client not in play(work).stopped, "its client runs fewer sequences than the other"
    finish_all(work)
    assert work.pages.used == 0


def test_a_better_priority_is_never_preempted_for_a_fair_share() -> None:
    work = scheduler(pages=400, seqs=2, rows=64)
    submit(work, *(of("a", 5, 20, priority=-1) for _ in range(3)))
    play(work)
    new_client = of("b", 5, 4)
    submit(work, new_client)
    play(work)
    assert not work.preemptions
    finish_all(work)


def check_turn(work: Scheduler, turn: Turn, rows: int) -> None:
    """Check the invariants of every round."""
    batch = turn.batch
    assert batch.sequences, "the batch is never empty"
    assert len(set(batch.sequences)) == len(batch.sequences)
    assert not set(turn.started) & set(turn.stopped)
    assert not set(batch.sequences) & set(turn.stopped)
    assert set(batch.sequences) <= set(work.running)
    read = sum(fed for seq, fed in zip(batch.sequences, batch.feeds, strict=True) if len(seq.tokens) - seq.cached > 1)
    assert read <= rows
    waiting = sum(n for seq in work.running if (n := len(seq.tokens) - seq.cached) > 1)
    assert turn.stopped or read == min(rows, waiting), "no row is left over while a prompt waits"


@pytest.mark.parametrize("seed", range(40))
def test_no_sequence_starves_and_every_page_is_released(seed: int) -> None:
    """Random clients, tenants, priorities, sizes, drafts and aborts in few pages and slots."""
    rng = random.Random(seed)
    rows = rng.randint(2, 30)
    work = scheduler(pages=rng.randint(9, 20), seqs=rng.randint(1, 6), rows=rows, prefix_cache=rng.random() < 0.7)
    alive: list[Sequence] = []
    for number in range(3000):
        for _ in range(rng.choice([0, 0, 1, 4]) if number < 60 else 0):
            fields = {"client": rng.choice("aaab") + rng.choice(["", "2"]), "priority": rng.choice([0, 0, 0, 1])}
            samples = rng.choice([1, 1, 3])
            name, prompt, output = next(_names), [rng.randrange(2)] * rng.randint(1, 20), rng.randint(1, 15)
            group = [sequence(prompt, output, name, index=i, tenant=rng.choice([None, "t"]), **fields) for i in range(samples)]
            submit(work, *group)
            alive += group
        if not work.has_work:
            continue
        turn = work.next()
        check_turn(work, turn, rows)
        work.reserve(turn.batch, tuple(rng.randint(0, 9) for _ in turn.batch.sequences))
        for seq, fed in zip(turn.batch.sequences, turn.batch.feeds, strict=True):
            assert len(seq.pages) * SIZE >= seq.cached + fed
            seq.cached += fed
            if seq.cached == len(seq.tokens):
                seq.tokens.append(7)
            work.settle(seq)
            if seq.output_len >= seq.request.max_tokens:
                seq.finish_reason = "length"
                work.remove(seq)
        if rng.random() < 0.05 and alive:
            gone = rng.choice(alive)
            if gone.finish_reason is None:
                gone.finish_reason = "abort"
                work.remove(gone)
        alive = [seq for seq in alive if seq.finish_reason is None]
        owners = Counter(page for seq in work.running for page in seq.pages)
        assert all(work.pages.references(page) == owners[page] for page in range(work.pages.count))
    assert not alive
    assert work.pages.used == 0
    assert not work.has_work
    assert not work._queue._root.parts, "clients without work are forgotten"


sizes = st.lists(st.integers(0, 50), min_size=1, max_size=12)


@given(st.integers(0, 200), sizes, st.integers(1, 40))
def test_a_budget_is_split_without_a_remainder(budget: int, wants: list[int], least: int) -> None:
    for parts in (fair_split(budget, wants, least), shortest_first(budget, wants)):
        assert sum(parts) == min(budget, sum(wants))
        assert all(0 <= part <= want for part, want in zip(parts, wants, strict=True))


@given(st.integers(0, 200), sizes)
def test_equal_parts_are_max_min_fair(budget: int, wants: list[int]) -> None:
    parts = fair_split(budget, wants)
    if budget >= len(wants):
        for part, want in zip(parts, wants, strict=True):
            assert part == want or part >= max(parts) - 1


@given(st.integers(1, 200), sizes, st.integers(1, 40))
def test_the_first_in_line_get_parts_of_a_useful_size(budget: int, wants: list[int], least: int) -> None:
    parts = fair_split(budget, wants, least)
    assert parts[0] >= min(wants[0], least, budget)


@settings(max_examples=50)
@given(st.integers(1, 64), st.lists(st.integers(1, 200), min_size=1, max_size=8))
def test_the_oldest_prompt_always_gets_its_quarter(budget: int, wants: list[int]) -> None:
    assert shortest_first(budget, wants)[0] >= min(wants[0], -(-budget // 4))
