"""Drafters that the settings leave open, chosen from what the model's folder offers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from outrider.config import SpeculationConfig
from outrider.draft.auto import resolve_auto
from outrider.draft.siblings import resolve_sibling
from outrider.errors import InvalidParameter

__all__ = ["resolve_drafters"]


def resolve_drafters(config: SpeculationConfig, directory: Path, on_gpu: bool = False) -> SpeculationConfig:
    """The same settings with every drafter named: a mixture's members and a cascade's levels, or `auto`'s."""
    config = resolve_sibling(config, directory)
    if config.method == "auto":
        return resolve_auto(config, directory, on_gpu)
    if config.method == "cascade":
        nested = config.nested() or _levels(directory)
        return replace(config, options={**config.options, "levels": _each(nested, directory)})
    if config.method == "mixture":
        nested = config.nested() or _members(directory)
        return replace(config, options={**config.options, "members": _each(nested, directory)})
    return config


def _each(nested: tuple[SpeculationConfig, ...], directory: Path) -> tuple[SpeculationConfig, ...]:
    return tuple(resolve_drafters(one, directory) for one in nested)


def _levels(directory: Path) -> tuple[SpeculationConfig, ...]:
    """A lookup that guesses for the model's draft model."""
    if not (directory / "draft" / "config.json").exists():
        raise InvalidParameter(
            "levels",
            f"method 'cascade' needs a draft model, and {directory} brings none; pass one: "
            "--method 'cascade:levels=ngram+(draft_model:model=DIR)', or in Python "
            'speculation={"method": "cascade", "levels": ["ngram", {"method": "draft_model", "model": DIR}]}',
        )
    return SpeculationConfig.parse({"method": "cascade", "levels": ["ngram", "draft_model"]}).nested()


def _members(directory: Path) -> tuple[SpeculationConfig, ...]:
    """A lookup beside the best network the model brings; beside another lookup where it brings none."""
    networks = {"eagle": "eagle", "mtp": "mtp", "dflash": "dflash", "draft": "draft_model", "medusa": "medusa"}
    brought = [method for folder, method in networks.items() if (directory / folder / "config.json").exists()]
    return SpeculationConfig.parse({"method": "mixture", "members": ["suffix", *(brought or ["recycle"])[:1]]}).nested()
