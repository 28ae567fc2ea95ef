"""EAGLE and MTP: one decoder layer that drafts from the target's features. One definition for training and serving.

The pairing, in training and in serving: row i joins the feature of position i with the token at i + 1,
carries the rotary position i, and predicts the token at i + 2. In a draft the head's output for
row i takes the place of the feature at i + 1. Rows are flat and attention is an argument, as in the
decoder, so a KV pool of one layer serves it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from outrider.heads.borrowed import Borrowed
from outrider.model import Attend, ModelSpec
from outrider.model.decoder import Layer, RopeTable, Turn, finished_logits, norm_weights, normed
from outrider.ops import Ops

__all__ = ["EAGLE1", "EAGLE3", "MTP", "EagleConfig", "EagleHead", "EagleLayer", "default_taps"]

EAGLE1, EAGLE3, MTP = "eagle1", "eagle3", "mtp"


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """A head's shape. EAGLE-1, 3 and 3.1 and MTP differ in fields.

    EAGLE-1 and MTP read one feature: the target's last hidden row *after* its final norm, as the published
    code does. Its tap is the stream leaving the last layer, and `EagleHead.fuse` applies that norm.
    MTP norms embedding and feature each before they are joined; its layer is a decoder layer of any kind.
    """

    shape: ModelSpec  # of its one layer; vocab and hidden are the head's
    target_hidden: int  # width of one tap
    taps: tuple[int, ...]  # target layers whose input rows are read
    form: str = EAGLE3
    draft_vocab: int | None = None  # tokens of a reduced vocabulary; None: the target's vocabulary
    own_embedding: bool = False  # False: the target's
    own_output: bool = False
    fc_bias: bool = False
    fc_norm: bool = False  # 3.1: a norm on each tap before fc
    norm_before_fc: bool = False  # one norm on the taps together
    norm_output: bool = False  # 3.1: what is fed back is the output after the last norm
    norm_before_residual: bool = False  # the residual is the normed feature

    @property
    def outputs(self) -> int:
        """Tokens the head can propose."""
        return self.draft_vocab or self.shape.vocab

    @property
    def wide(self) -> bool:
        """Whether the layer's attention reads embedding and feature side by side."""
        return self.form == EAGLE3

    @property
    def joins_normed(self) -> bool:
        """Whether embedding and feature are normed before `fc` joins them."""
        return self.form == MTP

    @property
    def own_norm(self) -> bool:
        """Whether the head has a last norm of its own."""
        return self.form != EAGLE1


class EagleLayer(Layer):
    """A decoder layer, under MTP any. Under EAGLE-3 q, k and v read two rows at once; under EAGLE-1 there is no first norm."""

    norm_hidden: nn.Parameter | None

    def __init__(self, config: EagleConfig, dtype: torch.dtype) -> None:
        (layer,) = config.shape.layers
        super().__init__(replace(layer, norm_in=None) if config.form == EAGLE1 else layer, config.shape.hidden, 0, dtype)
        if config.wide:
            self.qkv = nn.Parameter(torch.empty(self.qkv.shape[0], 2 * config.shape.hidden, dtype=dtype))
        self.norm_hidden = norm_weights(layer.norm_in if config.wide else None, config.shape.hidden)[0]

    def run(self, x: Tensor, residual: Tensor, turn: Turn, attend: Attend, ops: Ops) -> Tensor:
        """Attention over the rows x, then the feed-forward part, each added to the residual."""
        residual = residual + self.attention(x, turn, attend, ops)
        return residual + self.mlp(normed(residual, self.spec.norm_mlp, self.norm_mlp, self.norm_mlp_bias, ops), ops)


class EagleHead(nn.Module):
    """Drafts the target's next tokens, one forward per depth.

    `fuse` makes features of the target's taps, `forward` turns (token, feature) rows into hidden rows
    (the next features), `logits` scores them.
    """

    embedding: Tensor
    output: Tensor
    target_norm: Tensor
    target_norm_bias: Tensor | None
    vocab_ids: Tensor | None  # (draft_vocab,) target id of each output row; None: the same ids

    def __init__(self, config: EagleConfig, borrowed: Borrowed, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = config
        hidden, width = config.shape.hidden, config.target_hidden * len(config.taps)
        self.layer = EagleLayer(config, dtype)
        self.fc = nn.Parameter(torch.empty(hidden, width if config.wide else 2 * hidden, dtype=dtype))
        self.fc_bias = nn.Parameter(torch.zeros(hidden, dtype=dtype)) if config.fc_bias else None
        self.norm = nn.Parameter(torch.ones(hidden)) if config.own_norm else None
        self.norm_embedding = nn.Parameter(torch.ones(hidden)) if config.joins_normed else None
        self.norm_feature = nn.Parameter(torch.ones(hidden)) if config.joins_normed else None
        self.input_norm = nn.Parameter(torch.ones(width)) if config.norm_before_fc else None
        own_norms = [nn.Parameter(torch.ones(config.target_hidden)) for _ in config.taps]
        self.fc_norms = nn.ParameterList(own_norms) if config.fc_norm else None
        self._place("embedding", config.own_embedding, borrowed.embedding, (config.shape.vocab, hidden))
        self._place("output", config.own_output, borrowed.output, (config.outputs, hidden))
        self.register_buffer("target_norm", borrowed.norm, persistent=False)
        self.register_buffer("target_norm_bias", borrowed.norm_bias, persistent=False)
        self.target = borrowed.spec
        ids = None if config.draft_vocab is None else torch.arange(config.draft_vocab, device=borrowed.norm.device)
        self.register_buffer("vocab_ids", ids)
        (rope,) = config.shape.ropes
        self.rope = RopeTable(rope, config.shape.head_dim, config.shape.context)

    def stretch(self, positions: int) -> None:
        """Take up to so many positions. Behind its context, rows must not see farther back than the context reaches."""
        if positions > len(self.rope.cos):
            (rope,) = self.config.shape.ropes
            self.rope = RopeTable(rope, self.config.shape.head_dim, positions)

    def fuse(self, taps: Tensor, ops: Ops) -> Tensor:
        """Features (N, hidden) of the target's concatenated taps (N, taps * target_hidden)."""
        if not self.config.wide:
            return normed(taps, self.target.norm, self.target_norm, self.target_norm_bias, ops)
        return ops.linear(self.normed_taps(taps, ops), self.fc, self.fc_bias).float()

    def normed_taps(self, taps: Tensor, ops: Ops) -> Tensor:
        """Taps as `fc` reads them."""
        eps = self.config.shape.norm.eps
        if self.input_norm is not None:
            taps = ops.rms_norm(taps, self.input_norm, eps)
        if self.fc_norms is not None:
            parts = torch.split(taps, self.config.target_hidden, dim=-1)
            taps = torch.cat([ops.rms_norm(part, weight, eps) for part, weight in zip(parts, self.fc_norms, strict=True)], dim=-1)
        return taps

    def forward(self, tokens: Tensor, features: Tensor, positions: Tensor, attend: Attend, ops: Ops) -> Tensor:
        """Hidden rows (N, hidden): what `logits` scores, and the feature of the position after.

        Row i takes the feature of position i, the token at i + 1 and the position i.
        """
        c, layer = self.config, self.layer
        embedded, turn = nn.functional.embedding(tokens, self.embedding).float(), self.rope(positions)
        if self.target.embedding_scale != 1.0 and not c.own_embedding:
            embedded = embedded * self.target.embedding_scale
        if not c.wide:
            pair = torch.cat((self.normed_embedding(embedded, ops), self.normed_feature(features, ops)), dim=-1)
            joined = ops.linear(pair, self.fc, self.fc_bias).float()
            if not c.joins_normed:
                return layer.run(joined, joined, turn, attend, ops)
            return self._normed(layer(joined, turn, attend, ops), ops)
        assert layer.norm_hidden is not None
        feature = normed(features, layer.spec.norm_in, layer.norm_hidden, None, ops)
        pair = torch.cat((normed(embedded, layer.spec.norm_in, layer.norm_in, layer.norm_in_bias, ops), feature), dim=-1)
        hidden = layer.run(pair, feature if c.norm_before_residual else features, turn, attend, ops)
        return self._normed(hidden, ops) if c.norm_output else hidden

    def logits(self, hidden: Tensor, ops: Ops) -> Tensor:
        """(N, outputs) float32; column j is token j, or vocab_ids[j] where the vocabulary is reduced."""
        if self.config.own_norm and not self.config.norm_output:
            hidden = self._normed(hidden, ops)
        logits = ops.linear(hidden, self.output).float()
        return logits if self.config.own_output else finished_logits(logits, self.target)

    def normed_embedding(self, embedded: Tensor, ops: Ops) -> Tensor:
        """Embeddings as `fc` reads them."""
        return normed(embedded, self.config.shape.norm if self.config.joins_normed else None, self.norm_embedding, None, ops)

    def normed_feature(self, features: Tensor, ops: Ops) -> Tensor:
        """Features as `fc` reads them beside embeddings."""
        return normed(features, self.config.shape.norm if self.config.joins_normed else None, self.norm_feature, None, ops)

    def _normed(self, hidden: Tensor, ops: Ops) -> Tensor:
        return normed(hidden, self.config.shape.norm, self.norm, None, ops)

    def _place(self, name: str, is_own: bool, borrowed: Tensor, shape: tuple[int, int]) -> None:
        """Register a parameter of this head, or the target's tensor as a buffer that is neither saved nor trained."""
        if is_own:
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))
            return
        assert tuple(borrowed.shape) == shape, f"the target's {name} is {tuple(borrowed.shape)}, the head needs {shape}"
        self.register_buffer(name, borrowed, persistent=False)


def default_taps(layers: int) -> tuple[int, int, int]:
    """The published choice: an early, a middle and a late layer."""
    return (min(2, layers), layers // 2, max(layers - 3, 0))
