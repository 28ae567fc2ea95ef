"""EAGLE and Medusa behind the protocol: same tokens, and the drafts the heads' definitions ask for."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from outrider.bench.feature_specs import FEATURE_SPECS
from outrider.bench.feature_specs import random_decoder as feature_decoder
from outrider.cache import KVPool
from outrider.core import Batch, Drafts, Plan
from outrider.draft.eagle import EagleDrafter
from outrider.draft.growth import TreeShape
from outrider.draft.lookup import best_first
from outrider.draft.medusa import MedusaDrafter
from outrider.heads import Borrowed, MedusaConfig, MedusaHeads
from outrider.heads.runners import EagleRunner, MedusaRunner
from outrider.model import Decoder, Feed
from outrider.ops import Plain, serving_ops
from outrider.sampling import SamplingParams
from tests.support import VOCAB, make_engine, make_request, random_decoder, run, write_family
from tests.support.eagle import FORMS, random_head, reference_chain
from tests.support.engines import random_params

pytestmark = pytest.mark.usefixtures("both_paths")

SHAPES = {"chain": TreeShape(), "tree": TreeShape(beam=3, branch=3, depth=4), "wide": TreeShape(beam=2, branch=6, depth=3)}


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return random_decoder(write_family(tmp_path_factory.mktemp("m"), "llama2", request.param, num_hidden_layers=3))


def eagle(decoder: Decoder, form: str, shape: TreeShape) -> EagleDrafter:
    head = random_head(decoder, form)
    c = head.config.shape
    return EagleDrafter(head, KVPool(1, 160, c.kv_heads, 16, c.head_dim), serving_ops(), shape)


def requests(seed: str, count: int) -> list:  # type: ignore[type-arg]
    rng = random.Random(seed)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 45))] for _ in range(count)]
    return [make_request(prompt, random_params(rng, 25), f"r{i}") for i, prompt in enumerate(prompts)]


@pytest.mark.grid
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FORMS)
def test_eagle_changes_nothing(decoder: Decoder, form: str, shape: str) -> None:
    wanted = requests(f"{form} {shape}", 5)
    plain = [run(make_engine(decoder), [request])[0] for request in wanted]
    drafter = eagle(decoder, form, SHAPES[shape])
    engine = make_engine(decoder, drafter, 9)
    fast = run(engine, wanted)
    assert [w.seq.tokens for w in fast] == [w.seq.tokens for w in plain]
    assert [w.logprobs for w in fast] == [w.logprobs for w in plain]
    assert [w.seq.stats.fallback_reason for w in fast] == [None] * 5
    assert all(w.seq.stats.drafted > 0 for w in fast)
    assert engine.pages.used == 0
    assert not drafter._states


@pytest.mark.parametrize("form", FORMS)
def test_a_greedy_chain_is_the_head_run_by_definition(decoder: Decoder, form: str) -> None:
    if decoder.layers[0].qkv.dtype != torch.float32:
        pytest.skip("argmax of two roundings may differ in bfloat16")
    drafter = eagle(decoder, form, TreeShape())
    seen = []
    propose = drafter.propose

    def watching(batch: Batch, plan: Plan):  # type: ignore[no-untyped-def]
        drafts = propose(batch, plan)
        for seq, tree in zip(batch.sequences, drafts.per_sequence, strict=True):
            seen.append((list(seq.tokens), tree.tokens))
        return drafts

    drafter.propose = watching  # type: ignore[method-assign]
    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    run(make_engine(decoder, drafter, 4), [make_request([5, 9, 2, 8] * 9, greedy, "a"), make_request([3], greedy, "b")])
    assert len(seen) > 10
    for tokens, draft in seen:
        assert draft == reference_chain(decoder, drafter._head, tokens, len(draft))


CAPPED, SCALED = "sandwich norms, soft caps, windows, two rotary tables", "multipliers"
BIASED = "parallel with two norms, partial rotary, gelu, biases"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("features", [CAPPED, SCALED, BIASED])
def test_heads_follow_the_target(features: str, form: str) -> None:
    """What a target does to embeddings, hidden rows and logits, heads that use its tensors do too; by the definition."""
    target = feature_decoder(FEATURE_SPECS[features])
    head, spec = random_head(target, form), target.spec
    tokens, taps = [i * 37 % spec.vocab for i in range(20)], torch.randn(20, spec.hidden * len(head.config.taps))
    feed = Feed([2, 0, 1], 1, tokens)
    made = []
    for ops in (serving_ops(), Plain()):
        runner = EagleRunner(head, KVPool(1, 3, spec.kv_heads, 16, spec.head_dim), ops)
        hidden = runner.forward([feed], runner.fuse(taps))
        made.append(
            (hidden, runner.logits(hidden), MedusaRunner(medusa_heads(target, False), ops).logits(taps[:, : spec.hidden]))
        )
    for got, want in zip(*made, strict=True):
        torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-4)


def test_trees_hold_the_chain_and_are_ranked(decoder: Decoder) -> None:
    """A dynamic tree contains the greedy chain's first nodes and never breaks a path."""
    drafter = eagle(decoder, "eagle3", TreeShape(beam=4, branch=4, depth=5))
    trees = []
    propose = drafter.propose

    def watching(batch: Batch, plan: Plan):  # type: ignore[no-untyped-def]
        drafts = propose(batch, plan)
        trees.extend(drafts.per_sequence)
        return drafts

    drafter.propose = watching  # type: ignore[method-assign]
    run(make_engine(decoder, drafter, 12), [make_request([1, 2, 3], SamplingParams(temperature=0, max_tokens=30))])
    full = [tree for tree in trees if len(tree.tokens) == 12]
    assert full
    assert any(len(set(tree.parents)) < 12 for tree in full)
    for tree in full:
        pairs = list(zip(tree.parents, tree.tokens, strict=True))
        assert len(set(pairs)) == len(pairs), "siblings differ"


def medusa_heads(decoder: Decoder, own_output: bool) -> MedusaHeads:
    c = decoder.spec
    heads = MedusaHeads(MedusaConfig(c.hidden, c.vocab, c.depth, heads=3, own_output=own_output), Borrowed.of(decoder))
    heads.requires_grad_(False)
    for parameter in heads.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.2)
    return heads.eval()


def medusa(decoder: Decoder, own_output: bool, dynamic: bool) -> MedusaDrafter:
    return MedusaDrafter(medusa_heads(decoder, own_output), serving_ops(), dynamic)


@pytest.mark.grid
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("own_output", [False, True])
def test_medusa_changes_nothing(decoder: Decoder, own_output: bool, dynamic: bool) -> None:
    wanted = requests(f"medusa {own_output}", 5)
    plain = [run(make_engine(decoder), [request])[0].seq.tokens for request in wanted]
    drafter = medusa(decoder, own_output, dynamic)
    engine = make_engine(decoder, drafter, 10)
    fast = run(engine, wanted)
    assert [w.seq.tokens for w in fast] == plain
    assert [w.seq.stats.fallback_reason for w in fast] == [None] * 5
    assert all(w.seq.stats.drafted > 0 for w in fast)
    assert not drafter._last


@pytest.mark.parametrize("dynamic", [False, True])
def test_medusa_says_how_likely_each_node_is(decoder: Decoder, dynamic: bool) -> None:
    """Who chooses among nodes has nothing else to go by: siblings share their parent's chance."""
    drafter = medusa(decoder, False, dynamic)
    drawn: list[Drafts] = []
    propose = drafter.propose
    drafter.propose = lambda batch, plan: drawn.append(propose(batch, plan)) or drawn[-1]  # type: ignore[method-assign, func-returns-value]
    run(make_engine(decoder, drafter, 10), [make_request([1, 2, 3], SamplingParams(temperature=0, max_tokens=20))])
    for drafts in drawn:
        (tree,), (says,) = drafts.per_sequence, drafts.survival
        for parent in {*tree.parents}:
            above = 1.0 if parent < 0 else says[parent]
            assert 0.0 < sum(survival for survival, of in zip(says, tree.parents, strict=True) if of == parent) <= above + 1e-6
        assert not dynamic or says == sorted(says, reverse=True)
    assert any(drafts.per_sequence[0].tokens for drafts in drawn)


@pytest.mark.parametrize("nodes", [0, 1, 2, 5, 9, 30])
def test_the_best_nodes_are_drafted(nodes: int) -> None:
    """Three heads of three guesses: the nodes are the most probable paths of all, parents first."""
    chances = [[0.6, 0.2, 0.1], [0.5, 0.15, 0.12], [0.3, 0.2, 0.05]]
    worth = {
        ranks: math.prod(chances[head][rank] for head, rank in enumerate(ranks))
        for depth in (1, 2, 3)
        for ranks in itertools.product(range(3), repeat=depth)
    }
    tree = best_first(
        nodes, 0, lambda depth, survival, _: [(survival * c, rank, depth + 1) for rank, c in enumerate([*chances, []][depth])]
    )
    best = sorted(worth.values(), reverse=True)[:nodes]
    assert [worth[tuple(path)] for path in tree.paths()[1:]] == pytest.approx(best)
    assert tree.survival == pytest.approx(best)
    assert all(parent < node for node, parent in enumerate(tree.parents))
