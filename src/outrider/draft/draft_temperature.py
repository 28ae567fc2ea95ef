"""Draft temperature: by what to divide log q before the noise, learnt from the target's distribution afterwards."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.core import ROOT, Batch, Scores, Sequence, Tree, Verdict
from outrider.sampling import Row, SamplingParams, process
from outrider.sampling.noise import Key, bits, gumbel, keys_of

__all__ = [
    "TEMPERATURES",
    "DraftLogits",
    "DraftTemperature",
    "LogitsAt",
    "hits",
    "likelihood",
    "logits_of_chain",
    "logits_of_tree",
]

TEMPERATURES = (1.0, 0.9, 1.15, 0.8, 0.7, 1.3, 0.6, 0.5, 0.4)  # nearest to no change first: the first wins a tie
_TOKENS = 32  # of q, the most probable
_DRAWS = 16
_MIN_GAIN = 0.01  # a gain that a change must bring: this share of guesses, or this much log chance
_ENOUGH = 48  # positions seen before anything changes
_OFTEN, _YOUNG, _RARELY = 12, 96, 96  # every 12th position is looked at until 96 were, then every 96th,
_AT_ONCE = 8  # so many together: a look costs 0.8 ms, and 0.1 ms when it follows another
_LEAST = -7.0  # no choice counts for less than this log chance
_MEMORY = 0.998  # weight of the past at each position

_Floats = npt.NDArray[np.float64]


class DraftLogits(NamedTuple):
    """The raw logits of a draft at a node, over the target's ids, and the row they predict."""

    logits: Tensor  # (V,)
    row: Row

    def best(self) -> tuple[Tensor, _Floats]:
        """The most probable tokens and their log probabilities."""
        logq, ids = torch.log_softmax(process(self.logits, self.row), -1).topk(min(_TOKENS, len(self.logits)))
        return ids, logq.double().numpy()


LogitsAt = Callable[[tuple[int, ...]], DraftLogits | None]  # by path from the last token of the text


def logits_of_chain(tokens: list[int], logits: Tensor, sequence: int, row: Row) -> LogitsAt:
    """From logits (steps, sequences, V), looked up one at a time: few are looked at."""

    def at(path: tuple[int, ...]) -> DraftLogits | None:
        depth = len(path)
        return DraftLogits(logits[depth, sequence], row) if depth < len(tokens) and list(path) == tokens[:depth] else None

    return at


def logits_of_tree(tree: Tree, root: int, places: Seq[int], logits_at: Callable[[int], Tensor], row: Row) -> LogitsAt:
    """From logits (V,) by place: `root` is that of the logits after the root, `places` those of the nodes, -1 for none."""

    def at(path: tuple[int, ...]) -> DraftLogits | None:
        node = tree.find(path)
        place = -1 if node is None else root if node == ROOT else places[node]
        return None if place < 0 else DraftLogits(logits_at(place), row)

    return at


@dataclass(slots=True)
class _Record:
    """How well each temperature would have guessed."""

    right: _Floats = field(default_factory=lambda: np.zeros(len(TEMPERATURES)))
    weight: float = 0.0  # of the positions behind it
    seen: int = 0
    rounds: int = 0  # positions passed, looked at or not


class DraftTemperature:
    """A draft temperature for each request temperature, the one that would have guessed best so far.

    The rule `match` accepts a guess where argmax(log q / t + g) is argmax(log p + g). After a round
    both distributions are known at every node of the text, so the share of noises g under which the two agree
    can be estimated for every t at once, instead of waiting for single acceptances. A tree wants
    the chances of its guesses to be right, so there the likelihood of the choice decides. Only the
    past counts, and the same past decides the same. At temperature 0 there is nothing to adapt.
    """

    def __init__(self, tree: bool = False, by_depth: bool = False) -> None:
        self._score = likelihood if tree else hits
        self._by_depth = by_depth  # whether logits of different depths are of different kinds, as Medusa's heads are
        self.last: dict[Sequence, LogitsAt] = {}  # logits of the last draft, until its verdict is known
        self._records: dict[tuple[float, int], _Record] = {}
        self._held: list[tuple[_Record, DraftLogits, Tensor]] = []  # positions to look at: the draft's logits, the target's

    def temperature(self, params: SamplingParams, depth: int = 0) -> float:
        """By what to divide log q."""
        record = self._records.get(self._class(params, depth))
        if record is None or record.seen < _ENOUGH:
            return 1.0
        best = int(np.argmax(record.right))
        return TEMPERATURES[best] if record.right[best] - record.right[0] > _MIN_GAIN * record.weight else TEMPERATURES[0]

    def end(self, seq: Sequence) -> None:
        self.last.pop(seq, None)

    def commit(self, batch: Batch, verdicts: list[Verdict], scores: Scores) -> None:
        """Compare both distributions at the nodes of the last draft that became text."""
        if not self.last:
            return
        for seq, verdict, root in zip(batch.sequences, verdicts, scores.roots, strict=True):
            logits_at = self.last.pop(seq, None)
            if logits_at is not None and seq.finish_reason is None:
                self.learn(seq.request.params, logits_at, verdict, scores, root)

    def learn(self, params: SamplingParams, logits_at: LogitsAt, verdict: Verdict, scores: Scores, root: int) -> None:
        """Take in a round: the draft's logits by path, and the target's at the nodes that became text."""
        if root < 0 or params.greedy:  # it still reads its prompt, or has nothing to adapt
            return
        for depth, node in enumerate((-1, *verdict.path)):
            record = self._records.setdefault(self._class(params, depth), _Record())
            record.rounds += 1
            if record.rounds % (_OFTEN if record.seen < _YOUNG else _RARELY) == 0:
                draft = logits_at(tuple(verdict.tokens[:depth]))
                if draft is None:
                    break
                record.seen += 1
                draft = draft._replace(logits=draft.logits.clone())  # where they lie now the next round writes
                self._held.append((record, draft, scores.logits[root + 1 + node].clone()))
        if len(self._held) >= _AT_ONCE:
            self._look()

    def _look(self) -> None:
        """Take in what is held."""
        for record, draft, logits in self._held:
            ids, logq = draft.best()
            logp = torch.log_softmax(process(logits, draft.row), -1)[ids].double().cpu().numpy()
            record.right = record.right * _MEMORY + self._score(logq, logp)
            record.weight = record.weight * _MEMORY + 1.0
        self._held.clear()

    def _class(self, params: SamplingParams, depth: int) -> tuple[float, int]:
        return round(params.temperature, 1), depth if self._by_depth else 0


def hits(logq: _Floats, logp: _Floats) -> _Floats:
    """For each temperature, the share of noises under which the draft's best guess is the target's choice.

    logq and logp are of the same tokens.
    """
    scores, chosen = _noisy(logq, logp)
    return np.asarray((scores.argmax(2) == chosen).sum(1) / _DRAWS)


def likelihood(logq: _Floats, logp: _Floats) -> _Floats:
    """For each temperature, the mean log chance that the noisy scores give to the target's choice.

    A tree shares its nodes out by these chances: what counts is that they are right, not only which
    guess is the first.
    """
    scores, chosen = _noisy(logq, logp)
    chosen_scores = np.take_along_axis(scores, np.broadcast_to(chosen, scores.shape[:2])[..., None], 2)[..., 0]
    top = scores.max(2)
    total = top + np.log(np.exp(scores - top[..., None]).sum(2))
    return np.asarray(np.maximum(chosen_scores - total, _LEAST).sum(1) / _DRAWS)


def _noisy(logq: _Floats, logp: _Floats) -> tuple[_Floats, npt.NDArray[np.int64]]:
    """Noisy draft scores (temperatures, draws, tokens) and the choices (draws,), of draws that choose one of the tokens.

    The remainder of p counts as one more token: the largest of its noisy scores is distributed as if it were one.
    """
    remainder = max(1.0 - float(np.exp(logp).sum()), 1e-12)
    noise = _noise(len(logp) + 1)
    chosen = (np.append(logp, np.log(remainder)) + noise).argmax(1)
    known = np.flatnonzero(chosen < len(logp))
    return logq / np.array(TEMPERATURES)[:, None, None] + noise[known, :-1], chosen[known]


@lru_cache(maxsize=4)
def _noise(tokens: int) -> _Floats:
    """Gumbel noise of fixed draws, so that temperatures are compared on equal noise at every position."""
    return gumbel(bits(keys_of([Key(0, draw) for draw in range(_DRAWS)]), tokens))
