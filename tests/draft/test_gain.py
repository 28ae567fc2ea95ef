"""A level of a cascade is asked while its guesses save time, and tried again when they did not."""

from __future__ import annotations

import pytest

from outrider.draft.gain import Gain


def play(gain: Gain, rounds: int, accepted: float, alone: float = 1.0, guessing: float = 1.2) -> int:
    """Forwards that asked, of so many."""
    asked = 0
    for _ in range(rounds):
        asks = gain.asks()
        asked += asks
        gain.note(asks, accepted if asks else 0.0, guessing if asks else alone)
    return asked


def test_good_guesses_are_asked_for() -> None:
    assert play(Gain(), 200, accepted=2.0) == pytest.approx(200 * 24 / 25, abs=1)


def test_guesses_that_cost_more_than_they_save_are_left_out() -> None:
    asked = play(Gain(), 2000, accepted=0.1)
    assert 12 <= asked <= 12 + 2000 / 24 + 24


def test_a_level_comes_back_when_it_is_right_again() -> None:
    gain = Gain()
    play(gain, 200, accepted=0.0)
    assert not gain.pays
    assert play(gain, 400, accepted=3.0) > 250
    assert gain.pays


def test_nothing_is_judged_before_both_ways_are_known() -> None:
    gain = Gain()
    for _ in range(100):
        gain.note(True, 0.0, 1.0)
    assert gain.pays
    gain.note(False, 0.0, 1.0)
    gain.note(True, 0.0, None)  # a forward that read other text: its time says nothing
    assert gain.pays  # as fast, and never slower
    gain.note(False, 0.0, 0.5)
    assert not gain.pays
