"""Layers in a mapped file: the same bits as in memory, and clear words where that cannot be."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.config import EngineConfig
from outrider.engine.mapping import plan_mapped
from outrider.errors import InvalidParameter, ModelError
from outrider.model import Feed, LlamaShape, Rope, Runner
from outrider.model.mapped_stack import AHEAD, keep_layers
from outrider.ops import find_core
from outrider.ops.file_arena import FileArena
from tests.support import make_pool, random_decoder, write_family

needs_core = pytest.mark.skipif(find_core()[0] is None, reason="the native core is not in use")
MIB = 2**20


def outputs(runner: Runner, taps: tuple[int, ...]) -> list[torch.Tensor]:
    """Logits and taps of a prompt, then of a tree after it."""
    pages, prompt = list(range(8)), [(7 * i) % 90 for i in range(21)]
    out: list[torch.Tensor] = []
    for feed in (Feed(pages, 0, prompt), Feed(pages, 21, [5], [7, 9, 11, 13], [-1, 0, 0, 2])):
        rows = len(feed.tokens) + len(feed.nodes)
        hidden = runner.forward([feed], taps, range(rows))
        assert hidden.logits is not None
        out += [hidden.logits, hidden.last, *hidden.taps]
    return out


@needs_core
@pytest.mark.parametrize("kept", [0, 2, 100])
@pytest.mark.parametrize("family", ["llama3", "qwen3-moe"])
def test_layers_in_a_file_give_the_same_bits(tmp_path: Path, family: str, kept: int) -> None:
    folder = write_family(tmp_path / family, family, "bfloat16", num_hidden_layers=5)
    expected = outputs(Runner(random_decoder(folder, 3), make_pool(random_decoder(folder, 3))), (0, 3, 5))
    weights = FileArena(tmp_path / "packed")
    decoder = random_decoder(folder, 3)
    runner = Runner(decoder, make_pool(decoder), weights_file=weights)
    assert len(weights.sizes) == 5
    assert min(weights.sizes) > 0
    weights.keep(kept)
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(expected, outputs(runner, (0, 3, 5)), strict=True))
    assert not list((tmp_path / "packed").iterdir()), "the file has no name"
    runner.close()


@needs_core
def test_a_model_above_the_limit_says_how_fast_it_will_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=24, ignore_eos=True, logprobs=0)
    common: dict[str, Any] = {"kv_memory": "16MiB", "calibration_s": 0}
    plain = LLM(speculation="none", **common).generate("def main(argv):\n", params)[0].outputs[0]
    with caplog.at_level(logging.WARNING, "outrider"):
        llm = LLM(speculation="eagle:12:beam=3:branch=3", memory="64MiB", **common)
    assert "are read from the disk in every forward" in caplog.text
    assert "tokens a second without drafts" in caplog.text
    with llm:
        out = llm.generate("def main(argv):\n", params)[0].outputs[0]
    assert (out.token_ids, out.logprobs) == (plain.token_ids, plain.logprobs)
    assert out.speculation["accepted"] > 0
    with pytest.raises(InvalidParameter, match="not even with its layers in a file"):
        LLM(memory="24MiB", **common)


def test_the_smallest_limit_that_is_named_works() -> None:
    config = LlamaShape("LlamaForCausalLM", 32000, 2048, 16, 16, 8, 128, 8192, 2048, Rope(1e4), dtype="bfloat16").spec()
    sizes = EngineConfig(max_model_len=2048, max_num_seqs=1)
    weights = 2 * config.parameters
    with pytest.raises(InvalidParameter, match="lower max_model_len") as error:
        plan_mapped(config, sizes, 100 * MIB, weights, 2)
    least = int(str(error.value).split("are the least, ")[1].split(" bytes")[0])
    plan = plan_mapped(config, sizes, least, weights, 2)
    assert plan.kept is not None
    assert 0 <= plan.kept < weights // config.depth * 2
    more = plan_mapped(config, sizes, least + 500 * MIB, weights, 2)
    assert more.kept is not None
    assert more.kept > plan.kept
    assert more.pages >= plan.pages >= 2048 // 64


def test_as_many_layers_are_kept_as_the_budget_holds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    weights = FileArena(tmp_path)
    for _ in range(6):
        weights.begin()
        weights.take(100_000)[:] = 7
        weights.end()
    size = weights.sizes[0]
    with caplog.at_level(logging.WARNING, "outrider"):
        keep_layers(weights, 2 * size + 1)
    assert "2 of 6 layers stay" in caplog.text
    assert weights.bandwidth() > 0
    assert AHEAD < 6
    weights.close()


def test_memory_in_a_file_is_given_back(tmp_path: Path) -> None:
    weights = FileArena(tmp_path)
    weights.begin()
    first = weights.take(5000)
    first[:] = 3
    second = weights.take(10)
    weights.give_back(second)
    weights.end()
    assert len(weights.sizes) == 1
    assert weights.sizes[0] < 2 * 8192
    weights.give_up(0)
    assert first.unique().tolist() == [3], "what was given up is read again"
    weights.close()


def test_a_full_disk_and_a_folder_that_cannot_be_made_are_typed_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="OUTRIDER_CACHE"):
        FileArena(tmp_path / "file" / "packed")

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    weights = FileArena(tmp_path)
    weights.begin()
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ModelError, match="No space left"):
        weights.take(10)
    weights.close()
