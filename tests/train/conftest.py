"""The fixtures of tests/small_corpus.py."""

from ..small_corpus import packages, prepared, target

__all__ = ["packages", "prepared", "target"]
