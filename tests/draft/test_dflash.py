"""Block drafters in the engine: same tokens, and the native core draws the trees of the definition."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from outrider import LLM
from outrider.cache import KVPool
from outrider.core import Batch, Drafts, Plan, Tree
from outrider.draft.dflash import BlockDrafter, BlockOptions
from outrider.errors import InvalidParameter
from outrider.heads import save_block
from outrider.model import Decoder
from outrider.ops import serving_ops
from outrider.sampling import SamplingParams
from tests.support import VOCAB, make_engine, make_request, random_decoder, run, write_family
from tests.support.blocks import BLOCK, KINDS, random_block
from tests.support.engines import random_params


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return random_decoder(write_family(tmp_path_factory.mktemp("m"), "llama2", request.param, num_hidden_layers=3))


def drafter_of(decoder: Decoder, kind: str, options: BlockOptions = BlockOptions()) -> BlockDrafter:  # noqa: B008 (frozen)
    head = random_block(decoder, kind)
    c = head.config.shape
    return BlockDrafter(head, KVPool(c.depth, 160, c.kv_heads, 16, c.head_dim), serving_ops(), options)


def requests(seed: str, count: int) -> list:  # type: ignore[type-arg]
    rng = random.Random(seed)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 45))] for _ in range(count)]
    return [make_request(prompt, random_params(rng, 25), f"r{i}") for i, prompt in enumerate(prompts)]


@pytest.mark.usefixtures("both_paths")
@pytest.mark.grid
@pytest.mark.parametrize("nodes", [3, 14])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_change_nothing(decoder: Decoder, kind: str, nodes: int) -> None:
    wanted = requests(f"{kind} {nodes}", 5)
    plain = [run(make_engine(decoder), [request])[0] for request in wanted]
    drafter = drafter_of(decoder, kind)
    engine = make_engine(decoder, drafter, nodes)
    fast = run(engine, wanted)
    assert [w.seq.tokens for w in fast] == [w.seq.tokens for w in plain]
    assert [w.logprobs for w in fast] == [w.logprobs for w in plain]
    assert [w.seq.stats.fallback_reason for w in fast] == [None] * 5
    assert all(w.seq.stats.drafted > 0 for w in fast)
    assert engine.pages.used == 0
    assert not drafter._texts


def watched(decoder: Decoder, drafter: BlockDrafter, nodes: int, temperature: float, rule: str = "match") -> list[Tree]:
    seen: list[Tree] = []
    propose = drafter.propose

    def watching(batch: Batch, plan: Plan) -> Drafts:
        drafts = propose(batch, plan._replace(rule=rule))
        seen.extend(drafts.per_sequence)
        return drafts

    drafter.propose = watching  # type: ignore[method-assign]
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=24)
    run(make_engine(decoder, drafter, nodes), [make_request([5, 9, 2] * 7, params, "a"), make_request([3, 4], params, "b")])
    return [tree for tree in seen if tree.tokens]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", ["dflash", "dflash reduced", "dspark causal"])
def test_the_core_draws_the_trees_of_the_definition(decoder: Decoder, kind: str, temperature: float) -> None:
    native, defined = drafter_of(decoder, kind), drafter_of(decoder, kind)
    if not native._runner.draws_trees:
        pytest.skip("the native core is not in use")
    defined._runner.draws_trees = False
    for made, want in zip(watched(decoder, native, 12, temperature), watched(decoder, defined, 12, temperature), strict=True):
        assert sorted(made.paths()[1:]) == sorted(want.paths()[1:])
        assert sorted(made.survival) == pytest.approx(sorted(want.survival), rel=1e-4)


def test_a_block_is_as_long_as_its_option_says(decoder: Decoder) -> None:
    for length in (2, 4, None):
        trees = watched(decoder, drafter_of(decoder, "dspark", BlockOptions(block=length, candidates=1)), 9, 0.0)
        assert max(len(tree.tokens) for tree in trees) == (length or BLOCK)


def test_other_rules_get_chains(decoder: Decoder) -> None:
    trees = watched(decoder, drafter_of(decoder, "dspark"), 12, 0.8, "rejection")
    assert all(tree.parents == list(range(-1, len(tree.parents) - 1)) for tree in trees)


def test_a_head_is_found_beside_its_target_and_by_its_folder(tmp_path: Path) -> None:
    directory = write_family(tmp_path, "llama2", num_hidden_layers=3)
    with pytest.raises(InvalidParameter, match="method 'dflash' needs the directory"):
        LLM(directory, load_format="dummy", speculation="dflash")
    decoder = random_decoder(directory)
    head = random_block(decoder, "dspark")
    for folder in (directory / "dflash", tmp_path / "elsewhere"):
        save_block(head, folder)
        data = json.loads((folder / "config.json").read_text())
        del data["trained_for"]  # the target's weights are dummies
        (folder / "config.json").write_text(json.dumps(data))
    prompts, params = [[1, 2, 3] * 4, [7] * 5], SamplingParams(temperature=0.7, seed=3, max_tokens=20, ignore_eos=True)
    texts = {}
    elsewhere = {"method": "auto", "model": str(tmp_path / "elsewhere")}
    for name, settings in {"none": "none", "beside": {"method": "dspark", "adaptive": False}, "elsewhere": elsewhere}.items():
        llm = LLM(directory, load_format="dummy", speculation=settings)
        outputs = [result.outputs[0] for result in llm.generate(prompts, params)]
        texts[name] = [output.token_ids for output in outputs]
        assert all(output.speculation["fallback_reason"] is None for output in outputs)
    assert texts["beside"] == texts["elsewhere"] == texts["none"]
    assert "dflash" in llm.speculation.methods()


def test_nonsense_logits_are_a_fault_of_the_drafter_alone(decoder: Decoder) -> None:
    plain = run(make_engine(decoder), requests("nan", 2))
    drafter = drafter_of(decoder, "dflash")
    for parameter in drafter._head.layers[0].parameters():
        torch.nn.init.constant_(parameter, float("nan"))
    broken = BlockDrafter(drafter._head, KVPool(2, 160, decoder.spec.kv_heads, 16, decoder.spec.head_dim), serving_ops())
    fast = run(make_engine(decoder, broken, 6), requests("nan", 2))
    assert [w.seq.tokens for w in fast] == [w.seq.tokens for w in plain]
    assert any("not finite" in (w.seq.stats.fallback_reason or "") for w in fast)
