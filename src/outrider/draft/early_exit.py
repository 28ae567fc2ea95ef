"""Early exit: the target's own first layers draft, and verification goes on from where they stopped."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor

from outrider import checks
from outrider.core import Batch, Drafts, Needs, Plan, Scores, Sequence, Verdict
from outrider.draft.context import DraftContext
from outrider.draft.draft_temperature import DraftLogits, DraftTemperature
from outrider.draft.growth import Growing, TreeShape, drafts_of, grow
from outrider.draft.options import option
from outrider.errors import InvalidParameter
from outrider.model import Feed, Runner
from outrider.ops import BLOCK, one_torch_thread
from outrider.sampling import Row, choose

__all__ = ["Costs", "EarlyExit", "EarlyExitOptions", "best_length", "measure_costs"]

_TRIALS = 96  # positions at which every exit is tried before one is chosen
_EXITS = 6  # how many are tried, at most


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds for one block of rows."""

    layer: float
    head: float  # the output matrix


@dataclass(slots=True)
class _Trial:
    """Exits tried side by side: at how many positions each chose what the target chose."""

    exits: tuple[int, ...]
    right: list[int] = field(init=False)
    seen: int = 0

    def __post_init__(self) -> None:
        self.right = [0] * len(self.exits)


@dataclass(frozen=True, slots=True)
class EarlyExitOptions:
    """Which of the target's layers draft."""

    exit_layer: int | None = option(None, "layers that draft; chosen by agreement and cost where it is not set", 1)
    tail: int = option(0, "last layers that run after them", 0)


class EarlyExit:
    """Drafts with the target's first layers.

    What it does: the hidden rows after the first E layers go through the final norm and the output
        matrix as if they were the last, and the result is drafted. The KV of those layers lies in
        the target's own slots, so verification runs the other layers alone. With `tail` the draft
        skips the inner layers and runs the last few after the first E. Without `exit_layer`, exits
        are tried on the first positions read, and the one that pays most by measured agreement
        and cost is taken; where none pays, nothing is drafted.
    When it helps: where no head can be had, and best with models trained for it; a model that was
        not says little of its choice before its last layers.
    Cost: E layers and the output matrix per drafted token, of which verification saves the E layers.
    Needs: nothing beside the target; no memory of its own.
    Reference: Elhoushi et al. 2404.16710 (LayerSkip); Zhang et al. 2309.08168 (skipped layers).
    """

    Options = EarlyExitOptions

    def __init__(self, target: Runner, options: EarlyExitOptions = EarlyExitOptions(), costs: Costs | None = None) -> None:
        self._runner = target
        self._layers = target.decoder.config.layers
        exit_layer, tail = options.exit_layer, options.tail
        if exit_layer is not None:
            checks.integer("exit_layer", exit_layer, 1, self._layers - 1)
        checks.integer("tail", tail, 0, self._layers - (exit_layer or 1))
        self._tail = tail
        self._exit = exit_layer
        self._agreement: float | None = None  # of the chosen exit, where it was tried
        self._trial: _Trial | None = None
        self.needs = Needs()
        if exit_layer is None:
            self._trial = _Trial(_exits(self._layers - max(tail, 1)))
            self.needs = Needs(taps=(*self._trial.exits, self._layers))
        self._costs = costs or (Costs(1.0, 1.0) if exit_layer else measure_costs(target))
        self._draft_temperature = DraftTemperature()
        self._draft_logits: dict[Sequence, dict[tuple[int, ...], DraftLogits]] = {}  # of the last draft, by path

    @classmethod
    def build(cls, context: DraftContext) -> EarlyExit:
        if context.target.device_name != "cpu":
            raise InvalidParameter(
                "method", "early_exit runs some of the target's layers alone, which the GPU path cannot; pass device=cpu"
            )
        return cls(context.target, context.options(EarlyExitOptions))

    @property
    def exit_layer(self) -> int | None:
        """The exit in use; None while exits are tried, or where none pays."""
        return self._exit

    def begin(self, seq: Sequence) -> None:
        pass

    def end(self, seq: Sequence) -> None:
        self._draft_logits.pop(seq, None)

    def commit(self, batch: Batch, drafts: Drafts, verdicts: list[Verdict], scores: Scores) -> None:
        """Try exits on the rows read, as long as one is to be chosen; then compare both distributions."""
        if self._trial is not None and scores.taps is not None:
            self._try(self._trial, batch, scores)
        for seq, verdict, root in zip(batch.sequences, verdicts, scores.roots, strict=True):
            logits_at = self._draft_logits.pop(seq, None)
            if logits_at and seq.finish_reason is None:
                self._draft_temperature.learn(seq.request.params, logits_at.get, verdict, scores, root)

    @torch.inference_mode()
    def propose(self, batch: Batch, plan: Plan) -> Drafts:
        exit_layer = self._exit
        if exit_layer is None:
            return Drafts.empty(len(batch.sequences))
        growing = [
            Growing(seq, self._length(exit_layer, n), seq.pages, len(seq.tokens))
            for seq, n in zip(batch.sequences, plan.lengths, strict=True)
        ]
        hidden: dict[Sequence, list[Tensor]] = {seq: [] for seq in batch.sequences}

        def step(active: Seq[Growing], feeds: list[Feed]) -> Tensor:
            rows = self._runner.prepare(feeds)
            early = self._runner.run(rows, (exit_layer,), range(exit_layer))
            for draft, x in zip(active, early.taps[0], strict=False):  # one row each: drafts are chains
                hidden[draft.seq].append(x)
            last = early.last
            if self._tail:
                last = self._runner.run(rows, (), range(self._layers - self._tail, self._layers), early.taps[0]).last
            return self._runner.logits(last, range(len(active)))

        def start(active: Seq[Growing]) -> Tensor:
            return step(active, [Feed(draft.pages, draft.size - 1, draft.seq.tokens[-1:]) for draft in active])

        def extend(active: Seq[Growing]) -> Tensor:
            return step(active, [draft.feed() for draft in active])

        grow(growing, TreeShape(), start, extend, self._draft_temperature)
        self._draft_logits = {draft.seq: draft.logits for draft in growing if draft.logits}
        rows = [x for draft in growing for x in hidden[draft.seq]]
        resume = (
            self._runner.resume(exit_layer, torch.stack(rows), [len(hidden[draft.seq]) for draft in growing]) if rows else None
        )
        return drafts_of(growing, resume)

    def _length(self, exit_layer: int, planned: int) -> int:
        """All that is planned, or as much of it as pays."""
        if self._agreement is None:
            return planned
        return best_length(self._costs, (exit_layer, self._tail, self._layers), self._agreement, planned).length

    def _try(self, trial: _Trial, batch: Batch, scores: Scores) -> None:
        """Let every exit guess at some of the rows just read, with the requests' own noise."""
        assert scores.taps is not None
        rows: list[Row] = []
        places: list[int] = []
        for seq, fed, first in zip(batch.sequences, batch.feeds, scores.first_rows, strict=True):
            for i in range(min(fed, BLOCK)):  # the last ones it read
                places.append(first + fed - 1 - i)
                rows.append(Row.at(seq)._replace(position=len(seq.tokens) - 1 - i, allowed=None))
        taps = scores.taps[places].chunk(len(trial.exits) + 1, -1)
        wanted = choose(self._guess(taps[-1]), rows)
        for i, x in enumerate(taps[:-1]):
            guessed = choose(self._guess(x), rows)
            trial.right[i] += sum(a == b for a, b in zip(guessed, wanted, strict=True))
        trial.seen += len(rows)
        if trial.seen >= _TRIALS:
            self._choose(trial)

    def _guess(self, x: Tensor) -> Tensor:
        """Logits of rows that leave a layer, as if it were the last."""
        decoder, ops = self._runner.decoder, self._runner.ops
        return self._runner.logits(ops.rms_norm(x, decoder.norm, decoder.config.norm_eps), range(len(x)))

    def _choose(self, trial: _Trial) -> None:
        self._trial, self.needs = None, Needs()
        rates = [right / trial.seen for right in trial.right]
        options = [
            (best_length(self._costs, (e, self._tail, self._layers), rate, 16), e, rate)
            for e, rate in zip(trial.exits, rates, strict=True)
        ]
        best, exit_layer, rate = max(options, key=lambda candidate: candidate[0].speed)
        if best.length:
            self._exit, self._agreement = exit_layer, rate


@dataclass(frozen=True, slots=True)
class _Best:
    length: int
    speed: float  # tokens per second


def best_length(costs: Costs, shape: tuple[int, int, int], agreement: float, limit: int) -> _Best:
    """How far to draft with (exit, tail, layers) where each guess is right with this chance.

    Verification runs the layers from the exit on for all rows and those before it for the last node.
    """
    exit_layer, tail, layers = shape
    best = _Best(0, 1 / (layers * costs.layer + costs.head))
    tokens, alive = 1.0, 1.0
    for length in range(1, limit + 1):
        alive *= agreement
        tokens += alive
        drafting = length * ((exit_layer + tail) * costs.layer + costs.head)
        speed = tokens / (drafting + layers * costs.layer + costs.head)
        best = max(best, _Best(length, speed), key=lambda option: option.speed)
    return best


def measure_costs(runner: Runner, repeats: int = 3) -> Costs:
    """Time one block through the layers and through the output matrix, on the page that padding writes to."""
    rows = runner.prepare([Feed([runner.pool.pages - 1], 0, [0])])
    layers, head = [], []
    with one_torch_thread(runner.ops):
        for _ in range(repeats + 1):
            begun = time.perf_counter()
            last = runner.run(rows).last
            done = time.perf_counter()
            runner.logits(last, [0])
            layers.append(done - begun)
            head.append(time.perf_counter() - done)
    return Costs(median(layers[1:]) / runner.decoder.config.layers, median(head[1:]))


def _exits(before: int) -> tuple[int, ...]:
    """Exits to try, spread over the layers up to the last that leaves something out."""
    return tuple(sorted({max(1, before * (i + 1) // _EXITS) for i in range(_EXITS)}))
