"""Random EAGLE heads of every form, and the definition of their drafts."""

from __future__ import annotations

import torch

from outrider.heads import EAGLE1, EAGLE3, MTP, Borrowed, EagleConfig, EagleHead
from outrider.model import Decoder, LlamaShape
from outrider.ops import Plain

FORMS = {
    "eagle3": {"form": EAGLE3},
    "eagle3 reduced": {"form": EAGLE3, "draft_vocab": 60, "own_output": True},
    "eagle3.1": {"form": EAGLE3, "fc_norm": True, "norm_output": True, "norm_before_residual": True},
    "eagle1": {"form": EAGLE1, "fc_bias": True},
    "mtp": {"form": MTP, "norm_output": True},
}


def random_head(decoder: Decoder, form: str) -> EagleHead:
    c = decoder.spec
    shape = LlamaShape(
        c.architecture, c.vocab, c.hidden, 1, c.heads, c.kv_heads, c.head_dim, c.ffn, c.context, c.attention.rope
    ).spec()
    taps = (0, 1, 2) if FORMS[form]["form"] == EAGLE3 else (c.depth,)
    config = EagleConfig(shape, c.hidden, taps, **FORMS[form])
    head = EagleHead(config, Borrowed.of(decoder), decoder.layers[0].qkv.dtype).requires_grad_(False)
    generator = torch.Generator().manual_seed(7)
    for parameter in head.parameters():
        scale = 1.0 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5
        parameter.copy_((torch.randn(parameter.shape, generator=generator) * scale).to(parameter.dtype))
    if config.draft_vocab:
        head.vocab_ids = torch.randperm(config.shape.vocab, generator=generator)[: config.draft_vocab].sort().values
    return head.eval()


def reference_chain(decoder: Decoder, head: EagleHead, tokens: list[int], length: int, first: int = 0) -> list[int]:
    """The definition: run target and head over the whole text with dense attention, one token at a time.

    The head reads rows from `first` on.
    """
    ops = Plain()

    def dense(_layer, q, k, v):  # type: ignore[no-untyped-def]
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        out = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], is_causal=True
        )
        return out[0].transpose(0, 1)

    n = len(tokens)
    hidden = decoder(torch.tensor(tokens), torch.arange(n), dense, ops, head.config.taps)
    features = head.fuse(torch.cat(hidden.taps, -1)[first : n - 1], ops)
    draft: list[int] = []
    for _ in range(length):
        text = torch.tensor([*tokens, *draft])
        out = head(text[first + 1 :], features, torch.arange(first, first + len(features)), dense, ops)
        best = int(head.logits(out[-1:], ops).argmax())
        draft.append(best if head.vocab_ids is None else int(head.vocab_ids[best]))
        features = torch.cat((features, out[-1:]))
    return draft
