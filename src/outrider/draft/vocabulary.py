"""How a draft model's tokens relate to the target's."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from outrider import checks
from outrider.core import Sequence
from outrider.draft.context import DraftContext
from outrider.draft.reader import Text
from outrider.draft.transcript import Transcript
from outrider.errors import ModelError
from outrider.model import Runner
from outrider.text import Tokenizer

__all__ = ["Related", "SameTokens", "SharedTokens", "Side", "Vocabulary", "load_related", "relate", "shared_tokens"]

WAYS = ("auto", "shared", "text")
ENOUGH_SHARED = 0.5  # of the smaller vocabulary
_PROBES = ("def f(x):\n    return x + 1\n", "The quick, brown Fox.")


class Vocabulary(Protocol):
    """Between the target's token ids and the draft model's."""

    foreign: bool  # whether the model counts positions otherwise, so that it needs pages of its own

    def begin(self, seq: Sequence) -> None:
        """A sequence starts."""

    def end(self, seq: Sequence) -> None:
        """A sequence is over; forget it."""

    def text(self, seq: Sequence) -> Text | None:
        """What the draft model reads for a sequence; None where its text cannot be told yet."""

    def own(self, token: int) -> int:
        """The draft model's id of a target token it proposed."""

    def scores(self, logits: Tensor) -> Tensor:
        """The draft model's logits over the target's ids, -inf where it has no say."""


class SameTokens:
    """Both models have the same tokens. Ids past the end of the target's matrix, where one is padded, are cut."""

    foreign = False

    def __init__(self, vocab: int | None = None) -> None:
        self._vocab = vocab

    def begin(self, seq: Sequence) -> None:
        pass

    def end(self, seq: Sequence) -> None:
        pass

    def text(self, seq: Sequence) -> Text | None:
        return Text(seq, seq.tokens, len(seq.tokens))

    def own(self, token: int) -> int:
        return token

    def scores(self, logits: Tensor) -> Tensor:
        missing = 0 if self._vocab is None else self._vocab - logits.shape[1]
        return logits if missing == 0 else torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))


class SharedTokens:
    """The draft model proposes only tokens both tables have; the text it reads is in its own tokens."""

    foreign = True

    def __init__(self, target: Tokenizer, draft: Tokenizer, vocab: int) -> None:
        self._target = target
        self._draft = draft
        self._vocab = vocab
        self._own = {token: draft_id for token, draft_id in shared_tokens(target, draft).items() if token < vocab}
        self._ids = torch.tensor(list(self._own), dtype=torch.int64)
        self._own_ids = torch.tensor(list(self._own.values()), dtype=torch.int64)
        self._transcripts: dict[Sequence, Transcript] = {}

    def begin(self, seq: Sequence) -> None:
        self._transcripts[seq] = Transcript(self._target, self._draft)

    def end(self, seq: Sequence) -> None:
        self._transcripts.pop(seq, None)

    def text(self, seq: Sequence) -> Text | None:
        transcript = self._transcripts[seq]
        transcript.extend(seq.tokens)
        pending = [self._own.get(token) for token in transcript.pending]  # bytes of an open character
        known = [token for token in pending if token is not None]
        ids = [*transcript.ids, *known]
        return Text(seq, ids, transcript.settled) if ids and len(known) == len(pending) else None

    def own(self, token: int) -> int:
        return self._own[token]

    def scores(self, logits: Tensor) -> Tensor:
        out = torch.full((len(logits), self._vocab), float("-inf"))
        out[:, self._ids] = logits[:, self._own_ids]
        return out


def shared_tokens(target: Tokenizer, draft: Tokenizer) -> dict[int, int]:
    """The target's id to the draft's of every token that writes the same in both, and of the end of text."""
    theirs: dict[tuple[bool, bytes], int] = {}
    for i, written in sorted(draft.spellings().items()):
        theirs.setdefault(written, i)
    shared: dict[int, int] = {}
    taken: set[int] = set()
    if target.eos_id is not None and draft.eos_id is not None:
        shared[target.eos_id] = draft.eos_id
        taken.add(draft.eos_id)
    for i, written in sorted(target.spellings().items()):
        draft_id = theirs.get(written)
        if draft_id is not None and draft_id not in taken and i not in shared:
            shared[i] = draft_id
            taken.add(draft_id)
    return shared


class Related(NamedTuple):
    """A draft model that was loaded, and how its tokens become the target's (None: by way of text)."""

    runner: Runner
    tokenizer: Tokenizer | None
    vocabulary: Vocabulary | None


def load_related(context: DraftContext, way: str = "auto") -> Related:
    """The draft model that the settings name."""
    directory = context.weights("draft")
    runner, tokenizer = context.load_model(directory), Tokenizer.load(directory)
    target = Side(str(context.directory), context.tokenizer, context.target.decoder.config.vocab)
    return Related(runner, tokenizer, relate(target, Side(str(directory), tokenizer, runner.decoder.config.vocab), way))


class Side(NamedTuple):
    """One of the two models."""

    name: str
    tokenizer: Tokenizer | None
    vocab: int


def relate(target: Side, draft: Side, way: str = "auto") -> Vocabulary | None:
    """How the draft's tokens become the target's; None: by way of text. ModelError where nothing works."""
    checks.choice("vocabulary", way, WAYS)
    if target.tokenizer is None or draft.tokenizer is None:
        if target.vocab == draft.vocab:
            return SameTokens()
        bare = target.name if target.tokenizer is None else draft.name
        raise ModelError(
            f"{draft.name} has a vocabulary of {draft.vocab}, the target {target.vocab}, "
            f"and {bare} holds no tokenizer that tells which tokens they share"
        )
    ours, theirs = target.tokenizer.table(), draft.tokenizer.table()
    if ours == theirs:
        return SameTokens(target.vocab)
    shared = len(shared_tokens(target.tokenizer, draft.tokenizer))
    enough = shared >= ENOUGH_SHARED * min(len(ours), len(theirs))
    lost = _lost(target) or _lost(draft)
    if way == "shared" or (way == "auto" and enough):
        if shared:
            return SharedTokens(target.tokenizer, draft.tokenizer, target.vocab)
    elif not lost:
        return None
    odd = min(set(ours.items()) ^ set(theirs.items()))
    raise ModelError(
        f"{draft.name} and {target.name} have different tokenizers ({len(theirs)} and {len(ours)} tokens; "
        f"first difference: token {odd[0]!r}, id {odd[1]}) and cannot draft for each other: they share {shared} tokens"
        + (f", and text does not survive: {lost}" if lost else "")
    )


def _lost(side: Side) -> str | None:
    """What a tokenizer does to plain text that it does not give back."""
    assert side.tokenizer is not None
    for probe in _PROBES:
        back = side.tokenizer.decode(side.tokenizer.encode_bare(probe), skip_special_tokens=False)
        if back != probe:
            return f"{side.name} turns {probe!r} into {back!r}"
    return None
