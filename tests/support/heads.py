"""A small random target and heads for it."""

from __future__ import annotations

import torch
from torch import nn

from outrider.heads import Borrowed, EagleConfig, EagleHead, MedusaConfig, MedusaHeads
from outrider.model import Decoder
from outrider.train.shapes import DecoderShape, EagleShape, new_decoder

VOCAB, CONTEXT = 64, 40


def randomise(module: nn.Module, seed: int, std: float = 0.2) -> None:
    """Every parameter random, norms too, so that none can be forgotten unnoticed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in module.parameters():
            noise = torch.randn(param.shape, generator=generator)
            param.copy_(1.0 + 0.2 * noise if param.dim() == 1 else std * noise)


def toy_target(seed: int = 0, tied: bool = True) -> Decoder:
    shape = DecoderShape(layers=4, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=VOCAB, context=CONTEXT, tied=tied)
    decoder = new_decoder(shape.config(0), seed, torch.device("cpu"))
    randomise(decoder, seed, 0.3)
    return decoder.requires_grad_(False)


def toy_eagle(target: Decoder, shape: EagleShape = EagleShape(), seed: int = 1) -> EagleHead:  # noqa: B008 (frozen)
    return toy_head(target, shape.config(target.spec), seed)


def toy_head(target: Decoder, config: EagleConfig, seed: int = 1) -> EagleHead:
    head = EagleHead(config, Borrowed.of(target))
    randomise(head, seed)
    return head


def toy_medusa(target: Decoder, own_output: bool = False, blocks: int = 2) -> MedusaHeads:
    c = target.spec
    heads = MedusaHeads(MedusaConfig(c.hidden, c.vocab, c.depth, 3, blocks, own_output), Borrowed.of(target))
    randomise(heads, 2)
    return heads
