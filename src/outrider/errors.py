"""Every error a user can see. Each message names the fault and the fix."""

from __future__ import annotations

__all__ = [
    "DrafterFault",
    "EngineDead",
    "InvalidParameter",
    "ModelError",
    "OutriderError",
    "QueueFull",
    "RankDied",
    "RanksDiffer",
    "RequestFailed",
    "UnknownMethod",
]


class OutriderError(Exception):
    """Base of all errors raised on purpose."""


class InvalidParameter(OutriderError, ValueError):
    """A request or setting that cannot be honoured; `param` names it, and `code` is the API's word for it where it has one."""

    def __init__(self, param: str, message: str, code: str | None = None) -> None:
        super().__init__(f"{param}: {message}")
        self.param = param
        self.code = code


class UnknownMethod(InvalidParameter):
    """A drafter, rule or family that does not exist."""

    def __init__(self, param: str, name: str, known: list[str]) -> None:
        short = name if len(name) <= 80 else f"{name[:77]}..."
        super().__init__(param, f"unknown {short!r}; known: {', '.join(sorted(known))}")


class ModelError(OutriderError):
    """A model directory, weight file or tokenizer that cannot be used."""


class DrafterFault(OutriderError):
    """A drafter broke its contract; the engine goes on without it."""


class QueueFull(OutriderError):
    """More requests are waiting than the limit allows."""


class RequestFailed(OutriderError):
    """A request could not be prepared because of an unexpected error. Other requests are not affected."""


class EngineDead(OutriderError):
    """The engine's thread has ended or its LLM was closed. It accepts no more requests."""


class RankDied(EngineDead):
    """A process that holds a share of the model has ended or does not answer. The model must be loaded again."""


class RanksDiffer(OutriderError):
    """Processes that are to share a model have different weights, builds or settings."""
