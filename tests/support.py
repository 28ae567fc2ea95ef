"""Small models of every family, a drafter that knows the answer, and engines built by hand."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from outrider.cache import KVPool
from outrider.config import EngineConfig
from outrider.control import FixedLength
from outrider.core import Batch, Drafts, Needs, Plan, Request, Scores, Sequence, Verdict
from outrider.draft import Drafter
from outrider.draft.none import NoDrafter
from outrider.engine.commit import OutputProcessor
from outrider.engine.engine import Engine
from outrider.model import Decoder, LoadOptions, ModelConfig, Runner, load_decoder
from outrider.sampling import SamplingParams

VOCAB = 199
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama2": {"architectures": ["LlamaForCausalLM"], "num_key_value_heads": 4},
    "llama3": {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 3,
        "tie_word_embeddings": True,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        "rope_theta": 500000.0,
    },
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": 21},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "num_attention_heads": 6, "hidden_size": 60},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 20, "num_hidden_layers": 4},
}


def family_config(name: str, dtype: str = "float32", **changes: Any) -> ModelConfig:
    return ModelConfig.from_hf(BASE | FAMILIES[name] | {"dtype": dtype} | changes)


def write_family(directory: Path, name: str, dtype: str = "float32", **changes: Any) -> Path:
    """A directory with config.json alone, for dummy loading."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(BASE | FAMILIES[name] | {"dtype": dtype} | changes))
    return directory


def random_decoder(directory: Path, seed: int = 0) -> Decoder:
    """Random weights, with biases and norms that are not trivial."""
    decoder = load_decoder(directory, LoadOptions(load_format="dummy", seed=seed))
    generator = torch.Generator().manual_seed(seed + 1)
    for parameter in decoder.parameters():
        if parameter.dim() == 1:
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    with torch.no_grad():  # livelier logits: random models are otherwise nearly flat
        decoder.embedding *= 6.0
    return decoder


def make_pool(decoder: Decoder, page_size: int = 16, pages: int = 160) -> KVPool:
    c = decoder.config
    return KVPool(c.layers, pages, c.kv_heads, page_size, c.head_dim)


def make_engine(
    decoder: Decoder, drafter: Drafter | None = None, length: int = 0, rule: str = "match", pages: int = 160, **sizes: Any
) -> Engine:
    config = EngineConfig(**({"page_size": 16, "max_num_seqs": 8, "max_batch_rows": 40} | sizes))
    runner = Runner(decoder, make_pool(decoder, config.page_size, pages))
    return Engine(runner, None, drafter or NoDrafter(), FixedLength(length, rule), config)


def make_request(
    prompt: list[int], params: SamplingParams, name: str = "r", index: int = 0, tenant: str | None = None
) -> Request:
    stop = frozenset(params.stop_token_ids or ())
    return Request(name, tuple(prompt), params, params.seed or 0, stop, params.max_tokens or 16, index, tenant=tenant)


def run(engine: Engine, requests: list[Request], method: str = "test") -> list[OutputProcessor]:
    writers = [engine.submit(request, method) for request in requests]
    while engine.has_work:
        engine.round()
    return writers


@dataclass
class Oracle:
    """Knows the plain output and corrupts it, so that accepted runs of every length occur.

    Drafts are right for a length that has not yet been accepted, the longest that fits, and then for
    random lengths. With `branches`, wrong siblings hang from random nodes and the order of nodes is
    shuffled within what trees allow.
    """

    answers: dict[str, list[int]]  # request id -> prompt and plain output
    length: int
    branches: int = 0
    seed: int = 0
    needs: Needs = field(default_factory=Needs)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self.accepted: set[int] = set()

    def begin(self, seq: Sequence) -> None: ...

    def end(self, seq: Sequence) -> None: ...

    def commit(self, batch: Batch, drafts: Drafts, verdicts: list[Verdict], scores: Scores) -> None:
        counts = drafts.counts
        self.accepted |= {len(verdict.path) for b, verdict in enumerate(verdicts) if counts[b]}

    def propose(self, batch: Batch, plan: Plan) -> Drafts:
        self._trying: set[int] = set()
        return Drafts.trees([self._draft(seq, n) for seq, n in zip(batch.sequences, plan.lengths, strict=True)])

    def _draft(self, seq: Sequence, room: int) -> tuple[list[int], list[int]]:
        if room == 0:
            return [], []
        trunk = max(room - self.branches, 1)
        missing = [n for n in range(trunk + 1) if n <= self.length and n not in self.accepted | self._trying]
        right = missing[-1] if missing else self._random.randint(0, trunk)
        self._trying.add(right)
        truth = self.answers[seq.request.id][len(seq.tokens) : len(seq.tokens) + trunk]
        tokens = [t if i < right else self._wrong(t) for i, t in enumerate(truth)]
        parents = list(range(-1, len(tokens) - 1))
        for _ in range(min(self.branches, room - len(tokens))):
            parent = self._random.randrange(-1, len(tokens))
            tokens.append(self._random.randrange(VOCAB))
            parents.append(parent)
        return self._shuffled(tokens, parents) if self.branches else (tokens, parents)

    def _wrong(self, token: int) -> int:
        return (token + self._random.randrange(1, VOCAB)) % VOCAB

    def _shuffled(self, tokens: list[int], parents: list[int]) -> tuple[list[int], list[int]]:
        """Another topological order of the same tree."""
        new_index: dict[int, int] = {-1: -1}
        left = list(range(len(tokens)))
        out: list[int] = []
        while left:
            ready = [node for node in left if parents[node] in new_index]
            node = self._random.choice(ready)
            left.remove(node)
            new_index[node] = len(out)
            out.append(node)
        return [tokens[n] for n in out], [new_index[parents[n]] for n in out]


def solo_answers(decoder: Decoder, requests: list[Request]) -> list[OutputProcessor]:
    """Plain decoding, one request at a time."""
    return [run(make_engine(decoder), [request], "none")[0] for request in requests]


def renamed(request: Request, **changes: Any) -> Request:
    return replace(request, **changes)


def write_tokenizer(directory: Path, vocab: int = 300, extra: tuple[str, ...] = ()) -> Path:
    """A byte-level BPE with an end-of-text token, as Transformers loads it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    text = ["def main(argument): return argument + 1", "the quick brown fox jumps over the lazy dog", "naïve café 🙂 日本語"]
    special = ["<|end|>", *extra]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(text * 3, trainer)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    settings["chat_template"] = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory
