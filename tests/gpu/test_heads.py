"""Heads on the device equal the CPU's runners. These tests run in Triton's interpreter too."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch

from outrider.cache import KVPool
from outrider.config import EngineConfig
from outrider.control import FixedLength
from outrider.draft import Drafter
from outrider.draft.eagle import EagleDrafter
from outrider.draft.none import NoDrafter
from outrider.engine.commit import OutputProcessor
from outrider.engine.engine import Engine
from outrider.heads import EAGLE1, EAGLE3, Borrowed, EagleConfig, EagleHead, EagleRunner, MedusaConfig, MedusaHeads, MedusaRunner
from outrider.model import Decoder, Feed, LlamaShape
from outrider.ops import Blocked
from outrider.sampling import Row, SamplingParams, rank
from tests.support import VOCAB, make_request, random_decoder, run, write_family

INTERPRETED = True
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGES, SIZE = 9, 16
FORMS = {
    "eagle3": {"form": EAGLE3, "taps": (0, 1, 2)},
    "eagle3.1": {"form": EAGLE3, "taps": (1, 2), "fc_norm": True, "norm_output": True, "norm_before_residual": True},
    "eagle1": {"form": EAGLE1, "taps": (3,), "fc_bias": True},
}


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    directory: Path = tmp_path_factory.mktemp("m")
    return random_decoder(write_family(directory, "llama2", hidden_size=64, num_key_value_heads=2, num_hidden_layers=3))


def shuffled(network: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(7)
    for parameter in network.requires_grad_(False).parameters():
        scale = 1.0 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return network.eval()


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    return bool((got.cpu() - want).norm() / want.norm() < 1e-4)


def make_head(decoder: Decoder, form: str, draft_vocab: int | None = None) -> EagleHead:
    c = decoder.spec
    shape = LlamaShape(
        c.architecture, c.vocab, c.hidden, 1, c.heads, c.kv_heads, c.head_dim, c.ffn, c.context, c.attention.rope
    ).spec()
    reduced = {} if draft_vocab is None else {"draft_vocab": draft_vocab, "own_output": True}
    config = EagleConfig(shape, c.hidden, **FORMS[form], **reduced)  # type: ignore[arg-type]
    head = shuffled(EagleHead(config, Borrowed.of(decoder)))
    assert isinstance(head, EagleHead)
    if draft_vocab is not None:
        head.vocab_ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))[:draft_vocab].sort().values
    return head


@pytest.mark.parametrize("form", FORMS)
def test_an_eagle_head_on_the_device(decoder: Decoder, form: str) -> None:
    from outrider.heads.cuda_runners import CudaEagleRunner
    from outrider.model.cuda_runner import CudaRunner

    c, head = decoder.spec, make_head(decoder, form)
    config = head.config
    host = EagleRunner(deepcopy(head), KVPool(1, PAGES, c.kv_heads, SIZE, c.head_dim), Blocked())
    device = CudaEagleRunner(head, CudaRunner(decoder, PAGES, SIZE, DEVICE))
    generator = torch.Generator().manual_seed(1)
    lengths, taps = (20, 3), len(config.taps) * c.hidden
    tap_rows = torch.randn(sum(lengths), taps, generator=generator)
    assert close(device.fuse(tap_rows), host.fuse(tap_rows))
    pages: list[list[int]] = [[4, 1, 6], [2, 0]]
    texts = [Feed(pages[0], 1, list(range(5, 25))), Feed(pages[1], 2, [9, 8, 7], first_key=2)]
    levels = [
        texts,
        [Feed(pages[0], 21, (), [30, 31], [-1, -1]), Feed(pages[1], 5, (), [40], [-1])],  # roots' children
        [Feed(pages[0], 21, (), [32, 33], [-1, -1, 1, 0], 2), Feed(pages[1], 5, (), [41], [-1, 0], 1)],
    ]
    features = host.fuse(tap_rows)
    for feeds in levels:
        rows = sum(len(feed.tokens) + len(feed.nodes) for feed in feeds)
        got, want = device.forward(feeds, features[:rows].to(DEVICE)), host.forward(feeds, features[:rows])[:rows]
        assert close(got, want)
        assert close(device.logits(got), host.logits(want))
        features = want.flip(0)


@pytest.mark.parametrize(("form", "sizes"), [("eagle3.1", None), ("reduced", (1, 2))])
def test_a_chain_equals_drafting_token_by_token(
    decoder: Decoder, form: str, sizes: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One or several replays for several sequences draft what the head drafts token by token, greedy and sampled."""
    from outrider.heads import cuda_runners
    from outrider.heads.cuda_runners import CudaEagleRunner
    from outrider.model.cuda_runner import CudaRunner

    monkeypatch.setattr(cuda_runners, "GRAPH_ROWS", sizes or cuda_runners.GRAPH_ROWS)
    head = make_head(decoder, "eagle3" if form == "reduced" else form, 60 if form == "reduced" else None)
    ids = head.vocab_ids
    chains, steps = (CudaEagleRunner(deepcopy(head), CudaRunner(decoder, PAGES, SIZE, DEVICE)) for _ in range(2))
    for runner in (chains, steps):  # what lies before a sequence's first slot must not matter
        for pool in (runner._pool.keys, runner._pool.values):
            pool.normal_(std=30.0)
    width = len(head.config.taps) * decoder.spec.hidden
    texts = [([4, 1], 1, [5, 6, 7, 8, 9, 10, 11]), ([2, 0], 14, [12]), ([3, 5], 3, [13, 14])]
    feeds = [Feed(pages, start, tokens, first_key=1 if start < 3 else start) for pages, start, tokens in texts]
    taps = [torch.randn(len(feed.tokens), width, generator=torch.Generator().manual_seed(i)) for i, feed in enumerate(feeds)]
    heat = (0.0, 0.9, 1.3)
    rows = [
        Row(SamplingParams(temperature=heat[i]), 7 + i, 0, feed.start + len(feed.tokens), 1, (), frozenset())
        for i, feed in enumerate(feeds)
    ]
    drawn = chains.draft(feeds, [part.to(DEVICE) for part in taps], rows, 3)
    assert ((drawn.chances > 0) & (drawn.chances <= 1)).all()
    for i, feed in enumerate(feeds):
        hidden = steps.forward([feed], steps.fuse(taps[i]))[-1:]
        for step in range(3):
            logits = steps.logits(hidden)
            if ids is not None:
                logits = torch.full((1, VOCAB), float("-inf")).index_copy(1, ids, logits)
            token = int(rank(logits, [rows[i]._replace(position=rows[i].position + step)], 1).tokens[0, 0])
            assert drawn.tokens[i, step] == token, (i, step)
            hidden = steps.forward([Feed(feed.pages, rows[i].position + step, [token], first_key=feed.first_key)], hidden)


def test_an_eagle_drafter_changes_no_token(decoder: Decoder) -> None:
    """Rounds with features from prompts, plain rounds and accepted chains, with penalties too."""
    from outrider.heads.cuda_runners import CudaEagleRunner
    from outrider.model.cuda_runner import CudaRunner

    target = CudaRunner(decoder, 20, SIZE, DEVICE)
    params = [
        SamplingParams(temperature=0.0, max_tokens=7),
        SamplingParams(temperature=0.8, seed=3, presence_penalty=0.5, max_tokens=7),
    ]
    to_submit = [make_request(list(range(5, 25 - 9 * i)), p, f"r{i}") for i, p in enumerate(params)]

    def texts(drafter: Drafter, length: int) -> list[OutputProcessor]:
        config = EngineConfig(page_size=SIZE, max_num_seqs=2, max_batch_rows=24, prefix_cache=False)
        return run(Engine(target, None, drafter, FixedLength(length), config), to_submit)

    plain = texts(NoDrafter(), 0)
    head, c = make_head(decoder, "eagle3.1"), decoder.spec
    pool = KVPool(1, 20, c.kv_heads, SIZE, c.head_dim)
    fast = texts(EagleDrafter(head, pool, Blocked(), runner=CudaEagleRunner(head, target)), 3)
    assert [writer.seq.tokens for writer in fast] == [writer.seq.tokens for writer in plain]
    assert all(writer.seq.stats.drafted > 0 and writer.seq.stats.fallback_reason is None for writer in fast)


def test_medusa_heads_on_the_device(decoder: Decoder) -> None:
    from outrider.heads.cuda_runners import CudaMedusaRunner
    from outrider.model.cuda_runner import CudaRunner

    c = decoder.spec
    heads = shuffled(MedusaHeads(MedusaConfig(c.hidden, c.vocab, c.layers, heads=3, blocks=2), Borrowed.of(decoder)))
    assert isinstance(heads, MedusaHeads)
    host = MedusaRunner(deepcopy(heads), Blocked())
    device = CudaMedusaRunner(heads, CudaRunner(decoder, PAGES, SIZE, DEVICE))
    for rows in (1, 3):
        taps = torch.randn(rows, c.hidden, generator=torch.Generator().manual_seed(rows))
        assert close(device.logits(taps.to(DEVICE)), host.logits(taps))


def test_long_texts_are_read_in_parts() -> None:
    from outrider.model.cuda_runner import split_feeds

    feeds = [Feed([0], 3, list(range(7))), Feed([1], 0, [1, 2]), Feed([2], 4, (), [5, 6, 7, 8], [-1, 0, 1, 2])]
    parts = list(split_feeds(feeds, 4))
    assert [sum(len(feed.tokens) + len(feed.nodes) for feed in part) for part in parts] == [4, 4, 1, 4]
    tokens = [(feed.pages[0], feed.start + i, token) for part in parts for feed in part for i, token in enumerate(feed.tokens)]
    assert tokens == [(0, 3 + i, i) for i in range(7)] + [(1, 0, 1), (1, 1, 2)]
    assert parts[3] == [feeds[2]]
