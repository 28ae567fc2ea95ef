"""Every drafter under the rules that verify chains: it drafts chains, and nothing faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, SamplingParams, register_drafter
from outrider.core import Drafts, Needs
from outrider.draft import registry
from outrider.errors import InvalidParameter
from outrider.heads import save_mtp
from outrider.model import LoadOptions, load_decoder
from outrider.model.bundled import bundled_model
from outrider.train.shapes import MtpShape
from tests.support.heads import toy_head

RULES = ("rejection", "block", "lossy_typical")
METHODS = {
    "ngram": "ngram:4",
    "suffix": "suffix:8:branch=3:min_prob=0.0:shared_tokens=100",
    "recycle": "recycle:24",
    "lookahead": "lookahead:15",
    "draft_model": "draft_model:8:beam=3:branch=3",
    "eagle": "eagle:12:beam=3:branch=4:depth=4",
    "mtp": "mtp:8:beam=2:branch=3",
    "medusa": "medusa:24",
    "medusa static": "medusa:24:dynamic=0",
    "early_exit": "early_exit:4:exit_layer=6",
    "cascade": "cascade:8:levels=ngram+draft_model",
    "mixture": "mixture:24:members=suffix+(eagle:beam=3:branch=4)+medusa",
    "a user's trees": "branching:4",
}
PROMPT = "values = [1, 2, 3]\nvalues = [1, 2, 3]\nvalues = [1, 2,"


class Branching:
    """Two guesses beside each other, and one below the likelier."""

    needs = Needs()

    def begin(self, seq: Any) -> None: ...
    def commit(self, batch: Any, drafts: Any, verdicts: Any, scores: Any) -> None: ...
    def end(self, seq: Any) -> None: ...

    def propose(self, batch: Any, plan: Any) -> Drafts:
        trees = [([5, 6, 7], [-1, -1, 1]) if n >= 3 else ([], []) for n in plan.lengths]
        return Drafts.trees(trees, survival=[[0.3, 0.6, 0.2][: len(tokens)] for tokens, _ in trees])


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MTP module with random weights for the bundled model."""
    target = load_decoder(bundled_model(), LoadOptions(dtype="float32"))
    folder = tmp_path_factory.mktemp("module") / "mtp"
    save_mtp(toy_head(target, MtpShape().config(target.spec)), folder)
    return folder


@pytest.mark.grid(once=("rule",))
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", METHODS)
def test_chains_are_drafted(name: str, rule: str, module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTERED", {})
    register_drafter("branching", lambda _: Branching())
    weights = f":model={module}" if name == "mtp" else ""
    with LLM(speculation=f"{METHODS[name]}:rule={rule}{weights}", max_model_len=256) as llm:
        drafts, propose = list[Drafts](), llm.engine.drafter.propose
        monkeypatch.setattr(llm.engine.drafter, "propose", lambda batch, plan: drafts.append(propose(batch, plan)) or drafts[-1])
        params = [SamplingParams(temperature=t, seed=3, max_tokens=24, ignore_eos=True) for t in (0.0, 0.8)]
        outputs = [llm.generate(PROMPT, one)[0].outputs[0] for one in params]
        assert llm.kept("nobody").tokens == 0
    assert [output.speculation["fallback_reason"] for output in outputs] == [None, None]
    assert sum(output.speculation["drafted"] for output in outputs) > 0
    assert all(tree.parents == list(range(-1, len(tree.parents) - 1)) for one in drafts for tree in one.per_sequence)


@pytest.mark.parametrize("rule", RULES)
def test_auto_is_refused(rule: str) -> None:
    with pytest.raises(InvalidParameter, match=f"name a drafter to verify by '{rule}'"):
        LLM(speculation={"method": "auto", "rule": rule})
