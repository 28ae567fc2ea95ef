"""Published draft models: families by tokenizer, the pairs people use, what is known of them, memory and batches."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Fast
from tokenizers import models
from typer.testing import CliRunner

from outrider.bench.plan.roofline import PairCosts, Shape, chance_of, guessed_chance
from outrider.cli import app
from outrider.errors import InvalidParameter
from outrider.model.published import FAMILIES, HEADS, MEASURED, MODELS, identify, measured, named
from outrider.planning import Machine, Recommendation, best_length, expected_speedup, recommend_draft

H100 = Machine(bandwidth=3.35e12, memory=8 * 80e9, ridge=295)
PAIRS = [
    ("google/gemma-2-27b-it", "google/gemma-2-2b-it"),
    ("google/gemma-2-27b-it", "google/gemma-2-9b-it"),
    ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mistralai/Mistral-7B-Instruct-v0.2"),
    ("bigcode/starcoder", "bigcode/starcoderbase-1b"),
    ("codellama/CodeLlama-34b-hf", "codellama/CodeLlama-7b-hf"),
    ("codellama/CodeLlama-34b-Instruct-hf", "codellama/CodeLlama-7b-Instruct-hf"),
    ("meta-llama/Llama-2-13b-chat-hf", "TinyLlama/TinyLlama-1.1B-Chat-v1.0"),
    ("codellama/CodeLlama-13b-hf", "TinyLlama/TinyLlama_v1.1"),
    ("meta-llama/Llama-3.1-70B-Instruct", "meta-llama/Llama-3.2-1B-Instruct"),
    ("meta-llama/Llama-3.1-70B-Instruct", "meta-llama/Llama-3.2-3B-Instruct"),
    ("meta-llama/Llama-3.1-70B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"),
    ("meta-llama/Llama-3.3-70B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"),
    ("meta-llama/Meta-Llama-3-70B", "meta-llama/Meta-Llama-3-8B"),
    ("Qwen/Qwen2.5-72B-Instruct", "Qwen/Qwen2.5-7B-Instruct"),
    ("Qwen/Qwen2.5-72B", "Qwen/Qwen2.5-0.5B"),
    ("Qwen/Qwen2.5-32B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct"),
    ("Qwen/Qwen2.5-Coder-32B-Instruct", "Qwen/Qwen2.5-Coder-0.5B-Instruct"),
    ("Qwen/Qwen3-32B", "Qwen/Qwen3-1.7B"),
    ("Qwen/Qwen3-235B-A22B", "Qwen/Qwen3-0.6B"),
]


def advice(target: str | Path, machine: Machine = H100) -> Recommendation:
    (result,) = recommend_draft(target, machine=machine)
    return result


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_the_pairs_people_use_are_recommended(target: str, draft: str) -> None:
    options = {option.name: option for option in advice(target).drafts}
    assert draft in options
    option = options[draft]
    assert 0.3 <= option.chance < 1.0
    assert option.is_guess or re.match(r"published: rate \d+% with drafts of .*, https://", option.basis)
    assert option.pays[0] >= 1, "it pays at some batch"
    assert option.pays[1] <= option.concurrency
    assert option.concurrency < advice(target).concurrency, "the draft takes memory too"
    assert option.speedup > 1.2 or option.pays[0] > 1, "alone, or in batches, as for mixtures of experts"


@pytest.mark.parametrize("target", [name for model in MODELS for name in model.names])
def test_nothing_with_another_tokenizer_or_of_another_kind_is_offered(target: str) -> None:
    result = advice(target)
    (model, name), = named(target)  # fmt: skip
    by_name = {variant: other for other in MODELS for variant in other.names}
    for option in result.drafts:
        if option.method != "draft_model":
            assert (option.method, option.name) in HEADS[target]
            continue
        draft = by_name[option.name]
        assert draft.tokenizer == model.tokenizer
        assert draft.millions * 2.5 <= model.millions
        if name == model.instruct:
            assert option.name == (draft.instruct or draft.base)
        else:
            assert option.name == draft.base
    assert result.lookups[:2] == ["suffix", "ngram"]
    assert [option.speedup for option in result.drafts] == sorted((o.speedup for o in result.drafts), reverse=True)


def test_mistral_is_offered_no_draft_of_llama() -> None:
    result = advice("mistralai/Mistral-7B-v0.1")
    assert result.drafts == []
    assert set(result.lookups) >= {"suffix", "ngram", "recycle", "lookahead"}


def test_heads_are_suggested_for_their_target_alone() -> None:
    assert any(option.method == "eagle" for option in advice("meta-llama/Llama-3.1-8B-Instruct").drafts)
    assert not any(option.method == "eagle" for option in advice("meta-llama/Llama-3.1-8B").drafts)
    assert {option.method for option in advice("lmsys/vicuna-7b-v1.3").drafts} == {"eagle", "medusa", "draft_model"}
    names = {name for model in MODELS for name in model.names}
    assert HEADS.keys() <= names
    assert {name for pair in MEASURED for name in pair} <= names


def test_a_block_drafter_takes_one_pass_for_drafts_of_any_length() -> None:
    options = {option.method: option for option in advice("Qwen/Qwen3-8B").drafts}
    block, chain = options["dflash"], options["eagle"]
    assert block.weights_bytes > chain.weights_bytes, "several layers"
    assert block.best_length > chain.best_length
    costs = PairCosts(Shape(8_000, 0, 8_000), Shape(1_000, 0, 1_000), 100.0, in_blocks=True)
    tokens = sum(0.8**i for i in range(8))
    assert costs.speedup(0.8, 7) == pytest.approx(tokens / (1 + 1 / 8))
    assert costs.speedup(0.8, 7, 64) < costs.speedup(0.8, 7), "the arithmetic of its rows counts"


def test_a_size_means_every_target_of_it() -> None:
    results = recommend_draft("70B", machine=H100)
    assert {"meta-llama/Llama-2-70b-chat-hf", "meta-llama/Llama-3.3-70B-Instruct"} <= {result.target for result in results}
    assert [result.target for result in recommend_draft("8x7B", machine=H100)] == ["mistralai/Mixtral-8x7B-Instruct-v0.1"]
    for wrong in ("71B", "owner/nothing", "nothing", "7"):
        with pytest.raises(InvalidParameter, match="neither a model directory"):
            recommend_draft(wrong)
    with pytest.raises(InvalidParameter, match="not in a directory here"):
        recommend_draft("8x7B", [Path("x")])


def marked(directory: Path, family: str, **config: object) -> Path:
    """A folder with the configuration of a model, and a tokenizer that has the marks of a family."""
    directory.mkdir()
    table = {"<unk>": 0} | {token: 5 if i is None else i for token, i in FAMILIES[family].marks.items()}
    Fast(models.WordLevel(table, unk_token="<unk>")).save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 32000}
    llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 64}
    (directory / "config.json").write_text(json.dumps(llama | sizes | config))
    return directory


@pytest.mark.parametrize("family", FAMILIES)
def test_a_directory_belongs_to_the_family_of_its_tokenizer(family: str, tmp_path: Path) -> None:
    """Two families have 32,000 tokens, and a model's name and type may say anything."""
    result = advice(marked(tmp_path / "model", family))
    assert result.family == family
    assert result.drafts == []  # of no known size


def test_a_known_model_in_a_directory_is_known_by_name_or_by_tokenizer_and_size(tmp_path: Path) -> None:
    shape = {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    }
    result = advice(marked(tmp_path / "mine", "Llama 3", **shape))
    assert "meta-llama/Llama-3.2-1B-Instruct" in {option.name for option in result.drafts}
    snapshot = tmp_path / "models--meta-llama--Llama-3.1-8B" / "snapshots"
    snapshot.mkdir(parents=True)
    result = advice(marked(snapshot / "abc", "Llama 3"))
    assert "meta-llama/Llama-3.2-1B" in {option.name for option in result.drafts}, "base with base"
    path = tmp_path / "config.json"
    path.write_text((marked(tmp_path / "other", "Qwen3", vocab_size=32768, model_type="mistral") / "config.json").read_text())
    assert identify(path, None, 10**9) == (None, "", "Mistral v3")


def test_published_rates_become_chances() -> None:
    pair = named("meta-llama/Meta-Llama-3-70B")[0][0], named("meta-llama/Meta-Llama-3-8B")[0][0]
    known = measured(*pair)
    assert known is not None
    chance = chance_of(known, 0.5)
    assert sum(chance**i for i in range(1, 9)) / 8 == pytest.approx(known.rate, abs=1e-3)
    assert chance_of(known._replace(length=None), 0.9) == 0.9
    assert chance_of(known._replace(length=None), 0.1) == known.rate  # a rate is a lower bound of the chance
    assert guessed_chance(3, True) > guessed_chance(50, True) > guessed_chance(50, False)


def test_experts_are_read_by_more_rows() -> None:
    mixtral, mistral = (Shape.of(named(name)[0][0]) for name in ("8x7B", "mistralai/Mistral-7B-v0.1"))
    dense = Shape(mixtral.parameters, mixtral.kv_bytes_per_token, mixtral.parameters)
    few, many = (mixtral.forward(rows, 0, 1e9) for rows in (1, 64))
    assert few == pytest.approx(2 * mixtral.active)
    assert many == pytest.approx(2 * mixtral.parameters, rel=0.01)
    costs = PairCosts(mixtral, mistral, 295)
    assert costs.best(0.8)[0] == 0, "alone, the draft reads more than half of what the target does"
    assert costs.best(0.8, batch=16)[1] > 1.5
    assert costs.pays(0.8, 64)[0] > 1
    assert costs.pays(0.8, 1) == (0, 0)
    assert PairCosts(dense, mistral, 295).best(0.8)[1] > 1.5


def test_the_range_of_batches_ends_where_drafting_no_longer_pays() -> None:
    costs = PairCosts(*(Shape.of(named(f"codellama/CodeLlama-{size}-hf")[0][0]) for size in ("34b", "13b")), 295)
    first, last = costs.pays(0.8, 64)
    assert first == 1 < last < 64
    assert costs.best(0.8, last)[1] > 1.0
    assert costs.best(0.8, last + 1) == (0, 1.0)
    assert costs.pays(0.8, last - 1) == (1, last - 1)


def test_no_draft_pays_where_there_is_no_room() -> None:
    options = {option.name: option for option in advice("meta-llama/Llama-3.1-70B", Machine(memory=150e9, ridge=295)).drafts}
    assert options["meta-llama/Llama-3.1-8B"].pays == (0, 0)
    assert options["meta-llama/Llama-3.1-8B"].concurrency == 0
    assert options["meta-llama/Llama-3.2-1B"].concurrency > 0


def test_the_formulas_from_python() -> None:
    assert expected_speedup(0.8, 4, 0.1) == pytest.approx((1 - 0.8**5) / 0.2 / 1.4)
    assert expected_speedup([0.5, 0.0], 2, 0.0) == 1.5
    assert expected_speedup(0.0, 4, 0.05) < 1.0
    lengths = [expected_speedup(0.8, k, 0.1) for k in range(30)]
    assert best_length(0.8, 0.1) == lengths.index(max(lengths))
    assert best_length(0.1, 0.5) == 0
    assert expected_speedup(0.8, 4, 0.1, row_cost=0.02, batch=64) < expected_speedup(0.8, 4, 0.1, row_cost=0.02, batch=1)
    wrong = [(1 + 5 * 0.4) / (1 + 5 * ratio) for ratio in (0.1, 0.05)]
    assert wrong == pytest.approx([2.0, 2.4])  # a formula in circulation; see docs/planning.md
    assert [round(expected_speedup(0.4, 5, ratio), 2) for ratio in (0.1, 0.05)] == [1.11, 1.33]


def test_the_examples_of_the_page_run(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        exec(block, {})
    assert "Qwen/Qwen3-1.7B" in capsys.readouterr().out


def test_the_command_takes_a_size_and_a_hub_id() -> None:
    for target, count in (("34b", 1), ("google/gemma-2-27b-it", 1), ("27B", 2)):
        arguments = ["plan", "--target", target, "--device-memory", "160", "--ridge", "295", "--json"]
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, done.output
        targets = json.loads(done.stdout.splitlines()[-1])["targets"]
        assert len(targets) == count
        assert all(one["drafts"] for one in targets)
