"""Everything a model has to draft with, as arms the controller chooses among."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path

from outrider.config import SpeculationConfig
from outrider.core import Arm
from outrider.errors import InvalidParameter

__all__ = ["arms_of", "resolve_auto"]

_LOOKUPS = ("suffix", "ngram", "recycle")  # two of them know the same text
_COMPANIONS = {  # what may come with a target, in the folder of that name
    "draft": SpeculationConfig("draft_model", draft_tokens=12),
    "eagle": SpeculationConfig("eagle", draft_tokens=32, options={"beam": 3, "branch": 6, "depth": 8}),
    "medusa": SpeculationConfig("medusa", draft_tokens=32),
}
_MOST = 32  # nodes of an arm


def resolve_auto(config: SpeculationConfig, directory: Path, on_gpu: bool = False) -> SpeculationConfig:
    """The same settings with the members named: those given, or whatever there is for the model."""
    if config.rule != "match":
        raise InvalidParameter("rule", f"method 'auto' verifies by 'match'; name a drafter to verify by {config.rule!r}")
    if config.nested():
        return config
    able = {"draft": _COMPANIONS["draft"]} if on_gpu else _COMPANIONS  # heads run on the processor, too far from the target
    found = tuple(own for name, own in able.items() if (directory / name / "config.json").exists())
    names = ("suffix",) if found else ("suffix", "recycle")
    lookups = tuple(SpeculationConfig(name, draft_tokens=_MOST) for name in names)
    return replace(config, options={**config.options, "members": (*lookups, *found)})


def arms_of(members: Seq[SpeculationConfig]) -> list[Arm]:
    """Each member alone, and the suffix automaton beside each that is no lookup: its long copies, their good guesses."""
    alone = [Arm(own.method, (i,), min(own.draft_tokens, _MOST)) for i, own in enumerate(members)]
    pairs = [
        Arm(f"{a.method}+{b.method}", (i, j), _MOST)
        for i, a in enumerate(members)
        for j, b in enumerate(members)
        if a.method == "suffix" and b.method not in _LOOKUPS
    ]
    return alone + pairs
