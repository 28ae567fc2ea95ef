"""Who uses which arm, who has just begun to, and what that takes. No torch."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from collections.abc import Sequence as Seq

__all__ = ["Beginnings"]

_REMEMBERED = 8.0  # beginnings over which their time is averaged


class Beginnings:
    """A drafter that a sequence has not used yet reads all that came before: that costs once, and only if it is begun."""

    def __init__(self) -> None:
        self.begun = False  # somebody did not use its arm in the round before
        self.newcomers = 0  # sequences that use theirs for the first time
        self._using: set[tuple[Hashable, int]] = set()
        self._met: dict[int, set[Hashable]] = {}  # sequences that have used an arm
        self._seconds: dict[int, float] = {}  # it takes one of them to begin, by arm

    def note(self, users: Mapping[int, Seq[int]], keys: Seq[Hashable]) -> None:
        """Who drafts by which arm in a round."""
        using = {(keys[b], arm) for arm, own in users.items() for b in own}
        self.begun, self._using, self.newcomers = not using <= self._using, using, 0
        for arm, own in users.items():
            met = self._met.setdefault(arm, set())
            self.newcomers += sum(keys[b] not in met for b in own)
            met.update(keys[b] for b in own)

    def none(self) -> None:
        """A round like the one before."""
        self.begun, self.newcomers = False, 0

    def learn(self, arm: int, newcomers: int, seconds: float) -> None:
        """What reading all that came before took them."""
        usual = self._seconds.get(arm, 0.0)
        self._seconds[arm] = usual + (seconds / newcomers - usual) / _REMEMBERED

    def seconds(self, key: Hashable, arm: int) -> float:
        """It takes a sequence to use an arm, where it has not used it yet."""
        return 0.0 if key in self._met.get(arm, ()) else self._seconds.get(arm, 0.0)

    def forget(self, key: Hashable) -> None:
        self._using = set()
        for met in self._met.values():
            met.discard(key)
