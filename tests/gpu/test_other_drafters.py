"""Early exit, lookahead, a cascade and a mixture beside a target on the device. These run in Triton's interpreter too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.cache import KVPool
from outrider.config import EngineConfig
from outrider.control import FixedLength
from outrider.core import PendingDrafts, Plan, Sequence
from outrider.draft import Drafter
from outrider.draft.cascade import CascadeDrafter, ModelLevel
from outrider.draft.draft_model import DraftModel
from outrider.draft.early_exit import EarlyExit, EarlyExitOptions, LayerCosts, measure_costs
from outrider.draft.lookahead import LookaheadDrafter
from outrider.draft.mixture import Member, MixtureDrafter
from outrider.draft.suffix import SuffixDrafter
from outrider.engine.engine import Engine
from outrider.model import Decoder, Runner
from outrider.ops import Blocked
from outrider.sampling import SamplingParams
from tests.support import NoDrafter, make_request, random_decoder, run, write_family

INTERPRETED = True
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_GPU = DEVICE == "cuda"
PAGES, SIZE = 30, 16
TOKENS = 24 if ON_GPU else 4  # the interpreter is slow


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return random_decoder(write_family(tmp_path_factory.mktemp("m"), "llama2", hidden_size=64, num_key_value_heads=2))


def texts(
    target: Any, drafter: Drafter, length: int, tokens: int = TOKENS
) -> tuple[list[list[int]], list[Sequence], list[list[int]]]:
    """What two requests emit, their sequences, and every chain or tree that was drafted."""
    params = [SamplingParams(temperature=heat, seed=3, max_tokens=tokens) for heat in (0.0, 0.8)]
    requests = [make_request(list(range(5, 25 - 9 * i)), p, f"r{i}") for i, p in enumerate(params)]
    config = EngineConfig(page_size=SIZE, max_num_seqs=2, max_batch_rows=24, prefix_cache=False)
    drafted: list[list[int]] = []
    propose = drafter.propose

    def watching(batch: Any, plan: Plan) -> Any:
        drafts = propose(batch, plan)
        known = drafts.resolve() if isinstance(drafts, PendingDrafts) else drafts
        drafted.extend(tree.tokens for tree in known.per_sequence if tree.tokens)
        return drafts

    drafter.propose = watching  # type: ignore[method-assign]
    writers = run(Engine(target, None, drafter, FixedLength(length), config), requests)
    return [writer.seq.tokens for writer in writers], [writer.seq for writer in writers], drafted


@pytest.mark.parametrize(("exit_layer", "tail"), [(1, 0), (1, 1)] if ON_GPU else [(1, 0)])
def test_early_exit_drafts_what_it_drafts_on_the_host(decoder: Decoder, exit_layer: int, tail: int) -> None:
    from outrider.model.cuda_runner import CudaRunner

    target, c = CudaRunner(decoder, PAGES, SIZE, DEVICE), decoder.spec
    options = EarlyExitOptions(exit_layer, min(tail, c.depth - exit_layer - 1))
    host = Runner(decoder, KVPool(c.depth, PAGES, c.kv_heads, SIZE, c.head_dim), Blocked())
    plain, _, _ = texts(target, NoDrafter(), 0)
    early, sequences, drafted = texts(target, EarlyExit(target, options), 3)
    assert early == plain
    assert [seq.stats.fallback_reason for seq in sequences] == [None] * 2
    _, _, defined = texts(host, EarlyExit(host, options), 3)
    assert drafted[0] == defined[0]


def test_an_exit_is_chosen_by_what_a_forward_reads(decoder: Decoder) -> None:
    from outrider.model.cuda_runner import CudaRunner

    target = CudaRunner(decoder, PAGES, SIZE, DEVICE)
    costs = measure_costs(target)
    assert costs == LayerCosts(*target.read_bytes)
    assert 0 < costs.head < target.weight_bytes
    x = torch.randn(3, decoder.spec.hidden)
    host = Runner(decoder, KVPool(1, 1, 2, SIZE, decoder.spec.head_dim), Blocked())
    assert torch.allclose(target.logits_leaving(x.to(DEVICE)), host.logits_leaving(x), atol=1e-3)


MAKERS: dict[str, Callable[[Any], Drafter]] = {
    "lookahead": lambda _: LookaheadDrafter(),
    "cascade": lambda draft: CascadeDrafter([ModelLevel(draft)], SuffixDrafter()),
    "mixture": lambda draft: MixtureDrafter([Member(SuffixDrafter(), 4), Member(DraftModel(draft), 3)]),
}


@pytest.mark.parametrize("name", MAKERS if ON_GPU else ["lookahead"])
def test_other_drafters_change_no_token(decoder: Decoder, name: str, tmp_path: Path) -> None:
    from outrider.model.cuda_runner import CudaRunner

    target = CudaRunner(decoder, PAGES, SIZE, DEVICE)
    folder = write_family(tmp_path, "llama2", hidden_size=64, num_key_value_heads=2, num_hidden_layers=1)
    draft, tokens = CudaRunner(random_decoder(folder, 2), PAGES, SIZE, DEVICE, target=target), 2 * TOKENS
    plain, _, _ = texts(target, NoDrafter(), 0, tokens)
    fast, sequences, drafted = texts(target, MAKERS[name](draft), 4, tokens)
    assert fast == plain
    assert drafted
    assert [seq.stats.fallback_reason for seq in sequences] == [None] * 2
