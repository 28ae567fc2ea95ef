"""The proposal benchmark: rows for every lookup drafter, and a text that is read on faithfully."""

from __future__ import annotations

from benchmarks.proposal import LOOKUPS, _verdict, measure_proposals
from outrider.core import Drafts, Verdict


def test_rows() -> None:
    rows = list(measure_proposals([64, 128], rounds=10))
    assert [(row["method"], row["context"]) for row in rows] == [(name, size) for name in LOOKUPS for size in (64, 128)]
    assert all(row["propose_us"] > 0 and row["commit_us"] > 0 for row in rows)


def test_the_text_is_what_comes_out() -> None:
    """Whatever is drafted, the emitted tokens are the text's next ones."""
    drafts = Drafts.trees([([5, 9, 6, 7], [-1, -1, 0, 2])])
    assert _verdict(drafts, [5, 6, 8, 4])[:2] == ([0, 2], [5, 6, 8])
    assert _verdict(drafts, [1, 2, 3])[:2] == ([], [1])
    assert isinstance(_verdict(Drafts.empty(1), [1, 2]), Verdict)
