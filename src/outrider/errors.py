"""Every error a user can meet. Each message names what is wrong and what would be right."""

from __future__ import annotations

__all__ = ["DrafterFault", "EngineDead", "InvalidParameter", "ModelError", "OutriderError", "QueueFull", "UnknownMethod"]


class OutriderError(Exception):
    """Base of all errors raised on purpose."""


class InvalidParameter(OutriderError, ValueError):
    """A request or setting that cannot be honoured; `param` names it."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param}: {message}")
        self.param = param


class UnknownMethod(InvalidParameter):
    """A drafter, rule or family that does not exist."""

    def __init__(self, param: str, name: str, known: list[str]) -> None:
        super().__init__(param, f"unknown {name!r}; known: {', '.join(sorted(known))}")


class ModelError(OutriderError):
    """A model directory, weight file or tokenizer that cannot be used."""


class DrafterFault(OutriderError):
    """A drafter broke its contract; the engine goes on without it."""


class QueueFull(OutriderError):
    """More requests are waiting than the engine was told to hold."""


class EngineDead(OutriderError):
    """The engine's thread has ended; nothing more can be asked of it."""
