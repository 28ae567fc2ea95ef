"""A random decoder of every kind of weight, and a runner of it on the native core."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from outrider.bench.feature_specs import FEATURE_SPECS
from outrider.cache import KVPool
from outrider.model import Decoder, Feed, LlamaShape, Rope, Runner
from outrider.model.backends import CPU
from outrider.model.load import DTYPES
from outrider.ops import Core, Native

LONG = 70
PAGES = [3, 9, 1, 7, 4, 12, 0, 5, 8, 11]
TREE = [(5, -1), (17, -1), (8, 0), (31, 0), (2, 2), (40, 1), (77, 4), (9, 6), (9, 4), (3, -1)]
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


def make_runner(core: Core, decoder: Decoder, page_size: int = 16, int8: bool = False) -> Runner:
    """With `int8` keys and values are kept in it."""
    c = decoder.spec
    return Runner(decoder, KVPool(c.depth, 14, c.kv_heads, page_size, c.head_dim, int8), Native(core))


def assert_rows_agree(runner: Runner) -> None:
    """Rows have the same bits in one prompt, in chunks, beside another text, as nodes of a tree, and alone."""
    vocab = runner.decoder.spec.vocab
    text = [i * 37 % vocab for i in range(LONG)]

    def logits(*feeds: Feed) -> Tensor:
        rows = sum(len(feed.tokens) + len(feed.nodes) for feed in feeds)
        return runner.logits(runner.forward(list(feeds)).last, range(rows))

    whole = logits(Feed(PAGES, 0, text))
    for size in (1, 5, 16, 33):
        parts = [logits(Feed(PAGES, at, text[at : at + size])) for at in range(0, LONG, size)]
        assert torch.equal(torch.cat(parts), whole), f"chunks of {size}"

    tokens, parents = zip(*[(token % vocab, parent) for token, parent in TREE], strict=True)
    other = Feed([13, 10], 0, text[:7])
    tree = logits(other, Feed(PAGES, LONG - 3, text[-3:], tokens, parents))[7 + 2 :]
    assert torch.equal(tree[0], whole[-1]), "the root beside its tree"
    grown = [logits(Feed(PAGES, LONG, (), tokens[known : known + 2], parents[: known + 2], known)) for known in range(0, 10, 2)]
    assert torch.equal(torch.cat(grown), tree[1:]), "a tree grown level by level"
    for node in range(len(TREE)):
        path, here = [], node
        while here >= 0:
            path.insert(0, tokens[here])
            here = parents[here]
        alone = logits(Feed(PAGES, LONG, path))[-1]
        assert torch.equal(tree[node + 1], alone), f"node {node} decoded alone"
