"""Published models by tokenizer, the heads that were trained for them, and acceptance rates that somebody measured.

Which of them can draft for which follows from the table: the same tokenizer, and smaller. Nothing here is fetched.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from outrider.model.fields import read_json

__all__ = [
    "FAMILIES",
    "HEADS",
    "MEASURED",
    "MODELS",
    "SMALLER",
    "Family",
    "Measured",
    "Published",
    "family_of",
    "identify",
    "measured",
    "named",
]

SMALLER = 2.5  # times that a draft model must be smaller at least


class Family(NamedTuple):
    """Models with one tokenizer: a token of it at its id (None: at any), and how config.json alone tells it."""

    marks: Mapping[str, int | None]
    configs: tuple[tuple[str, int], ...]  # model_type and vocab_size


FAMILIES = {
    "Llama 2": Family({"\u2581": 29871}, (("llama", 32000), ("llama", 32016))),
    "Mistral v1": Family({"\u2581": 28705}, (("mistral", 32000), ("mixtral", 32000))),
    "Mistral v3": Family({"\u2581": 29473}, (("mistral", 32768), ("mixtral", 32768))),
    "Llama 3": Family({"<|begin_of_text|>": 128000}, (("llama", 128256),)),
    "Gemma 2": Family({"<start_of_turn>": 106}, (("gemma2", 256000),)),
    "Gemma 3": Family({"<start_of_turn>": 105}, (("gemma3_text", 262144), ("gemma3_text", 262208), ("gemma3", 262208))),
    "Qwen3": Family({"<think>": 151667}, (("qwen3", 151936), ("qwen3_moe", 151936))),  # before Qwen2.5: it has its marks too
    "Qwen2.5": Family({"<|im_start|>": 151644}, (("qwen2", 151936), ("qwen2", 152064))),
    "StarCoder": Family({"<fim_prefix>": 1, "<reponame>": None}, (("gpt_bigcode", 49152),)),
    "StarCoder2": Family({"<fim_prefix>": 1, "<repo_name>": None}, (("starcoder2", 49152),)),
}


class Published(NamedTuple):
    """A model on the hub."""

    line: str  # models trained alike
    tokenizer: str  # a name of FAMILIES
    base: str  # hub id; empty where it was not published
    instruct: str
    millions: int  # weights
    layers: int
    kv_heads: int
    head_dim: int
    active: int = 0  # millions of weights that one token uses, where it has experts
    experts: tuple[int, int] = (1, 1)  # of each layer, and how many of them a token uses

    @property
    def parameters(self) -> int:
        return self.millions * 10**6

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name in (self.instruct, self.base) if name)

    def draft_variant(self, target: Published, name: str) -> str | None:
        """Which variant drafts for the target's: instruct for instruct (or base where there is no other), base for base."""
        return (self.base if name == target.base else self.instruct or self.base) or None

    def drafts(self, name: str) -> list[tuple[Published, str]]:
        """The models that may draft for the variant `name`: the same tokenizer, and smaller; the largest first."""
        fitting = [m for m in MODELS if m.tokenizer == self.tokenizer and m.millions * SMALLER <= self.millions]
        variants = [(model, model.draft_variant(self, name)) for model in sorted(fitting, key=lambda model: -model.millions)]
        return [(model, variant) for model, variant in variants if variant]


def _line(line: str, tokenizer: str, base: str, instruct: str, *models: tuple[object, ...]) -> list[Published]:
    """Rows of one line: {} in both names is the size. A row is size, millions, layers, KV heads, head size, and experts."""
    return [Published(line, tokenizer, base.format(row[0]), instruct.format(row[0]), *row[1:]) for row in models]  # type: ignore[arg-type]


_QWEN = (
    ("0.5B", 494, 24, 2, 64), ("1.5B", 1544, 28, 2, 128), ("3B", 3086, 36, 2, 128), ("7B", 7616, 28, 4, 128),
    ("14B", 14770, 48, 8, 128), ("32B", 32764, 64, 8, 128), ("72B", 72706, 80, 8, 128),
)  # fmt: skip
MODELS: tuple[Published, ...] = (
    *_line("Llama 2", "Llama 2", "meta-llama/Llama-2-{}-hf", "meta-llama/Llama-2-{}-chat-hf",
           ("7b", 6738, 32, 32, 128), ("13b", 13016, 40, 40, 128), ("70b", 68977, 80, 8, 128)),
    Published("Llama 2", "Llama 2", "TinyLlama/TinyLlama_v1.1", "TinyLlama/TinyLlama-1.1B-Chat-v1.0", 1100, 22, 4, 64),
    *_line("Vicuna", "Llama 2", "", "lmsys/vicuna-{}-v1.3", ("7b", 6738, 32, 32, 128), ("13b", 13016, 40, 40, 128),
           ("33b", 32529, 60, 52, 128)),
    *_line("Vicuna", "Llama 2", "JackFram/llama-{}", "", ("68m", 68, 2, 12, 64), ("160m", 162, 12, 12, 64)),
    *_line("CodeLlama", "Llama 2", "codellama/CodeLlama-{}-hf", "codellama/CodeLlama-{}-Instruct-hf", ("7b", 6738, 32, 32, 128),
           ("13b", 13016, 40, 40, 128), ("34b", 33744, 48, 8, 128), ("70b", 68977, 80, 8, 128)),
    *_line("Llama 3", "Llama 3", "meta-llama/Meta-Llama-3-{}", "meta-llama/Meta-Llama-3-{}-Instruct", ("8B", 8030, 32, 8, 128),
           ("70B", 70554, 80, 8, 128)),
    *_line("Llama 3.1", "Llama 3", "meta-llama/Llama-3.1-{}", "meta-llama/Llama-3.1-{}-Instruct", ("8B", 8030, 32, 8, 128),
           ("70B", 70554, 80, 8, 128), ("405B", 405853, 126, 8, 128)),
    *_line("Llama 3.1", "Llama 3", "meta-llama/Llama-3.2-{}", "meta-llama/Llama-3.2-{}-Instruct", ("1B", 1236, 16, 8, 64),
           ("3B", 3213, 28, 8, 128)),
    Published("Llama 3.1", "Llama 3", "", "meta-llama/Llama-3.3-70B-Instruct", 70554, 80, 8, 128),
    Published("Mistral", "Mistral v1", "mistralai/Mistral-7B-v0.1", "mistralai/Mistral-7B-Instruct-v0.2", 7242, 32, 8, 128),
    Published("Mistral", "Mistral v1", "mistralai/Mixtral-8x7B-v0.1", "mistralai/Mixtral-8x7B-Instruct-v0.1",
              46703, 32, 8, 128, 12880, (8, 2)),
    Published("Mistral", "Mistral v3", "mistralai/Mistral-7B-v0.3", "mistralai/Mistral-7B-Instruct-v0.3", 7248, 32, 8, 128),
    Published("Mistral", "Mistral v3", "", "mistralai/Mixtral-8x22B-Instruct-v0.1", 140630, 56, 8, 128, 39150, (8, 2)),
    Published("Mistral", "Mistral v3", "", "mistralai/Mistral-Large-Instruct-2407", 122610, 88, 8, 128),
    *_line("Gemma 2", "Gemma 2", "google/gemma-2-{}", "google/gemma-2-{}-it", ("2b", 2614, 26, 4, 256), ("9b", 9242, 42, 8, 256),
           ("27b", 27227, 46, 16, 128)),
    *_line("Gemma 3", "Gemma 3", "google/gemma-3-{}-pt", "google/gemma-3-{}-it", ("1b", 1000, 26, 1, 256),
           ("4b", 4300, 34, 4, 256), ("12b", 12187, 48, 8, 256), ("27b", 27432, 62, 16, 128)),
    *_line("StarCoder", "StarCoder", "bigcode/starcoder{}", "", ("base-1b", 1137, 24, 1, 128), ("base-3b", 3043, 36, 1, 128),
           ("base-7b", 7327, 42, 1, 128), ("", 15517, 40, 1, 128)),
    *_line("StarCoder2", "StarCoder2", "bigcode/starcoder2-{}", "", ("3b", 3030, 30, 2, 128), ("7b", 7174, 32, 4, 128),
           ("15b", 15957, 40, 4, 128)),
    *_line("Qwen2.5", "Qwen2.5", "Qwen/Qwen2.5-{}", "Qwen/Qwen2.5-{}-Instruct", *_QWEN),
    *_line("Qwen2.5 Coder", "Qwen2.5", "Qwen/Qwen2.5-Coder-{}", "Qwen/Qwen2.5-Coder-{}-Instruct", *_QWEN[:-1]),
    *_line("Qwen3", "Qwen3", "Qwen/Qwen3-{}-Base", "Qwen/Qwen3-{}", ("0.6B", 596, 28, 8, 128), ("1.7B", 1721, 28, 8, 128),
           ("4B", 4022, 36, 8, 128), ("8B", 8191, 36, 8, 128), ("14B", 14768, 40, 8, 128),
           ("30B-A3B", 30532, 48, 4, 128, 3345, (128, 8))),
    *_line("Qwen3", "Qwen3", "", "Qwen/Qwen3-{}", ("32B", 32762, 64, 8, 128),
           ("235B-A22B", 235094, 94, 4, 128, 22190, (128, 8))),
)  # fmt: skip

# Heads trained on a target's hidden rows, by the target; the method that loads them comes first.
HEADS: dict[str, tuple[tuple[str, str], ...]] = {
    "meta-llama/Llama-3.1-8B-Instruct": (("eagle", "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3"),),
    "meta-llama/Llama-3.3-70B-Instruct": (("eagle", "RedHatAI/Llama-3.3-70B-Instruct-speculator.eagle3"),),
    "meta-llama/Meta-Llama-3-8B-Instruct": (("eagle", "yuhuili/EAGLE-LLaMA3-Instruct-8B"),),
    "meta-llama/Meta-Llama-3-70B-Instruct": (("eagle", "yuhuili/EAGLE-LLaMA3-Instruct-70B"),),
    "meta-llama/Llama-2-7b-chat-hf": (("eagle", "yuhuili/EAGLE-llama2-chat-7B"),),
    "meta-llama/Llama-2-13b-chat-hf": (("eagle", "yuhuili/EAGLE-llama2-chat-13B"),),
    "meta-llama/Llama-2-70b-chat-hf": (("eagle", "yuhuili/EAGLE-llama2-chat-70B"),),
    "lmsys/vicuna-7b-v1.3": (("eagle", "yuhuili/EAGLE-Vicuna-7B-v1.3"), ("medusa", "FasterDecoding/medusa-vicuna-7b-v1.3")),
    "lmsys/vicuna-13b-v1.3": (("eagle", "yuhuili/EAGLE3-Vicuna1.3-13B"), ("medusa", "FasterDecoding/medusa-vicuna-13b-v1.3")),
    "lmsys/vicuna-33b-v1.3": (("eagle", "yuhuili/EAGLE-Vicuna-33B-v1.3"), ("medusa", "FasterDecoding/medusa-vicuna-33b-v1.3")),
    "mistralai/Mixtral-8x7B-Instruct-v0.1": (("eagle", "yuhuili/EAGLE-mixtral-instruct-8x7B"),),
    "Qwen/Qwen3-4B": (("dflash", "z-lab/Qwen3-4B-DFlash-b16"), ("dflash", "deepseek-ai/dspark_qwen3_4b_block7")),
    "Qwen/Qwen3-8B": (("eagle", "RedHatAI/Qwen3-8B-speculator.eagle3"), ("dflash", "z-lab/Qwen3-8B-DFlash-b16")),
    "Qwen/Qwen3-14B": (("eagle", "RedHatAI/Qwen3-14B-speculator.eagle3"),),
    "Qwen/Qwen3-32B": (("eagle", "RedHatAI/Qwen3-32B-speculator.eagle3"),),
}


class Measured(NamedTuple):
    """A published acceptance rate (accepted over drafted tokens) and the conditions that its source states."""

    rate: float
    length: int | None  # drafted tokens of a round, at most; None where the source does not say
    source: str
    conditions: str


_LLAMA_CPP = "https://github.com/ggml-org/llama.cpp/pull"
_SWEEP = "https://inventivehq.com/blog/speculative-decoding-draft-model-size-sweep"
_SWEPT = "llama.cpp, a suite of coding tasks"
MEASURED: dict[tuple[str, str], Measured] = {
    ("meta-llama/Meta-Llama-3-70B-Instruct", "meta-llama/Meta-Llama-3-8B-Instruct"): Measured(
        0.587, 8, "https://devquasar.com/uncategorized/speculative-decoding-tradeoffs-gpu-with-large-models-llama-70b-8b/",
        "llama.cpp, both Q4_K_M, greedy, four prompts"),
    ("meta-llama/Llama-3.3-70B-Instruct", "meta-llama/Llama-3.2-3B-Instruct"): Measured(
        0.72, None, "https://huggingface.co/Nexusflow/Athene-V2-Chat/discussions/6", "vLLM, both AWQ"),
    ("meta-llama/Llama-2-70b-hf", "meta-llama/Llama-2-7b-hf"): Measured(
        0.356, 8, f"{_LLAMA_CPP}/2926", "llama.cpp, f16 and Q8_0, its default sampling, one prompt"),
    ("codellama/CodeLlama-34b-hf", "codellama/CodeLlama-7b-hf"): Measured(
        0.878, 16, f"{_LLAMA_CPP}/3006", "llama.cpp, both Q4_K_M, greedy, one prompt (quicksort in C)"),
    ("Qwen/Qwen2.5-Coder-32B-Instruct", "Qwen/Qwen2.5-Coder-3B"): Measured(
        0.343, 16, f"{_LLAMA_CPP}/10455", "llama.cpp, Q4_K_L and Q4_0, greedy, one prompt, a base model as the draft"),
    ("Qwen/Qwen2.5-Coder-14B-Instruct", "Qwen/Qwen2.5-Coder-0.5B-Instruct"): Measured(0.26, None, _SWEEP, _SWEPT),
    ("Qwen/Qwen2.5-Coder-14B-Instruct", "Qwen/Qwen2.5-Coder-1.5B-Instruct"): Measured(0.40, None, _SWEEP, _SWEPT),
    ("Qwen/Qwen2.5-Coder-14B-Instruct", "Qwen/Qwen2.5-Coder-3B-Instruct"): Measured(0.87, None, _SWEEP, _SWEPT),
}  # fmt: skip


def measured(target: Published, draft: Published) -> Measured | None:
    """What somebody measured for two models, whichever their variants."""
    pairs = ((ours, theirs) for ours in target.names for theirs in draft.names)
    return next((MEASURED[pair] for pair in pairs if pair in MEASURED), None)


def named(text: str) -> list[tuple[Published, str]]:
    """The models that a hub id or a size such as 70B or 8x7B means, each with the name of the variant."""
    exact = [(model, name) for model in MODELS for name in model.names if name.lower() == text.lower()]
    if exact or not re.fullmatch(r"(\d+x)?\d+(\.\d+)?b(-a\d+b)?", text.lower()):
        return exact
    size = re.compile(rf"(^|[-_a-z]){re.escape(text.lower())}($|[-_])")
    return [(model, model.names[0]) for model in MODELS if size.search(model.names[0].partition("/")[2].lower())]


def family_of(table: Mapping[str, int]) -> str | None:
    """The family of a tokenizer, by its table from tokens to ids."""
    for name, family in FAMILIES.items():
        if all(table.get(token) == i if i is not None else token in table for token, i in family.marks.items()):
            return name
    return None


def identify(directory: Path, tokens: Mapping[str, int] | None, parameters: int) -> tuple[Published | None, str, str | None]:
    """The published model in a directory (or config.json) with the name of its variant, as far as can be told, and its family.

    The folder's name decides, in the hub's cache too; else the tokenizer (config.json where there is none) and the size.
    """
    cached = (part.removeprefix("models--").replace("--", "/", 1) for part in directory.parts if part.startswith("models--"))
    folder = (directory.parent if directory.name == "config.json" else directory).name
    for hub_id in (*cached, folder):
        for model in MODELS:
            for name in model.names:
                if hub_id.lower() in (name.lower(), name.rpartition("/")[2].lower()):
                    return model, name, model.tokenizer
    family = family_of(tokens) if tokens is not None else _family_of_config(directory)
    fitting = [model for model in MODELS if model.tokenizer == family and abs(model.parameters / parameters - 1.0) < 0.03]
    return (fitting[0], fitting[0].names[0], family) if fitting else (None, "", family)


def _family_of_config(directory: Path) -> str | None:
    path = directory / "config.json" if directory.is_dir() else directory
    if path.suffix != ".json" or not path.exists():
        return None
    data = read_json(path)
    described = (data.get("model_type"), data.get("vocab_size"))
    return next((name for name, family in FAMILIES.items() if described in family.configs), None)
