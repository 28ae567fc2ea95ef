"""Recurrent mixers as data: what stands in a layer in place of attention, or beside it.

Each kind reads one product of the layer's input, passes columns of it through a short causal convolution, and all but the short
convolution keep a memory of fixed size. The arithmetic is in model/recurrence.py.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RECURRENT_KINDS", "Recurrent"]

RECURRENT_KINDS = ("short convolution", "gated delta rule", "Mamba-2")


@dataclass(frozen=True, slots=True)
class Recurrent:
    """A recurrent mixer of `heads` heads of values, and of keys where it has a memory (heads, key_dim, head_dim).

    Columns of its product, in order, and channels of its convolution:

        short convolution   gate, gate, values                  the first gate times the values
        gated delta rule    queries, keys, values, gate, b, a   queries, keys, values
        Mamba-2             gate, values, keys, queries, step   values, keys, queries
    """

    kind: str
    heads: int
    head_dim: int
    kernel: int  # rows that the convolution sees, the row itself included
    key_heads: int = 0  # each serves equally many heads of values
    key_dim: int = 0
    bias: bool = False  # on the product that it reads
    conv_bias: bool = False
    out_bias: bool = False
    norm_eps: float | None = None  # of the norm of its result; None: there is no norm
    norm_groups: int = 1  # the norm is over each of so many equal parts
    norm_first: bool = False  # the result is normed before the gate multiplies it
    step_limit: tuple[float, float] = (0.0, float("inf"))  # of Mamba-2's step
    scales: tuple[float, float, float, float, float] | None = None  # of the five parts of Mamba-2's columns
    out_scale: float = 1.0

    @property
    def inner(self) -> int:
        """Values in all heads."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Values in all heads of keys; queries have as many."""
        return self.key_heads * self.key_dim

    @property
    def channels(self) -> int:
        """Columns that the convolution takes."""
        return self.inner + 2 * self.keys

    @property
    def parts(self) -> tuple[int, ...]:
        """Widths of the columns of its product, in order."""
        if self.kind == "short convolution":
            return (self.inner,) * 3
        if self.kind == "gated delta rule":
            return (self.keys, self.keys, self.inner, self.inner, self.heads, self.heads)
        return (self.inner, self.inner, self.keys, self.keys, self.heads)

    @property
    def width(self) -> int:
        """Columns of the product that it reads."""
        return sum(self.parts)

    @property
    def norm_width(self) -> int:
        """Weights of its norm: those of one head, or of all."""
        return self.head_dim if self.kind == "gated delta rule" else self.inner

    @property
    def state_bytes(self) -> int:
        """Bytes of its state of one sequence: the window of the convolution, and the memory."""
        return 4 * ((self.kernel - 1) * self.channels + self.heads * self.key_dim * self.head_dim)

    def parameters(self, hidden: int) -> int:
        """Number of weights in the matrices."""
        return hidden * (self.width + self.inner) + self.kernel * self.channels
