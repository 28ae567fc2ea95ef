"""What runs a spec: `plain` (torch anywhere), `cpu` (the native core) and `cuda` (Triton kernels). Capability is data.

A backend names the features of `ModelSpec.features` that it lacks. `plain` lacks none.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import NamedTuple

from outrider.errors import InvalidParameter
from outrider.model.recurrent import RECURRENT_KINDS
from outrider.model.spec import ModelSpec
from outrider.ops import Blocked, Ops, serving_ops

__all__ = ["BACKENDS", "CPU", "CUDA", "PLAIN", "RECURRENT", "Backend", "cpu_ops"]

_log = logging.getLogger("outrider")


class Backend(NamedTuple):
    """A backend, and the features that it does not have yet."""

    name: str
    runs_on: str
    lacks: frozenset[str] = frozenset()

    def missing(self, spec: ModelSpec) -> list[str]:
        """Features of a spec that this backend lacks."""
        return sorted(self.lacks & spec.features())


# what comes with recurrent layers, and with the families that have some
RECURRENT = frozenset({
    *RECURRENT_KINDS, "multipliers of a part", "no MLP", "no mixer", "output gate", "recurrent beside attention",
})  # fmt: skip

PLAIN = Backend("plain", "torch")
CPU = Backend("cpu", "the native core", RECURRENT)
CUDA = Backend("cuda", "an NVIDIA GPU", RECURRENT - {"gated delta rule", "output gate", "short convolution"})
BACKENDS = (PLAIN, CPU, CUDA)


def cpu_ops(spec: ModelSpec) -> Ops:
    """The operations that serve a spec on the processor: the native core where it has every feature, else torch."""
    ops, missing = serving_ops(), CPU.missing(spec)
    if ops.core is None or not missing:
        return ops
    lacking = f"the native core does not support yet: {', '.join(missing)}"
    if spec.dtype in ("int8", "int4"):
        raise InvalidParameter("dtype", f"{spec.dtype} runs in the native core alone; {lacking}; pass dtype=bfloat16")
    _warn_once(f"{spec.architecture}: {lacking}; torch decodes, slower and with the same promises")  # but for recurrences
    return Blocked(ops.core)


@lru_cache(maxsize=64)
def _warn_once(message: str) -> None:
    _log.warning(message)
