"""The native core with several ranks: what the others send is added in order, and a rank that is gone ends the forward."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.cache import KVPool
from outrider.errors import RankDied
from outrider.model import Feed
from outrider.model.stack import decoder_stack, lay_out_rows
from outrider.ops import Stack, find_core
from outrider.ops.group import _GATHER, floats
from tests.support.native import make_decoder

CORE = find_core()[0]
pytestmark = pytest.mark.skipif(CORE is None, reason=find_core()[1])
PROMPT = Feed([0, 1, 2, 3, 4, 5], 0, [i * 5 % 97 for i in range(71)])  # more rows than the core takes at once


def stack_of(decoder: Any, group: Any = None) -> Stack:
    assert CORE is not None
    c = decoder.spec
    return decoder_stack(decoder, KVPool(c.depth, 8, c.kv_heads, 16, c.head_dim), CORE, group)


def ranks(size: int, others: Callable[[Tensor], list[Tensor]]) -> SimpleNamespace:
    """A group whose other ranks make their parts of this one's."""

    def gather(part: int, values: int, parts: int) -> int:
        mine = floats(part, values)
        made = others(mine)
        floats(parts, size * values).copy_(torch.cat([mine, *made]))
        return len(made)

    native = _GATHER(gather)
    return SimpleNamespace(size=size, address=ctypes.cast(native, ctypes.c_void_p).value, held=native)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_ranks_that_add_zeros_change_no_bit(monkeypatch: pytest.MonkeyPatch, kind: str, threads: int) -> None:
    decoder = make_decoder("float32" if kind == "int8" else kind)
    decoder.spec = replace(decoder.spec, dtype=kind)
    x = decoder.embedding[torch.tensor(PROMPT.tokens)].float().detach()
    alone = stack_of(decoder).forward(lay_out_rows([PROMPT]), features=x, wanted=range(71))
    monkeypatch.setattr(CORE, "threads", threads)
    group = ranks(3, lambda part: [torch.zeros_like(part)] * 2)
    shared = stack_of(decoder, group).forward(lay_out_rows([PROMPT]), features=x, wanted=range(71))
    assert torch.equal(shared.logits, alone.logits)


def test_parts_are_added_in_order_of_rank() -> None:
    """Large parts that cancel, so that another order gives other bits."""
    decoder, taps = make_decoder("float32"), torch.tensor([1], dtype=torch.int32)
    x = decoder.embedding[3:4].float().detach()
    own: list[Tensor] = []

    def others(part: Tensor) -> list[Tensor]:
        own.append(part[: decoder.spec.hidden].clone())
        return [torch.full_like(part, 2.0**18), torch.full_like(part, -(2.0**18))]

    group = ranks(3, others)
    made = stack_of(decoder, group).forward(lay_out_rows([Feed([0], 0, [3])]), taps, features=x, wanted=[0]).taps
    assert made is not None
    want = x[0]
    for part in own[:2]:  # of attention and of the feed-forward part
        want = want + ((part + 2.0**18) - 2.0**18)
    assert torch.equal(made[0, 0], want)
    assert not torch.equal(made[0, 0], x[0] + own[0] + own[1])


def test_a_rank_that_is_gone_ends_the_forward() -> None:
    decoder = make_decoder("bfloat16")
    calls: list[int] = []
    gone = ranks(1, lambda part: calls.append(1) or [])  # type: ignore[func-returns-value]
    gone.size = 2
    stack = stack_of(decoder, gone)
    x = torch.zeros(71, decoder.spec.hidden)
    with pytest.raises(RankDied, match="a rank of the model is gone; load the model again"):
        stack.forward(lay_out_rows([PROMPT]), features=x, wanted=[70])
    assert len(calls) == 1, "nobody is asked again"


def test_rows_without_an_embedding_come_as_features() -> None:
    stack = stack_of(make_decoder("bfloat16"), ranks(2, lambda part: [torch.zeros_like(part)]))
    with pytest.raises(IndexError):
        stack.forward(lay_out_rows([PROMPT]), wanted=[70])
