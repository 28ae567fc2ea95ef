"""What is sent and what comes back, in no engine's spelling, and the seam behind which engines are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["Answer", "AuditRequest", "Choice", "Drafting", "Side", "TokenLogprob"]


@dataclass(frozen=True, slots=True)
class AuditRequest:
    """One request. Temperature 0 is greedy; `logprobs` is the number of alternatives at each position."""

    prompt: str
    max_tokens: int
    temperature: float = 0.0
    seed: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    schema: Mapping[str, Any] | None = None
    n: int = 1


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's text, its log probability, and those of the most probable tokens there, by text."""

    text: str
    logprob: float
    top: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the texts that answer a request. Ids and log probabilities where the engine returns them."""

    text: str
    finish: str | None = None
    ids: tuple[int, ...] | None = None
    tokens: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, slots=True)
class Drafting:
    """Draft tokens, those accepted, and rounds. An engine may not report rounds."""

    drafted: int
    accepted: int
    rounds: int = 0

    def __add__(self, other: Drafting) -> Drafting:
        return Drafting(self.drafted + other.drafted, self.accepted + other.accepted, self.rounds + other.rounds)

    def __sub__(self, other: Drafting) -> Drafting:
        return Drafting(self.drafted - other.drafted, self.accepted - other.accepted, self.rounds - other.rounds)


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back. `refused`: the engine does not take such a request; `failed`: it broke."""

    choices: tuple[Choice, ...] = ()
    tokens: int = 0
    seconds: float = 0.0
    drafting: Drafting | None = None
    refused: str | None = None
    failed: str | None = None

    @property
    def good(self) -> bool:
        return self.refused is None and self.failed is None


class Side(Protocol):
    """An engine as it decodes plainly, or as it speculates."""

    name: str
    parallel: bool  # whether requests may overlap

    async def answer(self, request: AuditRequest) -> Answer:
        """Send one request and read its whole answer."""

    async def counters(self) -> Drafting | None:
        """What the engine has drafted since it started; None where it does not say."""

    async def close(self) -> None:
        """Close connections."""
