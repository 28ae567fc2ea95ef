"""`outrider plan --fleet`: from options to a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rich.console import Console

from outrider.bench.plan.fleet.load import FleetRequest, LoadShape, read_load
from outrider.bench.plan.fleet.measure import measure_replica
from outrider.bench.plan.fleet.replica_costs import BUNDLED, ReplicaCosts, read_replica, write_replica
from outrider.bench.plan.fleet.show import show_by_load, show_fleets
from outrider.bench.plan.fleet.sizing import MAX_REPLICAS, FleetQuestion, choose_fleet, speculation_by_load, stops_paying
from outrider.bench.plan.fleet.summary import Slo
from outrider.errors import InvalidParameter

__all__ = ["plan_fleet"]

_DEFAULT_RATE = 1.0


def plan_fleet(
    options: dict[str, Any], prompts: Callable[[], list[str]], console: Console, say: Callable[[str], None]
) -> dict[str, Any]:
    """Size a fleet for a load, or simulate one of a size that is set; `prompts` are those that a replica is measured with."""
    costs = _costs(options, prompts, say)
    slo = Slo(options["ttft"] / 1e3, options["tpot"] / 1e3)
    question = FleetQuestion(_load(options), costs, slo, options["replica_cost"], say)
    methods = (options["methods"] or "auto,none").split(",")
    for method in methods:
        costs.drafting(method)
    replicas, batch = options["replicas"], options["batch"]
    if replicas is not None and replicas > MAX_REPLICAS:
        raise InvalidParameter("--replicas", f"at most {MAX_REPLICAS:,} are simulated, got {replicas:,}")
    if replicas is not None:
        rows = [question.run(replicas, method, batch) for method in methods]
        by_load = []
    else:
        chosen = choose_fleet(question, methods[0], batch)
        rows = [chosen]
        rows += [question.run(chosen.replicas - 1, methods[0], chosen.batch)] if chosen.replicas > 1 else []
        rows += [question.run(chosen.replicas, method, chosen.batch) for method in methods[1:]]
        by_load = speculation_by_load(question, chosen) if methods[0] == "auto" else []
    about = dict(costs.measured)
    console.print(f"costs: {options['costs'] or BUNDLED.name} {about.get('model', '')} {about.get('device', '')}".rstrip())
    show_fleets(rows, slo, console)
    if by_load:
        show_by_load(by_load, console)
    return {
        "costs": about,
        "fleets": [row.as_dict() for row in rows],
        "by_load": [
            {"requests_per_s": rate, "auto": with_.as_dict(), "none": without.as_dict()} for rate, with_, without in by_load
        ],
        "stops_paying_at": stops_paying(by_load),
    }


def _costs(options: dict[str, Any], prompts: Callable[[], list[str]], say: Callable[[str], None]) -> ReplicaCosts:
    """From a file, measured now, or bundled for the bundled model."""
    if options["save_costs"] is not None:
        replica = measure_replica(options["model"], options["dtype"], prompts(), options["tokens"], say)
        write_replica(options["save_costs"], replica)
        return replica
    if options["costs"] is None and options["model"] is not None:
        raise InvalidParameter(
            "--costs",
            "the costs of a replica of this model are not known; measure and keep them with "
            f"`outrider plan --fleet --model {options['model']} --save-costs replica.json`, then pass --costs replica.json",
        )
    return read_replica(options["costs"])


def _load(options: dict[str, Any]) -> Callable[[], Iterable[FleetRequest]]:
    if options["trace"] is not None:
        if options["arrival"] is not None:
            raise InvalidParameter("--trace", "has its own times; leave out --arrival")
        requests = read_load(Path(options["trace"]))
        return lambda: requests
    shape = LoadShape(
        rate=_DEFAULT_RATE if options["arrival"] is None else options["arrival"],
        seconds=options["seconds"],
        prompt=options["prompt_tokens"],
        output=options["tokens"],
        spread=options["spread"],
        burstiness=options["burstiness"],
        shared=options["shared_prefix"],
        tenants=options["tenants"],
        turns=options["turns"],
        swing=options["swing"],
        seed=options["seed"],
    )
    return shape.requests
