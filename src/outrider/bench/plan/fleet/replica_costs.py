"""What one replica costs and how its drafts do: from the controller's file of costs, or from a recording of a replica."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from outrider.bench.plan.fleet.texts import made_up_texts
from outrider.bench.plan.trace import Trace, trace_from, trace_record
from outrider.config import EngineConfig
from outrider.control import Costs
from outrider.core import Arm
from outrider.errors import InvalidParameter, UnknownMethod

__all__ = ["BUNDLED", "ReplicaCosts", "read_replica", "write_replica"]

BUNDLED = Path(__file__).with_name("pyrite.json")
_HOW = (
    "measure one with `outrider plan --fleet --save-costs FILE` (with --model for another model), or pass the file in which "
    "the controller keeps what it measured (~/.cache/outrider/costs/*.json)"
)
_PAGES_PER_SEQUENCE = 32  # where the file does not say


@dataclass(frozen=True, slots=True)
class ReplicaCosts:
    """One replica on paper."""

    costs: Costs  # seconds of forwards, proposals and the rest of a round
    arms: tuple[Arm, ...]
    texts: Sequence[Mapping[str, Trace]]  # by arm
    sizes: EngineConfig = field(default_factory=EngineConfig)
    pages: int = 0  # of KV; 0: enough for every sequence at a context of 2,048
    context: int = 2048
    request_s: float = 0.0  # from a request's arrival to the engine's queue
    plan_s: tuple[float, float] = (0.0, 0.0)  # the controller's seconds in a round whose plan stands, and where it plans anew
    per_machine: int = 1  # replicas that share a machine
    alone: float = 1.0  # what a round takes while the others of its machine are idle, against the same while they work
    measured: Mapping[str, Any] = field(default_factory=dict)  # on what, and how
    named: bool = False  # the user named the only arm

    @property
    def kv_pages(self) -> int:
        return self.pages or self.sizes.max_num_seqs * max(_PAGES_PER_SEQUENCE, -(-self.context // self.sizes.page_size))

    def with_batch(self, sequences: int) -> ReplicaCosts:
        """The same replica with another number of sequences that run at once; KV grows where it was sized by them."""
        return replace(self, sizes=replace(self.sizes, max_num_seqs=sequences), pages=0)

    def drafting(self, speculation: str) -> ReplicaCosts:
        """The same replica with `auto` (all arms), `none`, or the one arm that is named."""
        if speculation == "auto":
            return self
        arms = tuple(arm for arm in self.arms if arm.name == speculation)
        if not arms and speculation != "none":
            raise UnknownMethod("--methods", speculation, ["auto", "none", *(arm.name for arm in self.arms)])
        return replace(self, arms=arms, named=bool(arms))


def read_replica(path: Path | None) -> ReplicaCosts:
    """The recording of a replica, or the controller's own file; None: that of the bundled model on the machine it names."""
    path = path or BUNDLED
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return _from_data(data)
    except OSError as error:
        raise InvalidParameter("--costs", f"{path} cannot be read: {error.strerror}; {_HOW}") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise InvalidParameter(
            "--costs", f"{path} holds no costs of a replica ({type(error).__name__}: {error}); {_HOW}"
        ) from None


def _from_data(data: Mapping[str, Any]) -> ReplicaCosts:
    costs = Costs.from_dict(data)
    if not costs.knows_forward:
        raise ValueError("it knows of no forward")
    about = data.get("replica")
    if about is not None:
        texts = [{name: trace_from(one) for name, one in text.items()} for text in data["texts"]]
        if not texts:
            raise ValueError("it holds no texts")
        arms = tuple(Arm(str(name), int(longest)) for name, longest in about["arms"].items())
        return ReplicaCosts(
            costs, arms, texts, EngineConfig(**about["sizes"]), int(about["pages"]), int(about["context"]),
            float(about["request_s"]), (float(about["plan_s"][0]), float(about["plan_s"][1])),
            int(about["per_machine"]), float(about["alone"]), data.get("measured", {}),
        )  # fmt: skip
    accepted: Mapping[str, Any] = costs.accepted.get("0") or next(iter(costs.accepted.values()), {})
    longest = {name: 32 for name in data["propose"] if name in accepted and costs.knows_proposal(name)}
    if not longest:
        raise ValueError("it does not say how often drafts were accepted: serve or generate for a while first")
    return ReplicaCosts(costs, tuple(Arm(*arm) for arm in longest.items()), made_up_texts(accepted, longest))


def write_replica(path: Path, replica: ReplicaCosts) -> None:
    """A file that `read_replica` reads, and every other reader of the controller's costs."""
    sizes = {name: getattr(replica.sizes, name) for name in ("max_num_seqs", "max_batch_rows", "page_size")}
    about = {
        "arms": {arm.name: arm.max_nodes for arm in replica.arms},
        "sizes": sizes,
        "pages": replica.pages,
        "context": replica.context,
        "request_s": replica.request_s,
        "plan_s": list(replica.plan_s),
        "per_machine": replica.per_machine,
        "alone": replica.alone,
    }
    texts = [{name: trace_record(trace) for name, trace in text.items()} for text in replica.texts]
    data = replica.costs.as_dict() | {"replica": about, "measured": dict(replica.measured), "texts": texts}
    path.write_text(json.dumps(data, separators=(",", ":")) + "\n", encoding="utf-8")
