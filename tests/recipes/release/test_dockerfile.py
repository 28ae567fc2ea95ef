"""The Dockerfile and what runs its steps, and the other files of deployment against the server."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from outrider.cli import app
from outrider.serve.guard import OPEN_PATHS
from recipes.release.dockerfile import read_dockerfile, run_steps, stages_for

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
STAGES = {stage.name: stage for stage in read_dockerfile(ROOT / "Dockerfile")}
DRAIN_S = 30  # the default of --drain-timeout


def variables() -> set[str]:
    group: Any = typer.main.get_command(app)
    return {parameter.envvar for parameter in group.commands["serve"].params if parameter.envvar} | {"OUTRIDER_CACHE"}


def loaded(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def test_targets_and_what_they_copy() -> None:
    assert list(STAGES) == ["wheel", "cpu", "cuda"]
    assert [stage.name for stage in stages_for(list(STAGES.values()), "cuda")] == ["wheel", "cuda"]
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for stage in STAGES.values():
        for step in stage.steps:
            if step.name == "COPY" and not step.text.startswith("--from"):
                for name in step.text.split()[:-1]:
                    assert (ROOT / name).exists()
                    assert name in sent, "the build's context holds it"


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_an_image_serves_without_root(target: str) -> None:
    stage = STAGES[target]
    assert json.loads(stage.last("ENTRYPOINT")) + json.loads(stage.last("CMD")) == ["outrider", "serve"]
    names = {word.partition("=")[0] for word in stage.last("ENV").split() if word.startswith("OUTRIDER_")}
    assert names <= variables()
    assert stage.last("USER") == "outrider"
    check = json.loads(stage.last("HEALTHCHECK").partition("CMD ")[2])
    compile(check[2], "HEALTHCHECK", "exec")
    assert re.search(r"}(/\w+)'", check[2])[1] in OPEN_PATHS  # type: ignore[index]


SERVER = """#!/usr/bin/env python
import http.server, os, signal, sys

signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        self.do_GET()
        self.wfile.write(open(os.environ["DATA"], "rb").read())


http.server.HTTPServer(("127.0.0.1", int(os.environ["OUTRIDER_PORT"])), Handler).serve_forever()
"""
SMALL = r"""# comment
ARG P=1
FROM python:${P} AS first
RUN apt-get update && apt-get install -y g++ && \
    echo made by first
WORKDIR /src
COPY thing.txt ./
RUN mkdir /src/out && cat thing.txt > /src/out/data
FROM python:${P} AS other
RUN false
FROM python:${P} AS last
ARG WORD=no
COPY --from=first /src /made
COPY serve-it usr/bin/
ENV DATA=/made/answer
RUN echo "{\"choices\": [{\"text\": \"$WORD $(cat /made/out/data)\"}]}" > /made/answer
HEALTHCHECK --interval=1s CMD ["python", "-c", "import os, urllib.request as u; u.urlopen('http://127.0.0.1:' + os.environ['OUTRIDER_PORT'])"]
ENTRYPOINT ["serve-it"]
CMD []
"""  # noqa: E501 (instructions are one line)


def test_steps_are_run_in_order_in_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A small Dockerfile with the real one's instructions; its server is a script."""
    (tmp_path / "thing.txt").write_text("copied")
    (tmp_path / "serve-it").write_text(SERVER)
    (tmp_path / "serve-it").chmod(0o755)
    (tmp_path / "Dockerfile").write_text(SMALL)
    monkeypatch.chdir(tmp_path)
    run_steps(tmp_path / "Dockerfile", "last", {"WORD": "yes"})
    said = capfd.readouterr().out
    assert "answered: yes copied" in said
    assert "healthy, answered, drained" in said
    assert said.index("skip apt-get install") < said.index("made by first") < said.index("AS last")
    assert "AS other" not in said


def test_compose_mounts_what_there_is() -> None:
    services = loaded(ROOT / "docker-compose.yml")["services"]
    assert set(services) == {"outrider", "prometheus", "grafana"}
    for service in services.values():
        for volume in service["volumes"]:
            if volume.startswith("./"):
                assert (ROOT / volume.split(":")[0]).exists(), volume
    assert set(services["outrider"]["environment"]) <= variables()
    assert services["outrider"]["build"]["target"] in STAGES
    assert loaded(DEPLOY / "compose" / "cuda.yml")["services"]["outrider"]["build"]["target"] in STAGES
    assert int(services["outrider"]["stop_grace_period"][:-1]) > DRAIN_S
    (job,) = loaded(DEPLOY / "compose" / "prometheus.yml")["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["outrider:8000"]}]
    assert job["authorization"]["credentials_file"] == services["outrider"]["environment"]["OUTRIDER_API_KEY_FILE"]
    (source,) = loaded(DEPLOY / "grafana" / "provisioning" / "datasources" / "prometheus.yml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = loaded(DEPLOY / "grafana" / "provisioning" / "dashboards" / "outrider.yml")["providers"]
    assert any(volume.split(":")[1].startswith(provider["options"]["path"]) for volume in services["grafana"]["volumes"])


def test_pods_are_probed_where_the_server_answers_without_a_key() -> None:
    deployment, service = yaml.safe_load_all((DEPLOY / "kubernetes" / "cpu" / "outrider.yaml").read_text())
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] in OPEN_PATHS
    assert pod["enableServiceLinks"] is False
    assert pod["terminationGracePeriodSeconds"] > DRAIN_S
    assert {variable["name"] for variable in container["env"]} <= variables()
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"]
    assert container["args"][0] == "serve"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd on this machine")
def test_the_unit_is_one(tmp_path: Path) -> None:
    text = (DEPLOY / "outrider.service").read_text()
    assert f"TimeoutStopSec={DRAIN_S + 15}" in text
    unit = tmp_path / "outrider.service"
    unit.write_text(text.replace("/opt/outrider/bin/outrider", shutil.which("true") or "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, [line for line in done.stderr.splitlines() if "outrider.service" in line]) == (0, [])
