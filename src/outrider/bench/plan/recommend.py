"""What drafts for a target: published siblings and heads with what is known of them, and local candidates, read and measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from outrider.bench.bandwidth import processor_bandwidth
from outrider.bench.plan.roofline import PairCosts, Shape, chance_of, guessed_chance
from outrider.bench.plan.subject import Prompt, Subject, learn_from
from outrider.draft.siblings import in_cache
from outrider.draft.vocabulary import SameTokens, Side, relate, shared_tokens
from outrider.errors import InvalidParameter, ModelError
from outrider.gguf import find_gguf
from outrider.model import ModelSpec, compile_spec, is_hub_id, read_spec
from outrider.model.fields import read_json
from outrider.model.published import HEADS, SMALLER, Published, identify, measured, named
from outrider.platform import memory_bytes
from outrider.sampling import SamplingParams
from outrider.text import Tokenizer

__all__ = ["DraftOption", "Fit", "Machine", "Recommendation", "rank_candidates", "recommend", "targets_of"]

_LARGEST = 200  # times smaller: of less than that few drafts are likely to be accepted
_CHANCES = (0.6, 0.7, 0.8, 0.9)
_RIDGE_GPU, _RIDGE_CPU = 295.0, 8.0  # rows whose arithmetic takes as long as reading the weights: an H100; two Zen 4 cores
_HEAD_LAYERS = {
    "eagle": 2.0,
    "medusa": 2.0,
    "dflash": 6.0,
}  # layers of its target that a head weighs about, with its output matrix
_HEAD_CHANCE = 0.75


@dataclass(frozen=True, slots=True)
class DraftOption:
    """A published draft model or head for the target, and what to expect of it."""

    name: str
    method: str  # draft_model, eagle, medusa, dflash
    parameters: int
    times_smaller: float
    chance: float  # that a draft token is accepted, once those before it were
    is_guess: bool  # whether the chance is a prior and no measurement
    basis: str  # the published rate with its conditions and source, or what was guessed from
    best_length: int  # alone; 0: it does not pay there
    speedup: float  # at this length
    pays: tuple[int, int]  # first and last batch size at which some length pays, as far as the memory goes; 0 and 0: none
    weights_bytes: int  # of both models
    kv_bytes_per_token: int  # of both
    concurrency: int  # sequences of 4,096 tokens that fit beside both


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
    """What to look for, what is published, and how the candidates fit."""

    target: str
    parameters: int
    pass_ms: float | None  # the time its bytes need; None where no bandwidth is known
    sizes: tuple[int, int]  # weights that a draft model should have
    family: str | None  # of the tokenizer
    concurrency: int  # sequences of 4,096 tokens that fit beside the target alone
    drafts: list[DraftOption]  # the quickest first
    lookups: list[str]  # methods that need no weights
    fits: list[Fit]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Target:
    """A target as far as it is known: from the table, or from a directory."""

    name: str
    shape: Shape
    published: Published | None
    variant: str
    family: str | None
    path: Path | None = None


@dataclass(frozen=True, slots=True)
class Machine:
    """Where both models run."""

    bandwidth: float | None = None  # bytes per second
    memory: float | None = None  # bytes
    ridge: float | None = None  # rows whose arithmetic takes as long as reading the weights


def recommend(target: str | Path, candidates: Sequence[Path] = (), machine: Machine = Machine()) -> list[Recommendation]:
    """For every target that is meant, from tables, configurations and tokenizers; no weights are read."""
    return [_recommend(one, candidates, machine) for one in targets_of(target)]


def _recommend(target: _Target, candidates: Sequence[Path], machine: Machine) -> Recommendation:
    if candidates and target.path is None:
        raise InvalidParameter("--candidates", f"need the target's tokenizer, and {target.name} is not in a directory here")
    on_gpu = torch.cuda.is_available()
    ridge = machine.ridge or (_RIDGE_GPU if on_gpu else _RIDGE_CPU)
    memory = machine.memory or (torch.cuda.get_device_properties(0).total_memory if on_gpu else memory_bytes())
    speed = machine.bandwidth or (processor_bandwidth() if target.path is not None and not on_gpu else None)
    size, count = target.shape.weight_bytes, target.shape.parameters
    published = [] if target.published is None else _published(target, target.published, ridge, memory)
    return Recommendation(
        target=target.name,
        parameters=count,
        pass_ms=size / speed * 1e3 if speed else None,
        sizes=(count // _LARGEST, int(count / SMALLER)),
        family=target.family,
        concurrency=PairCosts(target.shape, target.shape, ridge).concurrency(memory, with_draft=False),
        drafts=sorted(published, key=lambda option: -option.speedup),
        lookups=["suffix", "ngram", *(() if published else ("recycle", "lookahead"))],
        fits=[_fit(target, path, ridge) for path in candidates],
    )


def targets_of(target: str | Path) -> list[_Target]:
    """A directory, GGUF file or config.json; a hub id of the table or in the local cache; or a size such as 70B."""
    path = Path(target)
    if not path.exists():
        if known := named(str(target)):
            return [_Target(name, Shape.of(model), model, name, model.tokenizer) for model, name in known]
        if (cached := in_cache(str(target)) if is_hub_id(str(target)) else None) is None:
            raise InvalidParameter(
                "--target",
                f"{target} is neither a model directory, a GGUF file, a config.json, a size such as 70B, nor a hub id that the "
                "table of published models or the local cache has",
            )
        path = cached
    spec, tokenizer = _config(path), _tokenizer(path)
    model, variant, family = identify(path.resolve(), None if tokenizer is None else tokenizer.table(), spec.parameters)
    kv = 4 * len(spec.kv_layers) * spec.kv_heads * spec.head_dim
    shape = Shape.of(model) if model is not None else Shape(spec.parameters, kv, spec.parameters)
    return [_Target(str(target), shape, model, variant, family, path)]


def _published(target: _Target, model: Published, ridge: float, memory: float) -> list[DraftOption]:
    """Siblings with the target's tokenizer, and heads that were trained for it."""
    options = []
    for draft, variant in model.drafts(target.variant):
        smaller = model.millions / draft.millions
        guess = guessed_chance(smaller, model.line == draft.line)
        known = measured(model, draft)
        basis, chance = "guess: a prior by the size ratio", guess
        if known is not None:
            of = "of unknown length" if known.length is None else f"of up to {known.length} tokens"
            basis = f"published: rate {known.rate:.0%} with drafts {of} ({known.conditions}), {known.source}"
            chance = chance_of(known, guess)
        costs = PairCosts(target.shape, Shape.of(draft), ridge)
        options.append(_option((variant, "draft_model"), costs, chance, basis, memory))
    for method, name in HEADS.get(target.variant, ()):
        weights = int((model.active * 10**6 or model.parameters) * _HEAD_LAYERS[method] / model.layers)
        shape = Shape(weights, target.shape.kv_bytes_per_token // model.layers, weights)
        costs = PairCosts(target.shape, shape, ridge, in_blocks=method == "dflash")
        options.append(_option((name, method), costs, _HEAD_CHANCE, "guess: a prior for heads of its kind", memory))
    return options


def _option(what: tuple[str, str], costs: PairCosts, chance: float, basis: str, memory: float) -> DraftOption:
    target, draft = costs.target, costs.draft
    length, speedup = costs.best(chance)
    room = costs.concurrency(memory)
    return DraftOption(
        *what,
        parameters=draft.parameters,
        times_smaller=round(target.parameters / draft.parameters, 1),
        chance=round(chance, 3),
        is_guess=basis.startswith("guess"),
        basis=basis,
        best_length=length,
        speedup=round(speedup, 2),
        pays=costs.pays(chance, room),
        weights_bytes=target.weight_bytes + draft.weight_bytes,
        kv_bytes_per_token=target.kv_bytes_per_token + draft.kv_bytes_per_token,
        concurrency=room,
    )


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


def _fit(target: _Target, path: Path, ridge: float) -> Fit:
    draft, smaller = _config(path), target.shape.parameters
    assert target.path is not None
    ours = Side(target.name, _tokenizer(target.path), _config(target.path).vocab)
    tokens, says = _tokens(ours, Side(str(path), _tokenizer(path), draft.vocab))
    times = smaller / draft.parameters
    if times < SMALLER:
        says += f"; only {times:.1f} times smaller, and a draft pass costs about as much of a target pass"
    elif times > _LARGEST:
        says += f"; {times:.0f} times smaller, so few of its drafts are likely to be accepted"
    shape = Shape(draft.parameters, 4 * draft.depth * draft.kv_heads * draft.head_dim, draft.parameters)
    costs = PairCosts(target.shape, shape, ridge)
    estimates = {chance: costs.best(chance) for chance in _CHANCES}
    rounded = {chance: (length, round(speedup, 2)) for chance, (length, speedup) in estimates.items()}
    return Fit(str(path), draft.parameters, round(times, 2), tokens, says, rounded)


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
