"""The frozen target that drafters learn from: its tokens, taps, last hidden rows and logits for a batch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.errors import InvalidParameter
from outrider.model import Decoder, ModelConfig, load_decoder
from outrider.ops import Plain
from outrider.train.attention import causal_attend
from outrider.train.prepare import Prepared
from outrider.train.tokenizer import load_tokenizer

__all__ = ["Features", "FrozenTarget", "require_same_tokenizer"]

_ALIGNED = 16


class Features(NamedTuple):
    """What the target says about (B, T) tokens. Flat rows, as the decoder gives them."""

    tokens: Tensor  # (B, T)
    taps: dict[int, Tensor]  # layer -> (B * T, hidden), the stream entering it
    logits: Tensor  # (B * T, V)

    def span(self, depths: int) -> int:
        """Draft starts per row of text: every one has `depths` drafted tokens inside the text."""
        most = self.tokens.shape[1] - depths
        return most // _ALIGNED * _ALIGNED if most > 4 * _ALIGNED else most

    def cut(self, rows: Tensor, begin: int, span: int) -> Tensor:
        """Positions begin .. begin + span of flat rows (B * T, width), flat again."""
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
        """From a model directory, in the dtype it is served in."""
        return cls(load_decoder(directory).to(device))

    @property
    def config(self) -> ModelConfig:
        return self.decoder.config

    def reading(self, taps: Iterable[int]) -> FrozenTarget:
        """The same target with other taps."""
        wrong = [tap for tap in taps if not 0 <= tap <= self.config.layers]
        if wrong:
            raise InvalidParameter("taps", f"{wrong[0]} is not between 0 and the target's {self.config.layers} layers")
        return FrozenTarget(self.decoder, taps)

    @torch.no_grad()
    def features(self, tokens: Tensor) -> Features:
        """Everything about (B, T) tokens."""
        rows, length = tokens.shape
        positions = torch.arange(length, device=tokens.device).repeat(rows)
        with torch.autocast("cuda", torch.bfloat16, enabled=tokens.is_cuda):
            hidden = self.decoder(tokens.reshape(-1), positions, causal_attend(rows, length), self._ops, self.taps)
        # float32 products (TF32 on CUDA): logits rounded to bf16 would be targets off by several per cent
        logits = self.decoder.logits(hidden.last.float(), self._ops)
        return Features(tokens, dict(zip(self.taps, hidden.taps, strict=True)), logits)


def require_same_tokenizer(target: Path, prepared: Prepared) -> None:
    """Refuse a corpus whose ids mean other tokens to the target."""
    own, corpus = load_tokenizer(target), load_tokenizer(prepared.directory)
    if own.get_vocab() != corpus.get_vocab():
        sizes = f"{corpus.get_vocab_size()} and {own.get_vocab_size()} tokens"
        raise InvalidParameter(
            "tokenizer",
            f"the corpus in {prepared.directory} was encoded with another tokenizer than that of {target} ({sizes}); "
            f"prepare it again with --tokenizer {target}",
        )
