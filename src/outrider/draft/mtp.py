"""MTP: the module for the token after the next that today's checkpoints bring, applied again and again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from outrider.draft.context import DraftContext
from outrider.draft.eagle import EagleDrafter, EagleOptions
from outrider.heads import load_mtp

__all__ = ["MtpDrafter"]


@dataclass(frozen=True)
class MtpOptions(EagleOptions):
    """The shape of the draft, and how the module is read."""


class MtpDrafter(EagleDrafter):
    """Drafts with an MTP module.

    What it does: one decoder layer like the target's reads the target's last hidden row and the next token's embedding, both
        normed and joined by a matrix, and predicts the token after; its own output stands in for the hidden rows of drafted
        tokens. A chain, or with `beam` or `branch` above 1 a dynamic tree, as EAGLE grows them.
    When it helps: with models that were trained with such a module (DeepSeek, GLM-4.5) and bring it in their checkpoint; short
        drafts, because few modules were trained beyond their first token.
    Cost: one decoder layer and the target's output matrix per level.
    Needs: the target's last hidden row; one layer of KV in the target's pages.
    Reference: DeepSeek-V3 2412.19437; Cai et al. (FastMTP) 2509.18362.
    """

    Options = MtpOptions

    @classmethod
    def build(cls, context: DraftContext) -> Self:
        directory = context.head_weights("mtp")
        return cls.serving(load_mtp(directory, context.target.decoder, context.weight_options(directory)), context)
