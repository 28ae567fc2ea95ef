"""Verification rules: `match` (default, same tokens), `rejection`, `block`, and lossy `typical`."""

from outrider.verify.batch import guided, rows_of, verify

__all__ = ["guided", "rows_of", "verify"]
