"""Which networks run in a round, for listeners that time them: a profiler, a benchmark.

A log is active in the thread that runs a round, for as long as the round takes. Without one, a forward costs one
look at a context variable more. Nothing is replaced or wrapped from outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from typing import ParamSpec, Protocol, TypeVar

__all__ = ["ForwardLog", "active_log", "device_work", "logging_to", "network"]

P = ParamSpec("P")
T = TypeVar("T")


class ForwardLog(Protocol):
    """Runs every forward of a round, and may note, time or repeat it."""

    def run(self, forward: Callable[[], T]) -> T:
        """Run a forward on the processor. It writes the same keys and values when it runs again at once."""

    def launch(self, work: Callable[[], T]) -> T:
        """Put work on the GPU's stream."""


_active: ContextVar[ForwardLog | None] = ContextVar("outrider_forward_log", default=None)


def active_log() -> ForwardLog | None:
    """The log of the round that this thread runs."""
    return _active.get()


@contextmanager
def logging_to(log: ForwardLog | None) -> Iterator[None]:
    """Tell a log of every forward in this thread; None: tell nobody."""
    token = _active.set(log)
    try:
        yield
    finally:
        _active.reset(token)


def network(method: Callable[P, T]) -> Callable[P, T]:
    """A function that runs a network on the processor, once per call."""

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        log = _active.get()
        return method(*args, **kwargs) if log is None else log.run(partial(method, *args, **kwargs))

    return call


def device_work(method: Callable[P, T]) -> Callable[P, T]:
    """A function that launches a network on a GPU, once per call: a method, or a graph's replay."""

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        log = _active.get()
        return method(*args, **kwargs) if log is None else log.launch(partial(method, *args, **kwargs))

    return call
