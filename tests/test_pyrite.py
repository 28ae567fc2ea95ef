"""The bundled model: real weights, real tokenizer, every drafter, the same tokens."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

import pytest

from outrider import LLM, SamplingParams
from outrider.engine.acceptance import loops, read_prompts
from outrider.engine.outputs import CompletionOutput
from outrider.errors import InvalidParameter
from outrider.model.bundled import bundled_model

PROMPTS = [
    'def mean(values: list[float]) -> float:\n    """Average of the values.',
    "import os\nimport sys\n\n\ndef walk(root):\n    for name in",
    "class Queue:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n        self.items",
    "try:\n    import numpy as np\nexcept ImportError:\n    np = None\n\n\ndef",
    "x = 1\n",
]
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=40, logprobs=1),
    "sampled": SamplingParams(temperature=0.8, seed=11, max_tokens=40, top_p=0.95, logprobs=1),
    "shaped": SamplingParams(
        temperature=0.8,
        seed=5,
        max_tokens=40,
        repetition_penalty=1.1,
        presence_penalty=0.3,
        min_p=0.02,
        stop=["\n\n\n", "return"],
    ),
}
METHODS = {
    "ngram": {"method": "ngram", "draft_tokens": 8, "adaptive": False},
    "suffix": {"method": "suffix", "draft_tokens": 8, "adaptive": False},
    "recycle": {"method": "recycle", "draft_tokens": 14, "adaptive": False},
    "draft_model": {"method": "draft_model", "draft_tokens": 5, "adaptive": False},
    "draft_model tree": {"method": "draft_model", "draft_tokens": 16, "adaptive": False, "beam": 4, "branch": 3, "depth": 6},
    "early_exit": {"method": "early_exit", "draft_tokens": 3, "adaptive": False, "exit_layer": 9},
    "eagle": {"method": "eagle", "draft_tokens": 5, "adaptive": False},
    "eagle tree": {"method": "eagle", "draft_tokens": 24, "adaptive": False, "beam": 6, "branch": 6, "depth": 7},
    "medusa": {"method": "medusa", "draft_tokens": 24, "adaptive": False},
    "dflash": {"method": "dflash", "draft_tokens": 11, "adaptive": False, "candidates": 1},
    "dflash tree": {"method": "dflash", "draft_tokens": 32, "adaptive": False},
    "lookahead": "lookahead:24:adaptive=false",
    "cascade draft": "cascade:6:adaptive=false:levels=ngram+draft_model",
    "mixture with eagle": "mixture:16:adaptive=false:members=suffix+(eagle:beam=3:branch=4:depth=6)",
}


@functools.cache
def plain(kind: str) -> list[CompletionOutput]:
    """One request at a time, nothing drafted."""
    llm = LLM(speculation="none")
    return [llm.generate(prompt, PARAMS[kind])[0].outputs[0] for prompt in PROMPTS]


@pytest.mark.grid(once=["method"])
@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize("method", METHODS)
def test_same_tokens_in_a_batch(method: str, kind: str) -> None:
    llm = LLM(speculation=METHODS[method])
    assert llm.config.dtype == "bfloat16"
    fast = [result.outputs[0] for result in llm.generate(PROMPTS, PARAMS[kind])]
    for a, b in zip(plain(kind), fast, strict=True):
        assert (b.token_ids, b.text, b.logprobs, b.finish_reason) == (a.token_ids, a.text, a.logprobs, a.finish_reason)
        assert b.speculation["fallback_reason"] is None
    if kind == "greedy":
        rounds = sum(o.speculation["rounds"] for o in fast)
        trained = any(name in method for name in ("draft", "eagle", "dflash"))
        assert sum(len(o.token_ids) for o in fast) / rounds > (2.0 if trained else 1.2)
    assert llm.engine.pages.used == 0


def test_it_writes_python() -> None:
    texts = [output.text for output in plain("greedy")]
    keywords = re.compile(r"\b(def|return|import|self|if|for|class)\b")
    assert sum(bool(keywords.search(text)) for text in texts) >= 3, texts


def test_companions_come_with_it() -> None:
    for name in ("draft", "eagle", "medusa", "dflash"):
        assert (bundled_model() / name / "config.json").exists()


def test_the_tree_stays_small() -> None:
    """A checkout must stay under 63 MB, and no file over 16 MB."""
    sizes = [path.stat().st_size for path in bundled_model().rglob("*") if path.is_file()]
    assert sum(sizes) < 56e6
    assert max(sizes) < 16 * 2**20


def test_chat_template(tmp_path: Path) -> None:
    llm = LLM(speculation="none")
    result = llm.chat([{"role": "user", "content": "write a loop"}], SamplingParams(temperature=0, max_tokens=3))[0]
    assert "<|assistant|>" in llm.tokenizer.decode(result.prompt_token_ids, skip_special_tokens=False)


def test_loops() -> None:
    assert loops(list(range(8)) * 4)
    assert not loops(list(range(8)) * 3)
    assert not loops([1, 2])


def test_prompt_files(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(json.dumps(item) for item in ({"turns": ["a", "b"]}, {"prompt": "c"}, {"text": "d"})) + "\n\n")
    assert read_prompts(path) == ["a", "c", "d"]
    assert read_prompts(path, 2) == ["a", "c"]
    path.write_text('{"turns": ["a"]}\n{"other": 1}\n')
    with pytest.raises(InvalidParameter, match=r"p\.jsonl:2"):
        read_prompts(path)
    with pytest.raises(InvalidParameter, match="cannot be read"):
        read_prompts(tmp_path / "none.jsonl")
