"""A Transformers model with the cache of its class: one per sequence, for classes that paged attention cannot serve.

A forward is of one sequence. Draft nodes must be chains. A cache that can be cut is cut back to the text; any other one
(recurrent state, convolutions, a window that forgets) is copied before it reads drafts, and the copy takes its place only
if all of them became text.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from outrider.core import Batch, Drafts, Scores
from outrider.core import Sequence as Seq
from outrider.errors import InvalidParameter, ModelError
from outrider.model.hf.facade import Facade
from outrider.model.hf.paged import Taps
from outrider.model.hf.view import base_of, layers_of
from outrider.model.runner import Runner
from outrider.ops import Blocked
from outrider.ops.forwards import network

__all__ = ["CachedRunner", "ClassCache", "NoPages"]

_NAMES = ("past_key_values", "cache_params")  # of a cache, among the outputs and arguments of a class
_LAG = 8  # text tokens that a copied cache may be behind before it reads them without drafts


class NoPages:
    """Stands where a KVPool stands: pages are counted, and hold nothing."""

    token_bytes = 0

    def __init__(self, pages: int, page_size: int) -> None:
        self.pages, self.page_size = pages, page_size

    def slots(self, pages: Sequence[int], positions: Sequence[int]) -> list[int]:
        size = self.page_size
        return [pages[p // size] * size + p % size for p in positions]

    def move(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Nothing lies in slots."""

    def clear(self, pages: Sequence[int]) -> None:
        """Nothing lies in pages."""


@dataclass(slots=True)
class ClassCache:
    """A cache as the class of a model makes it, and the tokens it has read."""

    tokens: list[int] = field(default_factory=list)
    state: Any = None
    name: str = _NAMES[0]

    def copied(self) -> ClassCache:
        return ClassCache(list(self.tokens), copy.deepcopy(self.state), self.name)

    @property
    def can_be_cut(self) -> bool:
        """Whether it holds keys and values of every token, and nothing else.

        A cache class may hold more beside its layers, and then says that it cannot be cut.
        """
        layers = getattr(self.state, "layers", ())
        plain = bool(layers) and all(type(layer).__name__ == "DynamicLayer" for layer in layers)
        return plain and bool(getattr(self.state, "is_croppable", True))

    def cut(self, length: int) -> None:
        """Forget all but the first tokens."""
        if length < len(self.tokens):
            self.state.crop(length - len(self.tokens))
            self.tokens = self.tokens[:length]


@dataclass(slots=True)
class _Held:
    """The caches of one sequence: of its text, and where there are drafts that were tried, of both."""

    seq: Seq
    text: ClassCache
    tried: ClassCache | None = None


class CachedRunner(Runner):
    """Runs a view with its class's cache. `continues` says whether it may read several tokens after others."""

    chains_only = True
    partial_runs = "none"

    def __init__(self, view: Any, facade: Facade, pool: NoPages, continues: bool, held: int) -> None:
        self.decoder = facade  # type: ignore[assignment]
        self.pool = pool  # type: ignore[assignment]
        self.ops, self.stack = Blocked(), None
        self.guarantee = facade.guarantee
        self._view, self._continues, self._most = view, continues, held
        self._caches: dict[int, _Held] = {}  # by the id of a sequence, the least recently used first
        self._taps: Taps | None = None

    @torch.inference_mode()
    def score(self, batch: Batch, drafts: Drafts, taps: tuple[int, ...] = ()) -> Scores:
        """One forward, or several, of each sequence in turn."""
        if taps and self._taps is None:
            self._taps = Taps(layers_of(base_of(self._view)))
        logits: list[Tensor] = []
        tapped: list[Tensor] = []
        roots: list[int] = []
        first_rows: list[int] = []
        prompt_logits: dict[int, Tensor] = {}
        for b, (seq, fed, tree) in enumerate(zip(batch.sequences, batch.feeds, drafts.per_sequence, strict=True)):
            if tree.parents != list(range(-1, len(tree.parents) - 1)):
                raise InvalidParameter("draft", "this model verifies chains, and the draft branches")
            rows, hidden = self._score_one(seq, seq.tokens[: seq.cached + fed], tree.tokens, fed, taps)
            first_rows.append(sum(map(len, tapped)) if taps else sum(batch.feeds[:b]) + sum(drafts.counts[:b]))
            tapped.append(hidden)
            roots.append(sum(map(len, logits)) if batch.samples(b) else -1)
            if batch.samples(b):
                logits.append(rows[fed - 1 :])
            if seq.request.params.prompt_logprobs is not None and seq.cached < seq.prompt_len:
                prompt_logits[b] = rows[: min(fed, seq.prompt_len - seq.cached)]
        vocab = self.decoder.spec.vocab
        return Scores(
            torch.cat(logits) if logits else torch.empty(0, vocab),
            roots,
            first_rows,
            torch.cat(tapped) if taps else None,
            prompt_logits,
        )

    def _score_one(self, seq: Seq, text: list[int], nodes: list[int], fed: int, taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Logits of the last `fed` tokens of a text and of the draft nodes after it, and their tapped rows."""
        held = self._held(seq, text, fed)
        if held.text.can_be_cut or not nodes:
            rows, hidden = self._read(held.text, [*text, *nodes], taps)
        else:
            ready = len(text) - len(held.text.tokens)
            before = self._read(held.text, text, taps) if ready > _LAG or not self._continues or not held.text.tokens else None
            held.tried = held.text.copied()
            rows, hidden = self._read(held.tried, [*text, *nodes], taps)
            if before is not None:
                rows, hidden = torch.cat((before[0], rows)), torch.cat((before[1], hidden))
        count = fed + len(nodes)
        return rows[-count:], hidden[-count:]

    def _held(self, seq: Seq, text: list[int], fed: int) -> _Held:
        """The caches of a sequence, behind its text by `fed` tokens at least."""
        held = self._caches.pop(id(seq), None)
        if held is None or held.seq is not seq:
            held = _Held(seq, ClassCache())
        self._caches[id(seq)] = held
        while len(self._caches) > self._most:
            del self._caches[next(iter(self._caches))]
        if held.tried is not None and held.tried.tokens == text[: len(held.tried.tokens)]:
            held.text = held.tried  # every draft it read became text
        held.tried = None
        known = _common(held.text.tokens, text[: len(text) - fed])
        if known < len(held.text.tokens):
            if held.text.can_be_cut:
                held.text.cut(known)
            else:
                held.text = ClassCache()
        return held

    def read(self, cache: ClassCache, tokens: list[int]) -> Tensor:
        """Logits of what a cache lacks of a text, after letting it read that."""
        return self._read(cache, tokens, ())[0]

    @network
    def _read(self, cache: ClassCache, tokens: list[int], taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Let a cache read what it lacks of a text. Returns the logits and tapped rows of what it read."""
        missing = tokens[len(cache.tokens) :]
        at_once = self._continues or not cache.tokens
        parts = [missing] if at_once else [[token] for token in missing]
        read = [self._forward(cache, part, taps) for part in parts]
        return torch.cat([rows for rows, _ in read]), torch.cat([hidden for _, hidden in read])

    def _forward(self, cache: ClassCache, tokens: list[int], taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        if self._taps is not None:
            self._taps.want(taps)
        device = self.decoder.embedding.device
        ids = torch.tensor([tokens], device=device)
        extra = {} if cache.state is None else {cache.name: cache.state}
        known, cache.tokens, cache.state = cache.tokens, [], None  # where the class raises, its cache may hold anything
        out = self._view(input_ids=ids, use_cache=True, **extra)
        cache.name, cache.state = _cache_of(out)
        cache.tokens = known + tokens
        hidden = torch.cat(self._taps.taken(taps), -1).cpu() if taps and self._taps else torch.empty(len(tokens), 0)
        return out.logits[0].float().cpu(), hidden


def _common(a: list[int], b: list[int]) -> int:
    """Leading tokens that two texts share."""
    if a == b[: len(a)]:
        return len(a)
    return next((i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), min(len(a), len(b)))


def _cache_of(out: Any) -> tuple[str, Any]:
    """The cache among a class's outputs."""
    for name in _NAMES:
        if (state := getattr(out, name, None)) is not None:
            return name, state
    raise ModelError("the model keeps no KV cache (its outputs hold none), so no text can be continued; choose another model")
