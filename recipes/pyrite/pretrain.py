"""Pretraining of a model from fresh weights: compile, loop, export, and the held-out loss of the export.

Compiling needs no data, so a caller may prepare the corpus at the same time.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from outrider.errors import InvalidParameter
from outrider.model import Decoder, load_decoder
from outrider.train.corpus import TokenCorpus
from outrider.train.data import TrainingRows
from outrider.train.export import export_model
from outrider.train.loop import LoopOptions, Loss, TrainingOutcome, compile_checked, train
from outrider.train.optim import OptimOptions, build_optimizers
from outrider.train.shapes import DecoderShape, new_decoder
from outrider.train.sizing import evaluation_rows, pick_device
from recipes.pyrite.kernels import fastest_kernel, kernel
from recipes.pyrite.lm import HeldoutLoss, LmTask, heldout_loss

__all__ = ["PretrainOptions", "Pretraining"]

HELDOUT = ("heldout_packages", "heldout_files")
_EVALUATED = 96  # rows of each held-out set, during training


@dataclass(frozen=True, slots=True)
class PretrainOptions:
    """What to train and how, without the budget."""

    shape: DecoderShape = field(default_factory=DecoderShape)
    optim: OptimOptions = field(default_factory=OptimOptions)
    rows: int = 64
    micro_rows: int = 0
    seed: int = 0
    device: str = "auto"
    compile: bool = True
    eos: int = 0


class Pretraining:
    """A model being trained from scratch."""

    def __init__(self, options: PretrainOptions) -> None:
        torch.set_float32_matmul_precision("high")
        self.options = options
        self.device = pick_device(options.device)
        self.decoder: Decoder = new_decoder(options.shape.config(options.eos), options.seed, self.device)
        self._kernel = "default"
        self._compiled = False
        self._loss: Loss = LmTask(self.decoder, {}).loss

    def warm_up(self) -> None:
        """Choose the attention kernel and compile; weights stay as they are."""
        shape, rows = self.options.shape, self.options.micro_rows or self.options.rows
        best = fastest_kernel(self.decoder.spec, rows, shape.context, self.device)
        self._kernel = best
        if not self.options.compile:
            return
        example = torch.zeros(rows, shape.context + 1, dtype=torch.int64, device=self.device)
        for name in dict.fromkeys((best, "default")):
            with kernel(name):
                fast = compile_checked("lm", self._loss, lambda fast: torch.autograd.backward(fast(example)))
            self.decoder.zero_grad(set_to_none=True)
            if fast is not None:
                self._kernel, self._loss, self._compiled = name, fast, True
                return
            torch._dynamo.reset()
        print("compile: going on without it", flush=True)

    def train(self, corpus: TokenCorpus, loop: LoopOptions) -> TrainingOutcome:
        """Spend the loop's budget on a corpus."""
        shape = self.options.shape
        if corpus.vocab != shape.vocab or corpus.eos != self.options.eos:
            raise InvalidParameter("vocab", f"the corpus was prepared for {corpus.vocab} tokens, the model has {shape.vocab}")
        task = LmTask(self.decoder, {name: corpus.store(name) for name in HELDOUT}, evaluation_rows(self.device, _EVALUATED))
        rows = TrainingRows(corpus.store("train"), shape.context, self.options.seed)
        if self.device.type == "cuda" and not self._compiled and not loop.micro_rows:
            loop = replace(loop, micro_rows=max(loop.rows // 4, 1))  # eager keeps several times the activations
        with kernel(self._kernel):
            return train(task, rows, build_optimizers(self.decoder, self.options.optim), loop, self._loss)

    def export(self, tokenizer: Path, directory: Path) -> None:
        """Write the model directory."""
        export_model(self.decoder, tokenizer, directory)

    def evaluate(self, corpus: TokenCorpus, directory: Path, max_rows: int | None = None) -> dict[str, Any]:
        """Held-out losses of the trained weights and of the exported, int8 model."""
        served = load_decoder(directory).to(self.device)
        figures: dict[str, Any] = {}
        for name in HELDOUT:
            store = corpus.store(name)
            if store.tokens > 1:
                trained: HeldoutLoss = heldout_loss(self.decoder, store, max_rows)
                figures[name] = {"trained": trained.loss, **asdict(heldout_loss(served, store, max_rows))}
        return figures
