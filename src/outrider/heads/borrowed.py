"""Tensors that a head shares with its target: embedding, output matrix and final norm."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from outrider.model import Decoder, ModelSpec

__all__ = ["Borrowed"]


@dataclass(frozen=True, slots=True)
class Borrowed:
    """Frozen tensors of the target, and the spec that says how it uses them; no copies are made."""

    embedding: Tensor  # (V, hidden)
    output: Tensor  # (V, hidden)
    norm: Tensor  # (hidden,)
    norm_bias: Tensor | None
    spec: ModelSpec

    @classmethod
    def of(cls, target: Decoder, with_output: bool = True) -> Borrowed:
        """The tensors of a loaded target, without copies. Without `with_output` the output matrix may not be in memory."""
        target.materialise("embedding", *(["output"] if with_output else []))
        embedding = target.embedding.detach()
        matrix = embedding if target.output is None else target.output.detach()
        assert target.norm is not None
        bias = None if target.norm_bias is None else target.norm_bias.detach()
        return cls(embedding, matrix, target.norm.detach(), bias, target.spec)
