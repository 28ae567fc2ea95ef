"""The drafters that `recipes.pyrite.heads` can train: the ones that ship, and those they were compared with."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.train.frozen import FrozenTarget
    from outrider.train.networks import TrainableDrafter

__all__ = ["variants"]


def variants(args: argparse.Namespace) -> dict[str, Callable[[FrozenTarget], TrainableDrafter]]:
    """Everything a stage can name."""
    from outrider.train.early_exit import new_exits
    from outrider.train.shapes import (
        BlockShape,
        DecoderShape,
        EagleShape,
        MedusaShape,
        new_block,
        new_draft,
        new_eagle,
        new_medusa,
    )

    def eagle(kind: str = args.loss, **fields: Any) -> Callable[[FrozenTarget], TrainableDrafter]:
        return lambda target: new_eagle(target, EagleShape(**fields), kind, args.seed, args.depths)

    def draft(layers: int, hidden: int, ffn: int, kind: str = args.loss) -> Callable[[FrozenTarget], TrainableDrafter]:
        heads = max(hidden // 64, 2)
        return lambda target: new_draft(target, DecoderShape(layers, hidden, heads, heads // 2, ffn), kind, args.seed)

    def medusa(heads: int, blocks: int, kind: str = "kl", every: int = 1) -> Callable[[FrozenTarget], TrainableDrafter]:
        return lambda target: replace(new_medusa(target, MedusaShape(heads, blocks), kind), every=every)

    def block(kind: str = args.loss, **fields: Any) -> Callable[[FrozenTarget], TrainableDrafter]:
        training = {"blocks": args.blocks, "skip": args.skip, "fade": args.fade, "survival": args.survival}
        return lambda target: replace(new_block(target, BlockShape(**fields), kind, args.seed), **training)

    if args.smoke:
        return {
            "dflash": block(block=4, taps=(1, 2, 4), markov=8, context=112),
            "eagle": eagle(taps=(1, 2, 4)),
            "draft": draft(1, 32, 48),
            "medusa": medusa(2, 1),
            "scale_draft": draft(1, 32, 48),
            "scale_eagle": eagle(taps=(1, 2)),
            "scale_medusa": medusa(2, 1),
            "scale_block": block(block=4, markov=8, context=112, layers=1, taps=(1, 2)),
            "scale_exit": lambda target: new_exits(target, (1,), 32, args.loss, args.seed),
        }
    taps = (2, 6, 9, 12)  # the published three and the stream that leaves the last layer
    return {
        "eagle": eagle(taps=taps),
        "eagle_kl": eagle("kl", taps=taps),
        "eagle_lk": eagle("lk", taps=taps),
        "eagle_three": eagle(),
        "eagle_late": eagle(taps=(4, 8, 12)),
        "eagle_wide": eagle(taps=taps, ffn=2048),
        "eagle_plain": eagle(taps=taps, fc_norm=False, norm_output=False),
        "eagle1": eagle(form="eagle1"),
        "draft": draft(2, 256, 704),
        "draft_kl": draft(2, 256, 704, "kl"),
        "draft_deep": draft(3, 256, 512),
        "draft_slim": draft(4, 192, 512),
        "dflash": block(ffn=832, taps=(3, 7, 11), mask=4, block=16, markov=24, context=416),
        "dflash_plain": block(ffn=832, taps=(3, 7, 11), mask=4, block=16, markov=0, context=416, causal=False, from_anchor=False),
        "medusa": medusa(3, 2, every=4),
        "medusa_two": medusa(4, 2),
        "medusa_mix": medusa(4, 2, "mix"),
        "medusa_deep": medusa(4, 4),
        "medusa_deep_mix": medusa(4, 4, "mix"),
        "medusa_deep_greedy": medusa(4, 4, "greedy"),
        "medusa_six": medusa(4, 6),
        "medusa_six_greedy": medusa(4, 6, "greedy"),
        "medusa_five": medusa(5, 5),
        "medusa_eight": medusa(3, 8),
        "scale_draft": draft(3, 384, 1024),  # of recipes/scale_check.py
        "scale_eagle": eagle(),
        "scale_medusa": medusa(4, 2, every=4),
        "scale_block": block(layers=3, block=16, markov=64, context=416, mask=4),
        "scale_exit": lambda target: replace(new_exits(target, (), 0, args.loss, args.seed), every=4),
    }
