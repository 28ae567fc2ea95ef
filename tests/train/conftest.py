"""The fixtures of tests/support/corpus.py."""

from tests.support.corpus import packages, prepared, target

__all__ = ["packages", "prepared", "target"]
