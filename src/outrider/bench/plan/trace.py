"""What drafts came to, round by round: recorded by a policy that watches, kept as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from outrider.control import FixedLength, Load, RoundStats
from outrider.core import Arm, Drafts, Plan
from outrider.errors import InvalidParameter

__all__ = ["Guess", "Recorder", "Round", "Trace", "read_traces", "write_traces"]


class Guess(NamedTuple):
    """One sequence's draft and what came true of it."""

    parents: list[int]
    survival: list[float]  # as the drafter claims
    path: list[int]  # accepted nodes, from the root down
    at: int  # tokens the sequence had emitted in rounds before
    room: int  # nodes there was room for; a draft cut short says nothing about longer ones

    def best(self, most: int) -> tuple[int, int]:
        """Nodes and accepted ones, had only the likeliest `most` been verified; a parent comes before its children."""
        if len(self.parents) <= most:
            return len(self.parents), len(self.path)
        order = sorted(range(len(self.parents)), key=lambda i: (-self.survival[i], i))[:most]
        kept = set(order)
        return most, next((i for i, node in enumerate(self.path) if node not in kept), len(self.path))


@dataclass(slots=True)
class Round:
    """One round of all sequences, and what its parts took."""

    asked: int  # nodes the drafter was asked for, of the sequence that was asked for most
    batch: int
    rows: int
    prefill: bool
    guesses: list[Guess]
    propose_s: float = 0.0
    forward_s: float = 0.0
    host_s: float = 0.0


@dataclass(slots=True)
class Trace:
    """One request, drafted for by one method."""

    method: str
    prompt: int  # tokens
    most: int  # nodes asked for
    guesses: list[Guess] = field(default_factory=list)


class Recorder:
    """A fixed draft length, and a record of every round.

    A round lasts from one plan to the next: what lies between its parts is the host's.
    """

    arms: Sequence[Arm] = ()

    def __init__(self, length: int, rule: str = "match") -> None:
        self._policy = FixedLength(length, rule)
        self.rounds: list[Round] = []
        self._emitted: dict[Hashable, int] = {}
        self._begun = self._ended = 0.0
        self._load: Load | None = None
        self._trees: list[tuple[list[int], list[float]]] = []
        self._asked = 0

    def arms_named(self, method: str) -> list[int]:
        return self._policy.arms_named(method)

    def plan(self, load: Load) -> Plan:
        now = perf_counter()
        if self._load is not None and self._load.keys == load.keys:
            self._close(now)  # the same sequences go on: the time since is this round's
        elif self._load is not None:
            self._close(self._ended)
        plan = self._policy.plan(load)
        self._begun, self._load, self._asked = now, load, max(plan.lengths, default=0)
        return plan

    def select(self, drafts: Drafts, load: Load) -> Drafts:  # noqa: ARG002
        self._trees = [(list(tree.parents), own) for tree, own in zip(drafts.on_host(), drafts.says(), strict=True)]
        return drafts

    def observe(self, stats: RoundStats) -> None:
        assert self._load is not None
        guesses = []
        rows = zip(self._load.keys, self._load.room, self._trees, stats.paths, strict=True)
        for key, room, (parents, survival), path in rows:
            at = self._emitted.get(key, 0)
            guesses.append(Guess(parents, [round(s, 5) for s in survival[: len(parents)]], list(path), at, room))
            self._emitted[key] = at + len(path) + 1
        batch = len(self._load.keys)
        prefill = self._load.rows > batch
        self.rounds.append(Round(self._asked, batch, stats.rows, prefill, guesses, stats.propose_s, stats.forward_s))
        self._ended = perf_counter()

    def forget(self, key: Hashable) -> None:
        pass  # its last round is yet to be observed

    def take(self) -> list[Round]:
        """The rounds since the last time, the latest closed."""
        if self._load is not None:
            self._close(self._ended)
            self._load = None
        self._emitted.clear()
        taken, self.rounds = self.rounds, []
        return taken

    def _close(self, now: float) -> None:
        last = self.rounds[-1]
        last.host_s = max(now - self._begun - last.propose_s - last.forward_s, 0.0)


def write_traces(path: Path, traces: Iterable[Trace]) -> None:
    """One request per line."""
    with path.open("w", encoding="utf-8") as file:
        for own in traces:
            rounds = [guess._asdict() for guess in own.guesses]
            file.write(json.dumps({"method": own.method, "prompt": own.prompt, "most": own.most, "rounds": rounds}) + "\n")


def read_traces(path: Path) -> list[Trace]:
    """What `write_traces` wrote; a bad line is named."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InvalidParameter("--simulate", f"{path} cannot be read: {error.strerror}") from None
    traces = []
    for number, line in enumerate(lines, 1):
        try:
            data = json.loads(line)
            guesses = [Guess(own["parents"], own["survival"], own["path"], own["at"], own["room"]) for own in data["rounds"]]
            traces.append(Trace(str(data["method"]), int(data["prompt"]), int(data["most"]), _checked(guesses)))
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidParameter("--simulate", f"{path}:{number} is no trace of `outrider plan --record`: {error}") from None
    if not traces:
        raise InvalidParameter("--simulate", f"{path} holds no traces")
    return traces


def _checked(guesses: Sequence[Guess]) -> list[Guess]:
    for own in guesses:
        sizes = len(own.parents) == len(own.survival)
        if not sizes or any(not -1 <= p < i for i, p in enumerate(own.parents)) or any(n >= len(own.parents) for n in own.path):
            raise ValueError("a draft whose nodes do not fit together")
    return list(guesses)
