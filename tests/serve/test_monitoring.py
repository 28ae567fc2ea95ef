"""The files in deploy/ match the server: the dashboard's metrics are exactly the server's."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import generate_latest

from outrider.serve.metrics import Metrics
from outrider.serve.settings import ServerSettings
from tests.support.server import Running

DEPLOY = Path(__file__).parents[2] / "deploy"


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((DEPLOY / "grafana.json").read_text())
    return content


def queries(dashboard: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]


def test_dashboard_names_the_servers_metrics_and_all_of_them(server: Running, dashboard: dict[str, Any]) -> None:
    server.post("/v1/completions", prompt="def f(", max_tokens=4)
    served = dict(re.findall(r"^# TYPE (outrider:\w+) (\w+)$", server.http.get("/metrics").text, re.MULTILINE))
    samples = {
        name + ("_bucket" if kind == "histogram" else "") for name, kind in served.items() if not name.endswith("_created")
    }
    named = {name for expr in queries(dashboard) for name in re.findall(r"outrider:\w+", expr)}
    assert named == samples


def test_dashboard_groups_by_labels_that_exist(server: Running, dashboard: dict[str, Any]) -> None:
    server.post("/v1/completions", prompt="def f(", max_tokens=16, seed=1)
    text = server.http.get("/metrics").text
    labels = {
        name: set(re.findall(r"(\w+)=\"", pairs)) for name, pairs in re.findall(r"^(outrider:\w+)\{(.*)\}", text, re.MULTILINE)
    }
    for expr in queries(dashboard):
        for wanted, name in re.findall(r"by \(([\w, ]+)\) \((?:rate\()?(outrider:\w+)", expr):
            if name in labels:  # metrics without a value yet, such as fallbacks, have no labels
                assert set(wanted.split(", ")) - {"instance"} <= labels[name], expr
    assert {"position", "method", "finished_reason", "state", "reason"} <= set().union(*labels.values())


def test_dashboard_is_well_formed(dashboard: dict[str, Any]) -> None:
    assert dashboard["schemaVersion"] >= 39
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = [(x, y) for panel in panels for x, y in _cells(panel["gridPos"])]
    assert len(set(taken)) == len(taken)  # no two panels overlap
    assert max(x for x, _ in taken) == 23
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(panels))) - {"__rate_interval"}
    assert used == variables


def test_prometheus_scrapes_the_default_address() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    settings = ServerSettings()
    assert job["metrics_path"] == "/metrics"
    assert job["static_configs"] == [{"targets": [f"{settings.host}:{settings.port}"]}]


def test_alerts_use_metrics_that_exist() -> None:
    names = set(re.findall(r"(outrider:spec_decode_\w+)", generate_latest(Metrics("pyrite").registry).decode()))
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    assert config["rule_files"] == ["alerts.yml"]
    (group,) = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
    recorded, *alerts = group["rules"]
    assert set(re.findall(r"outrider:\w+", recorded["expr"])) <= names
    assert [alert["expr"] for alert in alerts] == [f"{recorded['record']} < {share}" for share in (0.2, 0.1)]


def _cells(place: dict[str, int]) -> list[tuple[int, int]]:
    return [(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])]
