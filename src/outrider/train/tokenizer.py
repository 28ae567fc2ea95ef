"""A target's tokenizer as training uses it: its files, the id that ends documents, and encoding in bulk."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from outrider.errors import ModelError

__all__ = ["copy_tokenizer", "document_end", "encode_documents", "load_tokenizer"]

_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
_BATCH = 256  # texts that tokenizers encodes side by side


def load_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of a model directory."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"{path} is missing: pass a directory with a tokenizer.json")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for every malformed file
        raise ModelError(f"{path} cannot be read: {error}") from None


def copy_tokenizer(source: Path, directory: Path) -> None:
    """The tokenizer's files, those of them that the source has."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in _FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, directory / name)


def document_end(directory: Path) -> int:
    """The id that ends documents: the model's end-of-sequence id, or its tokenizer's."""
    from outrider.model import ModelConfig  # here, because processes that only encode need no torch
    from outrider.model.load import generation_defaults
    from outrider.text import Tokenizer as Text

    config = ModelConfig.read(directory) if (directory / "config.json").exists() else None
    ids = () if config is None else config.eos_ids or sorted(generation_defaults(directory, config)[1])
    if ids:
        return ids[0]
    text = Text.load(directory)
    if text is None or text.eos_id is None:
        raise ModelError(f"{directory} names no end-of-sequence token; add eos_token_id to its config.json")
    return text.eos_id


def encode_documents(texts: Sequence[str], directory: Path, eos: int) -> list[npt.NDArray[np.uint32]]:
    """Ids of each text and the end-of-document id. Special tokens inside a text stay plain text."""
    tokenizer = _plain_tokenizer(directory)
    batches = (texts[begin : begin + _BATCH] for begin in range(0, len(texts), _BATCH))
    encoded = (encoding for batch in batches for encoding in tokenizer.encode_batch_fast(list(batch)))
    return [np.array([*encoding.ids, eos], dtype=np.uint32) for encoding in encoded]


@lru_cache(maxsize=1)
def _plain_tokenizer(directory: Path) -> Tokenizer:
    tokenizer = load_tokenizer(directory)
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
