"""Heads of the `speculators` package compute here what they compute there, and ours load there."""

from __future__ import annotations

from pathlib import Path

import torch

from outrider.heads import SaveOptions, load_eagle, load_mtp, save_mtp
from outrider.ops import Plain
from outrider.train.attention import causal_attend
from outrider.train.shapes import MtpShape
from tests.oracles.conftest import FULL, Oracle, run_package
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
