"""The model that comes with the package, and its drafters."""

from __future__ import annotations

from pathlib import Path

from outrider.errors import InvalidParameter

__all__ = ["bundled_model", "is_bundled"]

_PYRITE = Path(__file__).parents[1] / "models" / "pyrite"


def bundled_model() -> Path:
    """The directory of the bundled model, or an error that says what to pass instead."""
    if not (_PYRITE / "config.json").exists():
        raise InvalidParameter("model", "no model is bundled with this build; pass --model DIR_OR_HUB_ID (LLM(model=...))")
    return _PYRITE


def is_bundled(directory: Path) -> bool:
    """Whether a model's directory is that of the bundled one."""
    return directory.resolve() == _PYRITE.resolve()
