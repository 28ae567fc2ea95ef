"""One model for every engine: a Hugging Face directory in bfloat16, from a model directory or from a shape alone."""

from __future__ import annotations

import shutil
from pathlib import Path

from benchmarks.forward import RANDOM_MODELS
from outrider.errors import InvalidParameter
from outrider.heads.export import export_decoder
from outrider.model import LoadOptions, load_decoder, write_config
from outrider.model.bundled import bundled_model
from outrider.model.load import save_decoder

__all__ = ["DRAFTERS", "export_model", "find_model"]

DRAFTERS = ("draft", "eagle", "medusa")


def find_model(name: str) -> Path | None:
    """The directory of a model that is not random; None for a shape's name."""
    if name in RANDOM_MODELS:
        return None
    if name == "pyrite":
        return bundled_model()
    if not (Path(name) / "config.json").exists():
        raise InvalidParameter("--models", f"unknown {name!r}; a model directory, or one of: pyrite, {', '.join(RANDOM_MODELS)}")
    return Path(name)


def export_model(name: str, folder: Path) -> Path:
    """Write the model's weights (dequantised), configuration and tokenizer, and its draft model's beside them."""
    source = find_model(name)
    folder.mkdir(parents=True, exist_ok=True)
    if source is None:
        write_config(RANDOM_MODELS[name], folder)
        save_decoder(load_decoder(folder, LoadOptions("bfloat16", "dummy")), folder)
        return folder
    export_decoder(source, folder)
    if (source / "draft" / "config.json").exists():
        export_decoder(source / "draft", folder / "draft")
    for head in DRAFTERS[1:]:  # read by Outrider alone
        if (source / head).is_dir():
            shutil.copytree(source / head, folder / head)
    return folder
