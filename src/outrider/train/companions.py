"""The drafters of a target: made fresh, written to disk, and judged as written."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from outrider.errors import InvalidParameter, ModelError, OutriderError
from outrider.heads import (
    EAGLE1,
    EAGLE3,
    Borrowed,
    EagleConfig,
    EagleHead,
    MedusaConfig,
    MedusaHeads,
    SaveOptions,
    default_taps,
    load_eagle,
    load_medusa,
    save_eagle,
    save_medusa,
)
from outrider.model import Decoder, ModelConfig, load_decoder
from outrider.train.acceptance import agreement, served
from outrider.train.frozen import FrozenTarget
from outrider.train.generate import Written
from outrider.train.lm import Shape, export_model, new_decoder
from outrider.train.losses import Divergence
from outrider.train.onpolicy import steady
from outrider.train.students import DraftStudent, EagleStudent, MedusaStudent, Student, initialise
from outrider.train.tree import Ranks, expected, static_tree, token_ranks, tree_rounds
from outrider.train.unroll import usable_chain

__all__ = [
    "EagleShape",
    "MedusaShape",
    "Trial",
    "begin_from",
    "describe",
    "export",
    "judge",
    "load_student",
    "measure_tree",
    "new_draft",
    "new_eagle",
    "new_medusa",
    "set_vocabulary",
    "steady_ranks",
]

_TREE_NODES = 64  # of a measured static tree
_FRESH = 0.03  # root mean square of a fresh embedding


@dataclass(frozen=True, slots=True)
class EagleShape:
    """An EAGLE head to train. Empty and 0 mean: as the target."""

    form: str = EAGLE3
    taps: tuple[int, ...] = ()
    heads: int = 0
    kv_heads: int = 0
    ffn: int = 0
    own_output: bool = False
    draft_vocab: int = 0  # tokens of a reduced vocabulary, the most frequent ones
    fc_norm: bool = True
    norm_output: bool = True
    norm_before_residual: bool = False

    def config(self, target: ModelConfig) -> EagleConfig:
        """The head's configuration for a target."""
        if self.form not in (EAGLE1, EAGLE3):
            raise InvalidParameter("form", f"unknown {self.form!r}; known: {EAGLE1}, {EAGLE3}")
        wide = self.form == EAGLE3
        shape = replace(
            target,
            architecture="LlamaForCausalLM",
            layers=1,
            heads=self.heads or target.heads,
            kv_heads=self.kv_heads or target.kv_heads,
            ffn=self.ffn or target.ffn,
            windows=(None,),
            qk_norm=False,
            attention_bias=False,
            output_bias=False,
            mlp_bias=False,
        )
        return EagleConfig(
            shape=shape,
            target_hidden=target.hidden,
            taps=(self.taps or default_taps(target.layers)) if wide else (target.layers,),
            form=self.form,
            draft_vocab=self.draft_vocab or None,
            own_output=self.own_output or bool(self.draft_vocab),
            fc_bias=not wide,
            fc_norm=wide and self.fc_norm,
            norm_output=wide and self.norm_output,
            norm_before_residual=wide and self.norm_before_residual,
        )


@dataclass(frozen=True, slots=True)
class MedusaShape:
    """Medusa heads to train; the output matrix is the target's."""

    heads: int = 4
    blocks: int = 1


@dataclass(frozen=True, slots=True)
class Trial:
    """Text to judge students on: held-out rows, and what the target wrote at each temperature."""

    rows: Tensor
    written: dict[float, Written]
    fit: dict[float, Written] = field(default_factory=dict)  # to choose a tree by; empty: the same as it is judged on


def new_draft(target: FrozenTarget, shape: Shape, kind: Divergence, seed: int) -> DraftStudent:
    """A fresh draft model; its embedding starts as the main directions of the target's."""
    config = replace(shape, vocab=target.config.vocab).config(target.config.eos_ids[0])
    decoder = new_decoder(config, seed, target.decoder.norm.device)
    if config.hidden < target.config.hidden:
        table = target.decoder.embedding.detach().float()
        directions = torch.linalg.eigh(table.T @ table).eigenvectors  # ascending
        start = table @ directions[:, -config.hidden :]
        with torch.no_grad():  # at the scale of a fresh one: a tied model would start by repeating its input
            decoder.embedding.copy_(start * (_FRESH / start.pow(2).mean().sqrt()))
    return DraftStudent(decoder, kind)


def new_eagle(target: FrozenTarget, shape: EagleShape, kind: Divergence, seed: int, depths: int = 6) -> EagleStudent:
    """A fresh EAGLE head. A reduced vocabulary is set by `set_vocabulary` before training."""
    device = target.decoder.norm.device
    borrowed = Borrowed.of(target.decoder)
    head = EagleHead(shape.config(target.config), borrowed)
    initialise(head, seed)
    with torch.no_grad():
        if head.norm is not None:  # what the output matrix was made for
            head.norm.copy_(borrowed.norm)
        if head.config.own_output:
            head.output.copy_(borrowed.output[: head.config.outputs])
    return EagleStudent(head.to(device), kind, depths, fast=usable_chain(device))


def set_vocabulary(student: EagleStudent, target: FrozenTarget, counts: Tensor) -> None:
    """Let a head with a reduced vocabulary propose the most frequent tokens of (V,) counts."""
    head = student.module
    if head.vocab_ids is None:
        return
    ids = counts.topk(head.config.outputs).indices.sort().values.to(head.vocab_ids.device)
    with torch.no_grad():
        head.vocab_ids.copy_(ids)
        head.output.copy_(Borrowed.of(target.decoder).output[ids])


def new_medusa(target: FrozenTarget, shape: MedusaShape, kind: Divergence) -> MedusaStudent:
    """Fresh Medusa heads: zero blocks, so that every head starts as the target's own output."""
    config = MedusaConfig(target.config.hidden, target.config.vocab, target.config.layers, shape.heads, shape.blocks)
    return MedusaStudent(MedusaHeads(config, Borrowed.of(target.decoder)).to(target.decoder.norm.device), kind)


def measure_tree(student: Student, target: FrozenTarget, trial: Trial) -> float | None:
    """Give Medusa heads the static tree that suits text the target writes; tokens per round expected of it there."""
    if not isinstance(student, MedusaStudent):
        return None
    target = target.reading(student.taps)
    ranks = [steady_ranks(student, target, written, heat) for heat, written in (trial.fit or trial.written).items()]
    joined = np.concatenate([own.reshape(-1, own.shape[-1]) for own in ranks])
    choices = static_tree(joined, _TREE_NODES)
    student.module.config = replace(student.module.config, choices=choices)
    return expected(joined, choices)


def steady_ranks(student: MedusaStudent, target: FrozenTarget, written: Written, temperature: float) -> Ranks:
    """Ranks on the texts that neither loop nor end early, or on all where none is left."""
    kept = steady(written, target.config.eos_ids[0])
    if not bool(kept.any()):
        kept = torch.ones_like(kept)
    noise = None if written.noise is None else written.noise[kept]
    return token_ranks(student, target, Written(written.tokens[kept], written.prompt, noise), temperature)


def export(student: Student, tokenizer: Path, directory: Path) -> None:
    """Write a student as it is served: int8 matrices, and nothing that the target has. Replaced as a whole."""
    module = student.module
    if isinstance(module, Decoder):
        export_model(module, tokenizer, directory)
        return
    temporary = directory.with_name(directory.name + ".part")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        if isinstance(module, EagleHead):
            save_eagle(module, temporary, SaveOptions("eagle", int8=True))
        else:
            assert isinstance(module, MedusaHeads)
            save_medusa(module, temporary, SaveOptions("medusa", int8=True))
        shutil.rmtree(directory, ignore_errors=True)
        temporary.rename(directory)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise OutriderError(f"cannot write the head to {directory}: {error}; free some space or choose another --out") from error


def load_student(student: Student, target: FrozenTarget, directory: Path) -> Student:
    """What `export` wrote, seen as a student again."""
    device = target.decoder.norm.device
    if isinstance(student, DraftStudent):
        return replace(student, module=load_decoder(directory).to(device))
    if isinstance(student, EagleStudent):
        return replace(student, module=load_eagle(directory, target.decoder).to(device))
    assert isinstance(student, MedusaStudent)
    return replace(student, module=load_medusa(directory, target.decoder).to(device))


def begin_from(student: Student, target: FrozenTarget, directory: Path) -> None:
    """Let a fresh student go on from the weights of an exported one of the same shape."""
    saved = load_student(student, target, directory).module.state_dict()
    try:
        student.module.load_state_dict(saved)
    except RuntimeError as error:
        raise ModelError(f"{directory} holds a drafter of another shape: {error}") from None


def judge(student: Student, target: FrozenTarget, trial: Trial) -> dict[str, Any]:
    """Figures of a student: agreement on held-out text, tokens per round on what the target writes."""
    target = target.reading(student.taps)
    figures: dict[str, Any] = {"heldout": asdict(agreement(student, target, trial.rows))}
    for temperature, written in trial.written.items():
        figures[f"temperature {temperature}"] = served(student, target, written, temperature).as_dict()
        if isinstance(student, MedusaStudent):
            ranks = steady_ranks(student, target, written, temperature)
            figures[f"temperature {temperature}"]["trees"] = _trees(ranks, student.module.config)
            figures[f"temperature {temperature}"]["first_ranks"] = _first_ranks(ranks)
    return figures


def _trees(ranks: Ranks, config: MedusaConfig) -> dict[int, float]:
    """Tokens per round of the static tree, by its nodes, on texts that do not loop."""
    found = {}
    for nodes in (8, 16, 24, 32, 48, _TREE_NODES):
        tokens, rounds = tree_rounds(ranks, config.tree(nodes))
        found[nodes] = round(tokens / max(rounds, 1), 4)
    return found


def _first_ranks(ranks: Ranks) -> list[list[float]]:
    """For each head, how often the right token was its first, among its first two, and so on."""
    return [[round(float((ranks[..., head] <= rank).mean()), 4) for rank in range(5)] for head in range(ranks.shape[-1])]


def describe(figures: dict[str, Any], say: Callable[[str], None]) -> None:
    """The figures of `judge` as lines."""
    text = figures["heldout"]
    say(f"  held-out text: loss {text['loss']:.4f}, agreement {text['by_position']}, {text['tokens_per_round']:.2f} per round")
    for name, found in figures.items():
        if name.startswith("temperature"):
            say(
                f"  {name}: {found['tokens_per_round']:.2f} tokens per round ({found['tokens_per_round_all']:.2f} with the "
                f"{found['looping']:.0%} that loop), accepted by position {found['by_position']}"
            )
        if "trees" in found:
            say(f"    static trees {found['trees']}; right among the first ranks {found['first_ranks']}")
