"""What a layer asks of attention: the masks that pages serve, those they do not, and sinks."""

from __future__ import annotations

import pytest
import torch
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from outrider.cache import KVPool
from outrider.model.hf.attention import Form, Mask, Pages, Unfit
from outrider.model.runner import Feed, lay_out
from outrider.ops import paged_attention


def test_masks_are_recognised_by_what_they_show() -> None:
    assert Mask(causal_mask_function, None).window() is None
    assert Mask(sliding_window_causal_mask_function(7), 7).window() == 7


@pytest.mark.parametrize(
    "mask",
    [
        Mask(bidirectional_mask_function, None),
        Mask(chunked_causal_mask_function(8, torch.zeros(1, dtype=int)), 8),  # type: ignore[call-overload]
        Mask(sliding_window_causal_mask_function(7), 9),
        Mask(lambda *_: 1 / 0, None),
    ],
)
def test_other_masks_are_refused(mask: Mask) -> None:
    with pytest.raises(Unfit, match="mask"):
        mask.window()


def test_layers_have_pages_of_their_own_shape() -> None:
    pages = Pages([Form(2, 24), Form(1, 40)], 3, 16)
    assert pages.token_bytes == 8 * (2 * 32 + 1 * 48)
    assert pages.slots([2, 0], [3, 17]) == [35, 1]


def test_sinks_take_their_share_of_every_head() -> None:
    generator = torch.Generator().manual_seed(0)
    pool, length = KVPool(1, 4, 2, 16, 8), 21
    q, k, v = (torch.randn(length, heads, 8, generator=generator) for heads in (4, 2, 2))
    sinks = torch.tensor([0.5, -3.0, 4.0, 0.0])
    rows = lay_out([Feed([0, 1], 0, [0] * length)], pool, frozenset({None}))
    pool.write(0, rows.slots, k, v)
    ours = paged_attention(q, *pool.layer(0), rows.plan, sinks=sinks)
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, 1)) * 8**-0.5
    scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
    weights = torch.cat((scores, sinks[:, None, None].expand(4, length, 1)), -1).softmax(-1)[..., :-1]
    torch.testing.assert_close(ours, torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(2, 1)), rtol=1e-5, atol=1e-5)
    one = lay_out([Feed([0, 1], 20, [0])], pool, frozenset({None}))
    assert torch.equal(paged_attention(q[20:], *pool.layer(0), one.plan, sinks=sinks), ours[20:])
