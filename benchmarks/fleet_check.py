"""`python -m benchmarks.fleet_check`: does `outrider plan --fleet` predict? Two one-thread servers, and their simulation.

The servers are `outrider serve` with Pyrite and `auto`; this process is the client and the router. First both are kept busy
and every round is timed: these are the costs. Then the same requests go to the servers at three loads, and to the simulator.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from benchmarks.command import close_report, errors, run
from benchmarks.server import ServerProcess, client_of
from outrider.bench.client import ServedAnswer
from outrider.bench.environment import environment
from outrider.bench.plan.fleet.load import FleetRequest
from outrider.bench.plan.fleet.measure import RoundSample, costs_from, plan_seconds, record_texts
from outrider.bench.plan.fleet.replica_costs import ReplicaCosts, write_replica
from outrider.bench.plan.fleet.simulate import FleetRun, simulate
from outrider.bench.plan.trace import Trace
from outrider.bench.workloads import find_prompts
from outrider.config import EngineConfig
from outrider.control import Controller, Costs
from outrider.core import Arm
from outrider.engine.acceptance import read_prompts
from outrider.engine.llm import LLM
from outrider.errors import OutriderError
from outrider.quantiles import quantile
from outrider.routing import ReplicaLoad, RequestKeys, Router, token_prefix
from outrider.sampling import SamplingParams
from outrider.terminal import PlainConsole

__all__ = ["main"]

_TOLERANCE = 0.15
_AT_ONCE = (1, 2, 4)  # requests of each server while costs are measured
_FEWEST = 20  # requests of the lightest load
_KEPT_TEXTS = 8  # in a file of costs
_SHARES = (0.25, 0.5, 0.75)  # of the throughput of both servers when they are busy


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt as the servers and as the simulator get it, and what its drafts come to."""

    prompt: str
    ids: tuple[int, ...]
    drafts: dict[str, Trace]


@dataclass(frozen=True, slots=True)
class Facts:
    """What a simulated replica takes over from the loaded model."""

    arms: tuple[Arm, ...]
    pages: int
    page_size: int
    context: int


class Fleet:
    """The servers, their clients, and the requests that each of them has."""

    def __init__(self, servers: Sequence[ServerProcess], slots: int) -> None:
        self.names = [f"r{i}" for i in range(len(servers))]
        self.clients = {name: client_of(server.port) for name, server in zip(self.names, servers, strict=True)}
        self._slots = slots
        self._open = dict.fromkeys(self.names, 0)
        self._router = Router()

    def choose(self, text: Text, now: float) -> str:
        """The router's choice, by the requests that this client has open."""
        loads = {
            name: ReplicaLoad(min(count, self._slots), max(count - self._slots, 0), self._slots)
            for name, count in self._open.items()
        }
        keys = RequestKeys(prefix=token_prefix(text.ids))
        name = self._router.choose(keys, loads, now)
        self._router.sent(name, keys)
        return name

    async def stream(self, name: str, text: Text, tokens: int) -> ServedAnswer:
        self._open[name] += 1
        body = {"prompt": list(text.ids), "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        try:
            return await self.clients[name].stream(body)
        finally:
            self._open[name] -= 1

    async def close(self) -> None:
        for client in self.clients.values():
            await client.close()


def load_texts(prompts: Sequence[str], tokens: int) -> tuple[list[Text], Facts]:
    """Record what drafts come to, in this process and before anything is timed."""
    llm = LLM(speculation="auto", max_num_seqs=1, share=False)
    assert isinstance(llm.engine.policy, Controller)
    assert llm.tokenizer is not None
    ids = [tuple(llm.tokenizer.encode(prompt)) for prompt in prompts]
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=tokens, ignore_eos=True)
    drafts = record_texts(llm, ids, params)
    facts = Facts(tuple(llm.engine.policy.arms), llm.engine.pages.count, llm.engine.pages.page_size, llm.max_model_len)
    llm.close()
    return [Text(*parts) for parts in zip(prompts, ids, drafts, strict=True)], facts


@dataclass(frozen=True, slots=True)
class Busy:
    """Servers that were kept busy for a while."""

    window: tuple[float, float]
    tok_s: float
    client: float  # cores that the client used
    alone: list[ServedAnswer]  # while each server had one request


async def keep_busy(fleet: Fleet, names: Sequence[str], texts: Sequence[Text], tokens: int, seconds: float) -> Busy:
    """Keep some servers busy, each with one request at once at first, and then with more."""
    answers: list[ServedAnswer] = []
    draw = random.Random(0)

    async def one(name: str, until: float) -> None:
        while time.perf_counter() < until:
            answers.append(await fleet.stream(name, draw.choice(texts), tokens))

    began, cpu, alone = time.perf_counter(), time.process_time(), 0
    for count in _AT_ONCE:
        until = time.perf_counter() + seconds / len(_AT_ONCE)
        async with asyncio.TaskGroup() as group:
            for name in list(names) * count:
                group.create_task(one(name, until))
        alone = alone or len(answers)
    wall = time.perf_counter() - began
    tok_s = sum(answer.tokens for answer in answers) / wall
    return Busy((began, began + wall), tok_s, (time.process_time() - cpu) / wall, answers[:alone])


async def offer(fleet: Fleet, texts: Sequence[Text], load: Sequence[FleetRequest]) -> tuple[list[ServedAnswer], float, float]:
    """Send every request at its time: the answers, the seconds until the last one, and the client's share of a core."""
    began, cpu = time.perf_counter(), time.process_time()
    async with asyncio.TaskGroup() as group:
        tasks = []
        for request in load:
            await asyncio.sleep(max(began + request.at - time.perf_counter(), 0.0))
            text = texts[request.text]
            tasks.append(group.create_task(fleet.stream(fleet.choose(text, time.perf_counter()), text, request.output)))
    wall = time.perf_counter() - began
    return [task.result() for task in tasks], wall, (time.process_time() - cpu) / wall


def requests_at(rate: float, seconds: float, prompts: Sequence[tuple[int, ...]], tokens: int, seed: int) -> list[FleetRequest]:
    """Poisson arrivals of prompts at random, with answers of several lengths."""
    draw, now, load = random.Random(seed), 0.0, list[FleetRequest]()
    while (now := now + draw.expovariate(rate)) < seconds:
        text = draw.randrange(len(prompts))
        load.append(FleetRequest(now, prompts[text], draw.randint(tokens // 2, tokens), text))
    return load


def measured_row(answers: Sequence[ServedAnswer], wall: float) -> dict[str, float]:
    """The real run in numbers."""
    good = [answer for answer in answers if answer.failed is None]
    return _row([a.first_s for a in good], [a.total_s for a in good], [a.per_token_s or 0.0 for a in good],
                sum(a.tokens for a in good) / wall)  # fmt: skip


def simulated_row(result: FleetRun) -> dict[str, float]:
    """The run on paper in the same numbers."""
    return _row(result.first_s, result.total_s, result.per_token_s, result.tokens / result.seconds) | {
        "busy": result.busy_s / result.seconds / result.replicas,
        "drafting": result.drafting / result.sequence_rounds,
    }


def _row(first: Sequence[float], total: Sequence[float], per_token: Sequence[float], tok_s: float) -> dict[str, float]:
    return {
        "output_tok_s": tok_s, "median_latency_ms": 1e3 * median(total), "p99_latency_ms": 1e3 * quantile(total, 0.99),
        "median_ttft_ms": 1e3 * median(first), "median_tpot_ms": 1e3 * median(per_token),
    }  # fmt: skip


def recorded_costs(files: Sequence[Path], both: Busy, one: Busy) -> tuple[Costs, list[RoundSample], float]:
    """What a round costs while both servers are busy, the rounds that say so, and how much less it takes while one is."""
    data = [json.loads(path.read_text(encoding="utf-8")) for path in files]
    rows = [RoundSample(*row) for each in data for row in each["samples"]]
    crowded, alone = ([row for row in rows if busy.window[0] <= row.began < busy.window[1]] for busy in (both, one))
    costs = costs_from(crowded, Costs.from_dict(data[0]["costs"]))
    plain = [row for row in alone if not row.prefill]
    return costs, crowded, median(row.forward_s / costs.forward(row.rows, row.context) for row in plain)


async def real_runs(
    servers: Sequence[ServerProcess], texts: Sequence[Text], slots: int, seconds: float, tokens: int
) -> dict[str, Any]:
    """Measure costs under load, then run the three loads."""
    fleet = Fleet(servers, slots)
    with errors.status("both servers warm up") as status:
        await keep_busy(fleet, fleet.names, texts, tokens, seconds / 2)
        status.update("costs while both are busy, and while one is")
        both = await keep_busy(fleet, fleet.names, texts, tokens, seconds)
        one = await keep_busy(fleet, fleet.names[:1], texts, tokens, seconds / 2)
        rate = both.tok_s / (0.75 * tokens)
        if _SHARES[0] * rate * seconds < _FEWEST:
            raise OutriderError(
                f"two busy servers gave {both.tok_s:.0f} tokens a second: too few requests to compare; "
                "run it while nothing else runs, or with more --seconds"
            )
        runs = []
        for number, share in enumerate(_SHARES):
            status.update(f"load {share:g} of {rate:.1f} requests a second")
            load = requests_at(share * rate, seconds, [text.ids for text in texts], tokens, number)
            runs.append((share, load, *await offer(fleet, texts, load)))
    await fleet.close()
    return {"both": both, "one": one, "runs": runs}


def main(
    seconds: Annotated[float, typer.Option(min=2, help="Seconds of each load, and of measuring costs.")] = 30.0,
    tokens: Annotated[int, typer.Option(min=8, help="New tokens of a request: half as many to this many.")] = 96,
    prompts: Annotated[int, typer.Option(min=1, help="Different prompts.")] = 24,
    slots: Annotated[int, typer.Option(min=1, help="Sequences that a server runs at once.")] = 8,
    save_costs: Annotated[
        Path | None, typer.Option(help="Write the costs, as `outrider plan --fleet --costs` reads them.")
    ] = None,
    output: Annotated[Path, typer.Option(help="File for the result, as JSON.")] = Path("results/fleet_check.json"),
) -> None:
    """Two one-thread servers against their simulation: throughput and median latency at three loads, within 15 %."""
    with errors.status("recording what drafts come to"):
        texts, facts = load_texts(read_prompts(find_prompts("code"), prompts), tokens)
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{i}.json" for i in range(2)]
        os.environ["OUTRIDER_CACHE"] = folder
        with errors.status("the servers load"):
            servers = [
                ServerProcess(["--output", str(file), "--slots", str(slots)], ("benchmarks.fleet_server",)) for file in files
            ]
        try:
            real = asyncio.run(real_runs(servers, texts, slots, seconds, tokens))
        finally:
            for server in servers:
                server.stop()
        costs, samples, alone = recorded_costs(files, real["both"], real["one"])
    sizes = EngineConfig(max_num_seqs=slots, page_size=facts.page_size)
    paper = ReplicaCosts(
        costs, facts.arms, [text.drafts for text in texts], sizes, slots * facts.pages, facts.context,
        plan_s=plan_seconds(samples), per_machine=2, alone=alone,
    )  # fmt: skip
    paper = replace(paper, request_s=_request_seconds(paper, real["one"].alone, texts, tokens))
    rows = [_compare(share, load, answers, wall, client, paper) for share, load, answers, wall, client in real["runs"]]
    _show(rows)
    worst = max(abs(row["error"][name]) for row in rows for name in ("output_tok_s", "median_latency_ms"))
    report = {
        "what": "two `outrider serve` processes of one thread (Pyrite, auto) behind the router, and their simulation",
        "loads": rows, "worst_error": worst, "tolerance": _TOLERANCE,
        "client_cores_while_costs_were_measured": real["both"].client,
        "alone": alone,
        "request_s": paper.request_s, "plan_s": paper.plan_s, "rounds_timed": len(samples), "passed": worst <= _TOLERANCE,
    }  # fmt: skip
    if save_costs is not None:
        few = replace(paper, texts=paper.texts[:_KEPT_TEXTS], measured=environment() | {"model": "pyrite"})
        write_replica(save_costs, few)
    close_report(report, output)


def _request_seconds(paper: ReplicaCosts, alone: Sequence[ServedAnswer], texts: Sequence[Text], tokens: int) -> float:
    """From a request's arrival to the engine's queue and back: what the simulated first token of a lone request lacks."""
    load = [FleetRequest(10.0 * i, text.ids, tokens, i) for i, text in enumerate(texts)]
    return max(median(answer.first_s for answer in alone) - median(simulate(load, paper, 1).first_s), 0.0)


def _compare(
    share: float, load: Sequence[FleetRequest], answers: Sequence[ServedAnswer], wall: float, client: float, paper: ReplicaCosts
) -> dict[str, Any]:
    real, simulated = measured_row(answers, wall), simulated_row(simulate(load, paper, 2))
    error = {name: simulated[name] / real[name] - 1.0 for name in real}
    failed = [answer.failed for answer in answers if answer.failed is not None]
    return {
        "load": share, "requests": len(load), "failed": failed, "client_cores": client, "measured": real,
        "simulated": simulated, "error": error,
    }  # fmt: skip


def _show(rows: Sequence[dict[str, Any]]) -> None:
    console = PlainConsole(stderr=True)
    for row in rows:
        console.print(
            f"load {row['load']:g} of the busy throughput, {row['requests']} requests, client {row['client_cores']:.2f} cores"
        )
        for name, error in row["error"].items():
            console.print(
                f"  {name:18} measured {row['measured'][name]:9.2f}  simulated {row['simulated'][name]:9.2f}  {error:+.1%}"
            )


if __name__ == "__main__":
    run(main)
