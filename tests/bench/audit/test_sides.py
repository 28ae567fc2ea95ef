"""The sides of an audit beyond servers that run: Transformers, commands that are started, and the command line."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import outrider
from outrider.bench.audit.audit import AuditPlan, audit
from outrider.bench.audit.cases import SCHEMA, AuditSize
from outrider.bench.audit.http_side import HttpSide
from outrider.bench.audit.launched import launched
from outrider.bench.audit.records import Answer, AuditRequest, Choice
from outrider.bench.audit.transformers_side import TransformersSide, load_sides
from outrider.bench.audit.verdict import DIFFERENT, LOSSLESS, SAME
from outrider.bench.client import Endpoint
from outrider.cli import app
from outrider.errors import InvalidParameter, ModelError, OutriderError
from outrider.heads.export import ExportOptions, export_folder
from outrider.model.bundled import bundled_model
from tests.support.openai_server import stand_in

PROMPTS = ["def load(path):\n", "import os\nimport sys\n\n\nclass Config:\n"]
SMALL = AuditSize(prompts=2, few=1, tokens=24, concurrent=4, samples=0)
# A server that answers /v1/models, and says where its child process is.
SERVER = """
import subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
open(sys.argv[2], "w").write(str(child.pid))
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/v1/models" else 404)
        self.end_headers()
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The draft model, which is small, as Transformers loads it."""
    out = tmp_path_factory.mktemp("export") / "draft"
    export_folder(bundled_model() / "draft", out, ExportOptions("float32"))
    return out


@pytest.fixture(scope="module")
def sides(folder: Path) -> tuple[TransformersSide, TransformersSide]:
    return load_sides(folder, None, 4, "float32")


def test_prompt_lookup_of_transformers_is_lossless(sides: tuple[TransformersSide, TransformersSide]) -> None:
    result = audit(*sides, AuditPlan(PROMPTS, SMALL))
    assert result["verdict"] in (SAME, LOSSLESS), result["reasons"]
    assert result["kinds"]["greedy"]["equal"] == result["kinds"]["greedy"]["compared"] == 2 + 4
    assert result["kinds"]["concurrent"]["not_supported"] == "these sides take one request at a time"
    assert "presence_penalty" in next(iter(result["kinds"]["penalties"]["not_supported"]))
    assert result["kinds"]["logprobs"]["largest_logprob_gap"] < 1e-3
    assert result["acceptance"] is None
    assert set(result["speed"]) == {"greedy", "seeded"}


def test_a_model_that_says_something_else_is_detected(sides: tuple[TransformersSide, TransformersSide]) -> None:
    plain, other = sides
    wrong = TransformersSide("wrong", other._model, other._tokenizer, {"suppress_tokens": list(range(200, 400))})
    result = audit(plain, wrong, AuditPlan(PROMPTS, SMALL))
    assert result["verdict"] == DIFFERENT
    assert any(reason.startswith("greedy") for reason in result["reasons"])


def test_a_model_that_is_sped_up_is_audited_against_its_class(sides: tuple[TransformersSide, TransformersSide]) -> None:
    """It returns no logits, so samples are told apart by the ids of their tokens."""
    model, tokenizer = sides[0]._model, sides[0]._tokenizer
    size = AuditSize(prompts=1, few=1, tokens=24, concurrent=0, samples=40, sampled_prompts=2)
    with outrider.speed_up(model, tokenizer, "ngram", native=False, calibration_s=0, max_num_seqs=4) as fast:
        sound = audit(sides[0], TransformersSide("outrider", fast, tokenizer), AuditPlan(PROMPTS, size))
        warm = TransformersSide("outrider", fast, tokenizer, {"temperature": 3.0})
        planted = audit(sides[0], warm, AuditPlan(PROMPTS, replace(size, few=1, tokens=4)))
    assert sound["verdict"] in (SAME, LOSSLESS), sound["reasons"]
    assert "output_logits" in next(iter(sound["kinds"]["logprobs"]["not_with_speculation"]))
    assert 70 <= sound["sampling"]["samples"] <= 80
    assert {"first_tokens_between_sides", "later_tokens_between_sides"} <= sound["sampling"].keys()
    assert planted["verdict"] == DIFFERENT
    assert any("tokens differ between the sides" in reason for reason in planted["reasons"])


def test_what_generate_returns(sides: tuple[TransformersSide, TransformersSide]) -> None:
    plain, lookup = sides

    def ask(side: TransformersSide, **changes: Any) -> Any:
        return asyncio.run(side.answer(AuditRequest(PROMPTS[0], 12, **changes)))

    (choice,) = ask(plain, logprobs=3).choices
    assert choice.tokens is not None
    assert choice.ids is not None
    assert len(choice.tokens) == len(choice.ids) == 12
    assert "".join(token.text for token in choice.tokens) == choice.text
    assert all(token.logprob == max(token.top.values()) for token in choice.tokens)
    seeded = [ask(plain, temperature=1.0, seed=seed, n=2) for seed in (1, 1, 2)]
    assert seeded[0].choices == seeded[1].choices != seeded[2].choices
    assert len({choice.text for choice in seeded[0].choices}) == 2
    stop = choice.text.split()[1]
    stopped = ask(plain, stop=(stop,)).choices[0]
    assert (stopped.text, stopped.finish) == (choice.text.partition(stop)[0], "stop")
    ended = TransformersSide("ended", plain._model, plain._tokenizer, {"sequence_bias": [[[0], 1000.0]]})
    assert ask(ended, logprobs=1).choices[0] == Choice("", "stop", (), ())  # the first token ends the text
    assert ask(lookup, temperature=1.0, n=2).refused is not None
    assert ask(plain, schema=SCHEMA).refused == "generate takes no JSON schema"


def test_folders_that_transformers_cannot_load(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="Transformers cannot load"):
        load_sides(tmp_path, None, 4, "auto")


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "server.py").write_text(SERVER)
    return f"{sys.executable} {tmp_path / 'server.py'} {{port}} {tmp_path / 'pid'}"


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_server_that_is_started_ends_with_its_children(script: str, tmp_path: Path) -> None:
    with launched(script, 30) as url:
        assert url.startswith("http://127.0.0.1:")
        pid = int((tmp_path / "pid").read_text())
        assert is_running(pid)
    for _ in range(500):
        if not is_running(pid):
            break
        os.sched_yield()
        asyncio.run(asyncio.sleep(0.01))
    assert not is_running(pid)


def test_servers_that_do_not_start() -> None:
    with pytest.raises(InvalidParameter, match=r"\{port\}"), launched("true", 1):
        pass
    with pytest.raises(OutriderError, match="cannot be started"), launched("/nowhere/server {port}", 1):
        pass
    command = f"""{sys.executable} -c "import sys; print('no model'); sys.exit(3)" {{port}}"""
    with pytest.raises(OutriderError, match="ended with 3 before it served: no model"), launched(command, 30):
        pass


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "needs one of --self, --url, --command and --transformers"),
        (["--self", "--url", "http://x"], "needs one of"),
        (["--url", "http://127.0.0.1:1"], "--plain-url: is missing"),
        (["--url", "http://127.0.0.1:1", "--plain-body", "[]"], "JSON object"),
        (["--transformers", "x"], "needs one of --assistant and --prompt-lookup"),
        (["--command", "serve", "--plain-body", "{}"], "must hold"),
        (["--self", "--workload", "nothing"], "neither a workload"),
    ],
)
def test_mistakes_are_named(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["audit", *arguments])
    assert isinstance(result.exception, OutriderError)
    assert message in str(result.exception)


def test_what_a_server_does_by_default_is_switched_off_unless_the_request_asks_for_it() -> None:
    """A penalty by default turns choices that the returned log probabilities then do not explain."""
    sent: list[dict[str, Any]] = []

    class Recording(HttpSide):
        async def _send(self, body: dict[str, object]) -> Answer:
            sent.append(dict(body))
            return Answer((Choice("x"),), 1, 1.0)

    side = Recording("plain", Endpoint("http://127.0.0.1:9"))
    for request in (AuditRequest("x", 1), AuditRequest("x", 1, repetition_penalty=1.2)):
        asyncio.run(side.answer(request))
    plain, penalised = ([body[name] for name in ("repetition_penalty", "repeat_penalty")] for body in sent)
    assert plain == [1.0, 1.0]
    assert penalised == [1.2, 1.2]
    assert sent[0]["top_p"] == 1.0
    assert sent[0]["min_p"] == 0.0


def test_redirects_are_not_followed() -> None:
    """An audit talks to the addresses it is given."""
    with stand_in() as elsewhere:

        class Redirect(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.send_response(307)
                self.send_header("Location", f"{elsewhere.url}/v1/completions")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        with HTTPServer(("127.0.0.1", 0), Redirect) as server:
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
            side = HttpSide("redirected", Endpoint(f"http://127.0.0.1:{server.server_address[1]}", model="m"))
            answer = asyncio.run(side.answer(AuditRequest("x", 4)))
            server.shutdown()
    assert answer.failed is not None
    assert answer.failed.startswith("HTTP 307")
    assert elsewhere.bodies == []


def test_nobody_there_is_one_error() -> None:
    with stand_in() as server:
        url = server.url
    side = HttpSide("nobody", Endpoint(url))
    with pytest.raises(OutriderError, match="is a server running and ready there"):
        audit(side, side, AuditPlan(PROMPTS, SMALL))


@pytest.mark.slow
def test_the_command_writes_a_card_and_one_json_line(folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "outrider.cli", "audit", "--transformers", str(folder), "--prompt-lookup", "3", "--quick"]
    more = ["--max-requests", "48", "--output", str(tmp_path / "card"), "--name", "A name"]
    done = subprocess.run([*command, *more], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert json.loads(line) == json.loads((tmp_path / "card" / "audit.json").read_text())
    assert json.loads(line)["cut_short"] == "48 requests were sent"
    assert "# Audit: A name" in (tmp_path / "card" / "audit.md").read_text()
    assert "warming up" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_killed_audit_ends_its_servers(script: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "outrider.cli", "audit", "--plain-body", "{}", "--command", script]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            assert process.poll() is None
            asyncio.run(asyncio.sleep(0.05))
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    pid = int((tmp_path / "pid").read_text())
    for _ in range(1000):
        if not is_running(pid):
            break
        asyncio.run(asyncio.sleep(0.01))
    assert not is_running(pid)
