"""A kernel that decodes bytes, for tests. It needs Triton, so tests import it where they use it."""

# mypy: ignore-errors
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

from outrider.ops.cuda.quantised import decoded_mxfp4

__all__ = ["decode_mxfp4"]


@triton.jit
def decode_mxfp4(packed, low, high, FAST: tl.constexpr):
    """All 256 bytes, by halves."""
    at = tl.arange(0, 256)
    first, second = decoded_mxfp4(tl.load(packed + at), FAST)
    tl.store(low + at, first)
    tl.store(high + at, second)
