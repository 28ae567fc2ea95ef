"""A chain drafted in one replay equals drafting token by token, and a model that does not fit is refused."""

from __future__ import annotations

import pytest
import torch

from outrider import LLM
from outrider.errors import InvalidParameter
from outrider.model import Feed, load_decoder
from outrider.model.bundled import bundled_model
from outrider.sampling import Row, SamplingParams, rank


def test_a_chain_equals_drafting_token_by_token() -> None:
    from outrider.model.cuda_runner import CudaRunner

    decoder = load_decoder(bundled_model() / "draft")
    chains, steps = (CudaRunner(decoder, 41, 64, "cuda") for _ in range(2))
    lengths, texts = (1, 2, 3, 25, 63, 64, 126, 130, 200), []
    for i, n in enumerate(lengths):
        pages = list(range(4 * i, 4 * i + 4))
        ids = [(i * 31 + j * 7919) % 8000 + 1 for j in range(n)]
        texts.append((pages, ids, SamplingParams(temperature=[0.0, 0.9][i % 2])))
    rows = [Row(params, 7 + i, 0, len(ids), len(ids), (), frozenset()) for i, (_, ids, params) in enumerate(texts)]
    feeds = [Feed(pages, 0, ids) for pages, ids, _ in texts]
    drawn, chances, _ = chains.draft(feeds, rows, [5] * len(feeds), [1.0] * len(feeds))
    assert all(0 < chance <= 1 for chain in chances for chance in chain)
    for i, (pages, ids, _) in enumerate(texts):
        fed, text = 0, list(ids)
        for step in range(5):
            hidden = steps.forward([Feed(pages, fed, text[fed:])])
            logits = steps.logits(hidden.last, [len(text) - fed - 1])
            ranked = rank(logits, [rows[i]._replace(position=len(text))], 1)
            assert drawn[i][step] == ranked.tokens[0, 0], (i, step)
            fed, text = len(text), [*text, drawn[i][step]]


def test_a_model_that_does_not_fit_is_refused_with_advice() -> None:
    held = torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0]
    share = (held + (1 << 30)) / torch.cuda.mem_get_info()[1]
    with pytest.raises(InvalidParameter, match="lower max_model_len, raise memory"):
        LLM(speculation="none", device="cuda", memory=share)
