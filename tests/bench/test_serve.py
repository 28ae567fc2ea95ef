"""`outrider bench serve` against a stand-in server, over real HTTP on the loopback."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from outrider.bench.client import Client, Endpoint, Level, ServedAnswer
from outrider.bench.serve import ServerLoads, bench_server, crossover, parse_goodput, summarise_level
from outrider.cli import app
from outrider.errors import InvalidParameter, OutriderError
from tests.support.openai_server import stand_in

pytest.importorskip("httpx", reason="bench serve needs httpx: pip install 'outrider[bench]'")
QUIET = Console(file=io.StringIO())


def serve(*arguments: str) -> tuple[int, dict[str, object]]:
    done = CliRunner().invoke(app, ["bench", "serve", *arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, json.loads(done.stdout.splitlines()[-1])


def test_concurrency_and_the_numbers_it_reports(tmp_path: Path) -> None:
    with stand_in() as server:
        code, result = serve(
            "--url", f"{server.url}/v1/", "--concurrency", "1,3", "--num-prompts", "9", "--max-tokens", "10",
            "--output", str(tmp_path / "deep" / "out.json"), "--extra-body", '{"speculation": false}',
        )  # fmt: skip
    assert code == 0
    assert [row["max_concurrency"] for row in result["rows"]] == [1, 3]  # type: ignore[index]
    for row in result["rows"]:  # type: ignore[attr-defined]
        assert (row["completed"], row["failed"], row["failures"]) == (9, 0, {})
        assert (row["total_input_tokens"], row["total_output_tokens"], row["tokens_counted_by"]) == (63, 90, "server")
        assert row["output_throughput"] == pytest.approx(90 / row["duration"])
        assert row["mean_ttft_ms"] <= row["mean_e2el_ms"]
        assert row["median_tpot_ms"] >= 0
        assert row["p99_itl_ms"] >= row["median_itl_ms"] >= 0
    assert len(server.bodies) == 1 + 18  # one to warm up
    assert {body["model"] for body in server.bodies} == {"stand-in"}
    assert all(body["stream"] and body["speculation"] is False and body["temperature"] == 0.0 for body in server.bodies)
    assert json.loads((tmp_path / "deep" / "out.json").read_text())["rows"] == result["rows"]
    assert {"device", "versions", "command"} <= result.keys()


def test_as_many_in_flight_as_asked_for_and_no_more() -> None:
    with stand_in(together=3) as server:
        code, _ = serve("--url", server.url, "--concurrency", "3", "--num-prompts", "9", "--max-tokens", "4")
    assert code == 0
    assert server.busiest == 3


def test_rates_chat_goodput_and_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_API_KEY", "secret")
    with stand_in(usage=False) as server:
        code, result = serve(
            "--url", server.url, "--rate", "200,inf", "--num-prompts", "6", "--chat", "--max-tokens", "9",
            "--goodput", "ttft:60000", "tpot:60000",
        )  # fmt: skip
    assert code == 0
    assert set(server.keys) == {"Bearer secret"}
    assert "secret" not in json.dumps(result)
    assert all("messages" in body for body in server.bodies)
    steady, burst = result["rows"]  # type: ignore[misc]
    assert (steady["request_rate"], burst["request_rate"]) == (200.0, "inf")
    for row in (steady, burst):
        assert (row["tokens_counted_by"], row["total_output_tokens"]) == ("pieces", 6 * 3)
        assert row["goodput_share"] == 1.0
        assert row["request_goodput"] == row["request_throughput"]
        assert row["goodput_limits_ms"] == {"ttft": 60000.0, "tpot": 60000.0}


def test_refused_requests_are_counted_and_fail_the_run() -> None:
    with stand_in(refuse=2) as server:
        code, result = serve("--url", server.url, "--num-prompts", "4", "--max-tokens", "4")
    assert code == 1
    row = result["rows"][0]  # type: ignore[index]
    assert (row["completed"], row["failed"]) == (2, 2)
    assert row["failures"] == {"HTTP 503: too busy": 2}


def test_a_stream_that_breaks_off_has_failed() -> None:
    with stand_in(cut=True) as server:
        code, result = serve("--url", server.url, "--num-prompts", "2", "--max-tokens", "8")
    assert code == 1
    assert result["rows"][0]["failures"] == {"the stream broke off": 2}  # type: ignore[index]


def test_an_interrupted_run_keeps_its_finished_loads() -> None:
    with stand_in(stall=1 + 3) as server:
        arguments = ["--url", server.url, "--concurrency", "1,2,3", "--num-prompts", "3", "--max-tokens", "4"]
        command = [sys.executable, "-m", "outrider.cli", "bench", "serve", *arguments]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            with server.lock:
                assert server.lock.wait_for(lambda: len(server.bodies) == 1 + 3 + 2, timeout=120)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert [row["max_concurrency"] for row in json.loads(out.splitlines()[-1])["rows"]] == [1]
    assert "Traceback" not in err


def test_a_client_may_leave_before_the_end_and_come_back() -> None:
    async def use(url: str) -> tuple[ServedAnswer, ServedAnswer, tuple[int, bytes], int]:
        async with Client(Endpoint(url), address="127.0.0.2") as client:
            body = {"prompt": "x", "max_tokens": 400}
            left, whole = await client.stream(body, leave_after=1), await client.stream(body)
            return left, whole, await client.get("/v1/models"), await client.post("/v1/completions", json.dumps(body).encode())

    with stand_in() as server:
        left, whole, (status, data), posted = asyncio.run(use(server.url))
    assert left.cancelled
    assert left.failed is None
    assert left.text == "word " * 4
    assert not whole.cancelled
    assert (whole.status, whole.failed, whole.tokens, whole.text) == (200, None, 400, "word " * 400)
    assert (status, json.loads(data)["object"], posted) == (200, "list", 200)


def test_nobody_there_is_one_line() -> None:
    with stand_in() as server:
        url = server.url
    with pytest.raises(OutriderError, match="is a server running and ready there"):
        bench_server(Endpoint(url), ServerLoads([Level(concurrency=1)], ["x"], {}), QUIET)


def test_speculation_on_and_off_take_turns_at_each_load() -> None:
    with stand_in() as server:
        code, result = serve(
            "--url", server.url, "--compare", "--concurrency", "1,2", "--num-prompts", "2", "--max-tokens", "8", "--devices", "2"
        )
    assert code == 0
    off = [body.get("speculation") is False for body in server.bodies]
    assert off == [False, True, *2 * [*2 * [False], *4 * [True], *2 * [False]]]  # one each to warm up
    rows = result["rows"]
    assert [(row["max_concurrency"], row["speculation"]) for row in rows] == [(1, True), (1, False), (2, True), (2, False)]  # type: ignore[index]
    for fast, plain in zip(rows[::2], rows[1::2], strict=True):  # type: ignore[index]
        assert fast["speedup"] == pytest.approx(fast["output_throughput"] / plain["output_throughput"])
        assert fast["completed"] == plain["completed"] == 4
        assert fast["output_throughput_per_device"] == pytest.approx(fast["output_throughput"] / 2)
        assert fast["output_throughput_per_user"] > 0
    assert result["crossover"] == crossover(rows)  # type: ignore[arg-type]


def test_a_second_server_may_be_the_one_without_speculation() -> None:
    with stand_in() as server, stand_in() as plain:
        arguments = ["--url", server.url, "--compare", "--plain-url", plain.url, "--num-prompts", "1", "--max-tokens", "4"]
        code, _ = serve(*arguments)
    assert code == 0
    assert len(server.bodies) == len(plain.bodies) == 1 + 2
    assert not any("speculation" in body for body in [*server.bodies, *plain.bodies])


@pytest.mark.parametrize(
    ("ratios", "meeting"),
    [
        ([(1, 2.0), (4, 1.5), (16, 0.5)], 8.0),
        ([(1, 1.2), (8, 1.1)], None),
        ([(2, 0.9), (4, 1.3)], 0.0),
        ([(4, 0.9), (1, 1.1)], 2.0),
    ],
)
def test_the_load_where_they_meet(ratios: list[tuple[int, float]], meeting: float | None) -> None:
    rows = [{"max_concurrency": load, "speculation": on, "speedup": ratio} for load, ratio in ratios for on in (True, False)]
    assert crossover(rows) == (meeting if meeting is None else pytest.approx(meeting))


def test_goodput_counts_requests_within_every_limit() -> None:
    answers = [
        ServedAnswer(first_s=0.1, total_s=0.1 + 0.01 * 10, tokens=11, counted=True),  # 10 ms per token
        ServedAnswer(first_s=0.3, total_s=0.4, tokens=11, counted=True),  # late
        ServedAnswer(first_s=0.1, total_s=1.1, tokens=11, counted=True),  # slow
        ServedAnswer(first_s=0.1, total_s=0.1, tokens=1, counted=True),  # one token: no time per token
        ServedAnswer(failed="HTTP 500"),
    ]
    row = summarise_level(Level(rate=2.0), answers, 2.0, parse_goodput(["ttft:200,tpot:50"]))
    assert (row["completed"], row["failed"]) == (4, 1)
    assert row["request_goodput"] == 1.0
    assert row["goodput_share"] == 0.4
    assert row["mean_tpot_ms"] == pytest.approx((10 + 10 + 100) / 3)
    assert row["median_ttft_ms"] == pytest.approx(100.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--goodput", "ttft"], "'ttft' is not one of"),
        (["--goodput", "speed:3"], "'speed:3' is not one of"),
        (["--goodput", "ttft:-1"], "'ttft:-1' is not one of"),
        (["tpot:50"], "follows no --goodput"),
        (["--rate", "2", "--concurrency", "2"], "two ways"),
        (["--rate", "0"], "above 0"),
        (["--plain-url", "http://127.0.0.1:9"], "is for --compare"),
        (["--concurrency", "x"], "numbers separated by commas"),
        (["--extra-body", "[]"], "JSON object"),
        (["--workload", "random"], "need a model at hand"),
    ],
)
def test_bad_options_say_what_is_wrong(arguments: list[str], message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        serve(*arguments)
