"""Block drafters: the definition row by row, the same on every path, and files that come back as they were."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.cache import KVPool
from outrider.errors import ModelError, OutriderError
from outrider.heads import BlockRunner, SaveOptions, load_block, save_block, spread_taps
from outrider.model import Decoder, Feed, LoadOptions
from outrider.ops import Ops, Plain, serving_ops
from outrider.train.frozen import FrozenTarget
from tests.support import random_decoder, write_family
from tests.support.blocks import BLOCK, KINDS, MASK, random_block, reference_guesses

FULL = LoadOptions(dtype="float32")
pytestmark = pytest.mark.usefixtures("both_paths")


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return random_decoder(write_family(tmp_path_factory.mktemp("m"), "llama2", num_hidden_layers=3))


def runner_of(decoder: Decoder, kind: str, ops: Ops | None = None) -> BlockRunner:
    head, c = random_block(decoder, kind), decoder.spec
    return BlockRunner(head, KVPool(2, 12, c.kv_heads, 16, c.head_dim), ops or serving_ops())


def block(newest: int, start: int, pages: list[int], length: int = BLOCK) -> Feed:
    return Feed(pages, start, (newest, *[MASK] * (length - 1)))


@pytest.mark.parametrize("kind", KINDS)
def test_guesses_are_those_of_the_definition(decoder: Decoder, kind: str) -> None:
    """Features are read in pieces, pages lie anywhere, two texts share a call, and blocks before leave nothing behind."""
    runner, width = runner_of(decoder, kind), 2 * decoder.spec.hidden
    generator = torch.Generator().manual_seed(3)
    long, short = torch.randn(40, width, generator=generator), torch.randn(9, width, generator=generator)
    runner.read([Feed([7, 2, 5], 0, [0] * 33), Feed([1], 0, [0] * 9)], torch.cat((long[:33], short)))
    runner.guess([block(8, 33, [7, 2, 5])])  # writes slots that the next features take
    runner.read([Feed([7, 2, 5], 33, [0] * 7)], long[33:])
    for length in (2, BLOCK):
        made = runner.guess([block(11, 40, [7, 2, 5], length), block(4, 9, [1], length)]).logits
        want = torch.cat([reference_guesses(runner.head, taps, n, length) for taps, n in ((long, 11), (short, 4))])
        torch.testing.assert_close(made, want, atol=3e-4, rtol=1e-4)


def test_many_blocks_are_run_in_parts(decoder: Decoder) -> None:
    """The core takes 64 rows of blocks at once; a block's rows are never parted."""
    runner, width = runner_of(decoder, "dflash"), 2 * decoder.spec.hidden
    taps = torch.randn(12 * 5, width, generator=torch.Generator().manual_seed(3))
    runner.read([Feed([page], 0, [0] * 5) for page in range(12)], taps)
    together = runner.guess([block(page, 5, [page]) for page in range(12)]).logits.split(BLOCK - 1)
    for page in range(12):
        torch.testing.assert_close(together[page], runner.guess([block(page, 5, [page])]).logits, atol=1e-5, rtol=1e-5)


def test_rows_of_a_causal_block_do_not_depend_on_its_length(decoder: Decoder) -> None:
    runner = runner_of(decoder, "dspark causal")
    runner.read([Feed([0], 0, [0] * 9)], torch.randn(9, 2 * decoder.spec.hidden, generator=torch.Generator().manual_seed(1)))
    whole = runner.guess([block(2, 9, [0])]).logits
    torch.testing.assert_close(whole[:3], runner.guess([block(2, 9, [0], 3)]).logits, atol=1e-5, rtol=1e-5)


def test_training_computes_what_serving_does(decoder: Decoder) -> None:
    """Block s of a training pass is a block after features up to s and the token at s + 1."""
    from outrider.train.block import TrainableBlock

    for kind in ("dflash", "dspark", "dspark causal", "dflash2"):
        network, runner = TrainableBlock(random_block(decoder, kind)), runner_of(decoder, kind, Plain())
        tokens = torch.randint(0, decoder.spec.vocab, (2, 20), generator=torch.Generator().manual_seed(3))
        features = FrozenTarget(decoder).reading(network.taps).features(tokens)
        starts, guesses = torch.tensor([0, 4, 11]), network.depths
        rows = network._rows(features, starts, guesses)[..., : decoder.spec.hidden]
        taps = torch.cat([features.taps[tap] for tap in network.taps], -1).view(2, 20, -1)
        for text in range(2):
            for i, start in enumerate(starts.tolist()):
                runner.read([Feed([0, 1], 0, [0] * (start + 1))], taps[text, : start + 1].float())
                served = runner.guess([block(int(tokens[text, start + 1]), start + 1, [0, 1])]).rows
                torch.testing.assert_close(rows[text, i].float(), served.float(), atol=0.05, rtol=0.05)  # bf16 products, maybe


@pytest.mark.parametrize("layout", ["dflash", "speculators"])
@pytest.mark.parametrize("kind", KINDS)
def test_files_come_back_as_they_were(decoder: Decoder, kind: str, layout: str, tmp_path: Path) -> None:
    head = random_block(decoder, kind)
    save_block(head, tmp_path, SaveOptions(layout, target="some/target"))
    again = load_block(tmp_path, decoder, FULL)
    assert replace(again.config, shape=head.config.shape) == head.config
    assert again.config.shape.layers == head.config.shape.layers
    ours, theirs = head.state_dict(), again.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_published_files_count_taps_by_the_layer_that_they_leave(decoder: Decoder, tmp_path: Path) -> None:
    save_block(random_block(decoder, "dflash"), tmp_path / "a")
    save_block(random_block(decoder, "dflash"), tmp_path / "b", SaveOptions("speculators"))
    published, other = (json.loads((tmp_path / name / "config.json").read_text()) for name in "ab")
    assert published["dflash_config"]["target_layer_ids"] == [0, 1]
    assert other["aux_hidden_state_layer_ids"] == [1, 2]
    assert spread_taps(36, 5) == (2, 10, 18, 26, 34)  # layers 1, 9, 17, 25 and 33 of 36, as published


def edit(directory: Path, **fields: Any) -> None:
    path = directory / "config.json"
    data = json.loads(path.read_text())
    for name, value in fields.items():
        (data["dflash_config"] if name in data["dflash_config"] else data)[name] = value
    path.write_text(json.dumps({name: value for name, value in data.items() if value is not None}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"target_layer_ids": [0, 9]}, "the layers that it reads"),
        ({"target_layer_ids": []}, "the layers that it reads"),
        ({"mask_token_id": 100_000}, "mask_token_id"),
        ({"block_size": 1}, "block_size"),
        ({"block_size": None}, "'block_size' is missing"),
        ({"hidden_size": 32}, "hidden_size"),
        ({"vocab_size": 7}, "mask_token_id|vocab_size"),
        ({"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}, "sliding windows"),
        ({"markov_head_type": "rnn"}, "markov_head_type"),
        ({"target_hidden_size": 999}, "target_hidden_size"),
    ],
)
def test_heads_that_do_not_fit_are_refused_by_name(
    decoder: Decoder, tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    save_block(random_block(decoder, "dspark"), tmp_path)
    edit(tmp_path, **fields)
    with pytest.raises(OutriderError, match=message):
        load_block(tmp_path, decoder, FULL)


def test_missing_and_foreign_tensors_are_named(decoder: Decoder, tmp_path: Path) -> None:
    save_block(random_block(decoder, "dflash"), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "aux_hidden_norms.0.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="aux_hidden_norms"):
        load_block(tmp_path, decoder, FULL)
    save_file({name: tensor for name, tensor in tensors.items() if name != "fc.weight"}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"lacks 1 tensors, first 'fc.weight'"):
        load_block(tmp_path, decoder, FULL)


def test_an_assistant_of_transformers_is_read_and_agrees(tmp_path: Path) -> None:
    """The oracle is the class itself with random weights, saved by `save_pretrained`."""
    from transformers import AutoConfig, AutoModel

    decoder = random_decoder(write_family(tmp_path / "target", "llama2", num_hidden_layers=4))
    c = decoder.spec
    config = AutoConfig.for_model(
        "muse_glimmer_assistant", hidden_size=c.hidden, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, vocab_size=c.vocab, max_position_embeddings=256, target_layer_ids=[0, 2],
        block_size=BLOCK, mask_token_id=MASK, layer_types=["full_attention"] * 2, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    torch.manual_seed(5)
    oracle = AutoModel.from_config(config).float().eval()
    oracle.save_pretrained(tmp_path / "head")
    head = load_block(tmp_path / "head", decoder, FULL)
    runner = BlockRunner(head, KVPool(2, 4, 2, 16, 16), serving_ops())
    taps = torch.randn(21, 2 * c.hidden, generator=torch.Generator().manual_seed(2))
    runner.read([Feed([0, 1], 0, [0] * 21)], taps)
    made = runner.guess([block(9, 21, [0, 1])])
    embedded = head.embedding[torch.tensor([9, *[MASK] * (BLOCK - 1)])].float()
    with torch.no_grad():
        want = oracle(noise_embeds=embedded[None], context_hidden_states=taps[None], use_cache=False).last_hidden_state[0, 1:]
    torch.testing.assert_close(made.rows, want, atol=1e-4, rtol=1e-4)
