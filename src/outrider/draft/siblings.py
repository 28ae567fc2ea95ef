"""`model="auto"` of a drafter: the published sibling or head of the target, if it is in the local cache of the hub."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from outrider.config import WITH_WEIGHTS, SpeculationConfig
from outrider.errors import InvalidParameter
from outrider.model import read_spec
from outrider.model.published import HEADS, Published, identify
from outrider.text import Tokenizer

__all__ = ["AUTO", "in_cache", "resolve_sibling"]

AUTO = "auto"
_TIMES_SMALLER = 40.0


def in_cache(hub_id: str) -> Path | None:
    """The folder of a model in the local cache, if its configuration and weights are there; nothing is fetched."""
    folder = _folder(hub_id)
    return folder if folder is not None and any(folder.glob("*.safetensors")) else None


def _folder(hub_id: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(hub_id, "config.json")
    return Path(path).parent if isinstance(path, str) else None


def resolve_sibling(config: SpeculationConfig, directory: Path) -> SpeculationConfig:
    """The same settings with `model="auto"` replaced: what lies beside the target, or what of the table is in the cache."""
    if config.model != AUTO:
        return config
    folder = WITH_WEIGHTS.get(config.method)
    if any((directory / name / "config.json").exists() for name in ([folder] if folder else WITH_WEIGHTS.values())):
        return replace(config, model=None)
    names = _published(directory, config.method)
    for name in names:
        if (path := in_cache(name)) is not None:
            return replace(config, model=str(path))
    if not names:
        raise InvalidParameter(
            "--draft-model",
            f"auto knows no published draft for {directory} with method {config.method!r}; use --method suffix, which needs "
            "none, or train one with `outrider train draft`",
        )
    fetch = " or ".join(f"`hf download {name}`" for name in names[:4])
    pickled = next((name for name in names if _folder(name)), None)
    is_head = any(name == pickled for heads in HEADS.values() for _, name in heads)
    command = f"outrider {'heads ' if is_head else ''}convert {pickled} DIR"
    cure = f"; {pickled} is a pickle there: convert it with `{command}` and pass --draft-model DIR"
    what = f"auto: nothing that drafts for {directory} is in the local cache; fetch it with {fetch}{cure if pickled else ''}"
    raise InvalidParameter("--draft-model", what)


def _published(directory: Path, method: str) -> list[str]:
    """Hub ids, the most promising first: heads for the target, then siblings trained like it and about 40 times smaller."""
    tokenizer = Tokenizer.load(directory)
    tokens = None if tokenizer is None else tokenizer.table()
    model, variant, _ = identify(directory.resolve(), tokens, read_spec(directory).parameters)
    if model is None:
        return []
    heads = [name for kind, name in HEADS.get(variant, ()) if method in (kind, "auto")]
    if method not in ("draft_model", "auto"):
        return heads

    def rank(draft: Published) -> tuple[bool, float]:
        return draft.line != model.line, abs(math.log(model.millions / draft.millions / _TIMES_SMALLER))

    return heads + [name for _, name in sorted(model.drafts(variant), key=lambda pair: rank(pair[0]))]
