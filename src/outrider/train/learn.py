"""A whole `train draft`, `train eagle` or `train medusa` run: text, compile, loop, export, judgement."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outrider.train.acceptance import heldout_rows, written_for
from outrider.train.companions import Trial, describe, export, judge, load_student, measure_tree, set_vocabulary
from outrider.train.data import TokenStore, write_store
from outrider.train.distill import Distillation, DistillOptions
from outrider.train.frozen import FrozenTarget, require_same_tokenizer
from outrider.train.generate import Writing, merged, write_until
from outrider.train.loop import LoopOptions
from outrider.train.prepare import Prepared
from outrider.train.pretrain import pick_device
from outrider.train.served import served_acceptance
from outrider.train.students import EagleStudent, Student

__all__ = ["LearnOptions", "learn"]

Say = Callable[[str], None]
_JUDGED = 24  # held-out rows and written texts


@dataclass(frozen=True, slots=True)
class LearnOptions:
    """Where a drafter comes from and goes to, and how it learns, apart from the budget."""

    target: Path
    out: Path
    distill: DistillOptions
    device: str = "auto"
    compile: bool = True
    write_tokens: int = 0  # text the target writes to train on
    write_share: float = 0.35


def learn(
    make: Callable[[FrozenTarget], Student],
    name: str,
    prepared: Prepared,
    options: LearnOptions,
    loop: LoopOptions,
    say: Say = print,
) -> dict[str, Any]:
    """Train what `make` gives, write it to options.out, and return its figures."""
    torch.set_float32_matmul_precision("high")
    require_same_tokenizer(options.target, prepared)
    target = FrozenTarget.load(options.target, pick_device(options.device))
    student = make(target)
    size = sum(param.numel() for param in student.module.parameters())
    say(f"{name}: {size / 1e6:.2f}M parameters, target: {target.config.parameters / 1e6:.1f}M, on {target.decoder.norm.device}")
    store = _store(target, prepared, options, loop.directory)
    if isinstance(student, EagleStudent):
        counts = torch.bincount(torch.from_numpy(store.ids[:10_000_000].astype("int64")), minlength=target.config.vocab)
        set_vocabulary(student, target, counts)
    trial = _trial(target, prepared, options.distill.context)
    run = Distillation(target, {name: student}, None if trial is None else trial.rows)
    if options.compile:
        run.warm_up(loop.micro_rows or loop.rows, options.distill.context)
    run.train(store, options.distill, loop)
    expected = None if trial is None else measure_tree(student, target, trial)
    if expected is not None:
        say(f"  static tree: {expected:.2f} tokens per round on the text it was fitted to")
    export(student, options.target, options.out)
    figures = {} if trial is None else judge(load_student(student, target, options.out), target, trial)
    if figures:
        describe(figures, say)
        figures["served"] = served_acceptance(options.target, name, options.out, _heldout(prepared))
        for row in figures["served"]:
            rate = row["tokens_per_round"] or row["tokens_per_round_all"] or 1.0
            loop_share = f"{row['looping']:.0%} of outputs loop"
            say(f"  served at temperature {row['temperature']:g}: {rate:.2f} tokens per round ({loop_share})")
    (loop.directory / "result.json").write_text(json.dumps(figures, indent=1) + "\n")
    return figures


def _store(target: FrozenTarget, prepared: Prepared, options: LearnOptions, work: Path) -> TokenStore:
    """The corpus, with what the target writes where that is wanted; kept, so that a resumed run reads the same."""
    store = prepared.store("train")
    if not options.write_tokens:
        return store
    if not (work / "written.json").exists():
        length = min(512, options.distill.context)
        prompts = tuple(max(length * part // 16, 1) for part in (1, 3, 6))
        rows = min(max(options.write_tokens // length, 8), 2048)
        writing = Writing(tokens=options.write_tokens, rows=rows, length=length, prompts=prompts, seed=options.distill.seed)
        own = write_until(target.decoder, store, writing)
        documents = [own.ids[begin:end] for begin, end in zip(own.starts[:-1], own.starts[1:], strict=True)]
        write_store(work, "written", documents, own.groups, target.config.vocab)
    return merged(store, TokenStore.open(work, "written"), options.write_share)


def _trial(target: FrozenTarget, prepared: Prepared, context: int) -> Trial | None:
    """Held-out text and what the target makes of its beginnings; None where nothing is held out."""
    store = _heldout(prepared)
    if store.tokens < context:
        return None
    written = {heat: written_for(target, store, _JUDGED, 160, heat) for heat in (0.0, 0.8)}
    return Trial(heldout_rows(store, context, _JUDGED), written)


def _heldout(prepared: Prepared) -> TokenStore:
    """The larger of the two held-out sets."""
    return max((prepared.store(name) for name in ("heldout_packages", "heldout_files")), key=lambda store: store.tokens)
