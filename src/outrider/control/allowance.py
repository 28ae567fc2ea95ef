"""What may be lost on finding out. No torch."""

from __future__ import annotations

__all__ = ["Allowance"]

_SHARE = 0.001  # of the time that may go into trying what does not seem to pay
_SAVED = 8.0  # rounds that may be saved up for it
_FIRST = 32.0  # plain rounds of one sequence that may go into trying what is not known at all
_HARDLY_KNOWN = 0.003  # share of the time, more, for what may be better than it has seemed so far


class Allowance:
    """Seconds that probes may cost: a small share of the time, saved up, and a grant for what is hardly known.

    The grant is counted for every sequence, since a round delays them all: beginning with many must cost as little as
    beginning with one.
    """

    def __init__(self) -> None:
        self.credit = 0.0
        self.next = 0.0  # what the next probe would cost
        self._earned = 0.0  # by the last round
        self._grant = self._most = 0.0
        self.begun = False

    def begin(self, plain_round: float, unknown: float) -> None:
        """Grant what finding out about so much of the arms may cost."""
        self._grant = self._most = _FIRST * unknown * plain_round
        self.begun = True

    def earn(self, seconds: float, many: int) -> None:
        """By a round of so many sequences."""
        self._earned = _SHARE * seconds
        self.credit = min(self.credit + self._earned, _SAVED * seconds)
        if self._grant < self._most:
            self._grant += _HARDLY_KNOWN * seconds * many

    def gift(self, many: int) -> float:
        """Seconds of a round of so many sequences that the grant covers."""
        return self._grant / many

    def pay(self, seconds: float, many: int, granted: bool) -> None:
        """For a probe, as far as it goes from the grant; less than nothing is given back."""
        gift = max(min(seconds, self.gift(many)), 0.0) if granted else 0.0
        self._grant -= gift * many
        self.credit -= seconds - gift

    @property
    def is_enough(self) -> bool:
        return self.credit >= self.next

    @property
    def will_be_enough(self) -> bool:
        """After another round like the last."""
        return self.credit + self._earned >= self.next
