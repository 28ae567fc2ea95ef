"""An independent smaller model of the same tokenizer drafts a chain."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.core import Batch, Drafts, Needs, Plan, Scores, Sequence, Verdict
from outrider.errors import DrafterFault
from outrider.model import Feed, Runner
from outrider.sampling import CORRUPTED, Key, Row, Stream, choose, draw, law, process

__all__ = ["DraftModel"]


@dataclass(slots=True)
class _State:
    """What the draft model's KV holds for one sequence."""

    fed: list[int] = field(default_factory=list)  # token in each slot, in order
    checked: int = 0  # leading slots known to hold committed tokens

    def valid(self, text: Seq[int], committed: int) -> int:
        """Leading slots that hold this text; the others are forgotten.

        After full acceptance the last drafted token was never fed, and after a rejection the slots
        hold what was rejected: comparing tokens covers both, and rounds this drafter sat out. The
        newest token is always fed again, because its prediction is wanted.
        """
        limit = min(len(self.fed), len(text) - 1)
        keep = min(self.checked, limit)
        while keep < limit and self.fed[keep] == text[keep]:
            keep += 1
        self.checked = min(keep, committed)
        del self.fed[keep:]
        return keep


class DraftModel:
    """Drafts with a smaller model.

    What it does: decodes ahead with a model of the same vocabulary, drawing each token with the
        target's parameters and the target's noise, so that the two draws agree as often as the
        two laws allow.
    When it helps: where a model 10 to 100 times smaller exists and decoding waits for memory.
    Cost: one forward of the small model per drafted token; its own KV in the target's pages.
    Needs: KV beside the target's.
    Reference: Leviathan et al. 2211.17192; Chen et al. 2302.01318; coupling: Daliri et al. 2408.07978.
    """

    def __init__(self, runner: Runner) -> None:
        config = runner.decoder.config
        self.needs = Needs(kv_bytes_per_token=8 * config.layers * config.kv_heads * config.head_dim)
        self._runner = runner
        self._states: dict[Sequence, _State] = {}

    def begin(self, seq: Sequence) -> None:
        self._states[seq] = _State()

    def end(self, seq: Sequence) -> None:
        self._states.pop(seq, None)

    def commit(self, batch: Batch, drafts: Drafts, verdicts: list[Verdict], scores: Scores) -> None:
        pass

    def propose(self, batch: Batch, plan: Plan) -> Drafts:
        chains: list[list[int]] = [[] for _ in batch.sequences]
        laws: list[list[Tensor]] = [[] for _ in batch.sequences]
        context = self._runner.decoder.config.context
        lengths = [min(n, context - len(seq.tokens)) for seq, n in zip(batch.sequences, plan.lengths, strict=True)]
        while active := [b for b, n in enumerate(lengths) if len(chains[b]) < n]:
            sequences = [batch.sequences[b] for b in active]
            rows = [Row.at(seq, chains[b]) for seq, b in zip(sequences, active, strict=True)]
            logits = self._forward(sequences, [chains[b] for b in active])
            picked = self._pick_apart(logits, rows, sequences) if plan.keep_q else choose(logits, rows)
            if CORRUPTED in picked:
                raise DrafterFault("the draft model's logits are not finite")
            for j, b in enumerate(active):
                chains[b].append(picked[j])
                if plan.keep_q:
                    laws[b].append(law(logits[j], rows[j]))
        return Drafts.chains(chains, _stack(laws) if plan.keep_q else None)

    def _forward(self, sequences: Seq[Sequence], chains: Seq[list[int]]) -> Tensor:
        """Feed what each sequence's KV lacks, and give the logits after its newest token."""
        feeds, last, row = [], [], 0
        for seq, chain in zip(sequences, chains, strict=True):
            text = [*seq.tokens, *chain] if chain else seq.tokens
            state = self._states[seq]
            start = state.valid(text, len(seq.tokens))
            missing = text[start:]
            feeds.append(Feed(seq.pages, start, missing))
            state.fed += missing
            row += len(missing)
            last.append(row - 1)
        return self._runner.logits(self._runner.forward(feeds).last, last)

    def _pick_apart(self, logits: Tensor, rows: Seq[Row], sequences: Seq[Sequence]) -> list[int]:
        """Draw from q with noise of its own: ratio tests must not share the target's."""
        picked = []
        for own, row, seq in zip(logits, rows, sequences, strict=True):
            key = Key(row.seed, row.position, row.sample, Stream.DRAFT, seq.stats.rounds)
            picked += draw(process(own, row)[None], None if row.params.greedy else [key])
        return picked


def _stack(laws: list[list[Tensor]]) -> Tensor | None:
    """(B, D, V) from ragged rows, zero where nothing was drafted."""
    rows = [torch.stack(own) for own in laws if own]
    if not rows:
        return None
    out = torch.zeros(len(laws), max(map(len, laws)), rows[0].shape[1], dtype=torch.float64)
    for b, own in enumerate(laws):
        if own:
            out[b, : len(own)] = torch.stack(own)
    return out
