"""The head as served, one row at a time over a cache, against the head as trained, unrolled."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from outrider.cache import KVPool
from outrider.heads import EAGLE1, EagleHead, default_taps
from outrider.model import Attend
from outrider.ops import BLOCK, Blocked, Plain, Segment, paged_attention, plan_attention
from outrider.train.attention import flash_chain, plain_chain
from outrider.train.frozen import Features, FrozenTarget
from outrider.train.networks import TrainableEagle
from outrider.train.shapes import EagleShape, MtpShape
from tests.support.heads import VOCAB, toy_eagle, toy_head, toy_target

DEPTHS = 4
SHAPES = {
    "eagle3": EagleShape(fc_norm=False, norm_output=False),
    "eagle3.1": EagleShape(),
    "norm_before_residual": EagleShape(fc_norm=False, norm_output=False, norm_before_residual=True),
    "reduced": EagleShape(draft_vocab=20),
    "four_taps": EagleShape(taps=(1, 2, 3, 4)),
    "eagle1": EagleShape(form=EAGLE1),
    "mtp": MtpShape(),
}


def growing_cache() -> Attend:
    """Attention of single rows over every row before them."""
    keys: list[Tensor] = []
    values: list[Tensor] = []

    def attend(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys.append(k)
        values.append(v)
        group = q.shape[1] // k.shape[1]
        every_key = torch.cat(keys).repeat_interleave(group, 1)
        every_value = torch.cat(values).repeat_interleave(group, 1)
        weights = (torch.einsum("nhd,mhd->hnm", q, every_key) * q.shape[-1] ** -0.5).softmax(-1)
        return torch.einsum("hnm,mhd->nhd", weights, every_value)

    return attend


def recursive(head: EagleHead, tokens: Tensor, taps: Tensor, start: int, attend: Attend) -> list[Tensor]:
    """Hidden rows of a draft that starts after the true feature of `start`, as serving makes them."""
    ops = Plain()
    features = head.fuse(taps, ops)
    hidden = features[:1]
    for i in range(start + 1):
        hidden = head(tokens[i + 1 : i + 2], features[i : i + 1], torch.tensor([i]), attend, ops)
    steps = [hidden]
    for depth in range(1, DEPTHS):
        place = start + depth
        hidden = head(tokens[place + 1 : place + 2], hidden, torch.tensor([place]), attend, ops)
        steps.append(hidden)
    return steps


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_training_unrolls_what_serving_recurs(name: str, fast: bool) -> None:
    target = toy_target()
    head = toy_head(target, SHAPES[name].config(target.spec))
    network = TrainableEagle(head, depths=DEPTHS, fused=fast)
    tokens = torch.randint(0, VOCAB, (2, 24), generator=torch.Generator().manual_seed(3))
    features = FrozenTarget(target).reading(network.taps).features(tokens)
    span = features.span(DEPTHS)
    unrolled = [hidden.view(2, span, -1) for hidden in network.chain(features, DEPTHS)]
    for b, start in ((0, 0), (0, 7), (1, 3), (1, span - 1)):
        taps = torch.cat([features.taps[tap].view(2, 24, -1)[b] for tap in network.taps], dim=-1)
        one_by_one = recursive(head, tokens[b], taps, start, growing_cache())
        for depth, hidden in enumerate(one_by_one):
            torch.testing.assert_close(unrolled[depth][b, start], hidden[0], atol=2e-4, rtol=1e-5)
            served = head.logits(hidden, Plain())[0]
            torch.testing.assert_close(
                network.logits(unrolled[depth][b, start : start + 1], depth)[0], served, atol=1e-3, rtol=1e-4
            )


def test_a_paged_pool_serves_the_head() -> None:
    """KV of one layer in pages, drafted rows and all, gives the unrolled rows."""
    target = toy_target()
    head = toy_eagle(target)
    config, ops, pages = head.config.shape, Blocked(), [1, 0, 2]
    pool = KVPool(1, 4, config.kv_heads, BLOCK, config.head_dim)
    network = TrainableEagle(head, depths=DEPTHS)
    tokens = torch.randint(0, VOCAB, (1, 24), generator=torch.Generator().manual_seed(3))
    features = FrozenTarget(target).reading(network.taps).features(tokens)
    unrolled = network.chain(features, DEPTHS)
    taps = torch.cat([features.taps[tap] for tap in network.taps], dim=-1)

    @torch.inference_mode()
    def feed(ids: Tensor, rows: Tensor, start: int) -> Tensor:
        count = len(ids)
        padding = -count % BLOCK
        positions = torch.cat((torch.arange(start, start + count), torch.zeros(padding, dtype=torch.int64)))
        slots = torch.tensor([*pool.slots(pages, range(start, start + count)), *[3 * BLOCK] * padding])
        plan = plan_attention([Segment(0, start, count, pages)], BLOCK, frozenset({None}))

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            pool.write(layer, (slots // BLOCK, slots % BLOCK), k, v)
            return paged_attention(q, pool.keys[layer], pool.values[layer], plan)

        padded = torch.cat((rows, rows.new_zeros(padding, rows.shape[1])))
        hidden: Tensor = head(torch.nn.functional.pad(ids, (0, padding)), padded, positions, attend, ops)
        return hidden[:count]

    start = 9
    fused = head.fuse(torch.nn.functional.pad(taps, (0, 0, 0, BLOCK - 24 % BLOCK)), ops)
    hidden = feed(tokens[0, 1 : start + 2], fused[: start + 1], 0)[-1:]
    for depth in range(DEPTHS):
        torch.testing.assert_close(unrolled[depth][start], hidden[0], atol=2e-4, rtol=1e-5)
        hidden = feed(tokens[0, start + depth + 2 : start + depth + 3], hidden, start + depth + 1)


def test_a_row_does_not_see_other_drafts_or_the_future() -> None:
    target = toy_target()
    network = TrainableEagle(toy_eagle(target), depths=DEPTHS)
    frozen = FrozenTarget(target).reading(network.taps)
    tokens = torch.randint(0, VOCAB, (1, 24), generator=torch.Generator().manual_seed(3))
    changed = tokens.clone()
    changed[0, 12:] = (changed[0, 12:] + 1) % VOCAB
    before, after = (network.chain(frozen.features(text), DEPTHS) for text in (tokens, changed))
    for depth in range(DEPTHS):
        reads_to = 11 - (depth + 1)  # row r reads tokens up to r + depth + 1
        assert torch.equal(before[depth][: reads_to + 1], after[depth][: reads_to + 1])
        assert not torch.equal(before[depth][reads_to + 1], after[depth][reads_to + 1])


def test_the_fused_kernel_is_the_plain_one() -> None:
    generator = torch.Generator().manual_seed(0)
    shape = (2, 3, 20, 16)
    inputs = [torch.randn(shape, generator=generator) for _ in range(3)]
    inputs += [torch.randn((3, *shape), generator=generator) for _ in range(2)]

    def with_gradients(chain: Callable[..., Tensor]) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = chain(*leaves)
        torch.autograd.backward(out, torch.sin(out.detach()))
        return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    plain, fused = with_gradients(plain_chain), with_gradients(flash_chain)
    assert len(plain) == len(fused) == 6
    for one, other in zip(plain, fused, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_the_fused_kernel_can_be_compiled() -> None:
    shape = (1, 2, 8, 16)
    inputs = [torch.randn(shape, requires_grad=True) for _ in range(3)]
    inputs += [torch.randn((2, *shape), requires_grad=True) for _ in range(2)]
    torch.library.opcheck(torch.ops.outrider.flash_chain.default, tuple(inputs))


def test_eagle1_reads_the_last_hidden_row_after_the_final_norm() -> None:
    target = toy_target()
    head = toy_eagle(target, EagleShape(form=EAGLE1))
    tokens = torch.arange(8)[None]
    features: Features = FrozenTarget(target).reading(head.config.taps).features(tokens)
    last = head.fuse(features.taps[4], Plain())
    torch.testing.assert_close(target.logits(last, Plain()), features.logits)


def test_what_is_borrowed_is_neither_saved_nor_trained() -> None:
    target = toy_target()
    head = toy_eagle(target)
    assert head.embedding.data_ptr() == target.embedding.data_ptr()
    assert not {"embedding", "output", "target_norm"} & (set(head.state_dict()) | {name for name, _ in head.named_parameters()})


def test_default_taps() -> None:
    assert default_taps(32) == (2, 16, 29)
    assert default_taps(12) == (2, 6, 9)
