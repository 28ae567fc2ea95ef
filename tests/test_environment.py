"""The OUTRIDER_* variables: all that are read are known, those of Kubernetes are ignored, and typos are reported."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

import outrider
from outrider.cli import app
from outrider.environment import known_variables, tidy

KNOWN = known_variables(typer.main.get_command(app))
KUBERNETES = {  # variables of a pod for a service "outrider" with one named port
    "OUTRIDER_SERVICE_HOST": "10.0.171.239",
    "OUTRIDER_SERVICE_PORT": "8000",
    "OUTRIDER_SERVICE_PORT_HTTP": "8000",
    "OUTRIDER_PORT": "tcp://10.0.171.239:8000",
    "OUTRIDER_PORT_8000_TCP": "tcp://10.0.171.239:8000",
    "OUTRIDER_PORT_8000_TCP_PROTO": "tcp",
    "OUTRIDER_PORT_8000_TCP_PORT": "8000",
    "OUTRIDER_PORT_8000_TCP_ADDR": "10.0.171.239",
}


def test_every_variable_that_is_read_is_known() -> None:
    source = "".join(path.read_text() for path in Path(outrider.__file__).parent.rglob("*.py"))
    read = set(re.findall(r"environ(?:\.get\(|\[)[\"'](OUTRIDER_\w+)", source))
    assert read
    assert read <= KNOWN
    assert {"OUTRIDER_MAX_QUEUE", "OUTRIDER_API_KEY", "OUTRIDER_MODEL", "OUTRIDER_CACHE"} <= KNOWN


@pytest.mark.parametrize("service", ["OUTRIDER", "OUTRIDER_MODEL", "OUTRIDER_API"])
def test_variables_of_kubernetes_are_no_settings(service: str, caplog: pytest.LogCaptureFixture) -> None:
    environment = {name.replace("OUTRIDER", service, 1): value for name, value in KUBERNETES.items()} | {
        "OUTRIDER_MAX_QUEUE": "3"
    }
    tidy(environment, KNOWN)
    assert environment["OUTRIDER_MAX_QUEUE"] == "3"
    assert "OUTRIDER_PORT" not in environment
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == (service == "OUTRIDER"), warnings
    assert all("OUTRIDER_PORT=tcp://10.0.171.239:8000 is ignored" in line and "enableServiceLinks" in line for line in warnings)


@given(st.sampled_from(sorted(KNOWN)), st.sampled_from(["tcp", "udp", "sctp", "TCP"]), st.integers(0, 65535))
def test_a_service_s_address_is_never_a_setting(name: str, scheme: str, port: int) -> None:
    environment = {name: f"{scheme}://10.0.0.1:{port}", "HOME": "/root"}
    tidy(environment, KNOWN)
    assert environment == {"HOME": "/root"}


def test_typos_are_reported_with_the_nearest_name(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        tidy(
            {"OUTRIDER_MAX_QUEU": "3", "OUTRIDER_APIKEY": "secret", "OUTRIDER_ZZ": "1", "OUTRIDER_PORT": "80", "PATH": "x"}, KNOWN
        )
    slips = {record.getMessage().split()[0]: record.getMessage() for record in caplog.records}
    assert set(slips) == {"OUTRIDER_MAX_QUEU", "OUTRIDER_APIKEY", "OUTRIDER_ZZ"}
    assert "did you mean OUTRIDER_MAX_QUEUE?" in slips["OUTRIDER_MAX_QUEU"]
    assert "did you mean OUTRIDER_API_KEY?" in slips["OUTRIDER_APIKEY"]
    assert "known are OUTRIDER_" in slips["OUTRIDER_ZZ"]
    assert "secret" not in caplog.text
