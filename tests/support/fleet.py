"""Replicas on paper with costs that a formula can follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outrider.bench.plan.fleet.replica_costs import ReplicaCosts
from outrider.bench.plan.trace import DraftRecord, Trace
from outrider.config import EngineConfig
from outrider.control import Costs
from outrider.core import Arm

ROUND_S = 0.01


def guesser(right: int, nodes: int, name: str = "guesser", rounds: int = 40) -> Trace:
    """A drafter of chains whose first tokens are always accepted, with confidence that says so."""
    survival = [0.999**i if i < right else 0.001 for i in range(nodes)]
    parents, path = list(range(-1, nodes - 1)), list(range(right))
    return Trace(name, 0, nodes, [DraftRecord(parents, survival, path, i * (right + 1), 99) for i in range(rounds)])


def paper(
    batch: int = 1, texts: Sequence[Mapping[str, Trace]] = (), propose_s: float = 0.0001, pages: int = 0, **changes: Any
) -> ReplicaCosts:
    """A replica whose forwards all take as long, whatever their rows; `propose_s` is of a drafted token."""
    arms = [Arm(name, trace.max_length) for name, trace in (texts[0] if texts else {}).items()]
    forward = {str(rows): ROUND_S for rows in (1, 64, 1024)}
    propose = {arm.name: {str(b): {str(n): n * propose_s for n in (1, 8, 32)} for b in (1, 64)} for arm in arms}
    costs = Costs.from_dict({"forward": forward, "context": {}, "rest": {}, "propose": propose})
    sizes = EngineConfig(max_num_seqs=batch, max_queue=changes.pop("queue", None))
    return ReplicaCosts(costs, tuple(arms), texts or [{}], sizes, pages, **changes)
