"""The frozen target that drafters are distilled from: its taps and logits for a batch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.errors import InvalidParameter
from outrider.model import Decoder, LoadOptions, ModelSpec, load_decoder
from outrider.ops import Plain
from outrider.ops.products import emulates_bf16
from outrider.train.attention import causal_attend
from outrider.train.corpus import document_end
from outrider.train.sizing import autocast

__all__ = ["Features", "FrozenTarget"]

_ALIGNED = 16


class Features(NamedTuple):
    """The target's taps and logits for (B, T) tokens, in flat rows as the decoder returns them."""

    tokens: Tensor  # (B, T)
    taps: dict[int, Tensor]  # layer -> (B * T, hidden), the stream entering it
    logits: Tensor  # (B * T, V)

    def span(self, depths: int) -> int:
        """Draft starts per row of text: every one has `depths` drafted tokens inside the text."""
        span = self.tokens.shape[1] - depths
        return span // _ALIGNED * _ALIGNED if span > 4 * _ALIGNED else span

    def cut(self, rows: Tensor, begin: int, span: int) -> Tensor:
        """Positions begin .. begin + span of flat rows (B * T, width), as flat rows."""
        count, length = self.tokens.shape
        return rows.view(count, length, -1)[:, begin : begin + span].reshape(count * span, -1)


class FrozenTarget:
    """A target whose weights stay as they are; `features` may be replaced by a compiled version of itself."""

    def __init__(self, decoder: Decoder, taps: Iterable[int] = ()) -> None:
        self.decoder = decoder.requires_grad_(False)
        self.taps = tuple(sorted(set(taps)))
        self._ops = Plain()

    @classmethod
    def load(cls, directory: Path, device: torch.device) -> FrozenTarget:
        """From a model directory, in the dtype it is served in; in float32 on a CPU whose products in bf16 are emulated."""
        options = LoadOptions(dtype="float32") if device.type == "cpu" and emulates_bf16() else LoadOptions()
        decoder = load_decoder(directory, options).to(device)
        if not decoder.spec.eos_ids:
            decoder.spec = replace(decoder.spec, eos_ids=(document_end(directory),))
        return cls(decoder)

    @property
    def config(self) -> ModelSpec:
        return self.decoder.spec

    def reading(self, taps: Iterable[int]) -> FrozenTarget:
        """This target with other taps."""
        wrong = [tap for tap in taps if not 0 <= tap <= self.config.depth]
        if wrong:
            raise InvalidParameter("taps", f"{wrong[0]} is not between 0 and the target's {self.config.depth} layers")
        return FrozenTarget(self.decoder, taps)

    @torch.no_grad()
    def features(self, tokens: Tensor) -> Features:
        """Taps and logits of (B, T) tokens."""
        rows, length = tokens.shape
        positions = torch.arange(length, device=tokens.device).repeat(rows)
        with autocast(tokens.device):
            hidden = self.decoder(tokens.reshape(-1), positions, causal_attend(rows, length), self._ops, self.taps)
        # float32 products (TF32 on CUDA): logits rounded to bf16 would be targets off by several per cent
        logits = self.decoder.logits(hidden.last.float(), self._ops)
        return Features(tokens, dict(zip(self.taps, hidden.taps, strict=True)), logits)
