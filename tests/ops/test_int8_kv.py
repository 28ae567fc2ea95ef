"""Keys and values in int8 on the native core: against the rounding that the pool defines, and rows against themselves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outrider.bench.feature_specs import FEATURE_SPECS, random_decoder
from outrider.cache import KVPool
from outrider.model import Decoder, Feed, Runner
from outrider.ops import Core, Plain, find_core
from tests.support.native import LONG, PAGES, SERVED, TREE, assert_rows_agree, make_decoder, make_runner

pytestmark = pytest.mark.skipif(find_core()[0] is None, reason=find_core()[1])


def stored(pool: KVPool, layer: int, page: int) -> tuple[Tensor, Tensor]:
    """Keys and values (KV heads, slots, width) of a page: integers times scales."""
    size, heads = pool.page_size, pool.keys.shape[2]
    keys, values = pool.keys[layer, page], pool.values[layer, page]
    key_scales = keys[:, -1].contiguous().view(torch.float32)[..., 0]
    key_codes = keys[:, :-1].permute(0, 2, 1, 3).reshape(heads, size, -1)
    width = key_codes.shape[-1]
    value_codes = values[:, : size * width].reshape(heads, size // 4, width, 4).transpose(2, 3).reshape(heads, size, width)
    value_scales = values[:, size * width :].contiguous().view(torch.float32)
    return key_codes * key_scales[..., None], value_codes * value_scales[..., None]


def plain_runner(decoder: Decoder, int8: bool = True) -> Runner:
    c = decoder.spec
    return Runner(decoder, KVPool(c.depth, 14, c.kv_heads, 16, c.head_dim, int8), Plain())


def test_memory_holds_the_integers_that_the_pool_defines(core: Core) -> None:
    decoder = make_decoder("float32")
    native, plain = make_runner(core, decoder, int8=True), plain_runner(decoder)
    text = [i * 37 % 97 for i in range(40)]
    for runner in (native, plain):
        runner.forward([Feed(PAGES, 0, text)])
    keys, values = stored(native.pool, 0, PAGES[0])
    for got, want in ((keys, plain.pool.keys[0, PAGES[0]]), (values, plain.pool.values[0, PAGES[0]])):
        step = want.abs().amax(-1, keepdim=True) / 127.0
        off = (got - want).abs() > 1e-5
        assert bool(((got - want).abs() <= 1.01 * step).all())
        assert off.float().mean() < 0.01, "but for quotients on a tie"
    assert bool((stored(native.pool, 0, 13)[0] == 0.0).all())


def test_attention_is_that_over_rounded_keys_and_values(core: Core) -> None:
    """Queries and weights are rounded to bf16; what int8 itself loses is larger."""
    decoder = make_decoder("float32", hidden=128, ffn=192, heads=4, head_dim=32)
    feed = [Feed(PAGES, 0, [i * 37 % 97 for i in range(LONG)])]
    runners = (make_runner(core, decoder, int8=True), plain_runner(decoder), plain_runner(decoder, int8=False))
    got, want, whole = (runner.logits(runner.forward(feed).last, range(LONG)) for runner in runners)
    assert float((got - want).norm() / want.norm()) < 8e-3
    assert 1e-2 < float((want - whole).norm() / whole.norm()) < 5e-2


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", ["plain", "wide heads", "one head of keys", "short window", *SERVED[::4]])
def test_prefill_decode_chunks_and_trees_agree(core: Core, variant: str, kind: str, page_size: int) -> None:
    changes = {
        "plain": {}, "wide heads": {"head_dim": 80}, "one head of keys": {"heads": 20, "kv_heads": 1, "head_dim": 6},
        "short window": {"windows": (3, 21)},
    }  # fmt: skip
    decoder = make_decoder(kind, **changes[variant]) if variant in changes else random_decoder(FEATURE_SPECS[variant], kind)
    assert_rows_agree(make_runner(core, decoder, page_size, int8=True))


def test_accepted_nodes_move_with_their_scales(core: Core) -> None:
    runner, text = make_runner(core, make_decoder("float32"), int8=True), list(range(30))
    tokens, parents = zip(*TREE, strict=True)
    runner.forward([Feed(PAGES, 0, text, tokens, parents)])
    path = [0, 2, 4, 6]  # nodes of one branch
    pool = runner.pool
    pool.move(pool.slots(PAGES, [30 + node for node in path]), pool.slots(PAGES, range(30, 34)))
    moved = runner.forward([Feed(PAGES, 34, [50])]).last
    plain = make_runner(core, make_decoder("float32"), int8=True)
    plain.forward([Feed(PAGES, 0, text + [tokens[node] for node in path])])
    assert torch.equal(moved, plain.forward([Feed(PAGES, 34, [50])]).last)


def test_what_is_not_finite_stays_in_rows_that_see_it(core: Core) -> None:
    decoder = make_decoder("float32")
    sound = make_runner(core, decoder, int8=True).forward([Feed(PAGES, 0, list(range(40)))]).last.clone()
    decoder.embedding[96] = torch.nan
    runner = make_runner(core, decoder, int8=True)
    last = runner.forward([Feed(PAGES, 0, [*range(20), 96, *range(21, 40)])]).last
    assert torch.equal(last[:20], sound[:20])
    assert bool(last[20:].isnan().all())
    assert torch.equal(runner.forward([Feed(PAGES, 0, list(range(40)))]).last, sound), "the slot is written again"
    branches = runner.forward([Feed(PAGES, 40, [7], [96, 5, 6], [-1, -1, 1])]).last
    alone = runner.forward([Feed(PAGES, 40, [7, 5, 6])]).last
    assert torch.equal(branches[[0, 2, 3]], alone)
    assert bool(branches[1].isnan().all())
