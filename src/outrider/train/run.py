"""A whole run of a `train` command: text, training loop, export, figures."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from outrider.errors import InvalidParameter
from outrider.model import locate, read_spec
from outrider.model.bundled import bundled_model
from outrider.train.acceptance import agreement, heldout_rows, served_acceptance, written_for
from outrider.train.corpus import SUMMARY, TokenCorpus, require_same_tokenizer, write_corpus
from outrider.train.data import TokenStore, TrainingRows, write_store
from outrider.train.distill import Distillation
from outrider.train.documents import find_files, read_documents
from outrider.train.export import require_replaceable
from outrider.train.frozen import FrozenTarget
from outrider.train.generate import Writing, merged, write_until
from outrider.train.loop import Budget, LoopOptions
from outrider.train.networks import TrainableDrafter, TrainableMedusa
from outrider.train.optim import OptimOptions
from outrider.train.shapes import set_vocabulary
from outrider.train.sizing import StepSize, evaluation_rows, pick_device, resolve_step, training_bytes, uses_compiler
from outrider.train.task import TrainingTask
from outrider.train.tree import fit_tree

__all__ = ["run_task"]

Build = Callable[[FrozenTarget], TrainableDrafter]
Log = Callable[[str], None]
_LOG: Log = partial(print, flush=True)
_GPU_ROWS = 32
_DEPTHS = 6  # that an EAGLE head is unrolled for
_EVALUATED = 24  # held-out rows and written texts
_WRITTEN_TOKENS = 160  # after each held-out prompt
_MIN_HELDOUT = 192  # tokens; less text has no figures
_WRITTEN_SHARE = 0.35  # of the training text, where the target writes some of it


@dataclass(frozen=True, slots=True)
class _Setup:
    """A task with every "auto" and 0 resolved."""

    task: TrainingTask
    target: Path
    out: Path
    device: torch.device
    step: StepSize
    loop: LoopOptions


def run_task(task: TrainingTask, name: str, build: Build, log: Log = _LOG) -> dict[str, Any]:
    """Train the network that `build` makes, write it to task.out, and return its figures."""
    torch.set_float32_matmul_precision("high")
    setup = _resolve(task, name)
    corpus = _open_corpus(setup, log)
    require_same_tokenizer(setup.target, corpus)
    target = FrozenTarget.load(setup.target, setup.device)
    network = build(target)
    _introduce(name, network, target, setup, log)
    store = _training_text(target, corpus, setup, log)
    if network.vocab_ids is not None:
        set_vocabulary(network, target, _token_counts(store, target.config.vocab))
    rows = _heldout_rows(corpus, setup, log)
    run = Distillation(target, {name: network}, rows)
    if uses_compiler(setup.device, task.compile):
        run.warm_up(setup.step.micro_rows, setup.step.context)
    log(f"{name}: training begins")
    run.train(TrainingRows(store, setup.step.context, task.seed), OptimOptions(lr=task.lr, adam_lr=task.adam_lr), setup.loop)
    if rows is not None:
        network.settle(lambda one: agreement(one, target.reading(one.taps), rows).by_position[0])
    network.export(setup.target, setup.out)  # a user who does not wait for the figures has the drafter
    figures: dict[str, Any] = {}
    if rows is not None:
        if isinstance(network, TrainableMedusa):
            _fit_tree(network, target, corpus, setup, log)
        reading = target.reading(network.taps)
        figures["heldout"] = asdict(agreement(network.loaded(setup.out, target), reading, rows))
        figures["served"] = served_acceptance(setup.target, name, setup.out, corpus.heldout())
        _describe(figures, log)
    (setup.loop.directory / "result.json").write_text(json.dumps(figures, indent=1) + "\n")
    log(f"{name}: written to {setup.out}; metrics, plot and figures are in {setup.loop.directory}")
    return figures


def _resolve(task: TrainingTask, name: str) -> _Setup:
    budget = Budget(task.steps, None if task.minutes is None else task.minutes * 60)
    target, device = bundled_model() if task.target is None else locate(str(task.target)), pick_device(task.device)
    out, work = task.folders(name)
    require_replaceable(out, target)
    config = read_spec(target)
    if not 0 <= task.context <= config.context:
        raise InvalidParameter("context", f"{task.context} is not between 1 and the target's {config.context}")
    # Heads are at most as large as one layer of the target for each depth; draft models are smaller than it.
    token_bytes = training_bytes(replace(config, layers=config.layers[:1]), config.vocab, _DEPTHS)
    full = StepSize(config.context, _GPU_ROWS)
    step = resolve_step(device, StepSize(task.context, task.rows, task.micro_rows), full, token_bytes)
    loop = LoopOptions(budget, work, step.rows, step.micro_rows, checkpoint_steps=task.checkpoint_steps)
    return _Setup(task, target, out, device, step, loop)


def _open_corpus(setup: _Setup, log: Log) -> TokenCorpus:
    """The tokens of --data, those of the run that is being resumed, or the text read now."""
    task, directory = setup.task, setup.loop.directory / "corpus"
    if task.data is not None:
        return TokenCorpus.open(task.data)
    if (directory / SUMMARY).exists():
        log(f"corpus: the tokens of an earlier run are used; remove {setup.loop.directory} to read the text again")
        return TokenCorpus.open(directory)
    files = find_files(task.paths or [], task.suffixes.split(","))
    documents, dropped = read_documents(files, task.skip_unreadable)
    if dropped:
        log(f"corpus: {len(files)} files read, left out: " + ", ".join(f"{count} {why}" for why, count in dropped.items()))
    if not documents:
        raise InvalidParameter("corpus", f"no text to train on; pass .jsonl files, text files or folders of {task.suffixes}")
    return write_corpus(documents, setup.target, directory, [name for name in task.heldout.split(",") if name], log)


def _introduce(name: str, network: TrainableDrafter, target: FrozenTarget, setup: _Setup, log: Log) -> None:
    size = sum(param.numel() for param in network.module.parameters())
    log(f"{name}: {size / 1e6:.2f}M parameters, target: {target.config.parameters / 1e6:.1f}M, on {setup.device}")
    step = setup.step
    log(f"{name}: steps of {step.rows} rows of {step.context} tokens, {step.micro_rows} rows at a time")


def _training_text(target: FrozenTarget, corpus: TokenCorpus, setup: _Setup, log: Log) -> TokenStore:
    """The corpus, and what the target writes where the task asks for it; kept on disk, so that a resumed run reads the same."""
    store, task, work = corpus.store("train"), setup.task, setup.loop.directory
    if not task.write_tokens:
        return store
    if not (work / "written.json").exists():
        log(f"corpus: the target writes {task.write_tokens:,} tokens to train on")
        length = min(512, setup.step.context)
        prompts = tuple(max(length * part // 16, 1) for part in (1, 3, 6))
        rows = min(max(task.write_tokens // length, 8), 2048)
        writing = Writing(tokens=task.write_tokens, rows=rows, length=length, prompts=prompts, seed=task.seed)
        written = write_until(target.decoder, store, writing)
        documents = [written.ids[begin:end] for begin, end in zip(written.starts[:-1], written.starts[1:], strict=True)]
        write_store(work, "written", documents, written.groups, target.config.vocab)
    return merged(store, TokenStore.open(work, "written"), _WRITTEN_SHARE)


def _token_counts(store: TokenStore, vocab: int) -> torch.Tensor:
    return torch.bincount(torch.from_numpy(store.ids[:10_000_000].astype("int64")), minlength=vocab)


def _heldout_rows(corpus: TokenCorpus, setup: _Setup, log: Log) -> torch.Tensor | None:
    """Rows of held-out text to measure the loss on; None where too little is held out."""
    store = corpus.heldout()
    if store.tokens < min(setup.step.context, _MIN_HELDOUT):
        log(f"corpus: {store.tokens} held-out tokens are too few to measure acceptance with; add text")
        return None
    return heldout_rows(store, setup.step.context, evaluation_rows(setup.device, _EVALUATED))


def _fit_tree(network: TrainableMedusa, target: FrozenTarget, corpus: TokenCorpus, setup: _Setup, log: Log) -> None:
    """Choose the static tree by what the target writes after held-out text, and export it."""
    log("corpus: the target continues held-out text, to choose the static tree by")
    store, rows = corpus.heldout(), evaluation_rows(setup.device, _EVALUATED)
    texts = {temperature: written_for(target, store, rows, _WRITTEN_TOKENS, temperature) for temperature in (0.0, 0.8)}
    log(f"  static tree: {fit_tree(network, target, texts):.2f} tokens per round on the text it was fitted to")
    network.export(setup.target, setup.out)


def _describe(figures: dict[str, Any], log: Log) -> None:
    """The figures as lines: agreement on held-out text, and acceptance of the exported drafter in the engine."""
    heldout = figures["heldout"]
    positions, rate = heldout["by_position"], heldout["tokens_per_round"]
    log(f"  held-out text: loss {heldout['loss']:.4f}, agreement {positions}, {rate:.2f} tokens per round")
    for row in figures["served"]:
        rate = row["tokens_per_round"] or row["tokens_per_round_all"] or 1.0
        share = f"{row['looping']:.0%} of outputs loop"
        log(f"  served at temperature {row['temperature']:g}: {rate:.2f} tokens per round ({share})")
