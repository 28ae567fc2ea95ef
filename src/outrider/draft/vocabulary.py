"""How a draft model's tokens relate to the target's."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from outrider.core import Sequence
from outrider.draft.reader import Text

__all__ = ["SameTokens", "Vocabulary"]


class Vocabulary(Protocol):
    """Between the target's token ids and the draft model's."""

    foreign: bool  # whether the model counts positions otherwise, so that it needs pages of its own

    def begin(self, seq: Sequence) -> None:
        """A sequence starts."""

    def end(self, seq: Sequence) -> None:
        """A sequence is over; forget it."""

    def text(self, seq: Sequence) -> Text | None:
        """What the draft model reads for a sequence; None where its text cannot be told yet."""

    def own(self, token: int) -> int:
        """The draft model's id of a target token it proposed."""

    def scores(self, logits: Tensor) -> Tensor:
        """The draft model's logits over the target's ids, -inf where it has no say."""


class SameTokens:
    """Both models have the same tokens."""

    foreign = False

    def begin(self, seq: Sequence) -> None:
        pass

    def end(self, seq: Sequence) -> None:
        pass

    def text(self, seq: Sequence) -> Text | None:
        return Text(seq, seq.tokens, len(seq.tokens))

    def own(self, token: int) -> int:
        return token

    def scores(self, logits: Tensor) -> Tensor:
        return logits
