"""Verification rules: `match` (default, same tokens), `rejection`, `block`, and lossy `typical`."""

from outrider.verify.batch import guided, verify
from outrider.verify.rejection import rejection_sample

__all__ = ["guided", "rejection_sample", "verify"]
