"""One model for every engine: a Hugging Face directory in bfloat16, from a model directory or from a shape alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from benchmarks.forward import RANDOM_MODELS
from outrider.errors import InvalidParameter
from outrider.model import LoadOptions, load_decoder, write_config
from outrider.model.bundled import bundled_model
from outrider.model.load import save_decoder

__all__ = ["DRAFTERS", "export_model", "find_model"]

DRAFTERS = ("draft", "eagle", "medusa")
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "chat_template.jinja")


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
    _export(source, folder)
    if (source / "draft" / "config.json").exists():
        _export(source / "draft", folder / "draft")
    for head in DRAFTERS[1:]:  # read by Outrider alone
        if (source / head).is_dir():
            shutil.copytree(source / head, folder / head)
    return folder


def _export(source: Path, folder: Path) -> None:
    save_decoder(load_decoder(source, LoadOptions("bfloat16")), folder)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}, indent=1))
    for file in _TOKENIZER:
        if (source / file).exists():
            shutil.copy(source / file, folder / file)
