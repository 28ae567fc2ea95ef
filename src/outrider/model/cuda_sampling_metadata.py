"""Sampling metadata of a round on a GPU: the parameters of its rows and the penalty table of its sequences.

The tokens of a sequence are counted once, as they come. A round sends the parameters of each row that has some and the
penalised tokens of each sequence. Rows with grammars, lists of allowed tokens or bad words are chosen by the host instead.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.core import ROOT, Batch, Request, Tree, depths
from outrider.core import Sequence as Generation
from outrider.model.cuda_inputs import GraphInputs
from outrider.ops.cuda.penalties import ADJUSTS, BANS, COUNTED, FILTERS, SEEN, STOPS, PenaltyTable, TokenPenalty
from outrider.sampling import SamplingParams
from outrider.sampling.noise import prefix_of

__all__ = ["SamplingMetadata"]

_MAX_ROWS = 4096


class _Needs(NamedTuple):
    """What the rows of some requests are chosen with."""

    requests: list[Request]
    temperatures: NDArray[np.float32]
    prefixes: NDArray[np.uint64]  # of the noise
    shaped: list[int]  # requests with penalties, biases, bans or filters
    follows_text: bool  # some of their parameters change with the text

    @classmethod
    def of(cls, requests: list[Request]) -> _Needs:
        params = [request.params for request in requests]
        return cls(
            requests,
            np.array([0.0 if p.greedy else p.temperature for p in params], np.float32),
            np.array([prefix_of(request.seed, request.index) for request in requests], np.uint64),
            [i for i, p in enumerate(params) if p.adjusts or p.truncates],
            any(p.adjusts for p in params),
        )


class _Filled(NamedTuple):
    """What the penalty table holds."""

    needs: _Needs
    counts: list[int]  # rows of each request
    param_rows: NDArray[np.int32]


class SamplingMetadata:
    """Noise and parameters of a round's rows, and the token penalties of its sequences.

    While requests and their rows stay the same and no parameter follows the text, nothing is written again.
    """

    def __init__(self, device: torch.device) -> None:
        self.table = PenaltyTable(_MAX_ROWS, device)
        self._needs = _Needs.of([])
        self._filled: _Filled | None = None
        self._sequences: dict[Generation, _SequencePenalties] = {}

    def fill(self, inputs: GraphInputs, batch: Batch, trees: Sequence[Tree], roots: Sequence[int]) -> list[int]:
        """Set noise and parameters of every wanted row. Returns the sequences that the host must choose for."""
        requests = [seq.request for seq in batch.sequences]
        if requests != self._needs.requests:
            self._needs = _Needs.of(requests)
        needs = self._needs
        counts = [1 + len(tree.tokens) if root >= 0 else 0 for tree, root in zip(trees, roots, strict=True)]
        if inputs.sampled is None or inputs.sampled[0] is not needs or inputs.sampled[1] != counts:
            rows = sum(counts)
            inputs.temperatures[:rows] = np.repeat(needs.temperatures, counts)
            inputs.prefixes[:rows] = np.repeat(needs.prefixes, counts)
            inputs.param_rows[:] = -1
            inputs.sampled = None if needs.shaped else (needs, counts)
        if not needs.shaped:
            return []
        held = self._filled
        if held is not None and held.needs is needs and held.counts == counts and not needs.follows_text:
            inputs.param_rows[: len(held.param_rows)] = held.param_rows
            return []
        return self._fill_table(inputs, batch, trees, roots)

    def _fill_table(self, inputs: GraphInputs, batch: Batch, trees: Sequence[Tree], roots: Sequence[int]) -> list[int]:
        """Write the parameters of the sequences that have some. One that was not in the last round is counted from its start."""
        previous, self._sequences = self._sequences, {}
        self.table.clear()
        by_host = []
        for b in self._needs.shaped:
            if roots[b] < 0:
                continue
            places = self._add(batch.sequences[b], trees[b], previous)
            if places is None:
                by_host.append(b)
            else:
                inputs.param_rows[roots[b] : roots[b] + len(places)] = places
        self.table.send()
        counts = [1 + len(tree.tokens) if root >= 0 else 0 for tree, root in zip(trees, roots, strict=True)]
        self._filled = None if by_host else _Filled(self._needs, counts, inputs.param_rows[: sum(counts)].copy())
        return by_host

    def _add(self, seq: Generation, tree: Tree, previous: Mapping[Generation, _SequencePenalties]) -> range | None:
        """The rows of parameters of a root and its nodes, or None if the host must choose."""
        params, (nodes, parents, _) = seq.request.params, tree
        if params.structured is not None or params.allowed_token_ids is not None or params.bad_word_ids:
            return None
        seq_penalties = self._sequences[seq] = previous.get(seq) or _SequencePenalties(seq)
        seq_penalties.read(seq.tokens)
        paths = seq_penalties.paths(nodes, parents) if params.uses_history else []
        places = self.table.place(seq_penalties.params_words, 1 + len(nodes), len(seq_penalties.penalties) + sum(map(len, paths)))
        if places is None:
            return None
        if params.adjusts:
            row_params = self.table.row_params[places.start : places.stop]
            row_params[:, :2] = self.table.add(seq_penalties.penalties)
            for row, path in enumerate(paths, 1):
                row_params[row, 2:4] = self.table.add(path)
            _ban(row_params, params.min_tokens - seq.output_len, parents)
        return places


def _ban(row_params: NDArray[np.int32], remaining: int, parents: Sequence[int]) -> None:
    """Ban stop tokens at the root and at nodes less than `remaining` tokens below it."""
    if remaining <= 0:
        return
    row_params[[True, *(depth + 1 < remaining for depth in depths(parents))], 4] |= BANS


class _SequencePenalties:
    """The token penalties of one sequence: its biased, banned, seen and counted tokens."""

    def __init__(self, seq: Generation) -> None:
        self._params, self._stops = seq.request.params, seq.request.stop_ids
        self._prompt = seq.prompt_len
        self._read = self._prompt if self._params.repetition_penalty == 1.0 else 0  # the other penalties ignore the prompt
        self._places: dict[int, int] = {}
        self._counts: dict[int, int] = {}  # in the output
        self._words = np.zeros((64, 4), np.int32)
        self.params_words = _params_words(self._params)
        bias = self._params.logit_bias or {}
        for token in sorted(set(bias) | (self._stops if self._params.min_tokens else frozenset())):
            self._put(token, seen=False)

    @property
    def penalties(self) -> NDArray[np.int32]:
        return self._words[: len(self._places)]

    def read(self, tokens: Sequence[int]) -> None:
        """Count the tokens that were added since the last call."""
        if not self._params.uses_history:
            return
        for position in range(self._read, len(tokens)):
            token = tokens[position]
            if position >= self._prompt:
                self._counts[token] = self._counts.get(token, 0) + 1
            self._put(token, seen=True)
        self._read = len(tokens)

    def paths(self, nodes: Sequence[int], parents: Sequence[int]) -> list[list[TokenPenalty]]:
        """For every node, the penalties of the tokens on its path, with the path counted."""
        counts: dict[int, dict[int, int]] = {ROOT: {}}
        for node, (token, parent) in enumerate(zip(nodes, parents, strict=True)):
            above = counts[parent]
            counts[node] = above | {token: above.get(token, 0) + 1}
        known: dict[tuple[int, int], TokenPenalty] = {}
        out = []
        for node in range(len(nodes)):
            penalties = []
            for pair in counts[node].items():
                if pair not in known:
                    known[pair] = self._penalty(pair[0], self._counts.get(pair[0], 0) + pair[1], seen=True)
                penalties.append(known[pair])
            out.append(penalties)
        return out

    def _put(self, token: int, seen: bool) -> None:
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._words):
            self._words = np.concatenate((self._words, np.zeros_like(self._words)))
        self._words[place] = self._penalty(token, self._counts.get(token, 0), seen)

    def _penalty(self, token: int, count: int, seen: bool) -> TokenPenalty:
        params = self._params
        flags = STOPS if params.min_tokens and token in self._stops else 0
        if seen and params.repetition_penalty != 1.0:
            flags |= SEEN
        if count and (params.presence_penalty or params.frequency_penalty):
            flags |= COUNTED
        frequency = np.float32(params.frequency_penalty) * np.float32(count)
        return token, flags, _bits((params.logit_bias or {}).get(token, 0.0)), _bits(float(frequency))


def _bits(value: float) -> int:
    return int(struct.unpack("i", struct.pack("f", value))[0])


def _params_words(params: SamplingParams) -> NDArray[np.int32]:
    """The constant words of a row's parameters; penalty_kernels.py documents the layout."""
    words = np.zeros(12, np.int32)
    filters = params.truncates and not params.greedy
    words[4:6] = (ADJUSTS if params.adjusts else 0) | (FILTERS if filters else 0), max(params.top_k, 0)
    words[6:9].view(np.float32)[:] = params.min_p, params.repetition_penalty, params.presence_penalty
    words[10:].view(np.float64)[:] = params.top_p
    return words
