"""Verification rules: `match` (default, same tokens), `rejection`, `block`, and lossy `typical`."""

from outrider.verify.batch import rows_of, verify

__all__ = ["rows_of", "verify"]
