"""A cascade: a lookup or a small model drafts for a larger one, and that one for the target."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor

from outrider.config import SpeculationConfig
from outrider.core import Batch, Drafts, Needs, Plan, Scores, Sequence, Tree, Verdict
from outrider.draft.chains_only import best_chain
from outrider.draft.context import DraftContext
from outrider.draft.gain import Gain
from outrider.draft.growth import chain_of, draw_apart, stack_q
from outrider.draft.options import WeightOptions, option
from outrider.draft.protocol import Lookup, kept_by
from outrider.draft.reader import Reader, Text
from outrider.draft.related import load_related
from outrider.draft.shared_texts import Kept
from outrider.draft.vocabulary import SameTokens
from outrider.errors import DrafterFault, InvalidParameter
from outrider.model import Runner
from outrider.sampling import CORRUPTED, Row, rank

__all__ = ["CascadeDrafter", "CascadeOptions", "ModelLevel"]


@dataclass(frozen=True)
class CascadeOptions(WeightOptions):
    """The levels, lowest first."""

    levels: tuple[SpeculationConfig, ...] = option((), "drafters, lowest first: a lookup, then one or more draft_model")


class CascadeDrafter:
    """Speculates about the draft itself.

    What it does: the lowest level guesses a few tokens, the model above checks them all in one forward
        with its own choice rule (the same noise as the target's) and adds one of its own, and so on
        until it has drafted what is planned; that draft goes to the next level in the same way, and the
        last one's to the target. Each level's tokens are exactly those it would have chosen alone, so
        the target accepts as much as from the last level without a cascade, for fewer forwards.
    When it helps: where the draft model's own forwards are a large part of a round and the text repeats,
        or between a large target and a draft model that deserves a drafter.
    Cost: at most one forward of each model per token it drafts; less by every guess that is accepted. A level whose guesses
        save less time than they take is left out, and asked again now and then.
    Needs: KV beside the target's for every model; what the lowest level needs.
    Reference: Chen et al. 2312.11462 (cascade speculative drafting); Spector and Re 2308.04623 (staged).
    """

    Options = CascadeOptions

    def __init__(
        self,
        levels: Seq[ModelLevel],
        lookup: Lookup | None = None,
        lookup_tokens: int = 256,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if not levels:
            raise InvalidParameter("levels", "the last level of a cascade must be a model")
        self._levels = levels
        self._lookup = lookup
        self._lookup_tokens = lookup_tokens
        self._clock = clock
        self._gains = [Gain() for _ in levels]  # of what lies below each level
        below = Needs() if lookup is None else lookup.needs
        kv_bytes = sum(level.reader.runner.pool.token_bytes for level in levels)
        self.needs = Needs(below.taps, below.scores, below.kv_bytes_per_token + kv_bytes, keeps=below.keeps)

    @classmethod
    def build(cls, context: DraftContext) -> CascadeDrafter:
        lowest, *_ = configs = context.options(CascadeOptions).levels
        lookup = None
        if lowest.method != "draft_model":
            lookup, configs = context.build(lowest), configs[1:]
            if not lookup.needs.follows:
                raise InvalidParameter(
                    "levels", f"{lowest.method!r} cannot draft for a model: it guesses after committed text alone"
                )
        models = [_model_level(context, config) for config in configs]
        return cls(models, cast("Lookup | None", lookup), lowest.draft_tokens)

    def begin(self, seq: Sequence) -> None:
        for level in self._levels:
            level.reader.begin(seq)
        if self._lookup is not None:
            self._lookup.begin(seq)

    def end(self, seq: Sequence) -> None:
        for level in self._levels:
            level.reader.end(seq)
        if self._lookup is not None:
            self._lookup.end(seq)

    def kept(self, owner: str) -> Kept:
        return kept_by([] if self._lookup is None else [self._lookup], "kept", owner)

    def remember(self, owner: str, tokens: Seq[int]) -> Kept:
        return kept_by([] if self._lookup is None else [self._lookup], "remember", owner, tokens)

    def forget(self, owner: str) -> Kept:
        return kept_by([] if self._lookup is None else [self._lookup], "forget", owner)

    def commit(self, batch: Batch, drafts: Drafts, verdicts: list[Verdict], scores: Scores) -> None:
        if self._lookup is not None:
            self._lookup.commit(batch, drafts, verdicts, scores)

    def propose(self, batch: Batch, plan: Plan) -> Drafts:
        chains = [_Chain(seq, n) for seq, n in zip(batch.sequences, plan.lengths, strict=True)]
        self._draft(len(self._levels) - 1, chains, plan.keep_q)
        q = stack_q([chain.probs for chain in chains]) if plan.keep_q else None
        return Drafts([chain_of(chain.tokens, chain.chances) for chain in chains], q)

    def _draft(self, height: int, chains: Seq[_Chain], keep_q: bool) -> None:
        """Fill chains with the choices of one level, checking what the level below guesses as far as it goes."""
        level, gain = self._levels[height], self._gains[height]
        for chain in chains:
            chain.wanted = min(chain.wanted, level.reader.positions - len(chain.seq.tokens) - len(chain.before))
        goes_on = False  # the first forward reads what the text has become, which says nothing of the others
        while active := [chain for chain in chains if len(chain.tokens) < chain.wanted]:
            begun, size = self._clock(), sum(len(chain.tokens) for chain in active)
            guesses = self._below(height, active, keep_q) if gain.asks() else [[]] * len(active)
            level.extend(active, guesses, keep_q)
            right = (sum(len(chain.tokens) for chain in active) - size) / len(active) - 1
            gain.note(any(guesses), right, self._clock() - begun if goes_on else None)
            goes_on = True

    def _below(self, height: int, above: Seq[_Chain], keep_q: bool) -> list[list[int]]:
        """What the level below guesses next in each chain; the level itself adds one token more."""
        rooms = [chain.wanted - len(chain.tokens) - 1 for chain in above]
        if height > 0:
            limit = self._levels[height - 1].draft_tokens
            chains = [_Chain(chain.seq, min(room, limit), chain.path) for chain, room in zip(above, rooms, strict=True)]
            self._draft(height - 1, chains, keep_q)
            return [chain.tokens for chain in chains]
        lookup, limit = self._lookup, self._lookup_tokens
        return [
            _best_chain(lookup.follow(chain.seq, chain.path, min(room, limit))) if lookup is not None and room else []
            for chain, room in zip(above, rooms, strict=True)
        ]


@dataclass(slots=True)
class _Chain:
    """A draft while it grows, after a sequence and what levels above have drafted already."""

    seq: Sequence
    wanted: int
    before: Seq[int] = ()
    tokens: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    probs: list[Tensor] = field(default_factory=list)  # drawn from, where the rule needs them

    @property
    def path(self) -> list[int]:
        """Everything guessed after the sequence so far."""
        return [*self.before, *self.tokens]


def _model_level(context: DraftContext, config: SpeculationConfig) -> ModelLevel:
    if config.method != "draft_model":
        raise InvalidParameter("levels", f"levels above the lowest must be draft_model, got {config.method!r}")
    loaded = load_related(replace(context, config=config))
    if not isinstance(loaded.vocabulary, SameTokens):
        raise InvalidParameter("levels", f"{config.model or 'the draft model'} must have the target's tokenizer")
    return ModelLevel(loaded.runner, config.draft_tokens)


class ModelLevel:
    """A model that checks guesses by its choices. Its KV lies in the target's pages."""

    def __init__(self, runner: Runner, draft_tokens: int = 256) -> None:
        self.reader = Reader(runner)
        self.draft_tokens = draft_tokens  # most it drafts at once for a level above it

    def extend(self, chains: Seq[_Chain], guesses: Seq[list[int]], keep_q: bool) -> None:
        """Add to each chain the guesses that the model would have chosen, and its next choice; one forward for all."""
        texts: list[Text] = []
        rows: list[list[Row]] = []
        for chain, guess in zip(chains, guesses, strict=True):
            seq, path = chain.seq, [*chain.path, *guess]
            texts.append(Text(seq, [*seq.tokens, *path], len(seq.tokens)))
            rows.append([Row.at(seq, path[: len(path) - left]) for left in range(len(guess), -1, -1)])
        counts = [len(of_chain) for of_chain in rows]
        logits = torch.split(self.reader.read(texts, counts), counts)
        pick = _drawn if keep_q else _ranked
        for chain, guess, of_chain, chain_logits in zip(chains, guesses, rows, logits, strict=True):
            tokens, chances, probs = pick(chain_logits, of_chain, chain.seq)
            if CORRUPTED in tokens:
                raise DrafterFault("a model's logits are not finite")
            agreed = 0
            while agreed < len(guess) and guess[agreed] == tokens[agreed]:
                agreed += 1
            chain.tokens += tokens[: agreed + 1]
            chain.chances += chances[: agreed + 1]
            chain.probs += probs[: agreed + 1]


_Picked = tuple[list[int], list[float], list[Tensor]]  # tokens, their chances, and the distributions drawn from


def _ranked(logits: Tensor, rows: Seq[Row], _seq: Sequence) -> _Picked:
    """The choice at each row with the target's noise, and how sure it is."""
    best = rank(logits, rows, 1)
    return best.tokens[:, 0].tolist(), best.chances[:, 0].tolist(), []


def _drawn(logits: Tensor, rows: Seq[Row], seq: Sequence) -> _Picked:
    """Draws with separate noise, and the distributions drawn from."""
    drawn = [draw_apart(row_logits, row, seq) for row_logits, row in zip(logits, rows, strict=True)]
    return [token for token, _ in drawn], [float(q[token]) for token, q in drawn], [q for _, q in drawn]


def _best_chain(guess: Tree) -> list[int]:
    """Tokens of the likeliest path of a tree, from the root down."""
    return [guess.tokens[node] for node in best_chain(guess)]
