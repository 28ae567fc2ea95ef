"""What the rows of a round ask of the choice on a GPU, kept in the order the kernels read it.

A sequence's text is noted once, token by token; a round sends a head for each row and the marked tokens of each
sequence. Grammars, lists of allowed tokens and bad words are not told here: the host chooses for those.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.core import ROOT
from outrider.core import Sequence as Generation
from outrider.ops.cuda.shaping import ADJUSTS, BANS, COUNTED, FILTERS, SEEN, STOPS, Entry, Shaping
from outrider.sampling import SamplingParams

__all__ = ["Wishes"]

_MOST_ROWS = 4096


class Wishes:
    """The sequences of the last round that ask for more than a temperature, and their texts as the device knows them."""

    def __init__(self, device: torch.device) -> None:
        self.shaping = Shaping(_MOST_ROWS, device)
        self._texts: dict[Generation, _Text] = {}
        self._before: dict[Generation, _Text] = {}

    def begin(self) -> None:
        """A new round. Texts of sequences that sat the last one out are noted anew."""
        self._before, self._texts = self._texts, {}
        self.shaping.clear()

    def tell(self, seq: Generation, nodes: Sequence[int], parents: Sequence[int]) -> range | None:
        """Take in a root and its nodes: where their heads lie, empty where they need none. None: the host must choose."""
        params = seq.request.params
        if not (params.adjusts or params.truncates):
            return range(0)
        if params.structured is not None or params.allowed_token_ids is not None or params.bad_word_ids:
            return None
        text = self._texts[seq] = self._before.get(seq) or _Text(seq)
        text.read(seq.tokens)
        paths = text.paths(nodes, parents) if params.uses_history else []
        places = self.shaping.place(text.head, 1 + len(nodes), len(text.entries) + sum(map(len, paths)))
        if places is None:
            return None
        if params.adjusts:
            heads = self.shaping.heads[places.start : places.stop]
            heads[:, :2] = self.shaping.add(text.entries)
            for row, path in enumerate(paths, 1):
                heads[row, 2:4] = self.shaping.add(path)
            _ban(heads, params.min_tokens - seq.output_len, parents)
        return places

    def send(self) -> None:
        """Move all that was told to the device."""
        self.shaping.send()


def _ban(heads: NDArray[np.int32], left: int, parents: Sequence[int]) -> None:
    """Stop tokens are banned at the root and the nodes that lie less than `left` tokens on."""
    if left <= 0:
        return
    depths = [0]
    for parent in parents:
        depths.append(depths[parent + 1] + 1)
    heads[[depth < left for depth in depths], 4] |= BANS


class _Text:
    """The tokens of one sequence that its parameters treat differently."""

    def __init__(self, seq: Generation) -> None:
        self._params, self._stops = seq.request.params, seq.request.stop_ids
        self._prompt = seq.prompt_len
        self._read = self._prompt if self._params.repetition_penalty == 1.0 else 0  # the other penalties spare the prompt
        self._places: dict[int, int] = {}
        self._counts: dict[int, int] = {}  # in the output
        self._words = np.zeros((64, 4), np.int32)
        self.head = _head(self._params)
        bias = self._params.logit_bias or {}
        for token in sorted(set(bias) | (self._stops if self._params.min_tokens else frozenset())):
            self._put(token, seen=False)

    @property
    def entries(self) -> NDArray[np.int32]:
        return self._words[: len(self._places)]

    def read(self, tokens: Sequence[int]) -> None:
        """Note the tokens that have come since."""
        if not self._params.uses_history:
            return
        for position in range(self._read, len(tokens)):
            token = tokens[position]
            if position >= self._prompt:
                self._counts[token] = self._counts.get(token, 0) + 1
            self._put(token, seen=True)
        self._read = len(tokens)

    def paths(self, nodes: Sequence[int], parents: Sequence[int]) -> list[list[Entry]]:
        """For every node, the tokens on its path as they stand after it."""
        counts: dict[int, dict[int, int]] = {ROOT: {}}
        for node, (token, parent) in enumerate(zip(nodes, parents, strict=True)):
            above = counts[parent]
            counts[node] = above | {token: above.get(token, 0) + 1}
        known: dict[tuple[int, int], Entry] = {}
        out = []
        for node in range(len(nodes)):
            own = []
            for pair in counts[node].items():
                if pair not in known:
                    known[pair] = self._entry(pair[0], self._counts.get(pair[0], 0) + pair[1], seen=True)
                own.append(known[pair])
            out.append(own)
        return out

    def _put(self, token: int, seen: bool) -> None:
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._words):
            self._words = np.concatenate((self._words, np.zeros_like(self._words)))
        self._words[place] = self._entry(token, self._counts.get(token, 0), seen)

    def _entry(self, token: int, count: int, seen: bool) -> Entry:
        params = self._params
        marks = STOPS if params.min_tokens and token in self._stops else 0
        if seen and params.repetition_penalty != 1.0:
            marks |= SEEN
        if count and (params.presence_penalty or params.frequency_penalty):
            marks |= COUNTED
        less = np.float32(params.frequency_penalty) * np.float32(count)
        return token, marks, _bits((params.logit_bias or {}).get(token, 0.0)), _bits(float(less))


def _bits(value: float) -> int:
    return int(struct.unpack("i", struct.pack("f", value))[0])


def _head(params: SamplingParams) -> NDArray[np.int32]:
    """The words of a row's head that do not change; shape_kernels.py says which is which."""
    words = np.zeros(12, np.int32)
    filters = params.truncates and not params.greedy
    words[4:6] = (ADJUSTS if params.adjusts else 0) | (FILTERS if filters else 0), max(params.top_k, 0)
    words[6:9].view(np.float32)[:] = params.min_p, params.repetition_penalty, params.presence_penalty
    words[10:].view(np.float64)[:] = params.top_p
    return words
