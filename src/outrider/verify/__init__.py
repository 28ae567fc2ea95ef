"""Verification rules: `match` (default, same tokens), `rejection`, `block`, and lossy `typical`."""

from outrider.verify.batch import prune, rows_of, verify

__all__ = ["prune", "rows_of", "verify"]
