"""Heads of the `speculators` package compute here what they compute there, and ours load there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from outrider.cache import KVPool
from outrider.errors import ModelError
from outrider.heads import BlockRunner, SaveOptions, load_block, load_eagle, load_mtp, save_block, save_mtp
from outrider.model import Feed
from outrider.ops import Plain, serving_ops
from outrider.train.attention import causal_attend
from outrider.train.shapes import MtpShape
from tests.oracles.conftest import FULL, Oracle, run_package
from tests.support.blocks import random_block
from tests.support.heads import toy_head

CLOSE = {"atol": 1e-4, "rtol": 1e-4}
LOADS = """
import sys, torch
from speculators.models.mtp import MTPDraftModel
model = MTPDraftModel.from_pretrained(sys.argv[1], torch_dtype=torch.float32).eval()
case = torch.load(sys.argv[2])
logits, _, _ = model(case["tokens"], case["features"])
torch.save(logits[0], sys.argv[3])
"""

LOADS_BLOCK = """
import sys, torch
from speculators.models.dflash import DFlashDraftModel
from speculators.models.dflash2 import DFlash2DraftModel
from speculators.models.dspark import DSparkDraftModel
kind = {"dflash": DFlashDraftModel, "dflash2": DFlash2DraftModel, "dspark": DSparkDraftModel}[sys.argv[1]]
model, info = kind.from_pretrained(sys.argv[2], torch_dtype=torch.float32, output_loading_info=True)
assert not info["unexpected_keys"], info
model.save_pretrained(sys.argv[3])
"""


@torch.no_grad()
def test_mtp(oracle: Oracle) -> None:
    """The package runs every step over its own rows alone, so a step here begins with the hidden rows of the one before."""
    folder, case = oracle.case("mtp")
    head = load_mtp(folder, oracle.target, FULL)
    steps = [name for name in case if name.startswith("logits.")]
    tokens, features, count = case["tokens"][0], case["features"][0], case["logits.0"].shape[1]
    features = features[:count]
    for step in range(len(steps)):
        rows = tokens[step + 1 : step + 1 + count]
        features = head(rows, features, torch.arange(count), causal_attend(1, count), Plain())
        torch.testing.assert_close(head.logits(features, Plain()), case[f"logits.{step}"][0], **CLOSE)
    assert len(steps) == 3


@torch.no_grad()
def test_eagle3(oracle: Oracle) -> None:
    """The package pairs each feature with the token that it is given beside it, and counts positions from 1."""
    folder, case = oracle.case("eagle3")
    head = load_eagle(folder, oracle.target, FULL)
    tokens, count = case["tokens"][0], case["tokens"].shape[1]
    features = head.fuse(case["features"][0], Plain())
    hidden = head(tokens, features, torch.arange(count), causal_attend(1, count), Plain())
    torch.testing.assert_close(head.logits(hidden, Plain()), case["logits"][0], **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("name", ["dflash", "dflash_reduced", "dspark", "dflash2"])
def test_block_drafters(oracle: Oracle, name: str) -> None:
    """The package's block at position a sees the features before a, as ours does after a tokens."""
    folder, case = oracle.case(name)
    head = load_block(folder, oracle.target, FULL)
    c, skipped = head.config, 0 if head.config.from_anchor else 1
    for ops in (Plain(), serving_ops()):
        runner = BlockRunner(head, KVPool(c.shape.depth, 4, c.shape.kv_heads, 16, c.shape.head_dim), ops)
        for i, anchor in enumerate(case["anchors"].tolist()):
            runner.read([Feed([0, 1], 0, [0] * anchor)], case["features"][0, :anchor])
            made = runner.guess([Feed([0, 1], anchor, (int(case["tokens"][0, anchor]), *[c.mask] * (c.block - 1)))])
            torch.testing.assert_close(made.rows, case["hidden"][i, skipped:], **CLOSE)
            torch.testing.assert_close(made.logits, case["logits"][i, skipped:], **CLOSE)
    if head.pairs is None:
        return
    before = head.pairs.before(case["before"], case["hidden"], Plain())
    if "biased" in case:
        biased = case["logits"] + head.pairs.of_all(before.flatten(0, 1), Plain()).view_as(case["logits"])
        torch.testing.assert_close(biased, case["biased"], **CLOSE)
        assert head.confidence is not None
        confidence = head.confidence(torch.cat((case["hidden"], before), -1))
        torch.testing.assert_close(confidence, case["confidence"].sigmoid(), **CLOSE)
    else:
        candidates = case["candidates"]
        scores = case["logits"].gather(-1, candidates) + head.pairs.of_candidates(before[:, :, None], candidates)[:, :, 0]
        torch.testing.assert_close(scores, case["scores"], **CLOSE)


@pytest.mark.parametrize(("name", "kind"), [("dspark_gated", "gated"), ("dspark_rnn", "rnn")])
def test_markov_heads_of_other_kinds_are_refused_by_name(oracle: Oracle, name: str, kind: str) -> None:
    folder, _ = oracle.case(name)
    with pytest.raises(ModelError, match=f"markov_head_type '{kind}' is not supported"):
        load_block(folder, oracle.target, FULL)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["dflash", "dspark", "dflash2"])
def test_the_package_loads_our_block_drafters(oracle: Oracle, kind: str, tmp_path: Path) -> None:
    """Every tensor has its place there, and comes back as it was written."""
    head = random_block(oracle.target, kind)
    save_block(head, tmp_path / "head", SaveOptions("speculators", target=str(oracle.folder / "verifier")))
    run_package("-c", LOADS_BLOCK, kind, str(tmp_path / "head"), str(tmp_path / "again"))
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("head", "again"))
    assert ours.keys() - {"d2t", "t2d"} <= theirs.keys()
    assert all(torch.equal(ours[name], theirs[name].to(ours[name].dtype)) for name in ours.keys() - {"d2t", "t2d"})


@torch.no_grad()
def test_the_package_loads_our_module(oracle: Oracle, tmp_path: Path) -> None:
    head = toy_head(oracle.target, MtpShape().config(oracle.target.spec))
    save_mtp(head, tmp_path / "mtp", SaveOptions("speculators", target=str(oracle.folder / "verifier")))
    generator = torch.Generator().manual_seed(1)
    case = {"tokens": torch.randint(0, 64, (1, 12), generator=generator), "features": torch.randn(1, 12, 32, generator=generator)}
    torch.save(case, tmp_path / "case.pt")
    run_package("-c", LOADS, str(tmp_path / "mtp"), str(tmp_path / "case.pt"), str(tmp_path / "logits.pt"))
    there = torch.load(tmp_path / "logits.pt")[0]
    count = len(there)
    features = head(
        case["tokens"][0, 1 : count + 1], case["features"][0, :count], torch.arange(count), causal_attend(1, count), Plain()
    )
    torch.testing.assert_close(head.logits(features, Plain()), there, **CLOSE)
