"""How a draft model's tokens relate to the target's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as Seq
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from outrider import checks
from outrider.core import Sequence, integers
from outrider.draft.context import DraftContext, LoadedDraft
from outrider.draft.reader import Text
from outrider.errors import ModelError
from outrider.model import Runner
from outrider.text import Span, TextStream, Tokenizer

__all__ = ["Related", "SameTokens", "SharedTokens", "Side", "Transcript", "Vocabulary", "load_related", "relate", "shared_tokens"]

WAYS = ("auto", "shared", "text")
ENOUGH_SHARED = 0.5  # of the smaller vocabulary
_WINDOW = 32  # tokens encoded again when text comes after them
_PROBES = ("def f(x):\n    return x + 1\n", "The quick, brown Fox.")


class SameTokens:
    """Both models have the same tokens. Ids past the end of the target's matrix, where one is padded, are cut."""

    foreign = False  # whether the model counts positions otherwise, so that it needs separate pages

    def __init__(self, vocab: int | None = None) -> None:
        self._vocab = vocab

    def end(self, seq: Sequence) -> None:
        """A sequence is over; forget it."""

    def text(self, seq: Sequence) -> Text | None:
        """What the draft model reads for a sequence; None where its text is not known yet."""
        return Text(seq, seq.tokens, len(seq.tokens))

    def draft_id(self, token: int) -> int:
        """The draft model's id of a target token it proposed."""
        return token

    def scores(self, logits: Tensor) -> Tensor:
        """The draft model's logits over the target's ids, -inf for tokens it does not have."""
        missing = 0 if self._vocab is None else self._vocab - logits.shape[1]
        return logits if missing == 0 else torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))


class SharedTokens:
    """The draft model proposes only tokens both tables have; the text it reads is in its own tokens."""

    foreign = True

    def __init__(self, target: Tokenizer, draft: Tokenizer, vocab: int) -> None:
        self._vocab = vocab
        self._draft_id = {token: draft_id for token, draft_id in shared_tokens(target, draft).items() if token < vocab}
        self._ids, self._draft_ids = integers(list(self._draft_id)), integers(list(self._draft_id.values()))
        self._transcripts: dict[Sequence, Transcript] = defaultdict(partial(Transcript, target, draft))

    def end(self, seq: Sequence) -> None:
        self._transcripts.pop(seq, None)

    def text(self, seq: Sequence) -> Text | None:
        transcript = self._transcripts[seq]
        transcript.extend(seq.tokens)
        pending = [self._draft_id.get(token) for token in transcript.pending]  # bytes of an open character
        known = [token for token in pending if token is not None]
        ids = [*transcript.ids, *known]
        return Text(seq, ids, transcript.settled) if ids and len(known) == len(pending) else None

    def draft_id(self, token: int) -> int:
        return self._draft_id[token]

    def scores(self, logits: Tensor) -> Tensor:
        out = torch.full((len(logits), self._vocab), float("-inf"))
        out[:, self._ids] = logits[:, self._draft_ids]
        return out


Vocabulary = SameTokens | SharedTokens


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
    name, runner, tokenizer = _loaded_draft(context)
    target = Side(str(context.directory), context.tokenizer, context.target.decoder.spec.vocab)
    return Related(runner, tokenizer, relate(target, Side(name, tokenizer, runner.decoder.spec.vocab), way))


def _loaded_draft(context: DraftContext) -> LoadedDraft:
    if context.loaded is not None and context.config.model is None:
        return context.loaded
    directory = context.weights("draft")
    return LoadedDraft(str(directory), context.load_model(directory), Tokenizer.load(directory))


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


class Transcript:
    """What another tokenizer makes of a growing text.

    New text can change how the last tokens before it are cut, so a window of them is encoded again.
    Its first half only gives the second its surroundings. What the cut then misses is a guess about
    how the draft model would have read the text, and costs acceptance at most.
    """

    def __init__(self, target: Tokenizer, draft: Tokenizer) -> None:
        self.ids: list[int] = draft.bos_ids
        self._target = target
        self._draft = draft
        self._stream = TextStream(target, (), skip_special_tokens=False)
        self._read = 0
        self._text = ""  # of the window
        self._window: list[Span] = []

    @property
    def settled(self) -> int:
        """Leading ids that will not change."""
        return len(self.ids) - len(self._window)

    @property
    def pending(self) -> Seq[int]:
        """The target's tokens of a last character that is still open; they are not in the ids."""
        return self._stream.pending

    def extend(self, tokens: Seq[int]) -> None:
        """Take in what is new of the target's tokens."""
        if not self._read and list(tokens[: len(self._target.bos_ids)]) == self._target.bos_ids:
            self._read = len(self._target.bos_ids)  # the draft's own opens its ids
        text = "".join(map(self._stream.push, tokens[self._read :]))
        self._read = len(tokens)
        if text:
            self._append(text)

    def _append(self, text: str) -> None:
        old, self._text = self._window, self._text + text
        new = self._draft.spans(self._text)
        kept, taken = _meeting(old, new)
        del self.ids[len(self.ids) - len(old) + kept :]
        self.ids += [span.token for span in new[taken:]]
        self._window = [*old[:kept], *new[taken:]]
        drop = max(len(self._window) - _WINDOW, 0)
        while drop and not _apart(self._window, drop):
            drop -= 1
        if drop:
            cut = self._window[drop - 1].end
            self._text = self._text[cut:]
            self._window = [Span(token, start - cut, end - cut) for token, start, end in self._window[drop:]]


def _meeting(old: Seq[Span], new: Seq[Span]) -> tuple[int, int]:
    """How many old tokens to keep, and how many new ones they stand for: the first cut both have in the second half."""
    ends = {span.end: i + 1 for i, span in enumerate(new) if _apart(new, i + 1)}
    for i in range(len(old) // 2, len(old)):
        if i and _apart(old, i) and old[i - 1].end in ends:
            return i, ends[old[i - 1].end]
    return 0, 0


def _apart(spans: Seq[Span], i: int) -> bool:
    """Whether token i begins a new character."""
    return i >= len(spans) or spans[i].start >= spans[i - 1].end
