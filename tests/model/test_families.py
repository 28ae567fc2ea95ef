"""Every family against Transformers in float32, on tiny random models: logits everywhere, and the tokens of a long greedy text.

A new family is one entry in tests/support/families.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.model import Feed, Runner, load_decoder
from outrider.model.backends import CPU
from outrider.ops import Blocked, Native, find_core
from tests.support import make_pool
from tests.support.families import CASES, LENGTHS, VOCAB, build_reference

PROMPT, TOKENS = 56, 200
PAGES = [3, 9, 1, 7, 4, 12, 22, 15, 6, 18, 31, 2, 14, 28, 11, 5, 19, 8, 25]
# token, parent: two branches from the root, one of them forking again
TREE = [(5, -1), (17, -1), (8, 0), (31, 0), (2, 2), (40, 1), (77, 4)]
BACKENDS = ["plain", "cpu"]


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Path]:
    """A family's name, its Transformers model and the directory that it was saved in."""
    directory = tmp_path_factory.mktemp(request.param)
    return request.param, build_reference(request.param, directory), directory


def runner_of(directory: Path, backend: str) -> Runner:
    decoder, core = load_decoder(directory), find_core()[0]
    if backend == "cpu" and core is None:
        pytest.skip("the native core is not built")
    if backend == "cpu" and (missing := CPU.missing(decoder.spec)):
        pytest.skip(f"the native core lacks {missing}")
    return Runner(decoder, make_pool(decoder, pages=40), Blocked() if backend == "plain" else Native(core))  # type: ignore[arg-type]


def expected(reference: Any, tokens: list[int]) -> Tensor:
    with torch.no_grad():
        return reference(torch.tensor([tokens])).logits[0]  # type: ignore[no-any-return]


def logits(runner: Runner, feed: Feed) -> Tensor:
    return runner.logits(runner.forward([feed]).last, range(len(feed.tokens) + len(feed.nodes)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_prefill_decoding_and_tree_nodes_agree(case: tuple[str, Any, Path], backend: str) -> None:
    _, reference, directory = case
    runner = runner_of(directory, backend)
    text = [i * 37 % VOCAB for i in range(PROMPT)]
    start = runner.decoder.rotary_start(PROMPT)
    want = expected(reference, text)

    prefill = logits(runner, Feed(PAGES, 0, text, rotary_start=start))
    torch.testing.assert_close(prefill, want, atol=1e-4, rtol=0)
    steps = [logits(runner, Feed(PAGES, i, [token], rotary_start=start)) for i, token in enumerate(text)]
    assert torch.equal(torch.cat(steps), prefill), "decoding token by token gives the bits of prefill"

    tokens, parents = zip(*TREE, strict=True)
    rows = logits(runner, Feed(PAGES, PROMPT - 1, text[-1:], tokens, parents, rotary_start=start))
    assert torch.equal(rows[0], prefill[-1])
    for node in range(len(TREE)):
        path, here = [tokens[node]], parents[node]
        while here >= 0:
            path.insert(0, tokens[here])
            here = parents[here]
        torch.testing.assert_close(rows[node + 1], expected(reference, text + path)[-1], atol=1e-4, rtol=0)


def test_two_hundred_greedy_tokens_are_those_of_transformers(case: tuple[str, Any, Path]) -> None:
    """Each reads the text that one backend wrote: it would have written it too, if its argmax after every prefix is the next
    token. Decoding has the bits of reading (the test above).
    """
    name, reference, directory = case
    writer, reader = (runner_of(directory, backend) for backend in reversed(BACKENDS))
    length = LENGTHS.get(name, PROMPT + TOKENS)  # the table of a request is that of its maximum length
    text = [i * 11 % VOCAB for i in range(length - TOKENS)]
    start = writer.decoder.rotary_start(length)
    row = logits(writer, Feed(PAGES, 0, text, rotary_start=start))[-1]
    while len(text) < length:
        text.append(int(row.argmax()))
        row = logits(writer, Feed(PAGES, len(text) - 1, text[-1:], rotary_start=start))[0]
    for read in (expected(reference, text), logits(reader, Feed(PAGES, 0, text, rotary_start=start))):
        assert read[length - TOKENS - 1 : -1].argmax(-1).tolist() == text[-TOKENS:]
