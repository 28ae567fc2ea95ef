"""`outrider serve --data-parallel-size 2` as users start it: equal texts, a replica that is killed, a drain, nothing left."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from benchmarks.fleet.load import ConversationPlan, run_conversations, unequal
from outrider import LLM
from outrider.cli import app
from outrider.errors import InvalidParameter
from outrider.serve.flags import ServeFlags
from outrider.serve.fleet.command import plan_of
from tests.support.server import Process, until

KEY = {"Authorization": "Bearer secret"}
ANSWER = {"prompt": "def main(", "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    cache = str(tmp_path_factory.mktemp("cache"))
    process = Process(
        "--data-parallel-size", "2", "--threads", "2", "--method", "ngram", "--kv-memory", "128MiB", "--max-num-seqs", "4",
        "--api-key", "secret", "--api-key", "other", OUTRIDER_CACHE=cache, OUTRIDER_DRAIN_TIMEOUT="20",
    )  # fmt: skip
    try:
        process.hear("ready on http")
        yield process
    finally:
        if process.popen.poll() is None:
            process.end(signal.SIGTERM)
        assert process.popen.stderr is not None
        process.popen.stderr.close()


def client_of(fleet: Process) -> httpx.Client:
    return httpx.Client(base_url=fleet.url, headers=KEY, timeout=60, trust_env=False)


def state_of(fleet: Process) -> dict[str, dict[str, int | str]]:
    with client_of(fleet) as client:
        replicas: dict[str, dict[str, int | str]] = client.get("/replicas").json()["replicas"]
        return replicas


@pytest.mark.slow
def test_every_route_is_served_and_keys_are_checked(fleet: Process) -> None:
    assert "2 replicas share one fingerprint; 4 sequences at once on each" in fleet.stderr
    assert httpx.get(fleet.url + "/health", trust_env=False).json() == {"status": "ok", "replicas": 2, "same_tokens": True}
    for path in ("/v1/models", "/replicas", "/metrics", "/stats"):
        assert httpx.get(fleet.url + path, trust_env=False).status_code == 401
    with client_of(fleet) as client:
        prints = [replica["fingerprint"] for replica in client.get("/replicas").json()["replicas"].values()]
        assert prints[0] == prints[1]
        assert prints[0]["threads"] == 1, "two threads are shared out among two replicas"
        answer = client.post("/v1/completions", json=ANSWER)
        assert answer.json()["system_fingerprint"].endswith(prints[0]["digest"])
        metrics = client.get("/metrics").text
        assert all(f'outrider:num_requests_running{{replica="{name}"' in metrics for name in "01")
        assert client.get("/stats").json()["replicas"].keys() == {"0", "1"}
        assert client.post("/forget", json={"cache_salt": "s"}).json() == {"texts": 0, "tokens": 0}


@pytest.mark.slow
def test_a_stored_answer_is_found_on_its_replica(fleet: Process) -> None:
    with client_of(fleet) as client:
        for number in range(4):
            stored = client.post("/v1/responses", json={"input": f"{number}", "max_output_tokens": 1})
            if stored.status_code == 400:
                pytest.skip("the bundled model has no chat template")
            assert client.get(f"/v1/responses/{stored.json()['id']}").status_code == 200


@pytest.mark.slow
def test_texts_equal_solo_runs_and_a_killed_replica_costs_nobody_else(fleet: Process) -> None:
    victims: list[str] = []

    def kill() -> None:
        name, state = max(state_of(fleet).items(), key=lambda item: item[1]["sequences"])
        victims.append(name)
        os.kill(int(state["pid"]), signal.SIGKILL)

    plan = ConversationPlan(6, 4, cancel=0.2, streams=4, tokens=16)
    outcome = asyncio.run(run_conversations(fleet.url, plan, kill, headers=KEY))
    report = outcome.report(victims[0])
    assert report["lost"] == 0, report
    assert report["finished"] >= plan.requests // 2
    assert unequal(outcome) == 0
    until(lambda: state_of(fleet)[victims[0]]["status"] == "ok")
    assert state_of(fleet)[victims[0]]["starts"] == 2


@pytest.mark.slow
def test_a_flood_of_one_client_does_not_hold_up_another(fleet: Process) -> None:
    """Behind the front door clients are told apart: one that fills every slot loses one to the other."""
    flood = ANSWER | {"stream": True, "max_tokens": 1000, "ignore_eos": True, "n": 16}
    with ExitStack() as stack:
        client = stack.enter_context(client_of(fleet))
        streams = [stack.enter_context(client.stream("POST", "/v1/completions", json=flood)) for _ in range(2)]
        assert all(stream.status_code == 200 for stream in streams), "the first tokens are there"
        with httpx.Client(base_url=fleet.url, headers={"x-api-key": "other"}, timeout=60, trust_env=False) as other:
            assert other.post("/v1/completions", json=ANSWER).status_code == 200
            assert other.get("/stats").json()["waiting"] > 0, "it went before sequences that had waited for longer"


@pytest.mark.slow
def test_a_drain_finishes_what_runs_and_leaves_no_process(fleet: Process) -> None:
    """The last test of this server."""
    pids = [int(replica["pid"]) for replica in state_of(fleet).values()]
    body = ANSWER | {"stream": True, "max_tokens": 200, "ignore_eos": True}
    with client_of(fleet) as client, client.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        fleet.popen.send_signal(signal.SIGTERM)
        until(lambda: httpx.get(fleet.url + "/health", trust_env=False).json()["status"] == "draining")
        refused = httpx.post(fleet.url + "/v1/completions", json=ANSWER, headers=KEY, trust_env=False)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        events = [line for line in lines if line]
    assert events[-1] == "data: [DONE]"
    assert json.loads(events[-2][6:])["choices"][0]["finish_reason"] == "length"
    assert fleet.wait() == 0
    assert not any(map(_exists, pids))


def test_a_replica_ends_with_its_front_door(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    command = [sys.executable, "-m", "outrider.serve.fleet.replica", str(read_end), "serve", "--uds", str(tmp_path / "a")]
    with subprocess.Popen(command, pass_fds=[read_end]) as replica:
        os.close(read_end)
        os.close(write_end)  # as when the process that holds it dies
        assert replica.wait(60) in (0, -signal.SIGTERM, -signal.SIGKILL)


def test_threads_and_memory_are_shared_out() -> None:
    flags = ServeFlags(data_parallel_size=3, threads=7, device="cpu", max_num_seqs=5, kv_memory="3MiB")
    plan = plan_of(flags, ["serve", "--data-parallel-size", "3"])
    assert plan.arguments[3:] == ("--data-parallel-size", "1", "--threads", "2", "--kv-memory", str(2**20))
    both = ServeFlags(data_parallel_size=3, threads=7, device="cpu", memory="3GiB", kv_memory="3MiB")
    assert plan_of(both, []).arguments[4:] == ("--memory", str(2**30), "--kv-memory", str(2**20))
    assert (plan.replicas, plan.capacity) == (3, 5)
    assert plan_of(ServeFlags(data_parallel_size=4, threads=2, device="cpu"), []).arguments[2:4] == ("--threads", "1")


def test_what_cannot_be_served_says_what_to_type(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match="outrider serve --data-parallel-size N"):
        LLM(data_parallel_size=2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = CliRunner().invoke(app, ["serve", "--data-parallel-size", "2", "--port", str(taken.getsockname()[1])])
        assert isinstance(result.exception, InvalidParameter)
        assert "is in use on 127.0.0.1; choose another" in str(result.exception)
    place = tmp_path / "a.sock"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(place))
        other.listen()
        result = CliRunner().invoke(app, ["serve", "--uds", str(place)])
        assert "is in use; choose another" in str(result.exception)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
