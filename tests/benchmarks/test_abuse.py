"""The attacks of benchmarks/abuse are what they say they are. No server is started."""

from __future__ import annotations

import json

import pytest

from benchmarks.abuse.scenarios import BODY, SCENARIOS, padded


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_body_is_json_within_the_limit(name: str) -> None:
    scenario = SCENARIOS[name]
    for shot in scenario.shots():
        assert shot.path.startswith("/")
        assert len(shot.body) <= BODY
        assert isinstance(json.loads(shot.body), dict)


def test_large_bodies_are_nearly_as_large_as_they_may_be() -> None:
    body = padded('{"prompt":', '""', "}")
    assert BODY - 4 < len(body) <= BODY
