"""Matrix products by torch on a CPU: widths are padded, and matrices are packed for oneDNN where it supports that.

Without packing, oneDNN reorders a matrix in every call, which takes longer than the product of one row. Odd widths are
padded with zeros, because libraries treat the rows of such a product differently.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.ops.row_counts import BLOCK, Counts, agreeing_counts, cancelling, in_counts
from outrider.platform import ISA_VARIABLES, cpu_flags

__all__ = ["Product", "emulates_bf16"]

# A processor with none of these flags emulates products in bf16. One row then has a special kernel with other bits, which
# takes half the time of two rows; four to eight rows take as long one by one as together.
_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
_CAPS_BELOW_BF16 = frozenset({"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI"})  # of ONEDNN_MAX_CPU_ISA
_WIDTH = 32  # widths become multiples of it: rows of either dtype then lie on whole cache lines


class Product:
    """x times a matrix (columns, inner) transposed, plus a bias. A row's bits do not depend on the other rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None, pack: bool = True) -> None:
        """Without `pack` the matrix is read where it is, if its widths allow that: slower, without a copy."""
        self._pack = pack
        self._columns, inner = weight.shape
        self._missing = -inner % _WIDTH
        padded, padded_bias = weight.detach().contiguous(), None if bias is None else bias.detach()
        if self._missing or self._columns % _WIDTH:
            padded = F.pad(padded, (0, self._missing, 0, -self._columns % _WIDTH))
            padded_bias = None if padded_bias is None else F.pad(padded_bias, (0, -self._columns % _WIDTH))
        self._shape = (padded.shape[0], padded.shape[1])
        self._dtype, self._biased = weight.dtype, bias is not None
        self._multiply = _multiplication(padded, padded_bias, pack)
        self._counts: tuple[int, Counts] = (0, ())  # with the number of threads that they are for

    def __call__(self, x: Tensor) -> Tensor:
        """(rows, columns) of (rows, inner), in the matrix's dtype."""
        x = x.to(self._dtype)
        if self._missing:
            x = F.pad(x, (0, self._missing))
        threads = torch.get_num_threads()
        if threads != self._counts[0]:
            self._counts = (threads, _counts(self._shape, self._dtype, self._biased, threads, self._pack))
        out = in_counts(x, self._counts[1], self._multiply)
        return out if out.shape[1] == self._columns else out[:, : self._columns].contiguous()


def _multiplication(weight: Tensor, bias: Tensor | None, pack: bool) -> Callable[[Tensor], Tensor]:
    if not pack or not _can_pack(weight.dtype):
        return lambda x: F.linear(x, weight, bias)
    packed, multiply = torch.ops.mkldnn._reorder_linear_weight(weight, BLOCK), torch.ops.mkldnn._linear_pointwise.default
    return lambda x: multiply(x, packed, bias, "none", [], "")


@lru_cache(maxsize=8)
def _can_pack(dtype: torch.dtype) -> bool:
    """Whether this build of torch and this processor have packed products of the dtype."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(torch.zeros(_WIDTH, _WIDTH, dtype=dtype), BLOCK)
        torch.ops.mkldnn._linear_pointwise(torch.zeros(BLOCK, _WIDTH, dtype=dtype), packed, None, "none", [], "")
    except (AttributeError, RuntimeError):  # not in this build; not for this dtype or processor
        return False
    return True


def emulates_bf16() -> bool:
    """Whether oneDNN multiplies bf16 without instructions for it: the processor has none, or the environment caps them."""
    capped = any(os.environ.get(name, "").upper() in _CAPS_BELOW_BF16 for name in ISA_VARIABLES)
    return capped or not cpu_flags() & _BF16_FLAGS


@lru_cache(maxsize=1024)
def _counts(shape: tuple[int, int], dtype: torch.dtype, biased: bool, threads: int, pack: bool = True) -> Counts:
    """Row counts for a matrix of that shape; `threads` is what torch uses now, by which libraries cut products."""
    del threads
    if dtype == torch.bfloat16 and _can_pack(dtype) and emulates_bf16():
        return (1,)
    columns, inner = shape
    rows, weight_rows = cancelling(inner)
    weight = weight_rows.repeat(-(-columns // len(weight_rows)), 1)[:columns].to(dtype).contiguous()
    bias = weight_rows[0, :1].expand(columns).to(dtype).contiguous() if biased else None
    return agreeing_counts(rows.to(dtype), _multiplication(weight, bias, pack))
