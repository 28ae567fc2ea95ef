"""Replicas on Ray: one small cluster of this machine alone, from one replica to three, with one killed, and back to one."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from benchmarks.fleet.load import ConversationPlan, replicas_of, run_conversations, unequal
from outrider.cli import app
from outrider.errors import InvalidParameter
from outrider.routing import RequestKeys, Router
from outrider.serve.flags import ServeFlags, flags_of
from outrider.serve.fleet.ray_command import arguments_of
from outrider.serve.fleet.upstream import Call
from tests.support.server import Process, until

SCALING = {"scaling": {"min_replicas": 1, "max_replicas": 3, "up_s": 1, "down_s": 3}}


def our_ray() -> Any:
    """Our module for Ray, where Ray is installed. What Ray warns of while it is imported is no matter of ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("ray.serve", reason="Ray is not installed: pip install 'outrider[ray]'")
        from outrider.serve.fleet import ray
    return ray


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    our_ray()
    process = Process(
        "--data-parallel-backend", "ray", "--data-parallel-config", json.dumps(SCALING), "--threads", "1", "--method", "ngram",
        "--kv-memory", "64MiB", "--max-num-seqs", "4", OUTRIDER_CACHE=str(tmp_path_factory.mktemp("cache")),
    )  # fmt: skip
    try:
        process.hear("ready on http")
        yield process
    finally:
        try:
            if process.popen.poll() is None:
                process.end(signal.SIGTERM)
        finally:
            _end_group(process)


@pytest.mark.slow
def test_one_three_and_one_replica_with_one_killed(fleet: Process) -> None:
    until(lambda: _ready(fleet) == 1)
    victims: list[str] = []

    def kill() -> None:
        name, state = max(replicas_of(fleet.url).items(), key=lambda item: item[1]["sequences"])
        victims.append(name)
        os.kill(state["pid"], signal.SIGKILL)

    async def grow() -> None:
        load = asyncio.create_task(run_conversations(fleet.url, ConversationPlan(10_000, 1, streams=24, tokens=32, letters=60)))
        async with asyncio.timeout(120):
            while await asyncio.to_thread(_ready, fleet) < 3:
                await asyncio.sleep(0.3)
        load.cancel()

    asyncio.run(grow())
    outcome = asyncio.run(run_conversations(fleet.url, ConversationPlan(12, 4, cancel=0.2, streams=12, tokens=24), kill))
    report = outcome.report(victims[0])
    assert report["lost"] == 0, report
    assert report["finished"] >= len(outcome.answers) // 2
    assert unequal(outcome) == 0
    until(lambda: _ready(fleet) == 1, 120)


@pytest.mark.slow
def test_every_route_is_served_and_the_end_leaves_no_process(fleet: Process) -> None:
    """The last test of this server."""
    health = httpx.get(fleet.url + "/health", trust_env=False).json()
    assert health["status"] == "ok"
    assert health["same_tokens"]
    replica = next(iter(replicas_of(fleet.url).values()))
    assert replica["fingerprint"]["threads"] == 1
    assert "outrider:num_requests_running{replica=" in httpx.get(fleet.url + "/metrics", trust_env=False).text
    body = {"prompt": "def main(", "max_tokens": 4, "temperature": 0}
    answer = httpx.post(fleet.url + "/v1/completions", json=body, timeout=60, trust_env=False).json()
    assert answer["system_fingerprint"].endswith(replica["fingerprint"]["digest"])
    assert httpx.post(fleet.url + "/v1/completions", json={"prompt": 5}, trust_env=False).status_code == 400
    assert fleet.end(signal.SIGTERM) == 0
    until(lambda: not os.path.exists(f"/proc/{replica['pid']}"))


def test_the_router_of_ray_follows_prefixes_and_loads() -> None:
    ray = our_ray()
    router = object.__new__(ray.FleetRouter)
    router.initialize_state(capacity=4, spill=0.25)
    replicas = [SimpleNamespace(replica_id=SimpleNamespace(unique_id=name), routing_stats={}) for name in "ab"]

    def choose(*prefix: int) -> str:
        call = Call("POST", "/", keys=RequestKeys(prefix=prefix))
        request = SimpleNamespace(
            args=(call,), routing_context=SimpleNamespace(), metadata=SimpleNamespace(internal_request_id=str(prefix))
        )
        first = asyncio.run(router.choose_replicas(replicas, request))[0][0].replica_id
        router.on_request_routed(request, first, None)
        return str(first.unique_id)

    home = choose(1)
    assert choose(1, 2) == home, "the prefix is known there"
    assert choose(1, 2, 3) != home, "two of four sequences are too many more than none"
    assert isinstance(router._chooser, Router)
    for prefix in ((1,), (1, 2)):
        router.on_request_completed(replicas[0].replica_id, str(prefix))
    assert choose(1, 9) == home
    replicas[0].routing_stats = replicas[1].routing_stats = {"running": 4, "waiting": 4}
    assert router._load("a", replicas[0].routing_stats).waiting == 4, "what other front doors sent counts"
    router._forget(home)
    assert not router._sequences[home]


def test_the_policy_wants_what_brings_the_load_to_the_target() -> None:
    policy = our_ray().WantedReplicas(capacity=4, rule={"max_replicas": 3, "target": 0.5})
    metrics = {"running": {"a": 4.0, "b": 1.0}, "waiting": {"a": 0.0, "b": 0.0}}
    assert policy(SimpleNamespace(aggregated_metrics=metrics, total_num_requests=0))[0] == 3
    assert policy(SimpleNamespace(aggregated_metrics=None, total_num_requests=3.0))[0] == 2
    assert policy(SimpleNamespace(aggregated_metrics={}, total_num_requests=0.0))[0] == 1


def test_flags_reach_the_replicas() -> None:
    flags = ServeFlags(method="ngram", data_parallel_size=2, threads=4, api_key=("k",), max_num_seqs=5)
    arguments = arguments_of(flags, 1)
    assert arguments["scaling"] == {"min_replicas": 2, "max_replicas": 2}
    assert (arguments["num_cpus"], arguments["flags"]["api_key"]) == (2.0, ["k"])
    assert flags_of(arguments["flags"]).max_num_seqs == 5
    json.dumps(arguments)
    plan = our_ray().FleetPlan.parse(arguments)
    assert (plan.serve_flags().threads, plan.serve_flags().device) == (4, "cpu")


def test_wrong_arguments_say_what_to_write() -> None:
    with pytest.raises(InvalidParameter, match=r"is no flag of outrider serve \(did you mean 'max_num_seqs'\?\)"):
        flags_of({"max_num_seq": 5})
    with pytest.raises(InvalidParameter, match="max_num_seqs"):
        flags_of({"max_num_seqs": "many"})
    ray = our_ray()
    with pytest.raises(InvalidParameter, match="known are doors, flags"):
        ray.FleetPlan.parse({"replicas": 3})
    with pytest.raises(InvalidParameter, match="scaling: knows min_replicas"):
        ray.FleetPlan.parse({"scaling": {"most": 3}})
    with pytest.raises(InvalidParameter, match="--api-key"):
        ray.FleetPlan.parse({}).serve_flags()


def test_where_ray_is_missing_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "outrider.serve.fleet.ray", raising=False)
    result = CliRunner().invoke(app, ["serve", "--data-parallel-backend", "ray", "--port", "0"])
    assert isinstance(result.exception, InvalidParameter)
    assert str(result.exception) == "ray: needs ray: pip install 'outrider[ray]'"


def test_a_port_in_use_is_said_before_ray_starts() -> None:
    our_ray()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        result = CliRunner().invoke(app, ["serve", "--data-parallel-backend", "ray", "--port", port])
    assert isinstance(result.exception, InvalidParameter)
    assert str(result.exception) == f"--port: {port} is in use on 127.0.0.1; choose another, or 0 for any free one"


def _ready(fleet: Process) -> int:
    return sum(bool(replica["status"] == "ok") for replica in replicas_of(fleet.url).values())


def _end_group(process: Process) -> None:
    """End the cluster's processes where the server was killed before it could."""
    assert process.popen.stderr is not None
    process.popen.stderr.close()
    if process.popen.poll() is None:
        process.popen.kill()
        process.popen.wait()
