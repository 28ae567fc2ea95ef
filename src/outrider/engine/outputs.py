"""What callers get back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from outrider.core import Tree
from outrider.sampling import Logprob

__all__ = ["CompletionOutput", "Rejected", "RequestOutput", "Run", "StreamPiece", "Timings", "rejected_of", "sources_of"]


class Rejected(NamedTuple):
    """A drafted node that was not accepted."""

    token: int
    position: int  # depth in the draft, from 0
    parent: int  # its index among the round's rejected nodes; -1 below an accepted node or the root


class Run(NamedTuple):
    """The tokens of one round: the first `guessed` of `kept` came from a drafter, the rest from the target."""

    source: str
    guessed: int
    kept: int
    rejected: Sequence[Rejected] = ()  # only where the request has `return_rejected`


def rejected_of(tree: Tree, depths: Sequence[int], accepted: Sequence[int]) -> list[Rejected]:
    """The nodes of a draft that were not accepted, in the draft's order."""
    place = dict.fromkeys(accepted, -1)  # index of each node among the rejected
    out: list[Rejected] = []
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        if node not in place:
            place[node] = len(out)
            out.append(Rejected(token, depths[node], place.get(parent, -1)))
    return out


def sources_of(runs: Sequence[Run]) -> list[tuple[str, int | None]]:
    """For every token who guessed it and at which depth of the draft; the target's own have none."""
    out: list[tuple[str, int | None]] = []
    for source, guessed, kept, _ in runs:
        out += [(source, depth) for depth in range(guessed)]
        out += [("target", None)] * (kept - guessed)
    return out


@dataclass(slots=True)
class Timings:
    """Seconds of one request, and the speed of its decoding."""

    first_token_s: float = 0.0
    total_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    queued_s: float = 0.0  # until it was first admitted


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's n texts."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None
    seed: int
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    from_draft: list[bool] = field(default_factory=list)  # per token: guessed by the drafter?
    speculation: dict[str, Any] = field(default_factory=dict)
    timings: Timings = field(default_factory=Timings)
    runs: list[Run] = field(default_factory=list)
    cached_tokens: int = 0  # of the prompt, found in the prefix cache


@dataclass(slots=True)
class RequestOutput:
    """A request and its texts."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


@dataclass(slots=True)
class StreamPiece:
    """New text of one output, and the finished output with the last piece."""

    index: int
    text: str
    token_ids: list[int]
    from_draft: list[bool]
    output: CompletionOutput | None = None
    runs: list[Run] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
