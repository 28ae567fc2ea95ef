"""`train early-exit`: adapters for several exits, of which the one that pays most is kept and serves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.errors import InvalidParameter, ModelError
from outrider.heads import load_exit
from outrider.model import load_decoder
from outrider.ops import Plain
from outrider.train.corpus import TokenCorpus
from outrider.train.early_exit import TrainableExits, new_exits
from outrider.train.frozen import FrozenTarget
from tests.train.test_drafters import learn


@pytest.fixture
def frozen(target: Path) -> FrozenTarget:
    return FrozenTarget.load(target, torch.device("cpu"))


def test_adapters_are_trained_and_one_is_served(target: Path, prepared: TokenCorpus, tmp_path: Path) -> None:
    out = tmp_path / "early_exit"
    figures = learn("early-exit", target, prepared, out, "--exits=1,2,3", "--ffn=48", "--steps=100")
    adapter = load_exit(out, load_decoder(target))
    assert adapter.config.layer in (1, 2, 3)
    assert adapter.config.agreement == pytest.approx(figures["heldout"]["by_position"][0], abs=0.05)  # int8 rounds a little
    assert figures["served"][0]["tokens_per_round_all"] >= 1.0
    settings = {"method": "early_exit", "model": str(out), "draft_tokens": 3}
    params = SamplingParams(temperature=0.7, seed=4, max_tokens=20)
    prompts = [(5, 9, 11, 40), (7, 7, 30)]
    plain, fast = (
        [result.outputs[0].token_ids for result in LLM(target, speculation=one).generate(prompts, params)]
        for one in ("none", settings)
    )
    assert fast == plain


def test_the_exit_that_pays_is_kept(frozen: FrozenTarget) -> None:
    network = new_exits(frozen, (1, 2, 3), 16, "mix", seed=0)
    rates = {"1": 0.1, "2": 0.97, "3": 0.98}
    network.settle(lambda one: rates[one.chosen] if isinstance(one, TrainableExits) else 0.0)
    assert network.chosen == "2"
    assert network.adapter.config.agreement == 0.97
    assert network.taps == (1, 2, 3)


def test_fresh_adapters_change_nothing(frozen: FrozenTarget) -> None:
    network = new_exits(frozen, (2,), 16, "mix", seed=0)
    rows = torch.randn(5, frozen.config.hidden)
    assert torch.equal(network.adapter(rows, Plain()), rows)


def test_wrong_exits_and_files_are_refused(frozen: FrozenTarget, target: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match="not between 1 and"):
        new_exits(frozen, (frozen.config.depth,), 16, "mix", seed=0)
    network = new_exits(frozen, (2,), 16, "mix", seed=0)
    network.export(target, tmp_path / "exit")
    for options in ({"exit_layer": 1}, {"tail": 1}):
        settings = {"method": "early_exit", "model": str(tmp_path / "exit"), **options}
        with pytest.raises(InvalidParameter, match="the adapter in .* leaves layer 2"):
            LLM(target, speculation=settings)
    config = json.loads((tmp_path / "exit" / "config.json").read_text())
    (tmp_path / "exit" / "config.json").write_text(json.dumps(config | {"model_type": "medusa"}))
    with pytest.raises(ModelError, match="train early-exit"):
        LLM(target, speculation={"method": "early_exit", "model": str(tmp_path / "exit")})
