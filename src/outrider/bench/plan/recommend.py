"""Which draft model for a target: sizes and families that fit, what the tokenizers say, and local candidates measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outrider.bench.bandwidth import processor_bandwidth
from outrider.bench.plan.formulas import best_length, expected_tokens, survival_of
from outrider.bench.plan.subject import Prompt, Subject, learn_from
from outrider.draft.vocabulary import SameTokens, Side, relate, shared_tokens
from outrider.errors import InvalidParameter, ModelError
from outrider.gguf import find_gguf
from outrider.model import ModelSpec, compile_spec, read_spec
from outrider.model.fields import read_json
from outrider.sampling import SamplingParams
from outrider.text import Tokenizer

__all__ = ["Fit", "Recommendation", "rank_candidates", "recommend"]

_SMALLER = (10, 100)  # times
_CHANCES = (0.6, 0.7, 0.8, 0.9)
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# by size of the vocabulary: models that share a tokenizer, with their weights in millions
_FAMILIES: dict[int, tuple[str, dict[str, int]]] = {
    32000: ("Llama 2, Vicuna, TinyLlama, Mistral 7B v0.1", {"llama-68m": 68, "llama-160m": 162, "TinyLlama-1.1B": 1100}),
    32016: ("CodeLlama", {"llama-68m": 68, "llama-160m": 162, "TinyLlama-1.1B": 1100}),
    32768: ("Mistral 7B v0.3, Mixtral 8x22B", {"Mistral-7B-v0.3": 7250}),
    128256: ("Llama 3, 3.1, 3.2, 3.3", {"Llama-3.2-1B": 1236, "Llama-3.2-3B": 3213, "Llama-3.1-8B": 8030}),
    151936: (
        "Qwen2, Qwen2.5, Qwen3",
        {"Qwen2.5-0.5B": 494, "Qwen3-0.6B": 596, "Qwen2.5-1.5B": 1544, "Qwen3-1.7B": 1721, "Qwen3-4B": 4022},
    ),
    152064: ("Qwen2.5 from 7B on", {"Qwen2.5-0.5B": 494, "Qwen2.5-1.5B": 1544, "Qwen2.5-3B": 3086}),
}


@dataclass(frozen=True, slots=True)
class Fit:
    """A candidate beside the target, from its configuration and tokenizer alone."""

    path: str
    parameters: int
    times_smaller: float
    tokens: str  # same, shared, text, none
    says: str
    estimates: dict[float, tuple[int, float]]  # by acceptance: draft length, speed-up


@dataclass(frozen=True, slots=True)
class Recommendation:
    """What to look for, and how the candidates fit."""

    target: str
    parameters: int
    pass_ms: float  # the time its bytes need
    sizes: tuple[int, int]  # weights that a draft model should have
    family: str | None
    known: dict[str, int]  # of that family and size, in millions
    fits: list[Fit]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def recommend(target: Path, candidates: Sequence[Path], bandwidth: float | None = None) -> Recommendation:
    """From configurations, tokenizers and bandwidth (bytes per second); no weights are read."""
    config = _config(target)
    speed = bandwidth or processor_bandwidth()
    size = config.parameters * _BYTES.get(config.dtype, 2)
    low, high = (config.parameters // times for times in reversed(_SMALLER))
    family, known = _FAMILIES.get(config.vocab, (None, {}))
    fitting = {name: millions for name, millions in known.items() if low <= millions * 10**6 <= high}
    fits = [_fit(config, target, path) for path in candidates]
    return Recommendation(str(target), config.parameters, size / speed * 1e3, (low, high), family, fitting, fits)


def rank_candidates(
    target: Path, fits: Sequence[Fit], prompts: Sequence[Prompt], tokens: int, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Usable candidates by the speed-up of a short run at their best draft length, the best first."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, seed=0, ignore_eos=True)
    usable = [fit for fit in fits if fit.tokens != "none" and any(Path(fit.path).glob("*.safetensors"))]
    plain = Subject(str(target), "none")
    subjects = [Subject(str(target), {"method": "draft_model", "model": fit.path, "draft_tokens": 8}) for fit in usable]
    learn_from([plain, *subjects], prompts, params, say)
    rows = []
    for fit, subject in zip(usable, subjects, strict=True):
        profile = subject.profile
        best = profile.best_length()
        rows.append(
            {
                "path": fit.path,
                "draft_tokens": best,
                "speedup": round(profile.speedup(plain.profile, best), 3) if best else 1.0,
                "tokens_per_round": round(profile.tokens(profile.max_length), 3),
                "by_position": [round(chance, 3) for chance in profile.by_position()],
                "weights_bytes": profile.memory.weights,
                "kv_bytes_per_token": profile.memory.kv_per_token,
            }
        )
    return sorted(rows, key=lambda row: -row["speedup"])


def _config(path: Path) -> ModelSpec:
    if path.is_dir() or find_gguf(path) is not None:
        return read_spec(path)
    if path.name.endswith(".json") and path.exists():
        return compile_spec(read_json(path), str(path))
    raise InvalidParameter("--target", f"{path} is neither a model directory, a GGUF file nor a config.json")


def _fit(config: ModelSpec, target: Path, path: Path) -> Fit:
    draft = _config(path)
    tokens, says = _tokens(Side(str(target), _tokenizer(target), config.vocab), Side(str(path), _tokenizer(path), draft.vocab))
    smaller = config.parameters / draft.parameters
    if smaller < _SMALLER[0]:
        says += f"; only {smaller:.1f} times smaller, and a draft pass costs about as much of a target pass"
    elif smaller > _SMALLER[1]:
        says += f"; {smaller:.0f} times smaller, so few of its drafts are likely to be accepted"
    return Fit(str(path), draft.parameters, round(smaller, 2), tokens, says, _estimates(1.0 / smaller))


def _tokenizer(path: Path) -> Tokenizer | None:
    return Tokenizer.load(path if path.is_dir() or find_gguf(path) is not None else path.parent)


def _tokens(target: Side, draft: Side) -> tuple[str, str]:
    """How the two tokenizers relate, and what then."""
    try:
        relation = relate(target, draft)
    except ModelError as error:
        return "none", f"cannot draft for it: {error}"
    if isinstance(relation, SameTokens):
        return "same", "same tokens: drafts directly"
    assert target.tokenizer is not None
    assert draft.tokenizer is not None
    shared, ours = len(shared_tokens(target.tokenizer, draft.tokenizer)), len(target.tokenizer.table())
    if relation is None:
        return "text", f"different tokens ({shared} of {ours} shared): drafts by way of text, with fewer drafts accepted"
    what = "all of the target's tokens" if shared >= ours else f"{shared} of {ours} tokens"
    return "shared", f"shares {what}: proposes only those, and reads the text in the tokens of its tokenizer"


def _estimates(cost: float) -> dict[float, tuple[int, float]]:
    """Draft length and speed-up by acceptance, where a pass costs what its weights take to read and rows are free."""
    out = {}
    for chance in _CHANCES:
        tokens = [expected_tokens(survival_of(chance, k)) for k in range(33)]
        times = [1.0 + cost * k for k in range(33)]
        best = best_length(tokens, times)
        out[chance] = (best, round(tokens[best] / times[best], 2))
    return out
