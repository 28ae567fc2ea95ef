"""A damaged cost file is named and started afresh; it neither stops an engine nor changes its tokens."""

from __future__ import annotations

import copy
import json
import logging
import math
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from outrider.control import Costs
from outrider.engine import costs_file
from outrider.engine.llm import LLM
from outrider.model.bundled import bundled_model
from outrider.platform import cache_folder
from outrider.sampling import SamplingParams
from tests.support import write_family
from tests.support.examples import examples

_GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
_NUMBERS = [math.nan, math.inf, -math.inf, -1.0, 0, 0.0, 1e308, 1e-320, 10**400]
_odd = st.sampled_from([*_NUMBERS, None, True, "x", "", [], [1], {}, {"1": -1.0}, {"x": 1}])


@lru_cache(maxsize=1)
def sound() -> dict[str, Any]:
    """A table as a run leaves it."""
    costs = Costs()
    for rows in (1, 2, 4, 8):
        costs.observe_forward(rows, 100 * rows, 0.001 * rows)
        costs.observe_rest(rows, 0.0001)
        for drafter in ("suffix", "recycle"):
            for length in (2, 8):
                costs.observe_proposal(drafter, rows, length, 0.0001 * length)
    costs.accepted = json.loads((Path(bundled_model()) / costs_file.ACCEPTANCE).read_text())
    return json.loads(json.dumps(costs.as_dict()))  # type: ignore[no-any-return]


@st.composite
def damaged(draw: st.DrawFn) -> Any:
    """The table with one or two of its values replaced, at any depth."""
    data: Any = copy.deepcopy(sound())
    for _ in range(draw(st.integers(1, 2))):
        place: Any = data
        while True:
            keys = sorted(place) if isinstance(place, dict) else list(range(len(place)))
            key = draw(st.sampled_from(keys))
            if isinstance(place[key], dict | list) and place[key] and draw(st.integers(0, 4)):
                place = place[key]
                continue
            place[key] = copy.deepcopy(draw(_odd))
            break
    return data


@examples(300)
@given(st.one_of(damaged().map(json.dumps), st.text(max_size=20)))
@example("[" * 100_000)
@example('{"a":' * 100_000)
@example("9" * 5000)
@example(json.dumps(sound() | {"forward": {"1": 0.0}}))
@example(json.dumps(sound() | {"forward": {"1": math.nan}}))
@example(json.dumps(sound() | {"propose": {"suffix": {}}}))
@example(json.dumps(sound() | {"propose": {"suffix": {"0": {"1": 0.1}}}}))
def test_whatever_a_file_holds_times_are_finite_and_positive(tmp_path: Path, text: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    costs = Costs.load(path)
    for rows in (1, 3, 64, 500):
        assert 0.0 < costs.forward(rows, 1000) < math.inf
        assert 0.0 <= costs.rest(rows) < math.inf
        for drafter in ("suffix", "recycle"):
            assert 0.0 < costs.proposal(drafter, rows, 4) < math.inf


@pytest.mark.parametrize("text", ["{", "[]", "\xff", '{"forward": {"1": NaN}}', '{"forward": {"1": -1.0}}', "[" * 100_000])
def test_a_damaged_file_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text, encoding="latin-1")
    with caplog.at_level(logging.WARNING):
        Costs.load(path)
    assert f"{path} is damaged" in caplog.text
    caplog.clear()
    assert Costs.load(tmp_path / "none").as_dict() == Costs().as_dict()
    assert not caplog.text


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("tiny"), "llama2", num_hidden_layers=1)


@examples(60)
@given(damaged())
def test_an_engine_starts_and_writes_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path, data: Any
) -> None:
    monkeypatch.setattr("outrider.engine.build.costs_path", lambda *_: tmp_path / "costs.json")
    (tmp_path / "costs.json").write_text(json.dumps(data))
    prompt = [[1, 2, 3] * 5]
    plain = LLM(model, load_format="dummy", speculation="none", kv_bytes=2**20).generate(prompt, _GREEDY)[0].outputs[0]
    auto = LLM(model, load_format="dummy", speculation="auto", kv_bytes=2**20)
    output = auto.generate(prompt, _GREEDY)[0].outputs[0]
    assert output.token_ids == plain.token_ids
    assert output.speculation["fallback_reason"] is None
    auto.save_costs()
    kept = json.loads((tmp_path / "costs.json").read_text(), parse_constant=lambda name: pytest.fail(f"{name} was kept"))
    assert Costs.from_dict(kept).as_dict()["forward"]


def test_a_user_without_a_home_keeps_no_costs(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("OUTRIDER_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", nowhere)
    folder = cache_folder()
    costs = Costs.load(folder / "costs" / "x.json")
    costs.save(folder / "costs" / "x.json")
    assert not folder.exists()
    assert not caplog.text
