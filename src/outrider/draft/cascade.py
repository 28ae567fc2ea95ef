"""A cascade: a lookup or a small model drafts for a larger one, and that one for the target."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import NamedTuple, cast

from torch import Tensor

from outrider.config import SpeculationConfig
from outrider.core import ROOT, Batch, Drafts, Needs, Plan, Scores, Sequence, Tree, Verdict
from outrider.draft.context import DraftContext
from outrider.draft.options import WeightOptions, option
from outrider.draft.protocol import Lookup, stack_q
from outrider.draft.vocabulary import SameTokens, load_related
from outrider.errors import DrafterFault, InvalidParameter
from outrider.model import Feed, Runner
from outrider.sampling import CORRUPTED, Key, Row, Stream, draw, probs_of, process, rank

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
    Cost: at most one forward of each model per token it drafts; less by every guess that comes true.
    Needs: KV beside the target's for every model; what the lowest level needs.
    Reference: Chen et al. 2312.11462 (cascade speculative drafting); Spector and Re 2308.04623 (staged).
    """

    Options = CascadeOptions

    def __init__(self, levels: Seq[ModelLevel], lookup: Lookup | None = None, lookup_tokens: int = 256) -> None:
        if not levels:
            raise InvalidParameter("levels", "the last level of a cascade must be a model")
        self._levels = levels
        self._lookup = lookup
        self._lookup_tokens = lookup_tokens
        below = Needs() if lookup is None else lookup.needs
        self.needs = Needs(
            taps=below.taps,
            scores=below.scores,
            kv_bytes_per_token=below.kv_bytes_per_token + sum(level.kv_bytes_per_token for level in levels),
        )

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
            level.begin(seq)
        if self._lookup is not None:
            self._lookup.begin(seq)

    def end(self, seq: Sequence) -> None:
        for level in self._levels:
            level.end(seq)
        if self._lookup is not None:
            self._lookup.end(seq)

    def commit(self, batch: Batch, drafts: Drafts, verdicts: list[Verdict], scores: Scores) -> None:
        if self._lookup is not None:
            self._lookup.commit(batch, drafts, verdicts, scores)

    def propose(self, batch: Batch, plan: Plan) -> Drafts:
        chains = [_Chain(seq, n) for seq, n in zip(batch.sequences, plan.lengths, strict=True)]
        self._draft(len(self._levels) - 1, chains, plan.keep_q)
        q = stack_q([chain.probs for chain in chains]) if plan.keep_q else None
        return Drafts([Tree.chain(chain.tokens, chain.survival()) for chain in chains], q)

    def _draft(self, height: int, chains: Seq[_Chain], apart: bool) -> None:
        """Fill chains with the choices of one level, checking what the level below guesses as far as it goes."""
        level = self._levels[height]
        for chain in chains:
            chain.wanted = min(chain.wanted, level.context - chain.start)
        while active := [chain for chain in chains if len(chain.tokens) < chain.wanted]:
            guesses = self._below(height, active, apart)
            for chain, chosen in zip(active, level.choices(active, guesses, apart), strict=True):
                chain.tokens += chosen.tokens
                chain.chances += chosen.chances
                chain.probs += chosen.probs

    def _below(self, height: int, above: Seq[_Chain], apart: bool) -> list[list[int]]:
        """What the level below thinks comes next in each chain; the level itself adds one token more."""
        if height == 0:
            if self._lookup is None:
                return [[] for _ in above]
            wanted = [min(chain.wanted - len(chain.tokens) - 1, self._lookup_tokens) for chain in above]
            return [
                _best_chain(self._lookup.follow(chain.seq, chain.path, n)) if n else []
                for chain, n in zip(above, wanted, strict=True)
            ]
        limit = self._levels[height - 1].draft_tokens
        chains = [_Chain(chain.seq, min(chain.wanted - len(chain.tokens) - 1, limit), chain.path) for chain in above]
        self._draft(height - 1, chains, apart)
        return [chain.tokens for chain in chains]


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
    def start(self) -> int:
        return len(self.seq.tokens) + len(self.before)

    @property
    def path(self) -> list[int]:
        """Everything guessed after the sequence so far."""
        return [*self.before, *self.tokens]

    def survival(self) -> list[float]:
        out, survival = [], 1.0
        for chance in self.chances:
            survival *= chance
            out.append(survival)
        return out


class _Chosen(NamedTuple):
    """A level's tokens: the guesses it would have chosen itself, then its own next one."""

    tokens: list[int]
    chances: list[float]
    probs: list[Tensor]


def _model_level(context: DraftContext, config: SpeculationConfig) -> ModelLevel:
    if config.method != "draft_model":
        raise InvalidParameter("levels", f"levels above the lowest must be draft_model, got {config.method!r}")
    loaded = load_related(replace(context, config=config))
    if not isinstance(loaded.vocabulary, SameTokens):
        raise InvalidParameter("levels", f"{config.model or 'the draft model'} must have the target's tokenizer")
    return ModelLevel(loaded.runner, config.draft_tokens)


class ModelLevel:
    """A model that checks guesses by its own choices. Its KV lies in the target's pages."""

    def __init__(self, runner: Runner, draft_tokens: int = 256) -> None:
        config = runner.decoder.config
        self.kv_bytes_per_token = runner.pool.token_bytes
        self.context = config.context
        self.draft_tokens = draft_tokens  # most it drafts at once for a level above it
        self._runner = runner
        self._fed: dict[Sequence, list[int]] = {}  # the token in each slot
        self._settled: dict[Sequence, int] = {}  # leading slots known to hold committed tokens

    def begin(self, seq: Sequence) -> None:
        self._fed[seq], self._settled[seq] = [], 0

    def end(self, seq: Sequence) -> None:
        self._fed.pop(seq, None)
        self._settled.pop(seq, None)

    def choices(self, chains: Seq[_Chain], guesses: Seq[list[int]], apart: bool) -> list[_Chosen]:
        """Check a guess after each chain, all in one forward."""
        feeds: list[Feed] = []
        wanted: list[int] = []  # rows of the forward whose logits are looked at
        rows: list[Row] = []
        total = 0
        for chain, guess in zip(chains, guesses, strict=True):
            feeds.append(self._feed(chain, guess))
            total += len(feeds[-1].tokens)
            wanted += range(total - len(guess) - 1, total)
            path = chain.path
            rows += [Row.at(chain.seq, [*path, *guess[:i]]) for i in range(len(guess) + 1)]
        logits = self._runner.logits(self._runner.forward(feeds).last, wanted)
        out, first = [], 0
        for chain, guess in zip(chains, guesses, strict=True):
            span = slice(first, first + len(guess) + 1)
            first = span.stop
            pick = _drawn_apart if apart else _ranked
            out.append(_cut(pick(logits[span], rows[span], chain.seq), guess))
        return out

    def _feed(self, chain: _Chain, guess: list[int]) -> Feed:
        """What the KV lacks of a chain and its guess; the token before the guess is always fed, for its logits.

        Slots may hold what a round rejected, or lack what this level was not asked about: the tokens say so.
        """
        seq, fed, path = chain.seq, self._fed[chain.seq], chain.path
        text, ends = [*seq.tokens, *path, *guess], len(seq.tokens) + len(path)
        limit = min(len(fed), ends - 1)
        keep = min(self._settled[seq], limit)
        while keep < limit and fed[keep] == text[keep]:
            keep += 1
        self._settled[seq] = min(keep, len(seq.tokens))
        fed[keep:] = text[keep:]
        return Feed(seq.pages, keep, text[keep:])


def _ranked(logits: Tensor, rows: Seq[Row], _seq: Sequence) -> _Chosen:
    """The choice at each row with the target's noise, and how sure it is."""
    best = rank(logits, rows, 1)
    _check(best.tokens.min())
    return _Chosen(best.tokens[:, 0].tolist(), best.chances[:, 0].tolist(), [])


def _drawn_apart(logits: Tensor, rows: Seq[Row], seq: Sequence) -> _Chosen:
    """Draws with noise of their own, and the distributions drawn from: ratio tests must not share the target's noise."""
    picked: list[int] = []
    for row_logits, row in zip(logits, rows, strict=True):
        key = Key(row.seed, row.position, row.sample, Stream.DRAFT, seq.stats.rounds)
        picked += draw(process(row_logits, row)[None], None if row.params.greedy else [key])
    _check(min(picked))
    probs = [probs_of(row_logits, row) for row_logits, row in zip(logits, rows, strict=True)]
    return _Chosen(picked, [float(row_logits[token]) for row_logits, token in zip(probs, picked, strict=True)], probs)


def _check(lowest: int) -> None:
    if lowest == CORRUPTED:
        raise DrafterFault("a model's logits are not finite")


def _cut(chosen: _Chosen, guess: list[int]) -> _Chosen:
    """Choices as far as the guess agrees, and the first that differs from it or follows it."""
    agreed = 0
    while agreed < len(guess) and guess[agreed] == chosen.tokens[agreed]:
        agreed += 1
    return _Chosen(chosen.tokens[: agreed + 1], chosen.chances[: agreed + 1], chosen.probs[: agreed + 1])


def _best_chain(guess: Tree) -> list[int]:
    """The likeliest path of a tree, from the root down."""
    best: dict[int, int] = {}  # parent -> its likeliest child
    for node, parent in enumerate(guess.parents):
        if parent not in best or guess.survival[node] > guess.survival[best[parent]]:
            best[parent] = node
    path, node = [], ROOT
    while node in best:
        node = best[node]
        path.append(guess.tokens[node])
    return path
