"""Texts that are longer than a drafter's context: it goes on from a window, or says why it does not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.cache import KVPool
from outrider.core import Batch, Plan
from outrider.draft.dflash import BlockDrafter, BlockOptions
from outrider.draft.draft_model import DraftModel
from outrider.draft.eagle import EagleDrafter
from outrider.draft.growth import TreeShape
from outrider.heads import BlockHead, Borrowed, EagleHead
from outrider.model import Decoder, Runner, save_decoder
from outrider.ops import Plain, serving_ops
from outrider.train.attention import causal_attend
from tests.support import make_engine, make_pool, make_request, random_decoder, run, write_family
from tests.support.blocks import random_block, reference_guesses
from tests.support.eagle import random_head, reference_chain

pytestmark = pytest.mark.usefixtures("both_paths")

CONTEXT, SIGHT = 48, 36  # of the drafters; slots that they see
GREEDY = SamplingParams(temperature=0.0, max_tokens=90)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return random_decoder(write_family(tmp_path_factory.mktemp("m"), "llama2"))


def watched(drafter: Any, first_key: Callable[[Any], int] = lambda _: 0) -> list[tuple[list[int], list[int], int]]:
    """The text, the chain and the first slot seen of every draft to come."""
    seen: list[tuple[list[int], list[int], int]] = []
    propose = drafter.propose

    def watching(batch: Batch, plan: Plan) -> Any:
        drafts = propose(batch, plan)
        pairs = zip(batch.sequences, drafts.per_sequence, strict=True)
        seen.extend((list(seq.tokens), list(tree.tokens), first_key(seq)) for seq, tree in pairs if tree.tokens)
        return drafts

    drafter.propose = watching
    return seen


def same_tokens(target: Decoder, drafter: Any, prompts: tuple[int, ...]) -> None:
    requests = [make_request([i * 37 % 190 for i in range(n)], GREEDY, f"r{n}") for n in prompts]
    plain = [run(make_engine(target), [request])[0].seq.tokens for request in requests]
    fast = run(make_engine(target, drafter, 4), requests)
    assert [writer.seq.tokens for writer in fast] == plain
    assert [writer.seq.stats.fallback_reason for writer in fast] == [None] * len(prompts)
    assert [writer.seq.stats.off_reason for writer in fast] == [None] * len(prompts)


@pytest.mark.parametrize("shape", [TreeShape(), TreeShape(beam=2, branch=2)])
def test_a_draft_model_reads_its_window_again(target: Decoder, shape: TreeShape, tmp_path: Path) -> None:
    """A chain is what the model writes after the window alone, which is between half its context and all it sees."""
    decoder = random_decoder(write_family(tmp_path, "llama2", max_position_embeddings=CONTEXT), seed=3)
    decoder.make_tables(512)
    drafter = DraftModel(Runner(decoder, make_pool(decoder)), shape)
    seen = watched(drafter, drafter._reader.first_key)
    same_tokens(target, drafter, (5, 30, 130))
    assert sum(len(tokens) > CONTEXT for tokens, _, _ in seen) > 50
    assert max(first for _, _, first in seen) > 150
    for tokens, chain, first in seen if shape.is_chain else ():
        assert (first == 0 and len(tokens) <= SIGHT) or CONTEXT // 2 <= len(tokens) - first <= SIGHT
        assert chain == written(decoder, tokens[first:], len(chain))


def written(decoder: Decoder, tokens: list[int], length: int) -> list[int]:
    """What a model writes after a text, by dense attention."""
    for _ in range(length):
        count = len(tokens)
        rows = decoder(torch.tensor(tokens), torch.arange(count), causal_attend(1, count), Plain()).last
        tokens = [*tokens, int(decoder.logits(rows[-1:], Plain()).argmax())]
    return tokens[len(tokens) - length :]


def short_head(target: Decoder, form: str) -> EagleHead:
    """A head whose context is shorter than the target's."""
    whole = random_head(target, form)
    config = replace(whole.config, shape=replace(whole.config.shape, context=CONTEXT))
    head = EagleHead(config, Borrowed.of(target)).requires_grad_(False)
    head.load_state_dict(whole.state_dict())
    return head.eval()


@pytest.mark.parametrize("form", ["eagle3.1", "eagle1", "mtp"])
def test_a_head_sees_a_window(target: Decoder, form: str) -> None:
    head = short_head(target, form)
    head.stretch(512)
    shape = head.config.shape
    drafter = EagleDrafter(head, KVPool(1, 160, shape.kv_heads, 16, shape.head_dim), serving_ops())
    seen = watched(drafter)
    same_tokens(target, drafter, (5, 130))
    long = [(tokens, chain) for tokens, chain, _ in seen if len(tokens) > CONTEXT]
    assert len(long) > 50
    for tokens, chain in [*long[:4], *long[-4:]]:
        assert chain == reference_chain(target, head, tokens, len(chain), first=len(tokens) - 1 - SIGHT)


def test_a_block_sees_a_window(target: Decoder) -> None:
    """A chain is what the definition guesses after the last features that the context has room for."""
    whole = random_block(target, "dflash")
    config = replace(whole.config, shape=replace(whole.config.shape, context=CONTEXT))
    head = BlockHead(config, Borrowed.of(target)).requires_grad_(False)
    head.load_state_dict(whole.state_dict())
    head.stretch(512)
    shape = head.config.shape
    drafter = BlockDrafter(head, KVPool(2, 160, shape.kv_heads, 16, shape.head_dim), serving_ops(), BlockOptions(candidates=1))
    seen = watched(drafter)
    same_tokens(target, drafter, (5, 130))
    long = [(tokens, chain) for tokens, chain, _ in seen if len(tokens) > CONTEXT and len(chain) == 4]
    assert len(long) > 20
    for tokens, chain in [*long[:4], *long[-4:]]:
        count, length = len(tokens), len(chain) + 1
        taps = target(torch.tensor(tokens), torch.arange(count), causal_attend(1, count), Plain(), config.taps).taps
        read = torch.cat(taps, -1)[count - 1 + length - CONTEXT : count - 1]
        assert chain == reference_guesses(head, read, tokens[-1], length).argmax(-1).tolist()


def test_without_more_positions_drafting_ends_and_the_reason_is_named(target: Decoder) -> None:
    head = short_head(target, "eagle3")
    shape = head.config.shape
    drafter = EagleDrafter(head, KVPool(1, 160, shape.kv_heads, 16, shape.head_dim), serving_ops())
    (writer,) = run(make_engine(target, drafter, 4), [make_request([1, 2, 3], GREEDY, "r")])
    assert writer.seq.stats.drafted > 0
    assert writer.seq.stats.fallback_reason is None
    assert writer.seq.stats.off_reason == "the text is longer than the context of the head (48 tokens)"


@pytest.mark.parametrize(("family", "goes_on"), [("llama2", True), ("gpt2", False)])
def test_start_up_and_outputs_name_the_limit(
    family: str, goes_on: bool, target: Decoder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A model with a table of learned positions cannot go on."""
    save_decoder(target, write_family(tmp_path / "target", "llama2"))
    draft = tmp_path / "draft"
    if family == "gpt2":
        gpt2(draft)
    else:
        save_decoder(random_decoder(write_family(draft, family, max_position_embeddings=CONTEXT), seed=3), draft)
    settings = {"method": "draft_model", "model": str(draft), "draft_tokens": 3, "adaptive": False}
    with caplog.at_level(logging.INFO, "outrider"), LLM(str(tmp_path / "target"), speculation=settings) as llm:
        output = llm.generate([list(range(60))], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))[0].outputs[0]
    said = [
        record for record in caplog.records if "its context of 48 tokens is shorter than requests may be (512)" in record.message
    ]
    assert [record.levelname for record in said] == (["INFO"] if goes_on else ["WARNING"])
    assert (output.speculation["drafted"] > 0) == goes_on
    reason = None if goes_on else "the text is longer than the context of the draft model (48 tokens)"
    assert output.speculation["off_reason"] == reason


def gpt2(directory: Path) -> None:
    """A small GPT-2 of the target's vocabulary."""
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": 199, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).save_pretrained(directory)
