"""Random LoRA adapters on every product of a spec, and what they are equal to."""

from __future__ import annotations

import torch

from outrider.model import Decoder, ModelSpec
from outrider.model.lora import LoraParts
from outrider.ops.adapters import LowRank

__all__ = ["merged", "random_parts"]


def random_parts(spec: ModelSpec, seed: int, rank: int = 5, dtype: torch.dtype = torch.float32) -> LoraParts:
    """Adapters of several ranks and scales on all linears of all layers but the keys' and, with odd seeds, the last layer's."""
    generator, parts = torch.Generator().manual_seed(seed), dict[tuple[int, str], tuple[LowRank, ...]]()
    for i, layer in enumerate(spec.layers[: -1 if seed % 2 else None]):
        a, m = layer.attention, layer.mlp
        shapes = {
            "qkv": [(slice(0, a.q_width), spec.hidden), (slice(a.q_width + a.kv_width, a.qkv_width), spec.hidden)],
            "out": [(slice(0, spec.hidden), a.q_width)],
            "gate_up": [(slice(at, at + m.width), spec.hidden) for at in range(0, m.up_width, m.width)],
            "down": [(slice(0, spec.hidden), m.width)],
        }
        for product, columns in shapes.items():
            if product in ("gate_up", "down") and m.router is not None:
                continue  # experts have none
            parts[i, product] = tuple(
                LowRank(
                    where,
                    (torch.randn(rank + extra, inner, generator=generator) * inner**-0.5).to(dtype),
                    (torch.randn(where.stop - where.start, rank + extra, generator=generator) * 0.4).to(dtype),
                    0.7 + extra,
                )
                for extra, (where, inner) in enumerate(columns)
            )
    return parts


def merged(decoder: Decoder, parts: LoraParts) -> Decoder:
    """A decoder with an adapter added to its weights, in place."""
    for (layer, product), low_ranks in parts.items():
        matrix = getattr(decoder.layers[layer], product)
        for part in low_ranks:
            matrix[part.columns] += (part.scale * (part.up.float() @ part.down.float())).to(matrix.dtype)
    return decoder
