"""The drafters of a target: made fresh, written to disk, and judged as written."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
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
from outrider.train.students import DraftStudent, EagleStudent, MedusaStudent, Student, initialise
from outrider.train.tree import static_tree, token_ranks
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
    """Give Medusa heads the static tree that suits the trial's text; tokens per round of its first 24 nodes."""
    if not isinstance(student, MedusaStudent):
        return None
    target = target.reading(student.taps)
    ranks = np.concatenate([token_ranks(student, target, written) for written in trial.written.values()])
    choices = static_tree(ranks, _TREE_NODES)
    student.module.config = replace(student.module.config, choices=choices)
    hits = [np.all(ranks[:, : len(path)] == path, axis=1).mean() for path in choices[:24]]
    return 1.0 + float(sum(hits))


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
    return figures


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
