"""Block drafters (DFlash): a few layers that guess all tokens of a block in one pass. One definition for training and serving.

A block is the newest token and masked slots after it, at absolute positions. Every layer attends to the block and to the text
before it, whose keys and values are made of the target's features alone; so a draft writes nothing that would have to be taken
back. Rows are flat, blocks lie end to end, and attention is an argument, as in the decoder.

DSpark adds scores of pairs and a confidence, DFlash 2 convolutions within the block and a selector of paths; see heads/pairs.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.heads.borrowed import Borrowed
from outrider.heads.pairs import Confidence, PairScores
from outrider.model import Attend, ModelSpec
from outrider.model.decoder import Layer, RopeTable, Turn, finished_logits, norm_weights, normed
from outrider.ops import Ops

__all__ = ["BlockConfig", "BlockHead", "Convolution", "KeyValue", "Selector", "in_block", "spread_taps"]


class KeyValue(NamedTuple):
    """Keys and values of rows in one layer."""

    keys: Tensor  # (N, KV heads, head_dim), rotated
    values: Tensor


@dataclass(frozen=True, slots=True)
class Convolution:
    """Of DFlash 2: a causal convolution over a block's rows, before and after each part of a layer."""

    taps: int = 2
    group: int = 16  # channels that share what is computed from the row


@dataclass(frozen=True, slots=True)
class Selector:
    """Of DFlash 2: pair scores that depend on the row, over the best tokens of each slot."""

    rank: int
    candidates: int = 16


@dataclass(frozen=True, slots=True)
class BlockConfig:
    """A block drafter's shape. DFlash, DSpark and DFlash 2 differ in fields."""

    shape: ModelSpec  # of its layers; vocab and hidden are the head's
    target_hidden: int  # width of one tap
    taps: tuple[int, ...]  # target layers whose input rows are read
    block: int  # rows: the newest token and masks
    mask: int  # the token id in masked slots
    causal: bool = False  # rows of a block see the rows before them alone
    from_anchor: bool = False  # DSpark: the newest token's row guesses too, each row for the place after its own
    markov: int = 0  # rank of the pair scores; 0: there are none
    confidence: bool = False  # a row says how likely its guess is accepted
    confidence_of_pair: bool = False  # and reads the pair scores' row of the token before
    convolution: Convolution | None = None
    selector: Selector | None = None
    draft_vocab: int | None = None  # tokens of a reduced vocabulary; None: the target's vocabulary
    own_embedding: bool = False  # False: the target's
    own_output: bool = False

    @property
    def outputs(self) -> int:
        """Tokens the head can propose."""
        return self.draft_vocab or self.shape.vocab

    @property
    def guesses(self) -> int:
        """Tokens a block guesses."""
        return self.block if self.from_anchor else self.block - 1


class BlockHead(nn.Module):
    """Guesses the tokens of a block.

    `fuse` makes features of the target's taps, `keys_values` what the layers attend to in the text, `forward` the rows of
    blocks, and `logits` scores them.
    """

    embedding: Tensor
    output: Tensor
    vocab_ids: Tensor | None  # (draft_vocab,) target id of each output row; None: the same ids

    def __init__(self, config: BlockConfig, borrowed: Borrowed, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = config
        shape, hidden = config.shape, config.shape.hidden
        self.fc = nn.Parameter(torch.empty(hidden, config.target_hidden * len(config.taps), dtype=dtype))
        self.hidden_norm = norm_weights(shape.norm, hidden)[0]
        self.layers = nn.ModuleList(Layer(layer, hidden, i, dtype) for i, layer in enumerate(shape.layers))
        convolution = config.convolution
        parts = 0 if convolution is None else 2 * shape.depth
        self.convolutions = nn.ModuleList(_BlockConvolution(convolution, hidden, dtype) for _ in range(parts))  # type: ignore[arg-type]
        self.norm = norm_weights(shape.norm, hidden)[0]
        rank, gated = (config.selector.rank, True) if config.selector else (config.markov, False)
        self.pairs = PairScores(shape.vocab, config.outputs, rank, hidden if gated else None, dtype) if rank else None
        self.confidence = Confidence(hidden + (rank if config.confidence_of_pair else 0)) if config.confidence else None
        self._place("embedding", config.own_embedding, borrowed.embedding, (shape.vocab, hidden), dtype)
        self._place("output", config.own_output, borrowed.output, (config.outputs, hidden), dtype)
        self.target, self.target_norm = borrowed.spec, borrowed.norm
        ropes = [layer.attention.rope for layer in shape.layers]
        self._rope_of = [None if rope is None else shape.ropes.index(rope) for rope in ropes]  # the table of each layer
        ids = None if config.draft_vocab is None else torch.arange(config.draft_vocab, device=borrowed.norm.device)
        self.register_buffer("vocab_ids", ids)
        self.stretch(shape.context)

    def stretch(self, positions: int) -> None:
        """Rotary tables for texts of that length; rows must not see farther back than the context reaches."""
        shape = self.config.shape
        self.positions = max(positions, shape.context)
        rows = self.positions + self.config.block  # a block may begin at the last position
        self.ropes = nn.ModuleList(RopeTable(rope, shape.head_dim, rows) for rope in shape.ropes)

    def fuse(self, taps: Tensor, ops: Ops) -> Tensor:
        """Features (N, hidden) of the target's concatenated taps (N, taps * target_hidden)."""
        return normed(ops.linear(taps, self.fc).float(), self.config.shape.norm, self.hidden_norm, None, ops)

    def keys_values(self, features: Tensor, positions: Tensor, ops: Ops) -> list[KeyValue]:
        """What each layer attends to at the text's positions. No norm comes before these products."""
        turns, made = self._turns(positions), []
        for layer in self.layers:
            assert isinstance(layer, Layer)
            rows = ops.linear(features, layer.qkv, layer.qkv_bias).float()
            _, keys, values = layer.queries_keys_values(rows, turns[layer.index], ops)
            made.append(KeyValue(keys, values))
        return made

    def tokens(self, newest: Tensor, length: int) -> Tensor:
        """Ids (N * length,) of blocks after the newest tokens (N,), end to end."""
        masks = newest.new_full((len(newest), length - 1), self.config.mask)
        return torch.cat((newest[:, None], masks), 1).flatten()

    def forward(self, tokens: Tensor, positions: Tensor, length: int, attend: Attend, ops: Ops) -> Tensor:
        """Rows (N, hidden) after the last norm, of blocks of `length` rows that lie end to end."""
        x = F.embedding(tokens, self.embedding).float()
        if self.target.embedding_scale != 1.0 and not self.config.own_embedding:
            x = x * self.target.embedding_scale
        turns = self._turns(positions)
        for layer in self.layers:
            assert isinstance(layer, Layer)
            turn = turns[layer.index]
            x = self._convolved(layer, x, turn, length, attend, ops) if self.convolutions else layer(x, turn, attend, ops)
        return normed(x, self.config.shape.norm, self.norm, None, ops)

    def logits(self, rows: Tensor, ops: Ops) -> Tensor:
        """(N, outputs) float32; column j is token j, or vocab_ids[j] where the vocabulary is reduced."""
        logits = ops.linear(rows, self.output).float()
        return logits if self.config.own_output else finished_logits(logits, self.target)

    def guessing(self, rows: Tensor, length: int) -> Tensor:
        """Of the rows (blocks * length, width) those that guess, (blocks, guesses, width)."""
        return rows.view(-1, length, rows.shape[-1])[:, 0 if self.config.from_anchor else 1 :]

    def _convolved(self, layer: Layer, x: Tensor, turn: Turn | None, length: int, attend: Attend, ops: Ops) -> Tensor:
        """A layer with convolutions around attention and feed-forward part."""
        spec = layer.spec
        first, second = self.convolutions[2 * layer.index], self.convolutions[2 * layer.index + 1]
        assert isinstance(first, _BlockConvolution)
        assert isinstance(second, _BlockConvolution)
        read = normed(x, spec.norm_in, layer.norm_in, layer.norm_in_bias, ops)
        read, after = first.open(read, length, ops)
        x = x + first.close(layer.attention(read, turn, attend, ops), after, length)
        read = normed(x, spec.norm_mlp, layer.norm_mlp, layer.norm_mlp_bias, ops)
        read, after = second.open(read, length, ops)
        return x + second.close(layer.mlp(read, ops), after, length)

    def _turns(self, positions: Tensor) -> list[Turn | None]:
        """The rotary turns of each layer."""
        turns = [table(positions) for table in self.ropes]
        return [None if rope is None else turns[rope] for rope in self._rope_of]

    def _place(self, name: str, is_own: bool, borrowed: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> None:
        """Register a parameter of this head, or the target's tensor as a buffer that is neither saved nor trained."""
        if is_own:
            self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=dtype)))
            return
        assert tuple(borrowed.shape) == shape, f"the target's {name} is {tuple(borrowed.shape)}, the head needs {shape}"
        self.register_buffer(name, borrowed, persistent=False)


class _BlockConvolution(nn.Module):
    """One before and one after a part of a layer: out[t] = sum over i of kernel[t, i] * x[t - i], zero before the block."""

    def __init__(self, shape: Convolution, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape = shape
        self.base = nn.Parameter(torch.zeros(2, shape.taps, hidden))
        self.projection = nn.Parameter(torch.empty(2 * shape.taps * (hidden // shape.group), hidden, dtype=dtype))

    def open(self, x: Tensor, length: int, ops: Ops) -> tuple[Tensor, Tensor]:
        """Rows before the part, and the kernels (N, taps, groups) for what comes after it."""
        before, after = ops.linear(x, self.projection).float().view(len(x), 2, self.shape.taps, -1).unbind(1)
        return self._convolve(x, before, self.base[0], length), after

    def close(self, x: Tensor, kernels: Tensor, length: int) -> Tensor:
        return self._convolve(x.float(), kernels, self.base[1], length)

    def _convolve(self, x: Tensor, kernels: Tensor, base: Tensor, length: int) -> Tensor:
        kernels = base + kernels.repeat_interleave(self.shape.group, -1)  # (N, taps, hidden)
        rows = x.view(-1, length, x.shape[-1])
        delayed = [F.pad(rows, (0, 0, i, 0))[:, :length].reshape(x.shape) for i in range(self.shape.taps)]
        return torch.stack([kernels[:, i] * part for i, part in enumerate(delayed)]).sum(0)


def spread_taps(layers: int, count: int) -> tuple[int, ...]:
    """The published choice: `count` layers evenly from the second to the third from last, as numbers of the layer after each."""
    if count == 1:
        return (max(layers // 2, 1),)
    return tuple(round(1 + i * max(layers - 4, 0) / (count - 1)) + 1 for i in range(count))


def in_block(length: int, causal: bool, device: torch.device) -> Tensor:
    """Which rows (length, length) of a block a row of it sees."""
    every = torch.ones(length, length, dtype=torch.bool, device=device)
    return every.tril() if causal else every
