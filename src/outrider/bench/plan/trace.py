"""What drafts came to, round by round: recorded by a listener, kept as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from outrider.core import RoundReport
from outrider.core import Sequence as Generation
from outrider.errors import InvalidParameter

__all__ = ["DraftRecord", "RecordedRound", "Recorder", "Trace", "read_traces", "trace_from", "trace_record", "write_traces"]


class DraftRecord(NamedTuple):
    """One sequence's draft and what was accepted of it."""

    parents: list[int]
    survival: list[float]  # the drafter's confidence
    path: list[int]  # accepted nodes, from the root down
    at: int  # tokens the sequence had emitted in rounds before
    room: int  # nodes there was room for; a draft cut short says nothing about longer ones

    def best(self, max_nodes: int) -> tuple[int, int]:
        """Nodes and accepted ones, had only the likeliest `max_nodes` been verified; a parent comes before its children."""
        if len(self.parents) <= max_nodes:
            return len(self.parents), len(self.path)
        order = sorted(range(len(self.parents)), key=lambda i: (-self.survival[i], i))[:max_nodes]
        kept = set(order)
        return max_nodes, next((i for i, node in enumerate(self.path) if node not in kept), len(self.path))

    def likeliest(self, max_nodes: int) -> tuple[list[int], list[int], list[float]]:
        """The nodes a drafter would have proposed under a shorter plan: their numbers, parents and survival."""
        order = sorted(range(len(self.parents)), key=lambda i: (-self.survival[i], i))[:max_nodes]
        nodes = sorted(order)
        place = {node: i for i, node in enumerate(nodes)} | {-1: -1}
        return nodes, [place[self.parents[node]] for node in nodes], [self.survival[node] for node in nodes]


@dataclass(slots=True)
class RecordedRound:
    """One round of all sequences, and what its parts took."""

    length: int  # planned draft nodes, of the sequence with the longest plan
    batch: int
    rows: int
    prefill: bool
    drafts: list[DraftRecord]
    propose_s: float = 0.0
    forward_s: float = 0.0
    host_s: float = 0.0
    experts: float = 0.0  # distinct ones that the forward read, the mean over layers; 0: the model has none


@dataclass(slots=True)
class Trace:
    """One request, drafted for by one method."""

    method: str
    prompt: int  # tokens
    max_length: int  # nodes planned for each round
    drafts: list[DraftRecord] = field(default_factory=list)


class Recorder:
    """A listener that records every round.

    While the same sequences run, a round lasts until the next one begins: what lies between its parts is the host's.
    """

    def __init__(self) -> None:
        self._rounds: list[RecordedRound] = []
        self._emitted: dict[Generation, int] = {}
        self._sequences: list[Generation] = []
        self._began = self._ended = 0.0

    def observe(self, report: RoundReport) -> None:
        sequences = report.batch.sequences
        if self._rounds:
            self._close(report.began if sequences == self._sequences else self._ended)
        phases = report.phases
        longest, rows = max(report.plan.lengths, default=0), report.rows
        drafts = self._drafts(report)
        spent = (phases.propose, phases.forward)
        made = RecordedRound(longest, len(sequences), rows, report.prefill, drafts, *spent, experts=report.experts)
        self._rounds.append(made)
        self._sequences = list(sequences)
        self._began, self._ended = report.began, report.began + phases.wall - phases.learn

    def take(self) -> list[RecordedRound]:
        """The rounds since the last time, the latest closed."""
        if self._rounds:
            self._close(self._ended)
        taken, self._rounds, self._sequences = self._rounds, [], []
        self._emitted.clear()
        return taken

    def _drafts(self, report: RoundReport) -> list[DraftRecord]:
        drafts = []
        for b, (seq, tree, survival) in enumerate(
            zip(report.batch.sequences, report.drafts.per_sequence, report.drafts.survival, strict=True)
        ):
            position, got = self._emitted.get(seq, 0), report.sequences[b]
            path = list(report.verdicts[b].path[: got.accepted])
            confidence = [round(s, 5) for s in survival[: len(tree.parents)]]
            drafts.append(DraftRecord(list(tree.parents), confidence, path, position, report.room[b]))
            self._emitted[seq] = position + len(path) + 1
        return drafts

    def _close(self, now: float) -> None:
        last = self._rounds[-1]
        last.host_s = max(now - self._began - last.propose_s - last.forward_s, 0.0)


def write_traces(path: Path, traces: Iterable[Trace]) -> None:
    """One request per line."""
    with path.open("w", encoding="utf-8") as file:
        for trace in traces:
            file.write(json.dumps(trace_record(trace)) + "\n")


def trace_record(trace: Trace) -> dict[str, Any]:
    """A trace as plain data, for JSON."""
    rounds = [draft._asdict() for draft in trace.drafts]
    return {"method": trace.method, "prompt": trace.prompt, "most": trace.max_length, "rounds": rounds}


def trace_from(data: Mapping[str, Any]) -> Trace:
    """A trace from plain data; what is none raises ValueError, KeyError or TypeError."""
    drafts = [
        DraftRecord(draft["parents"], draft["survival"], draft["path"], draft["at"], draft["room"]) for draft in data["rounds"]
    ]
    return Trace(str(data["method"]), int(data["prompt"]), int(data["most"]), _checked(drafts))


def read_traces(path: Path) -> list[Trace]:
    """What `write_traces` wrote; a bad line is named."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidParameter("--simulate", f"{path} cannot be read: {getattr(error, 'strerror', error)}") from None
    traces = []
    for number, line in enumerate(lines, 1):
        try:
            traces.append(trace_from(json.loads(line)))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise InvalidParameter("--simulate", f"{path}:{number} is no trace of `outrider plan --record`: {error}") from None
    if not traces:
        raise InvalidParameter("--simulate", f"{path} holds no traces")
    return traces


def _checked(drafts: Sequence[DraftRecord]) -> list[DraftRecord]:
    for draft in drafts:
        sizes = len(draft.parents) == len(draft.survival)
        if (
            not sizes
            or any(not -1 <= p < i for i, p in enumerate(draft.parents))
            or any(n >= len(draft.parents) for n in draft.path)
        ):
            raise ValueError("a draft whose nodes do not fit together")
    return list(drafts)
