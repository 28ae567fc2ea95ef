"""`outrider serve --tensor-parallel-size`: it serves, and ends with all its processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.support.processes import children, command, is_running
from tests.support.server import Process, until


@pytest.fixture
def server() -> Iterator[Process]:
    process = Process("--method", "ngram", "-tp", "2", "--device", "cpu")
    process.hear("ready on")
    yield process
    process.popen.kill()
    process.wait()
    assert process.popen.stderr is not None
    process.popen.stderr.close()


def ranks(server: Process) -> list[int]:
    found = [child for child in children(server.popen.pid) if b"outrider.engine.rank" in command(child)]
    assert len(found) == 1
    return found


def test_a_rank_that_dies_ends_the_server(server: Process) -> None:
    assert "in each of 2 ranks (tensor parallel by gloo)" in server.stderr
    body = {"prompt": "def f(", "max_tokens": 3, "temperature": 0}
    assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200
    (rank,) = ranks(server)
    os.kill(rank, signal.SIGKILL)
    began = time.monotonic()
    code = server.wait()
    assert time.monotonic() - began < 10, "what is promised"
    assert code == 1
    assert (
        f"rank 1 of the model (process {rank}) was killed by SIGKILL; the others were ended, load the model again"
        in server.stderr
    )
    assert not is_running(rank)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.exhaustive)])
def test_a_server_that_is_ended_leaves_nothing_behind(server: Process, number: int) -> None:
    found = ranks(server)
    code = server.end(number)
    assert code == (0 if number == signal.SIGINT else -number)
    until(lambda: not any(map(is_running, found)), 10)
