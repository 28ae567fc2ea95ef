"""What the engine did since it started: plain counts, added to in every round, read between rounds."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import accumulate

from outrider.core import RoundReport

__all__ = ["GAP_BOUNDS", "Tally"]

GAP_BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)  # seconds


@dataclass(slots=True)
class Tally:
    """Counts over all sequences. Depths are kept as histograms, so that a round costs the same however deep it drafts."""

    rounds: int = 0  # of one sequence each
    emitted: int = 0
    drafts: int = 0  # rounds that drafted
    drafted: int = 0
    accepted: int = 0
    by_source: dict[str, list[int]] = field(default_factory=dict)  # drafted and accepted
    gaps: list[int] = field(default_factory=lambda: [0] * (len(GAP_BOUNDS) + 1))  # tokens by the time they took
    gap_s: float = 0.0
    _deepest: list[int] = field(default_factory=lambda: [0] * 257)
    _reached: list[int] = field(default_factory=lambda: [0] * 257)

    def observe(self, report: RoundReport) -> None:
        """Count a round."""
        gaps: dict[tuple[float, int], int] = {}  # sequences, by when their last tokens came and how many came now
        for seq in report.sequences:
            if not seq.emits:
                continue
            self.rounds += 1
            self.emitted += seq.kept
            if seq.depths:
                self._count_draft(seq.drafter, seq.depths, seq.accepted)
            if seq.kept and seq.last_token:
                key = (seq.last_token, seq.kept)
                gaps[key] = gaps.get(key, 0) + 1
        for (before, kept), sequences in gaps.items():
            self.note_gap((report.tokens_at - before) / kept, kept * sequences)

    def _count_draft(self, drafter: str, depths: Seq[int], accepted: int) -> None:
        self.drafts += 1
        self.drafted += len(depths)
        self.accepted += accepted
        counts = self.by_source.setdefault(drafter, [0, 0])
        counts[0] += len(depths)
        counts[1] += accepted
        self._deepest[max(depths) + 1] += 1
        self._reached[accepted] += 1

    def note_gap(self, seconds: float, tokens: int) -> None:
        """Count tokens that came this many seconds after those before them."""
        self.gaps[bisect_left(GAP_BOUNDS, seconds)] += tokens
        self.gap_s += seconds * tokens

    def drafted_by_position(self) -> list[int]:
        """Rounds that drafted to each position or beyond it."""
        return _at_least(self._deepest)

    def accepted_by_position(self) -> list[int]:
        """Rounds whose draft was accepted up to each position, as far as any drafted."""
        counts = _at_least(self._reached)
        return counts + [0] * (len(self.drafted_by_position()) - len(counts))


def _at_least(counts: Seq[int]) -> list[int]:
    """Of counts by depth, how many lie at 1 or deeper, at 2 or deeper, ...; up to the deepest."""
    sums = list(accumulate(reversed(counts[1:])))[::-1]
    return [n for n in sums if n]
