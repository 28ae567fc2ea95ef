"""The networks to train for a target: their shapes, and fresh weights for each of them.

The networks themselves are defined in `heads/` and `model/`, once for training and serving.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from outrider.errors import InvalidParameter
from outrider.heads import (
    EAGLE1,
    EAGLE3,
    MTP,
    BlockConfig,
    BlockHead,
    Borrowed,
    EagleConfig,
    EagleHead,
    MedusaConfig,
    MedusaHeads,
    default_taps,
    spread_taps,
)
from outrider.model import Decoder, LlamaShape, ModelSpec, Rope
from outrider.train.attention import usable_chain
from outrider.train.block import TrainableBlock
from outrider.train.frozen import FrozenTarget
from outrider.train.losses import Divergence
from outrider.train.networks import TrainableDrafter, TrainableDraftModel, TrainableEagle, TrainableMedusa, TrainableMtp

__all__ = [
    "BlockShape",
    "DecoderShape",
    "EagleShape",
    "MedusaShape",
    "MtpShape",
    "initialise",
    "new_block",
    "new_decoder",
    "new_draft",
    "new_eagle",
    "new_medusa",
    "new_mtp",
    "set_vocabulary",
]

_FRESH = 0.03  # root mean square of a fresh embedding


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """The size of a decoder to train: a draft model, or a target."""

    layers: int = 12
    hidden: int = 512
    heads: int = 8
    kv_heads: int = 4
    ffn: int = 1408
    vocab: int = 8192
    context: int = 2048
    tied: bool = True

    def config(self, eos: int) -> ModelSpec:
        """The decoder's configuration; weights are stored for bfloat16."""
        if self.hidden % self.heads or self.heads % self.kv_heads:
            rule = f"{self.heads} must divide hidden {self.hidden} and be a multiple of kv_heads {self.kv_heads}"
            raise InvalidParameter("heads", rule)
        return LlamaShape(
            architecture="LlamaForCausalLM",
            vocab=self.vocab,
            hidden=self.hidden,
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.hidden // self.heads,
            ffn=self.ffn,
            context=self.context,
            rope=Rope(theta=10000.0),
            tied=self.tied,
            windows=(None,) * self.layers,
            dtype="bfloat16",
            eos_ids=(eos,),
        ).spec()


@dataclass(frozen=True, slots=True)
class EagleShape:
    """An EAGLE head to train. Empty and 0 mean: as in the target."""

    form: str = EAGLE3
    taps: tuple[int, ...] = ()
    ffn: int = 0
    own_output: bool = False
    draft_vocab: int = 0  # tokens of a reduced vocabulary, the most frequent ones
    fc_norm: bool = True
    norm_output: bool = True
    norm_before_residual: bool = False

    def config(self, target: ModelSpec) -> EagleConfig:
        """The head's configuration for a target."""
        if self.form not in (EAGLE1, EAGLE3):
            raise InvalidParameter("form", f"unknown {self.form!r}; known: {EAGLE1}, {EAGLE3}")
        wide = self.form == EAGLE3
        return EagleConfig(
            shape=_layers(target, "LlamaForCausalLM", self.ffn),
            target_hidden=target.hidden,
            taps=(self.taps or default_taps(target.depth)) if wide else (target.depth,),
            form=self.form,
            draft_vocab=self.draft_vocab or None,
            own_output=self.own_output or bool(self.draft_vocab),
            fc_bias=not wide,
            fc_norm=wide and self.fc_norm,
            norm_output=wide and self.norm_output,
            norm_before_residual=wide and self.norm_before_residual,
        )


@dataclass(frozen=True, slots=True)
class MtpShape:
    """An MTP module to train. Its layer is Qwen3's, whatever the target's, so that other tools read it."""

    ffn: int = 0  # 0: as in the target

    def config(self, target: ModelSpec) -> EagleConfig:
        """The module's configuration for a target."""
        shape = _layers(target, "Qwen3ForCausalLM", self.ffn)
        return EagleConfig(shape, target.hidden, (target.depth,), MTP, norm_output=True)


def _layers(target: ModelSpec, architecture: str, ffn: int, count: int = 1) -> ModelSpec:
    """Layers with the target's widths and rotary settings."""
    rope = target.attention.rope or Rope()
    return LlamaShape(
        architecture=architecture,
        vocab=target.vocab,
        hidden=target.hidden,
        layers=count,
        heads=target.heads,
        kv_heads=target.kv_heads,
        head_dim=target.head_dim,
        ffn=ffn or target.ffn,
        context=target.context,
        rope=rope if rope.kind in ("default", "linear", "llama3") else Rope(rope.theta),
        norm_eps=target.norm.eps,
        qk_norm=architecture == "Qwen3ForCausalLM",
        dtype=target.dtype,
        eos_ids=target.eos_ids,
    ).spec()


@dataclass(frozen=True, slots=True)
class MedusaShape:
    """Medusa heads to train; the output matrix is the target's."""

    heads: int = 4
    blocks: int = 1


@dataclass(frozen=True, slots=True)
class BlockShape:
    """A block drafter to train. Empty and 0 mean: as in the target."""

    layers: int = 2
    block: int = 12
    taps: tuple[int, ...] = ()
    ffn: int = 0
    markov: int = 32  # rank of the pair scores
    confidence: bool = False
    causal: bool = True
    from_anchor: bool = True
    mask: int | None = None  # None: the last id of the vocabulary
    draft_vocab: int = 0  # tokens of a reduced vocabulary, the most frequent ones
    context: int = 0  # tokens that it sees; a shorter one than the target's is a window that moves on

    def config(self, target: ModelSpec) -> BlockConfig:
        """The drafter's configuration for a target."""
        shape = _layers(target, "Qwen3ForCausalLM", self.ffn, self.layers)
        return BlockConfig(
            shape=replace(shape, context=self.context) if self.context else shape,
            target_hidden=target.hidden,
            taps=self.taps or spread_taps(target.depth, min(3, target.depth)),
            block=self.block,
            mask=target.vocab - 1 if self.mask is None else self.mask,
            causal=self.causal,
            from_anchor=self.from_anchor,
            markov=self.markov,
            confidence=self.confidence,
            confidence_of_pair=self.confidence and self.markov > 0,
            draft_vocab=self.draft_vocab or None,
            own_output=bool(self.draft_vocab),
        )


def new_decoder(config: ModelSpec, seed: int, device: torch.device) -> Decoder:
    """A decoder with fresh float32 weights."""
    decoder = Decoder(config)
    initialise(decoder, seed)
    return decoder.to(device)


def new_draft(target: FrozenTarget, shape: DecoderShape, kind: Divergence, seed: int) -> TrainableDraftModel:
    """A fresh draft model; its embedding starts as the main directions of the target's."""
    shape = replace(shape, vocab=target.config.vocab, context=target.config.context)
    config = shape.config(target.config.eos_ids[0])
    decoder = new_decoder(config, seed, target.decoder.norm.device)
    if config.hidden < target.config.hidden:
        table = target.decoder.embedding.detach().float()
        directions = torch.linalg.eigh(table.T @ table).eigenvectors  # ascending
        start = table @ directions[:, -config.hidden :]
        with torch.no_grad():  # at the scale of a fresh one: a tied model would start by repeating its input
            decoder.embedding.copy_(start * (_FRESH / start.pow(2).mean().sqrt()))
    return TrainableDraftModel(decoder, kind)


def new_eagle(target: FrozenTarget, shape: EagleShape, kind: Divergence, seed: int, depths: int = 6) -> TrainableEagle:
    """A fresh EAGLE head. A reduced vocabulary is set by `set_vocabulary` before training."""
    head = _fresh_head(target, shape.config(target.config), seed)
    return TrainableEagle(head, kind, depths, fused=usable_chain(target.decoder.norm.device))


def new_mtp(target: FrozenTarget, shape: MtpShape, kind: Divergence, seed: int, depths: int = 3) -> TrainableMtp:
    """A fresh MTP module."""
    head = _fresh_head(target, shape.config(target.config), seed)
    return TrainableMtp(head, kind, depths, fused=usable_chain(target.decoder.norm.device))


def _fresh_head(target: FrozenTarget, config: EagleConfig, seed: int) -> EagleHead:
    borrowed = Borrowed.of(target.decoder)
    head = EagleHead(config, borrowed)
    initialise(head, seed)
    with torch.no_grad():
        if head.norm is not None:  # the norm that the target's output matrix was trained with
            head.norm.copy_(borrowed.norm)
        if config.own_output:
            head.output.copy_(borrowed.output[: config.outputs])
    return head.to(target.decoder.norm.device)


def set_vocabulary(network: TrainableDrafter, target: FrozenTarget, counts: Tensor) -> None:
    """Let a head with a reduced vocabulary propose the most frequent tokens of (V,) counts."""
    head = network.module
    if network.vocab_ids is None:
        return
    ids = counts.topk(head.config.outputs).indices.sort().values.to(head.vocab_ids.device)
    with torch.no_grad():
        head.vocab_ids.copy_(ids)
        head.output.copy_(Borrowed.of(target.decoder).output[ids])


def new_medusa(target: FrozenTarget, shape: MedusaShape, kind: Divergence) -> TrainableMedusa:
    """Fresh Medusa heads: the blocks are zero, so every head starts as the target's output."""
    config = MedusaConfig(target.config.hidden, target.config.vocab, target.config.depth, shape.heads, shape.blocks)
    return TrainableMedusa(MedusaHeads(config, Borrowed.of(target.decoder)).to(target.decoder.norm.device), kind)


def new_block(target: FrozenTarget, shape: BlockShape, kind: Divergence, seed: int, blocks: int = 64) -> TrainableBlock:
    """A block drafter whose layers begin as the target's last ones where their shapes agree.

    Its features begin as the tap that is nearest to those layers, normed as their inputs are.
    """
    config, borrowed = shape.config(target.config), Borrowed.of(target.decoder)
    head = BlockHead(config, borrowed)
    initialise(head, seed)
    with torch.no_grad():
        assert head.norm is not None
        head.norm.copy_(borrowed.norm)
        head.fc.zero_()
        nearest = max(range(len(config.taps)), key=lambda i: config.taps[i] if config.taps[i] < target.config.depth else -1)
        head.fc[:, nearest * config.target_hidden : (nearest + 1) * config.target_hidden] = torch.eye(*head.fc.shape[:1])
        for layer, source in zip(head.layers, list(target.decoder.layers)[-shape.layers :], strict=True):
            for name, parameter in layer.named_parameters():
                begin = getattr(source, name, None)
                if isinstance(begin, Tensor) and begin.shape == parameter.shape:
                    parameter.copy_(begin)
        if head.pairs is not None:
            head.pairs.right.zero_()  # no pair has a score yet
    return TrainableBlock(head.to(target.decoder.norm.device), kind, blocks=blocks)


def initialise(module: nn.Module, seed: int) -> None:
    """Fresh weights: small normals, zero where a sublayer joins the residual stream, norms at one.

    Embeddings and outputs are small normals too; callers that have better ones copy them afterwards.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, param in module.named_parameters():
            last = name.rsplit(".", 1)[-1]
            if last in ("out", "down") or name.startswith("weights."):
                param.zero_()
            elif param.dim() > 1:
                std = 0.02 if last in ("embedding", "output") else 0.5 / math.sqrt(param.shape[-1])
                param.copy_(torch.randn(param.shape, generator=generator) * std)
