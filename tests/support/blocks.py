"""Random block drafters of every kind, and the definition of what they guess."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.heads import BlockConfig, BlockHead, Borrowed, Convolution, Selector
from outrider.model import Decoder, LlamaShape, ModelSpec
from outrider.ops import Plain

KINDS = {
    "dflash": {},
    "dflash causal": {"causal": True},
    "dflash reduced": {"draft_vocab": 60, "own_output": True},
    "dspark": {"from_anchor": True, "markov": 8, "confidence": True, "confidence_of_pair": True},
    "dspark causal": {"from_anchor": True, "markov": 8, "causal": True},
    "dflash2": {"convolution": Convolution(2, 4), "selector": Selector(8, 6)},
}
BLOCK, MASK = 6, 3


def block_config(c: ModelSpec, kind: str) -> BlockConfig:
    shape = LlamaShape(
        "Qwen3ForCausalLM",
        c.vocab,
        c.hidden,
        2,
        c.heads,
        c.kv_heads,
        c.head_dim,
        c.ffn,
        c.context,
        c.attention.rope,
        qk_norm=True,
    ).spec()
    return BlockConfig(shape, c.hidden, (1, 2), BLOCK, MASK, **KINDS[kind])  # type: ignore[arg-type]


def random_block(decoder: Decoder, kind: str) -> BlockHead:
    head = BlockHead(block_config(decoder.spec, kind), Borrowed.of(decoder), decoder.layers[0].qkv.dtype)  # type: ignore[union-attr]
    return _randomised(head)


def block_for(target: ModelSpec, kind: str) -> BlockHead:
    """One that borrows nothing, for a target of that width, depth and vocabulary."""
    nothing = torch.empty(0)
    config = replace(block_config(target, kind), own_embedding=True, own_output=True)
    return _randomised(BlockHead(config, Borrowed(nothing, nothing, nothing, None, target)))


def _randomised(head: BlockHead) -> BlockHead:
    config = head.requires_grad_(False).config
    generator = torch.Generator().manual_seed(7)
    for parameter in head.parameters():
        scale = 1.0 if parameter.dim() != 2 else parameter.shape[-1] ** -0.5
        parameter.copy_((torch.randn(parameter.shape, generator=generator) * scale).to(parameter.dtype))
    if config.draft_vocab:
        head.vocab_ids = torch.randperm(config.shape.vocab, generator=generator)[: config.draft_vocab].sort().values
    return head.eval()


def reference_rows(head: BlockHead, taps: Tensor, newest: int, length: int) -> Tensor:
    """The definition, one row and one head of attention at a time: rows (length, hidden) of a block after a text's features."""
    config, n = head.config, len(taps)
    s = config.shape
    features = _rms(taps @ head.fc.T, head.hidden_norm)
    x = head.embedding[torch.tensor([newest, *[config.mask] * (length - 1)])].float()
    for i, layer in enumerate(head.layers):
        around = head.convolutions[2 * i : 2 * i + 2] or None
        read, after = _open(around, 0, _rms(x, layer.norm_in))
        q, _, _ = _split(layer, read, torch.arange(n, n + length), s)
        _, near_k, near_v = _split(layer, read, torch.arange(n, n + length), s)
        _, far_k, far_v = _split(layer, features, torch.arange(n), s)
        rows = []
        for row in range(length):
            seen = n + (row + 1 if config.causal else length)
            keys, values = torch.cat((far_k, near_k))[:seen], torch.cat((far_v, near_v))[:seen]
            heads = []
            for h in range(s.heads):
                group = h // (s.heads // s.kv_heads)
                weights = torch.softmax(keys[:, group] @ q[row, h] / s.head_dim**0.5, 0)
                heads.append(weights @ values[:, group])
            rows.append(torch.cat(heads))
        x = x + _close(around, 0, torch.stack(rows) @ layer.out.T, after)
        read, after = _open(around, 1, _rms(x, layer.norm_mlp))
        gate, up = (read @ layer.gate_up.T).chunk(2, -1)
        x = x + _close(around, 1, (F.silu(gate) * up) @ layer.down.T, after)
    return _rms(x, head.norm)


def _rms(x: Tensor, weight: Tensor | None) -> Tensor:
    assert weight is not None
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def _split(layer, x: Tensor, positions: Tensor, s) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[no-untyped-def]
    """Queries, keys and values by head, queries and keys normed and rotated."""
    q, k, v = (x @ layer.qkv.T).split((s.heads * s.head_dim, s.kv_heads * s.head_dim, s.kv_heads * s.head_dim), -1)
    q, k, v = (part.view(len(x), -1, s.head_dim) for part in (q, k, v))
    half = s.head_dim // 2
    angles = positions[:, None, None] * s.attention.rope.theta ** (-torch.arange(half) / half)

    def turned(part: Tensor, weight: Tensor) -> Tensor:
        a, b = _rms(part, weight).chunk(2, -1)
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)

    return turned(q, layer.q_norm), turned(k, layer.k_norm), v


def _open(around, part: int, x: Tensor) -> tuple[Tensor, Tensor | None]:  # type: ignore[no-untyped-def]
    if around is None:
        return x, None
    kernels = (x @ around[part].projection.T).view(len(x), 2, 2, -1)
    return _convolve(x, kernels[:, 0], around[part].base[0]), kernels[:, 1]


def _close(around, part: int, x: Tensor, kernels: Tensor | None) -> Tensor:  # type: ignore[no-untyped-def]
    return x if around is None or kernels is None else _convolve(x, kernels, around[part].base[1])


def _convolve(x: Tensor, kernels: Tensor, base: Tensor) -> Tensor:
    width, out = x.shape[1] // kernels.shape[-1], torch.zeros_like(x)
    for t in range(len(x)):
        for channel in range(x.shape[1]):
            for tap in range(min(2, t + 1)):
                out[t, channel] += (base[tap, channel] + kernels[t, tap, channel // width]) * x[t - tap, channel]
    return out


def reference_guesses(head: BlockHead, taps: Tensor, newest: int, length: int) -> Tensor:
    """Logits (guesses, outputs) by the definition; scores of pairs are left out."""
    rows = reference_rows(head, taps, newest, length)[0 if head.config.from_anchor else 1 :]
    return head.logits(rows, Plain())
