"""`--draft-model auto`: the published sibling or head in the local cache, or what to fetch."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider import LLM
from outrider.cli import app
from outrider.config import SpeculationConfig
from outrider.draft.resolve import resolve_drafters
from outrider.errors import InvalidParameter
from outrider.model.bundled import bundled_model

TARGET, SIBLING = "Llama-3.3-70B-Instruct", "meta-llama/Llama-3.2-1B-Instruct"
HEAD = "RedHatAI/Llama-3.3-70B-Instruct-speculator.eagle3"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "hub"
    folder.mkdir()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder))
    return folder


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """The bundled model under a published name, without the drafters that lie beside it."""
    folder = tmp_path / TARGET
    folder.mkdir()
    for path in bundled_model().iterdir():
        if path.is_file():
            (folder / path.name).symlink_to(path)
    return folder


def put(cache: Path, hub_id: str, source: Path) -> Path:
    """A model in the cache, as the hub's client lays it out."""
    folder = cache / f"models--{hub_id.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    shutil.copytree(source, folder / "snapshots" / "abc")
    return folder / "snapshots" / "abc"


def resolve(target: Path, method: str) -> SpeculationConfig:
    return resolve_drafters(SpeculationConfig.parse({"method": method, "model": "auto"}), target)


def test_what_is_not_cached_is_named(cache: Path, target: Path) -> None:
    with pytest.raises(InvalidParameter, match=rf"fetch it with `hf download {HEAD}` or `hf download {SIBLING}`"):
        resolve(target, "auto")
    with pytest.raises(InvalidParameter, match=f"hf download {SIBLING}") as refused:
        resolve(target, "draft_model")
    assert HEAD not in str(refused.value)
    (cache / f"models--{SIBLING.replace('/', '--')}").mkdir()
    with pytest.raises(InvalidParameter, match="is in the local cache"):
        resolve(target, "draft_model")
    head = put(cache, HEAD, bundled_model() / "eagle")
    for weights in head.glob("*.safetensors"):
        weights.rename(weights.with_suffix(".bin"))
    with pytest.raises(InvalidParameter, match=f"{HEAD} is a pickle there: convert it with `outrider heads convert {HEAD} DIR`"):
        resolve(target, "auto")


def test_a_cached_sibling_drafts(cache: Path, target: Path) -> None:
    path = put(cache, SIBLING, bundled_model() / "draft")
    assert resolve(target, "draft_model").model == str(path)
    members = resolve(target, "auto").nested()
    assert [(member.method, member.model) for member in members][1:] == [("draft_model", str(path))]
    prompt = "def add(a, b):\n    "
    with LLM(target, speculation={"method": "draft_model", "model": "auto", "adaptive": False}) as llm:
        (fast,), (plain,) = (llm.generate(prompt, max_tokens=16, speculation=on)[0].outputs for on in (True, False))
    assert fast.token_ids == plain.token_ids
    assert fast.speculation["accepted"] > 0
    arguments = ["generate", prompt, "--model", str(target), "--draft-model", "auto", "--max-tokens", "4"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output


def test_a_head_for_this_target_comes_first(cache: Path, target: Path) -> None:
    put(cache, SIBLING, bundled_model() / "draft")
    head = put(cache, HEAD, bundled_model() / "eagle")
    assert [(member.method, member.model) for member in resolve(target, "auto").nested()][1:] == [("eagle", str(head))]
    assert resolve(target, "eagle").model == str(head)
    assert resolve(target, "draft_model").model != str(head)


def test_what_lies_beside_the_target_needs_no_cache(cache: Path) -> None:
    assert {member.method for member in resolve(bundled_model(), "auto").nested()} >= {"draft_model", "eagle"}
    assert resolve(bundled_model(), "draft_model").model is None


def test_a_model_nobody_knows_is_told_of_lookups(cache: Path, target: Path) -> None:
    with pytest.raises(InvalidParameter, match="use --method suffix"):
        resolve(target.rename(target.with_name("mine")), "auto")
