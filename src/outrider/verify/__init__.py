"""Verification rules: `match` (default, same tokens), `rejection`, `block`, and lossy `typical`."""

from outrider.verify.batch import guided, verify

__all__ = ["guided", "verify"]
