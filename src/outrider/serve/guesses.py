"""Rejected draft tokens, for clients that request them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from outrider.engine.outputs import Run

__all__ = ["with_rejected"]


def with_rejected(
    details: Iterable[dict[str, Any]], runs: Sequence[Run], decode: Callable[[int], str]
) -> Iterator[dict[str, Any]]:
    """Add the rejected draft tokens of a round to its last token, which the target chose instead of them."""
    last: dict[int, Run] = {}  # by the index of a round's last token
    kept = 0
    for run in runs:
        kept += run.kept
        if run.rejected and run.kept:
            last[kept - 1] = run
    for number, detail in enumerate(details):
        if number in last:
            run = last[number]
            detail["drafter"] = run.source
            detail["rejected"] = [
                {"id": node.token, "text": decode(node.token), "position": node.position, "parent": node.parent}
                for node in run.rejected
            ]
        yield detail
