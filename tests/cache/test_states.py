"""States of recurrent layers: where rows may go on, and which states are kept after pages."""

from __future__ import annotations

import torch

from outrider.cache import LayerState, Past, Pending, SequenceState, StateCache


def states(value: float) -> list[LayerState]:
    return [LayerState(torch.full((2, 3), value))]


def nodes(count: int) -> list[torch.Tensor]:
    return [torch.arange(float(count))[:, None]]


def test_rows_go_on_where_the_last_forward_began_or_from_its_root_on() -> None:
    state = SequenceState()
    state.keep(0, Past(), Pending(4, states(1.0), states(2.0), nodes(3)))
    assert state.at(0) == Past()
    assert [state.at(start) for start in (1, 3, 9)] == [None] * 3, "nothing is known there"
    before, after, later = state.at(4), state.at(5), state.at(7)
    assert before is not None
    assert after is not None
    assert later is not None
    assert (float(before.states[0].window[0, 0]), before.rows) == (1.0, 0)
    assert (float(after.states[0].window[0, 0]), after.rows) == (2.0, 0)
    assert (float(later.states[0].window[0, 0]), later.inputs[0].flatten().tolist()) == (2.0, [0.0, 1.0])


def test_a_forward_before_a_verdict_leaves_the_way_back() -> None:
    state = SequenceState()
    state.keep(0, Past(), Pending(4, states(1.0), states(2.0)))
    first = state.at(5)
    assert first is not None
    state.keep(5, first, Pending(5, (), states(3.0)))
    second = state.at(6)
    assert second is not None
    state.keep(6, second, Pending(6, (), states(4.0)), overlaps=True)
    assert state.at(5) is first, "the verdict on it is not known yet"
    assert state.at(6) is second
    state.keep(6, second, Pending(6, (), states(4.0)))
    assert state.at(5) is None


def test_accepted_nodes_are_replayed_in_the_order_of_the_path() -> None:
    state = SequenceState()
    state.keep(0, Past(), Pending(4, states(1.0), states(2.0), nodes(5)))
    state.accept([1, 4])
    replayed = state.at(7)
    assert replayed is not None
    assert replayed.inputs[0].flatten().tolist() == [1.0, 4.0]
    assert state.at(8) is None


def test_states_after_pages_are_found_by_their_keys_and_the_oldest_is_dropped() -> None:
    cache, keys = StateCache(2), [b"a", b"b", b"c", b"d"]
    state = cache.begin([], 16)
    assert state is not None
    state.borders = {0: states(0.0), 1: states(1.0), 3: states(3.0)}
    cache.publish(state, keys[:3])
    assert (cache.kept, list(state.borders)) == (2, [3]), "what is not a committed page yet stays"
    assert [cache.usable(keys[:count]) for count in range(5)] == [0, 1, 2, 2, 2]
    cache.begin(keys[:1], 16)
    cache.publish(state, keys)
    assert [cache.usable([key]) for key in keys] == [1, 0, 0, 1], "the second was used least recently"
    resumed = cache.begin(keys, 16)
    assert resumed is not None
    assert (resumed.position, float(resumed.past.states[0].window[0, 0])) == (64, 3.0)
    cache.forget(keys[:1])
    assert cache.kept == 1


def test_a_model_without_recurrent_layers_starts_after_any_page() -> None:
    cache = StateCache()
    assert cache.usable([b"a", b"b"]) == 2
    assert cache.begin([b"a"], 16) is None


def test_without_room_nothing_is_collected() -> None:
    state = StateCache(0).begin([], 16)
    assert state is not None
    assert state.borders is None
