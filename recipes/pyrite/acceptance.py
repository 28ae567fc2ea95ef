"""Acceptance of Pyrite's drafters for the controller's first rounds: models/pyrite/acceptance.json.

    PYTHONPATH=src:. python -m recipes.pyrite.acceptance

The prompts are first halves of functions from installed packages that Pyrite was not trained on. Every drafter of `auto` drafts
for each of them at each temperature. The acceptance that the controller has then learnt is written to the model's folder. Takes
two minutes on two cores.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import random
from collections.abc import Sequence
from pathlib import Path

from outrider.control import Controller, Costs
from outrider.engine.costs_file import ACCEPTANCE
from outrider.engine.llm import LLM
from outrider.sampling import SamplingParams
from recipes.pyrite.packages import HELDOUT

TEMPERATURES = (0.0, 0.4, 0.7, 0.8, 1.0, 1.4, 1.5)
TEXTS, TOKENS = 8, 96


class FreeDrafts(Costs):
    """Costs under which every drafter drafts as many tokens as it can: drafts cost nothing."""

    def forward(self, rows: float, context: int, drafter: str = "") -> float:  # noqa: ARG002
        return 1.0

    def proposals(self, drafter: str, batch: int, lengths: Sequence[float], context: int = 0) -> list[float]:  # noqa: ARG002
        return [0.0] * len(lengths)


def functions() -> list[str]:
    """The first half of functions of middling length."""
    halves: list[str] = []
    for package in HELDOUT:
        spec = importlib.util.find_spec(package)
        for path in sorted(Path(spec.origin).parent.rglob("*.py")) if spec and spec.origin else ():
            text = path.read_text(errors="replace")
            for node in ast.walk(ast.parse(text)):
                lines = (ast.get_source_segment(text, node) or "").split("\n") if isinstance(node, ast.FunctionDef) else ()
                if 12 <= len(lines) <= 40:
                    halves.append("\n".join(lines[: len(lines) // 2]) + "\n")
    return halves


def main() -> None:
    texts = random.Random(0).sample(functions(), TEXTS * len(TEMPERATURES))
    llm = LLM(speculation="auto", prefix_cache=False, share=False)
    policy = llm.engine.policy = Controller(llm.engine.policy.arms, FreeDrafts())
    for t, temperature in enumerate(TEMPERATURES):
        for number, text in enumerate(texts[t * TEXTS : (t + 1) * TEXTS]):
            params = SamplingParams(temperature=temperature, seed=number, max_tokens=TOKENS, ignore_eos=True)
            for arm in policy.arms:
                llm.generate(text, params, speculation={"method": arm.name})
        print(f"temperature {temperature:g} done", flush=True)
    (llm.directory / ACCEPTANCE).write_text(json.dumps(policy.accepted, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
