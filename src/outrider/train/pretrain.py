"""A whole `train lm` run: fresh weights, compile, loop, export, and the held-out loss of the export.

Compiling needs no data, so a caller may prepare the corpus meanwhile.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from outrider.errors import InvalidParameter
from outrider.model import Decoder, load_decoder
from outrider.train.attention import fastest_kernel, kernel
from outrider.train.data import Rows
from outrider.train.lm import Heldout, LmTask, Shape, export_model, heldout_loss, new_decoder
from outrider.train.loop import LoopOptions, Loss, Outcome, compiled, train
from outrider.train.optim import OptimOptions, build_optimizers
from outrider.train.prepare import Prepared

__all__ = ["PretrainOptions", "Pretraining", "pick_device"]

HELDOUT = ("heldout_packages", "heldout_files")


@dataclass(frozen=True, slots=True)
class PretrainOptions:
    """What to train and how, apart from the budget."""

    shape: Shape = field(default_factory=Shape)
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
        best = fastest_kernel(self.decoder.config, rows, shape.context, self.device)
        self._kernel = best
        if not self.options.compile:
            return
        example = torch.zeros(rows, shape.context + 1, dtype=torch.int64, device=self.device)
        for name in dict.fromkeys((best, "default")):
            with kernel(name):
                fast = compiled(self._loss, example, self.decoder)
            if fast is not None:
                self._kernel, self._loss, self._compiled = name, fast, True
                return
        print("compile: going on without it", flush=True)

    def train(self, prepared: Prepared, loop: LoopOptions) -> Outcome:
        """Spend the loop's budget on a prepared corpus."""
        shape = self.options.shape
        if prepared.vocab != shape.vocab or prepared.eos != self.options.eos:
            raise InvalidParameter("vocab", f"the corpus was prepared for {prepared.vocab} tokens, the model has {shape.vocab}")
        task = LmTask(self.decoder, {name: prepared.store(name) for name in HELDOUT})
        rows = Rows(prepared.store("train"), shape.context, self.options.seed)
        if self.device.type == "cuda" and not self._compiled and not loop.micro_rows:
            loop = replace(loop, micro_rows=max(loop.rows // 4, 1))  # eager keeps several times the activations
        with kernel(self._kernel):
            return train(task, rows, build_optimizers(self.decoder, self.options.optim), loop, self._loss)

    def export(self, tokenizer: Path, directory: Path) -> None:
        """Write the model directory."""
        export_model(self.decoder, tokenizer, directory)

    def judge(self, prepared: Prepared, directory: Path, most_rows: int | None = None) -> dict[str, Any]:
        """Held-out losses of the trained weights and of the exported, int8 model."""
        served = load_decoder(directory).to(self.device)
        figures: dict[str, Any] = {}
        for name in HELDOUT:
            store = prepared.store(name)
            if store.tokens > 1:
                trained: Heldout = heldout_loss(self.decoder, store, most_rows)
                figures[name] = {"trained": trained.loss, **asdict(heldout_loss(served, store, most_rows))}
        return figures


def pick_device(name: str) -> torch.device:
    """ "auto" is CUDA where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cpu", "cuda"):
        raise InvalidParameter("device", f"unknown {name!r}; known: auto, cpu, cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise InvalidParameter("device", "no CUDA device here; pass --device cpu")
    return torch.device(name)
