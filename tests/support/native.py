"""A random decoder of every kind of weight, and a runner of it on the native core."""

from __future__ import annotations

from dataclasses import replace

import torch

from outrider.bench.feature_specs import FEATURE_SPECS
from outrider.cache import KVPool
from outrider.model import Decoder, LlamaShape, Rope, Runner
from outrider.model.backends import CPU
from outrider.model.load import DTYPES
from outrider.ops import Core, Native

SERVED = [name for name, spec in FEATURE_SPECS.items() if not CPU.missing(spec)]  # by the native core


def make_decoder(dtype: str, **changes: object) -> Decoder:
    """A decoder with random weights of every kind the configuration asks for."""
    shape = LlamaShape("LlamaForCausalLM", 97, 48, 2, 4, 2, head_dim=12, ffn=72, context=256, rope=Rope(), dtype=dtype)
    decoder = Decoder(replace(shape, **changes).spec(), DTYPES.get(dtype, torch.float32)).requires_grad_(False).eval()  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(5)
    for parameter in decoder.parameters():
        scale = 0.3 if parameter.dim() == 1 else parameter.shape[1] ** -0.5
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale + (parameter.dim() == 1))
    return decoder


def make_runner(core: Core, decoder: Decoder, page_size: int = 16) -> Runner:
    c = decoder.spec
    return Runner(decoder, KVPool(c.depth, 14, c.kv_heads, page_size, c.head_dim), Native(core))
