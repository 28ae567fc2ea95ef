"""Transformers' own calls on a sped-up model: tensors in, tensors out, and its names for everything."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import outrider
from outrider.engine.speed_up import SpedUpModel
from outrider.errors import InvalidParameter
from outrider.heads import save_block
from outrider.model import LlamaShape, Rope
from outrider.model.bundled import bundled_model
from tests.support.blocks import block_for
from tests.support.transformers_models import pyrite_in_transformers, tiny_model

IDS = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6], [9, 8, 9, 8, 9, 8, 9, 8]])
QUICK = {"native": False, "calibration_s": 0}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("mixtral")


@pytest.fixture(scope="module")
def fast(model: Any) -> Iterator[SpedUpModel]:
    with outrider.speed_up(model, speculation="suffix", **QUICK) as fast:
        yield fast


@pytest.fixture(scope="module")
def pyrite(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    model, tokenizer = pyrite_in_transformers(tmp_path_factory.mktemp("pyrite"))
    return model, tokenizer


@pytest.fixture(scope="module")
def fast_pyrite(pyrite: tuple[Any, Any]) -> Iterator[SpedUpModel]:
    with outrider.speed_up(*pyrite, speculation="none", max_num_seqs=4, max_model_len=256, **QUICK) as fast:
        yield fast


def ended_at(text: list[int], eos: int) -> int:
    return text.index(eos) if eos in text else len(text)


def test_rows_that_end_early_are_padded(model: Any, fast: SpedUpModel) -> None:
    """An end-of-sequence id that one row writes before the other does."""
    free = model.generate(IDS, max_new_tokens=20, do_sample=False)[:, 8:].tolist()
    eos = next(token for token in free[0] if 0 < ended_at(free[0], token) < ended_at(free[1], token))
    settings = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": eos, "pad_token_id": 3}
    assert torch.equal(fast.generate(input_ids=IDS, **settings), model.generate(IDS, **settings))


def test_padding_on_the_left_is_not_read(model: Any, fast: SpedUpModel) -> None:
    ids = torch.tensor([[0, 0, 0, 5, 6, 7], [1, 2, 9, 8, 9, 8]])
    mask = (ids > 0).long()
    inputs = {"input_ids": ids, "attention_mask": mask}
    settings = {"max_new_tokens": 12, "do_sample": False}
    assert torch.equal(fast.generate(**inputs, **settings), model.generate(**inputs, **settings))
    with pytest.raises(InvalidParameter, match="padded on the left alone"):
        fast.generate(input_ids=ids, attention_mask=mask.flip(1), **settings)


def test_lengths_mean_what_they_do_in_transformers(model: Any, fast: SpedUpModel) -> None:
    with pytest.warns(UserWarning, match="max_new_tokens"):
        wanted = model.generate(IDS)
    assert torch.equal(fast.generate(IDS), wanted)
    for settings in (
        {"max_length": 15},
        {"max_new_tokens": 3},
        {"max_new_tokens": 5, "min_new_tokens": 5, "eos_token_id": 7},
    ):
        assert torch.equal(fast.generate(IDS, **settings), model.generate(IDS, **settings)), settings


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.4},
        {"bad_words_ids": [[5], [9, 8]]},
        {"min_length": 14, "eos_token_id": [5, 9, 17]},
        {"return_dict_in_generate": True},
    ],
)
def test_parameters_mean_what_they_do_in_transformers(model: Any, fast: SpedUpModel, settings: dict[str, Any]) -> None:
    common: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, **settings}
    ours, theirs = fast.generate(IDS, **common), model.generate(IDS, **common)
    if "return_dict_in_generate" in settings:
        assert type(ours) is type(theirs)
        ours, theirs = ours.sequences, theirs.sequences
    assert torch.equal(ours, theirs)


def test_sampling_repeats_by_the_seed_of_torch(fast: SpedUpModel) -> None:
    def drawn(seed: int, **more: Any) -> Tensor:
        torch.manual_seed(seed)
        out: Tensor = fast.generate(IDS, max_new_tokens=10, do_sample=True, temperature=1.2, top_p=0.95, **more)
        return out

    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))
    several = drawn(1, num_return_sequences=3)
    assert several.shape == (6, 18)
    assert torch.equal(several[:, :8], IDS.repeat_interleave(3, 0))
    assert len({tuple(row) for row in several[:3].tolist()}) == 3


def test_sampling_has_the_distribution_of_the_class(model: Any, fast: SpedUpModel) -> None:
    """First tokens of many draws against the probabilities that Transformers' processors leave."""
    settings = {"temperature": 0.7, "top_k": 8, "top_p": 0.9}
    torch.manual_seed(0)
    drawn = fast.generate(IDS[:1], max_new_tokens=1, do_sample=True, num_return_sequences=128, **settings)[:, 8]
    out = model.generate(IDS[:1], max_new_tokens=1, do_sample=True, output_scores=True, return_dict_in_generate=True, **settings)
    probs = out.scores[0][0].softmax(-1)
    counts = torch.bincount(drawn, minlength=len(probs)).double()
    assert counts[probs == 0].sum() == 0
    kept = probs > 0.02
    statistic = ((counts - 128 * probs) ** 2 / (128 * probs))[kept].sum()
    assert statistic < 30  # of at most 7 degrees of freedom: one in ten thousand seeds is beyond it


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"num_beams": 4}, "num_beams"),
        ({"output_scores": True}, "output_scores"),
        ({"logits_processor": [object()]}, "logits_processor"),
        ({"max_tokns": 3}, "max_tokns"),
        ({"max_length": 8}, "max_length"),
        ({"max_new_tokens": 5000}, "max_tokens"),
    ],
)
def test_what_is_not_served_is_named(fast: SpedUpModel, settings: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidParameter, match=named):
        fast.generate(IDS, **settings)


class Streamer:
    """Keeps the tokens it is given."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        self.seen += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


def test_a_streamer_sees_every_token(fast: SpedUpModel) -> None:
    streamer = Streamer()
    out = fast.generate(IDS[:1], max_new_tokens=9, do_sample=False, streamer=streamer)
    assert streamer.ended
    assert streamer.seen == out[0].tolist()
    with pytest.raises(InvalidParameter, match="streamer"):
        fast.generate(IDS, max_new_tokens=9, streamer=streamer)


def test_custom_generate_keeps_the_users_call(model: Any) -> None:
    custom = outrider.custom_generate(speculation="suffix", **QUICK)
    settings: dict[str, Any] = {"max_new_tokens": 14, "do_sample": False}
    wanted = model.generate(IDS, **settings)
    assert torch.equal(model.generate(IDS, **settings, custom_generate=custom), wanted)
    sampled = model.generate(IDS, max_new_tokens=4, do_sample=True, num_return_sequences=2, custom_generate=custom)
    assert sampled.shape == (4, 12)
    padded = {"input_ids": torch.tensor([[0, 0, 5, 6]]), "attention_mask": torch.tensor([[0, 0, 1, 1]])}
    assert torch.equal(model.generate(**padded, **settings, custom_generate=custom), model.generate(**padded, **settings))
    with pytest.raises(InvalidParameter, match="stopping_criteria: Never"):
        model.generate(IDS, **settings, stopping_criteria=[Never()], custom_generate=custom)
    custom.close()  # type: ignore[attr-defined]
    assert torch.equal(model.generate(IDS, **settings), wanted)


def test_what_transformers_keeps_to_itself_is_passed_to_the_factory(pyrite: tuple[Any, Any]) -> None:
    """It hands neither `assistant_model` nor `streamer` nor `tokenizer` to such a function."""
    model, tokenizer = pyrite
    inputs, settings = tokenizer(SNIPPET, return_tensors="pt"), {"max_new_tokens": 24, "do_sample": False}
    wanted = model.generate(**inputs, **settings)
    streamer = Streamer()
    custom = outrider.custom_generate(
        assistant_model=str(bundled_model() / "eagle"), tokenizer=tokenizer, streamer=streamer, max_num_seqs=2, **QUICK
    )
    assert torch.equal(model.generate(**inputs, **settings, custom_generate=custom), wanted)
    assert streamer.ended
    assert streamer.seen == wanted[0].tolist()
    custom.close()  # type: ignore[attr-defined]


class Never:
    """A stopping criterion of a user's."""

    def __call__(self, *_: Any, **__: Any) -> bool:
        return False


@pytest.fixture
def new_costs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """None are known: what other tests have measured on a busy machine may say that a drafter does not pay."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))


# The usual snippets, as Transformers' documentation has them, with `model` wrapped and nothing else changed.

SNIPPET = "import os\n\n\ndef read(path):\n    with open(path) as file:\n        return file.read()\n\n\ndef write(path"


def texts(model: Any, tokenizer: Any, **settings: Any) -> list[str]:
    inputs = tokenizer(SNIPPET, return_tensors="pt")
    outputs = model.generate(**inputs, do_sample=False, max_new_tokens=24, **settings)
    decoded: list[str] = tokenizer.batch_decode(outputs, skip_special_tokens=True)
    return decoded


def test_the_prompt_lookup_snippet_runs(pyrite: tuple[Any, Any], fast_pyrite: SpedUpModel) -> None:
    wanted = texts(*pyrite)
    assert texts(fast_pyrite, pyrite[1], prompt_lookup_num_tokens=3) == wanted


@pytest.mark.usefixtures("new_costs")
def test_the_assistant_snippet_runs(pyrite: tuple[Any, Any], fast_pyrite: SpedUpModel) -> None:
    from transformers import AutoModelForCausalLM

    folder = Path(pyrite[0].name_or_path) / "draft"
    assistant = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    assert texts(fast_pyrite, pyrite[1], assistant_model=assistant, num_assistant_tokens=4) == texts(*pyrite)
    assert beside(fast_pyrite).accepted > 4


@pytest.mark.usefixtures("new_costs")
def test_the_early_exit_snippet_runs(pyrite: tuple[Any, Any], fast_pyrite: SpedUpModel) -> None:
    assert texts(fast_pyrite, pyrite[1], assistant_early_exit=8) == texts(*pyrite)
    assert beside(fast_pyrite).drafted > 0


@pytest.mark.usefixtures("new_costs")
@pytest.mark.parametrize("head", ["eagle", "medusa"])
def test_a_heads_folder_drafts(pyrite: tuple[Any, Any], fast_pyrite: SpedUpModel, head: str) -> None:
    assert texts(fast_pyrite, pyrite[1], assistant_model=str(bundled_model() / head)) == texts(*pyrite)
    assert beside(fast_pyrite).accepted > 4


@pytest.mark.parametrize("kind", ["dflash", "dspark", "dflash2"])
@pytest.mark.parametrize("name", ["mixtral", "deepseek-v3", "bloom"])
def test_a_block_drafter_reads_the_hidden_rows_of_a_class(name: str, kind: str, tmp_path: Path) -> None:
    """Both levels: over pages, and one sequence at a time with the class's cache."""
    model = tiny_model(name)
    c = model.config
    spec = LlamaShape("LlamaForCausalLM", c.vocab_size, c.hidden_size, 3, 4, 2, 8, 24, 64, Rope()).spec()
    save_block(block_for(spec, kind), tmp_path)
    wanted = model.generate(IDS, max_new_tokens=20, do_sample=False)
    assistant = {"assistant_model": str(tmp_path), "speculation": {"method": "dflash", "draft_tokens": 6, "adaptive": False}}
    with outrider.speed_up(model, **assistant, **QUICK) as fast:
        assert torch.equal(fast.generate(IDS, max_new_tokens=20, do_sample=False), wanted)
        assert fast.guarantee.tokens_guaranteed == (name != "bloom")
        (output,) = fast.generate([IDS[0].tolist()], max_tokens=12, ignore_eos=True)[0].outputs
        assert output.speculation["drafted"] > 0
        assert output.speculation["fallback_reason"] is None


def beside(fast: SpedUpModel) -> Any:
    """What the drafter of the last call that brought one has done."""
    return list(fast._beside.values())[-1][1].engine.tally


@pytest.mark.parametrize("method", ["cascade", "mixture", "auto"])
def test_methods_made_of_others_use_the_assistant(model: Any, method: str) -> None:
    wanted = model.generate(IDS, max_new_tokens=20, do_sample=False)
    with outrider.speed_up(model, speculation=method, assistant_model=tiny_model("mixtral"), **QUICK) as fast:
        assert "draft_model" in fast.speculation.methods()
        assert torch.equal(fast.generate(IDS, max_new_tokens=20, do_sample=False), wanted)


@pytest.mark.usefixtures("new_costs")
def test_an_assistant_of_another_tokenizer_drafts(fast_pyrite: SpedUpModel, pyrite: tuple[Any, Any], tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from tests.support.models import write_tokenizer

    other = AutoTokenizer.from_pretrained(write_tokenizer(tmp_path), local_files_only=True)
    assistant = tiny_model("llama", vocab_size=300)
    assert texts(fast_pyrite, pyrite[1], assistant_model=assistant, assistant_tokenizer=other) == texts(*pyrite)
    assert beside(fast_pyrite).drafted > 0


def test_threads_chat_and_stream_work_as_in_an_llm(fast_pyrite: SpedUpModel) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(3) as pool:
        jobs = [pool.submit(fast_pyrite.generate, SNIPPET[: 20 + 9 * i], temperature=0.0, max_tokens=6) for i in range(3)]
        together = [job.result()[0].outputs[0].token_ids for job in jobs]
    alone = [fast_pyrite.generate(SNIPPET[: 20 + 9 * i], temperature=0.0, max_tokens=6)[0].outputs[0].token_ids for i in range(3)]
    assert together == alone
    streamed = "".join(piece.text for piece in fast_pyrite.stream(SNIPPET, temperature=0.0, max_tokens=6))
    assert streamed == fast_pyrite.generate(SNIPPET, temperature=0.0, max_tokens=6)[0].outputs[0].text
