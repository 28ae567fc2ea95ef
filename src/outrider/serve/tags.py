"""Tags: what clients call their kinds of requests, and what speculation brought for each.

A client names a tag in the body (`tag`, or `metadata.tag`) or in the header X-Outrider-Tag. Tags become values of a label in
/metrics, so their letters are safe and their number is bounded: the first 32 are counted by name, and others as `other`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.engine.outputs import CompletionOutput

__all__ = ["HEADER", "MAX_TAGS", "OTHER", "TAG", "TagCounts", "TagTally", "is_tag", "tag_of_metadata"]

TAG = r"^[A-Za-z0-9_.\-]{1,64}$"
HEADER = "X-Outrider-Tag"
MAX_TAGS = 32
OTHER = "other"


def is_tag(value: object) -> bool:
    """Whether a value can be a tag."""
    return isinstance(value, str) and re.fullmatch(TAG.strip("^$"), value) is not None


def tag_of_metadata(metadata: Any) -> dict[str, str]:
    """The tag in a request's metadata as a field of the request. Metadata is the client's, so a value that is no tag is none."""
    tag: Any = metadata.get("tag") if isinstance(metadata, Mapping) else None
    return {"tag": tag} if is_tag(tag) else {}


@dataclass(slots=True)
class TagTally:
    """What the finished sequences of a tag got."""

    rounds: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def acceptance(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_round(self) -> float:
        return self.tokens / self.rounds if self.rounds else 0.0


class TagCounts:
    """Counts by tag of at most MAX_TAGS tags, and of all others together."""

    def __init__(self) -> None:
        self._tallies: dict[str, TagTally] = {}

    def reserve(self, tags: Iterable[str]) -> None:
        """Count these tags by name even if many others come first."""
        for tag in tags:
            self._tally(tag)

    def add(self, tag: str, output: CompletionOutput) -> None:
        """Count a finished sequence."""
        stats, tally = output.speculation, self._tally(tag)
        tally.rounds += stats["rounds"]
        tally.tokens += len(output.token_ids)
        tally.drafted += stats["drafted"]
        tally.accepted += stats["accepted"]

    def _tally(self, tag: str) -> TagTally:
        named = len(self._tallies) - (OTHER in self._tallies)
        label = tag if tag in self._tallies or named < MAX_TAGS else OTHER
        return self._tallies.setdefault(label, TagTally())

    def items(self) -> Iterator[tuple[str, TagTally]]:
        return iter(self._tallies.items())

    def as_dict(self) -> dict[str, dict[str, float]]:
        """The counts as `/stats` shows them."""
        return {
            tag: {
                "rounds": tally.rounds,
                "tokens": tally.tokens,
                "acceptance": round(tally.acceptance, 4),
                "tokens_per_round": round(tally.tokens_per_round, 4),
            }
            for tag, tally in self.items()
        }
