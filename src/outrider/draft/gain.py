"""Whether a level of a cascade is worth asking: seconds per token with its guesses, and without."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Gain"]

_FADE = 0.9  # weight of what was known, where a forward is noted
_TRIED = 12  # forwards with guesses before they are judged
_AGAIN = 24  # forwards after which the other way is tried once


@dataclass(slots=True)
class _Mean:
    """A mean that forgets."""

    value: float = 0.0
    weight: float = 0.0

    def note(self, value: float) -> None:
        self.weight = _FADE * self.weight + 1.0
        self.value += (value - self.value) / self.weight


@dataclass(slots=True)
class Gain:
    """Notes forwards of one level, and says whether the level below should guess for the next one."""

    _accepted: _Mean = field(default_factory=_Mean)  # guesses per forward that had some
    _with: _Mean = field(default_factory=_Mean)  # seconds of such a forward, guessing included
    _alone: _Mean = field(default_factory=_Mean)
    _tried: int = 0
    _since: int = 0  # forwards since the other way was last tried

    def asks(self) -> bool:
        """Whether to ask the level below; counts the call."""
        self._since += 1
        other = self._since > _AGAIN
        if other:
            self._since = 0
        return self.pays != other

    @property
    def pays(self) -> bool:
        """Whether a token takes less time with guesses; yes until both ways are known."""
        if self._tried < _TRIED or not self._alone.weight or not self._with.weight:
            return True
        return self._with.value <= self._alone.value * (1.0 + self._accepted.value)

    def note(self, guessed: bool, accepted: float, seconds: float | None) -> None:
        """A forward: whether there were guesses, how many were right in a chain, and its time where it read no other text."""
        if guessed:
            self._tried += 1
            self._accepted.note(accepted)
        if seconds is not None:
            (self._with if guessed else self._alone).note(seconds)
