"""Recorded conversations of coding agents, and a runner that makes the model write what was recorded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.core import Batch, Computed, Drafts, Scores, Sequence
from outrider.errors import InvalidParameter
from outrider.model import Runner

__all__ = ["PlantedRunner", "Recording", "Turn", "read_recordings"]

_PLANTED = 1e4  # the logit of a recorded token


@dataclass(frozen=True, slots=True)
class Turn:
    """What the user sent, and what the model answered; None: the model answers as it likes."""

    user: str
    answer: str | None
    forgets: bool = False  # the prompt holds nothing of the turns before: the agent has cut its history


@dataclass(frozen=True, slots=True)
class Recording:
    """A conversation. Its kind says in which form the answers edit."""

    name: str
    kind: str
    turns: tuple[Turn, ...]

    def prompts(self) -> Iterator[tuple[str, Turn]]:
        """What is sent in every turn: as much of the conversation as the agent has kept."""
        history = ""
        for turn in self.turns:
            history = turn.user if turn.forgets else history + turn.user
            yield history, turn
            history += (turn.answer or "") + "\n"


def read_recordings(path: Path) -> list[Recording]:
    """Recordings from JSONL: objects with `name`, `kind` and `turns`, each of `user`, `answer` and perhaps `forgets`."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidParameter("recordings", f"{path} cannot be read: {error}") from None
    recordings = []
    for number, line in enumerate(lines, 1):
        try:
            recordings.append(_recording(json.loads(line)))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            problem = f"line {number} of {path.name} is no conversation ({type(error).__name__}: {error})"
            raise InvalidParameter("recordings", problem) from None
    if not recordings:
        raise InvalidParameter("recordings", f"{path.name} holds none")
    return recordings


def _recording(item: dict[str, Any]) -> Recording:
    turns = tuple(Turn(turn["user"], turn["answer"], bool(turn.get("forgets"))) for turn in item["turns"])
    if not turns or not all(isinstance(turn.user, str) and isinstance(turn.answer, str | None) for turn in turns):
        raise ValueError("a turn needs texts as user and answer")
    return Recording(str(item["name"]), str(item["kind"]), turns)


class PlantedRunner:
    """A runner whose target chooses recorded tokens.

    The forward is computed whole; then the logit of the recorded token is raised in every row whose path is the recorded one. All
    other rows keep the model's logits, so a wrong draft is rejected as it would be.
    """

    def __init__(self, runner: Runner) -> None:
        self.recorded: dict[str, list[int]] = {}  # the answer to each request, by its id
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, batch: Batch, drafts: Drafts, taps: tuple[int, ...] = ()) -> Computed:
        return Computed(self.score(batch, drafts, taps))

    def score(self, batch: Batch, drafts: Drafts, taps: tuple[int, ...] = ()) -> Scores:
        scores = self._runner.score(batch, drafts, taps)
        for seq, tree, root in zip(batch.sequences, drafts.per_sequence, scores.roots, strict=True):
            if root >= 0 and seq.request.id in self.recorded:
                self._plant(scores, seq, (tree.tokens, tree.parents), root)
        return scores

    def _plant(self, scores: Scores, seq: Sequence, tree: tuple[list[int], list[int]], root: int) -> None:
        """Raise the recorded token at the root and at every node of the recorded path."""
        recorded, depth_of = self.recorded[seq.request.id], {-1: seq.output_len}
        for node, (token, parent) in enumerate(zip(*tree, strict=True)):
            depth = depth_of.get(parent)
            if depth is not None and depth < len(recorded) and recorded[depth] == token:
                depth_of[node] = depth + 1
        rows = [(root + 1 + node, recorded[depth]) for node, depth in depth_of.items() if depth < len(recorded)]
        scores.logits[[row for row, _ in rows], [token for _, token in rows]] = _PLANTED
