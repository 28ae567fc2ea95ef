"""Prompts that come with the package, by name."""

from __future__ import annotations

from pathlib import Path

__all__ = ["find_prompts"]

# editing: code, then a comment that asks for it again with a small change, and the beginning of the copy
_NAMES = ("editing",)


def find_prompts(name: str) -> Path:
    """The file of a bundled workload, or the path itself."""
    return Path(__file__).parent / f"{name}.jsonl" if name in _NAMES else Path(name)
