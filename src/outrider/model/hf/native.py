"""Handing a user's model over to the native backend, where its family is one that Outrider runs itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.errors import ModelError
from outrider.model.decoder import Decoder
from outrider.model.families import compile_spec, names_of
from outrider.model.files import Header
from outrider.model.load import served_dtype
from outrider.model.spec import ModelSpec
from outrider.model.weights import Checkpoint, StoredWeights

__all__ = ["ModuleSource", "native_decoder"]


class ModuleSource:
    """The tensors of a loaded model, by the names that its family gives them: a class may call its output matrix otherwise."""

    decoded: tuple[str, ...] = ()

    def __init__(self, model: Any, output: str) -> None:
        tensors: dict[str, Tensor] = model.state_dict()
        head = model.get_output_embeddings()
        called = next(name for name, module in model.named_modules() if module is head) + "."
        self._tensors = {
            f"{output}.{name.removeprefix(called)}" if name.startswith(called) else name: tensor
            for name, tensor in tensors.items()
        }

    def headers(self) -> Mapping[str, Header]:
        place = "the model"
        return {name: Header(tuple(t.shape), str(t.dtype).removeprefix("torch."), place) for name, t in self._tensors.items()}

    def tensor(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        tensor = self._tensors[name].detach().cpu()
        return tensor.to(dtype) if tensor.dim() == 2 else tensor

    def grouped(self, name: str) -> None:
        """Modules hold floating point."""

    def blocks(self, name: str) -> None:
        """Modules hold floating point."""

    def floats(self, name: str) -> None:
        """Modules hold floating point without scales."""

    def close(self) -> None:
        """No files are open."""


def native_decoder(model: Any, widen: bool) -> Decoder | None:
    """A decoder over a model's weights; None where no family has its architecture, or something in it is not the family's.

    Matrices that a family stores as the decoder holds them are shared; fused ones are copied, and the native core packs what
    it multiplies by.
    """
    spec = _spec(model)
    if spec is None:
        return None
    held = torch.float32 if widen or spec.dtype != "bfloat16" else torch.bfloat16
    try:
        checkpoint = Checkpoint.over(Path(type(model).__name__), spec, ModuleSource(model, names_of(spec).output))
        with torch.device("meta"):
            decoder = Decoder(checkpoint.spec, held)
        parameters = dict(decoder.named_parameters())
        checkpoint.check(parameters)
    except ModelError:
        return None
    decoder.make_tables()
    decoder.requires_grad_(False)
    decoder.source = StoredWeights(checkpoint, parameters, held)
    decoder.materialise(*(name for name in parameters if not name.startswith(("layers.", "embedding", "output"))), "output_bias")
    return decoder.eval()


def _spec(model: Any) -> ModelSpec | None:
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    config["dtype"] = str(model.dtype).removeprefix("torch.")
    if config.get("quantization_config") or model.dtype not in (torch.float32, torch.bfloat16):
        return None
    try:
        spec = compile_spec(config, type(model).__name__)
    except ModelError:
        return None
    return replace(spec, dtype=served_dtype("auto", spec.dtype))
