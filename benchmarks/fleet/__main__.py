"""`python -m benchmarks.fleet`: replicas on Ray and behind the front door of one machine, under load, floods and a kill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.command import close_report, errors, run
from benchmarks.fleet.load import ConversationPlan
from benchmarks.fleet.phases import crowd, flooded, killed, prefix_rate, scaled, server_with

_SHARE = 0.9  # of one replica's prefix hit rate that a fleet's must reach
_SCALING = {"scaling": {"min_replicas": 1, "max_replicas": 3, "up_s": 2, "down_s": 4}}


def main(
    requests: Annotated[int, typer.Option(min=20, help="Requests of the run in which a replica is killed.")] = 300,
    seconds: Annotated[float, typer.Option(min=1.0, help="Seconds of the crowd.")] = 20.0,
    method: Annotated[str, typer.Option(help="How the replicas draft.")] = "ngram",
    backend: Annotated[str, typer.Option(help="ray, mp (the front door of one machine) or both.")] = "both",
    output: Annotated[Path | None, typer.Option(help="File for the report, as JSON.")] = None,
) -> None:
    """Three replicas of one thread each: equal texts, nothing lost, prefixes that stay where they are; and from one to three."""
    own = ("--method", method, "--kv-memory", "192MiB", "--max-num-seqs", "8", "--threads", "3")
    three = (*own, "--data-parallel-size", "3")
    report: dict[str, Any] = {}
    plan = ConversationPlan(requests // 10, 10, streams=8)
    with errors.status("one replica"), server_with(*own[:-1], "1") as url:
        alone = prefix_rate(url, plan)
        report["one_flood"] = flooded(url, 40, 40)
    if backend in ("both", "mp"):
        with errors.status("the front door of one machine"), server_with(*three) as url:
            report["mp"] = _fleet(url, plan, alone)
            report["mp_crowd"] = crowd(url, 100, seconds)
        two = (*own[:-1], "2", "--data-parallel-size", "2")
        with errors.status("a flood at the front door"), server_with(*two) as url:
            report["mp_flood"] = flooded(url, 40, 40)
    if backend in ("both", "ray"):
        with errors.status("Ray"), server_with(*three, "--data-parallel-backend", "ray") as url:
            report["ray"] = _fleet(url, plan, alone)
        scaling = ("--data-parallel-backend", "ray", "--data-parallel-config", json.dumps(_SCALING))
        with errors.status("one, three and one replica on Ray"), server_with(*own[:-1], "1", *scaling) as url:
            report["ray_scaling"] = scaled(url, ConversationPlan(40, 1, streams=40, tokens=64))
    report["passed"] = all(phase["passed"] for phase in report.values())
    close_report(report, output)


def _fleet(url: str, plan: ConversationPlan, alone: float) -> dict[str, Any]:
    rate = prefix_rate(url, plan)
    share = {"prefix_hit_rate": round(rate, 4), "of_one_replica": round(alone, 4), "passed": rate >= _SHARE * alone}
    leaving = ConversationPlan(plan.conversations, plan.turns, 0.2, plan.streams, plan.tokens, seed=1)
    after = killed(url, leaving)
    return {"prefixes": share, "killed": after, "passed": share["passed"] and after["passed"]}


if __name__ == "__main__":
    run(main)
