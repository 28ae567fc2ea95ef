"""Folders of trained models, written as they are served."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from outrider.errors import InvalidParameter
from outrider.model import Decoder, save_decoder, write_config
from outrider.model.files import int8_mark
from outrider.model.folders import replaced
from outrider.train.corpus import copy_tokenizer

__all__ = ["export_model", "require_replaceable", "save_model"]


def save_model(decoder: Decoder, folder: Path, tokenizer: Path) -> None:
    """Write a decoder as a model directory with int8 weights."""
    config = replace(decoder.spec, dtype="bfloat16")
    eos = config.eos_ids[0]
    generation = {"eos_token_id": list(config.eos_ids), "pad_token_id": eos, "do_sample": False}
    save_decoder(decoder, folder, int8=True)
    write_config(config, folder, {"bos_token_id": None, "pad_token_id": eos} | int8_mark())
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    copy_tokenizer(tokenizer, folder)


def export_model(decoder: Decoder, tokenizer: Path, directory: Path) -> None:
    """Replace a folder by a decoder's model directory."""
    with replaced(directory) as folder:
        save_model(decoder, folder, tokenizer)


def require_replaceable(directory: Path, target: Path) -> None:
    """Refuse an output folder that holds something other than a drafter: an export replaces the whole folder."""
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return
    holds_target = directory.resolve() in (target.resolve(), *target.resolve().parents)
    is_drafter = (directory / "config.json").is_file() and not any(path.is_dir() for path in directory.iterdir())
    if holds_target or not is_drafter:
        raise InvalidParameter("out", f"{directory} exists and is no drafter's folder; training would replace it, choose another")
