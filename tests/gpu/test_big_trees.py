"""Large trees that a draft model grows on a GPU: the best nodes of what it says, and the same tokens as without them.

These run in Triton's interpreter too (TRITON_INTERPRET=1).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider.config import EngineConfig
from outrider.control import FixedLength
from outrider.core import Plan, Tree
from outrider.draft.draft_model import DraftModel
from outrider.draft.growth import TreeShape
from outrider.engine.engine import Engine
from outrider.model import Decoder, Feed
from outrider.model.runner import TreeGrowth
from outrider.sampling import Row, SamplingParams, rank
from tests.support import NoDrafter, make_request, random_decoder, write_family
from tests.support.engines import assert_same_bits, run_recorded

INTERPRETED = True
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
TOKENS, ROOM, BRANCH = (48, 200, 4) if ON_GPU else (4, 12, 2)  # the interpreter is slow


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = write_family(tmp_path_factory.mktemp("models") / "one", "llama2", "bfloat16", hidden_size=64)
    return random_decoder(folder, 3)


def runner_of(decoder: Decoder, target: Any = None) -> Any:
    from outrider.model.cuda_runner import CudaRunner

    return CudaRunner(decoder, 81, 16, DEVICE, target=target)


def request(heat: float, name: str = "r") -> Any:
    params = SamplingParams(temperature=heat, seed=7, max_tokens=TOKENS)
    return make_request([(7 * i + 3) % 90 for i in range(21)], params, name)


@pytest.mark.parametrize("heat", [0.0, 0.9])
def test_trees_are_the_best_nodes_of_what_the_model_says(decoder: Decoder, heat: float) -> None:
    """Every node of the tree, ranked anew by the host from the logits after its path as if that were text."""
    runner, tokens = runner_of(decoder), list(request(heat).prompt_ids)
    row = Row(request(heat).params, 7, 0, len(tokens), len(tokens), (), frozenset())
    room = 24 if ON_GPU else 6
    ((ids, parents, survival),) = runner.grow([Feed(list(range(9)), 0, tokens)], [row], [room], TreeGrowth(5, BRANCH))
    tree = Tree(ids, parents, survival)
    assert 5 <= len(ids) <= room
    checked = range(-1, len(ids)) if ON_GPU else range(-1, 1)
    for node in checked:
        path = tree.path(node) if node >= 0 else []
        logits = runner.logits(runner.forward([Feed(list(range(20, 29)), 0, tokens + path)]).last, [len(tokens) + len(path) - 1])
        ranked = rank(logits, [row._replace(position=row.position + len(path))], BRANCH)
        above = survival[node] if node >= 0 else 1.0
        children = {ids[i]: survival[i] for i, parent in enumerate(parents) if parent == node}
        expected = dict(zip(ranked.tokens[0].tolist(), (above * ranked.chances[0]).tolist(), strict=True))
        assert children.items() <= {token: pytest.approx(chance, rel=1e-3) for token, chance in expected.items()}.items()
        worst = min(survival)
        missing = [chance for token, chance in expected.items() if token not in children]
        assert len(path) == 5 or all(chance <= 1.01 * worst for chance in missing)


@pytest.mark.parametrize("heat", [0.0, 0.9])
def test_large_trees_change_no_bit(decoder: Decoder, heat: float) -> None:
    """A model that drafts for itself: nearly everything is accepted, and two texts grow side by side."""
    target = runner_of(decoder)
    config = EngineConfig(page_size=16, max_num_seqs=4, max_batch_rows=64, prefix_cache=False)
    requests = [request(heat, "a"), request(heat, "b")]
    plain = run_recorded(Engine(target, None, NoDrafter(), FixedLength(0), config), requests)
    drafter = DraftModel(runner_of(decoder, target), TreeShape(branch=BRANCH))
    engine = Engine(target, None, drafter, FixedLength(ROOM), config)
    fast = run_recorded(engine, requests)
    assert_same_bits(plain, fast)
    stats = fast[0][0].seq.stats
    assert stats.drafted > stats.emitted, "trees have more nodes than the text has tokens left"
    assert stats.accepted > 0


def test_a_tree_has_no_more_nodes_than_planned(decoder: Decoder) -> None:
    target = runner_of(decoder)
    drafter = DraftModel(runner_of(decoder, target), TreeShape(branch=BRANCH, depth=3))
    seen: list[Tree] = []
    propose = drafter.propose

    def recording(batch: Any, plan: Plan) -> Any:
        drafts = propose(batch, plan)
        seen.extend(drafts.per_sequence)
        return drafts

    drafter.propose = recording  # type: ignore[method-assign]
    config = EngineConfig(page_size=16, max_num_seqs=4, max_batch_rows=64, prefix_cache=False)
    run_recorded(Engine(target, None, drafter, FixedLength(5), config), [request(0.0)])
    drafted = [tree for tree in seen if tree.tokens]
    assert drafted
    assert all(len(tree.tokens) <= 5 and max(tree.depths) < 3 for tree in drafted)
