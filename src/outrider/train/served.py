"""Acceptance of an exported drafter, measured in the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outrider.engine.acceptance import measure_acceptance
from outrider.engine.llm import LLM
from outrider.sampling import SamplingParams
from outrider.train.data import TokenStore
from outrider.train.generate import document_starts

__all__ = ["served_acceptance"]

_METHODS = {"draft": "draft_model"}  # name of the command -> name of the method, where they differ
_NODES = {"medusa": 24}
_CHAIN = 5


def served_acceptance(target: Path, name: str, drafter: Path, store: TokenStore, prompts: int = 8) -> list[dict[str, Any]]:
    """Tokens per round and acceptance by position on beginnings of held-out documents, greedy and at 0.8."""
    settings = {"method": _METHODS.get(name, name), "model": str(drafter), "draft_tokens": _NODES.get(name, _CHAIN)}
    llm = LLM(target, speculation=settings)
    size = min(96, llm.max_model_len // 2)
    texts = [tuple(int(token) for token in row) for row in document_starts(store, prompts, size, seed=7)]
    length = min(120, llm.max_model_len - size)
    figures = []
    for temperature in (0.0, 0.8):
        params = SamplingParams(temperature=temperature, seed=7, max_tokens=length)
        figures.append(measure_acceptance(llm, texts, params).as_dict())
    return figures
