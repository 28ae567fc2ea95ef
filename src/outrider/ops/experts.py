"""Mixtures of experts in the native core's layout; ops/cpu/experts.h explains how rows use them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from outrider.ops.native import Addressed, PackedLinear

__all__ = ["ExpertRouter", "PackedExperts"]

_SCORES = ("softmax", "sigmoid", "sparsemixer")  # Scores of experts.h


class ExpertRouter(NamedTuple):
    """How rows choose their experts, in the order of Router in experts.h."""

    matrix: PackedLinear  # columns: the experts, and one more where the shared expert has a gate
    correction: Tensor | None
    experts: int
    chosen: int
    scores: str
    groups: int
    chosen_groups: int
    normalised: bool
    scale: float
    closeness: float


class PackedExperts(Addressed):
    """The router and the matrices of a layer's experts: equal in shape, the shared one perhaps not."""

    def __init__(
        self,
        router: ExpertRouter,
        gate_up: Sequence[PackedLinear],
        down: Sequence[PackedLinear],
        shared: tuple[PackedLinear, PackedLinear] | None = None,
    ) -> None:
        self.router, self.gate_up, self.down, self.shared = router, gate_up, down, shared
        self._tables = [array("q", [matrix.handle for matrix in matrices]) for matrices in (gate_up, down)]
        numbers = array("q", (router.experts, router.chosen, _SCORES.index(router.scores), router.groups, router.chosen_groups))
        words = (router.matrix.handle, 0 if router.correction is None else router.correction.data_ptr(), *numbers)
        floats = array("q", array("d", (router.scale, router.closeness)).tobytes())
        tables = (table.buffer_info()[0] for table in self._tables)
        common = (0, 0) if shared is None else tuple(matrix.handle for matrix in shared)
        has_gate = router.matrix.columns > router.experts
        self._spec = array("q", (*words, router.normalised, *floats, *tables, *common, has_gate))
        self.handle = self._spec.buffer_info()[0]

    def check(self, hidden: int, ffn: int) -> None:
        """Refuse matrices that do not fit together, or rows of `hidden` values and memory for `ffn` of the shared expert."""
        router, width = self.router, self.down[0].inner
        if not 1 <= router.chosen <= router.experts or router.groups * router.chosen_groups < 1:
            raise ValueError(f"{router.chosen} of {router.experts} experts cannot be chosen")
        if router.matrix.inner != hidden or router.matrix.columns not in (router.experts, router.experts + 1):
            raise ValueError(f"the router is {(router.matrix.columns, router.matrix.inner)} for {router.experts} experts")
        if len(self.gate_up) != router.experts or len(self.down) != router.experts:
            raise ValueError(f"{len(self.gate_up)} and {len(self.down)} experts are there, not {router.experts}")
        shapes = {(width, hidden): self.gate_up, (hidden, width): self.down}
        if self.shared is not None:
            inner = self.shared[1].inner
            shapes |= {(inner, hidden): [self.shared[0]], (hidden, inner): [self.shared[1]]}
            if inner > ffn:
                raise ValueError(f"the stack needs {inner} values between gate_up and down, not {ffn}")
        for shape, matrices in shapes.items():
            if any((matrix.columns, matrix.inner) != shape for matrix in matrices):
                raise ValueError(f"an expert is not {shape}, which the stack needs")

    @property
    def bytes(self) -> int:
        """Bytes of all experts."""
        return sum(matrix.bytes for matrix in (*self.gate_up, *self.down, *(self.shared or ()), self.router.matrix))
