"""From documents to token stores on disk: encode with the target's tokenizer, hold out a part, write.

Held-out text is never trained on; the figures of a run are measured on it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from outrider.errors import InvalidParameter, ModelError
from outrider.text import Tokenizer as TextTokenizer
from outrider.train.checkpoint import guarded_write
from outrider.train.data import Ids, TokenStore, write_store
from outrider.train.documents import Document

__all__ = [
    "SUMMARY",
    "TokenCorpus",
    "choose_packages",
    "copy_tokenizer",
    "document_end",
    "encode_documents",
    "hold_out",
    "load_tokenizer",
    "name_hash",
    "require_same_tokenizer",
    "tokenize",
    "write_corpus",
]

SUMMARY = "corpus.json"
HELDOUT_SHARE = 0.03  # of the tokens
MAX_HELDOUT = 200_000  # tokens: several times what an evaluation reads
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
_BATCH = 256  # texts that tokenizers encodes side by side


@dataclass(frozen=True, slots=True)
class TokenCorpus:
    """A folder with token stores, the tokenizer and corpus.json."""

    directory: Path
    summary: Mapping[str, Any]

    @classmethod
    def open(cls, directory: Path) -> TokenCorpus:
        """A folder whose corpus.json was written, which happens last."""
        try:
            return cls(directory, json.loads((directory / SUMMARY).read_text()))
        except (OSError, json.JSONDecodeError) as error:
            raise ModelError(f"{directory} holds no tokens to train on: {error}") from None

    @property
    def vocab(self) -> int:
        return int(self.summary["vocab"])

    @property
    def eos(self) -> int:
        return int(self.summary["eos"])

    def store(self, split: str) -> TokenStore:
        """The tokens of one split."""
        return TokenStore.open(self.directory, split)

    def heldout(self) -> TokenStore:
        """The largest split that is not trained on."""
        tokens: Mapping[str, int] = self.summary["tokens"]
        return self.store(max((name for name in tokens if name != "train"), key=lambda name: tokens[name]))


def tokenize(documents: Sequence[Document], target: Path) -> list[Ids]:
    """Ids of every document by the target's tokenizer and chat template, each closed by the end-of-sequence id."""
    eos = document_end(target)
    texts = iter(encode_documents([document.text for document in documents if not document.messages], target, eos))
    chats = iter(_conversations([document for document in documents if document.messages], target, eos))
    return [next(chats) if document.messages else next(texts) for document in documents]


def write_corpus(
    documents: Sequence[Document], target: Path, directory: Path, heldout: Sequence[str] = (), log: Callable[[str], None] = print
) -> TokenCorpus:
    """Encode documents for a target and write what to train on and what to hold out into `directory`.

    `heldout` names packages; without names a part is chosen by hash.
    """
    ids = tokenize(documents, target)
    splits = hold_out([document.package for document in documents], ids, heldout)
    copy_tokenizer(target, directory)
    vocab = load_tokenizer(target).get_vocab_size()
    tokens = {}
    for name, members in splits.items():
        packages, parts = [package for package, _ in members], [part for _, part in members]
        tokens[name] = write_store(directory, name, parts, packages, vocab).tokens
    log(f"corpus: {len(documents)} documents, {tokens['train']:,} tokens to train on, {tokens['heldout']:,} held out")
    summary = {"vocab": vocab, "eos": document_end(target), "documents": len(documents), "tokens": tokens}
    with guarded_write(directory / SUMMARY) as file:  # last: its presence means the folder is complete
        file.write(json.dumps(summary, indent=1).encode())
    return TokenCorpus(directory, summary)


Split = list[tuple[str, Ids]]  # (package, ids) of each document


def hold_out(packages: Sequence[str], ids: Sequence[Ids], names: Sequence[str] = ()) -> dict[str, Split]:
    """The documents to train on and those to hold out.

    Whole packages are held out: those named, or some by hash. Where the packages are too few and too large for that, as in
    a single text file, the end of the longest document is held out.
    """
    sizes: dict[str, int] = {}
    for package, document in zip(packages, ids, strict=True):
        sizes[package] = sizes.get(package, 0) + len(document)
    missing = [name for name in names if name not in sizes]
    if missing:
        raise InvalidParameter("heldout", f"no text is named {missing[0]!r}; known: {_some(sizes)}")
    size = min(HELDOUT_SHARE * sum(sizes.values()), MAX_HELDOUT)
    chosen = frozenset(names) or choose_packages(sizes, size)
    if not names and sum(sizes[name] for name in chosen) < size / 2:
        chosen = frozenset()
    splits: dict[str, Split] = {"train": [], "heldout": []}
    for package, document in zip(packages, ids, strict=True):
        splits["heldout" if package in chosen else "train"].append((package, document))
    if not chosen:
        longest = max(range(len(ids)), key=lambda i: len(ids[i]))
        package, document = splits["train"][longest]
        cut = max(len(document) - int(size), 1)
        splits["train"][longest] = (package, document[:cut])
        splits["heldout"].append((package, document[cut:]))
    return splits


def choose_packages(sizes: Mapping[str, int], wanted: float) -> frozenset[str]:
    """Packages of about `wanted` size together, in the order of the hash of their names."""
    chosen: set[str] = set()
    taken = 0
    for name in sorted(sizes, key=name_hash):
        if taken >= wanted or len(sizes) < 2:
            break
        if taken + sizes[name] <= 1.5 * wanted:  # a large package would be all that the figures are about
            chosen.add(name)
            taken += sizes[name]
    return frozenset(chosen)


def name_hash(name: str) -> int:
    """64 bits that depend on the name alone, equal on every machine."""
    return int.from_bytes(hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "big")


def _conversations(documents: Sequence[Document], target: Path, eos: int) -> Iterator[Ids]:
    tokenizer = TextTokenizer.load(target) if documents else None
    for document in documents:
        if tokenizer is None:
            raise ModelError(f"{target} holds no tokenizer")
        ids = tokenizer.chat(document.messages, add_generation_prompt=False)
        yield np.array(ids if ids[-1:] == [eos] else [*ids, eos], dtype=np.uint32)


def _some(names: Mapping[str, int]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:8]) + (", ..." if len(listed) > 8 else "")


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
    for name in _TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, directory / name)


def document_end(directory: Path) -> int:
    """The id that ends documents: the model's end-of-sequence id, or its tokenizer's."""
    from outrider.model import read_spec  # here, because processes that only encode need no torch
    from outrider.model.load import generation_defaults

    config = read_spec(directory) if (directory / "config.json").exists() else None
    ids = () if config is None else config.eos_ids or sorted(generation_defaults(directory, config)[1])
    if ids:
        return ids[0]
    text = TextTokenizer.load(directory)
    if text is None or text.eos_id is None:
        raise ModelError(f"{directory} names no end-of-sequence token; add eos_token_id to its config.json")
    return text.eos_id


def encode_documents(texts: Sequence[str], directory: Path, eos: int) -> list[Ids]:
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


def require_same_tokenizer(target: Path, corpus: TokenCorpus) -> None:
    """Refuse a corpus whose ids are other tokens of the target."""
    target_tokenizer, corpus_tokenizer = load_tokenizer(target), load_tokenizer(corpus.directory)
    if target_tokenizer.get_vocab() != corpus_tokenizer.get_vocab():
        sizes = f"{corpus_tokenizer.get_vocab_size()} and {target_tokenizer.get_vocab_size()} tokens"
        raise InvalidParameter(
            "tokenizer",
            f"the corpus in {corpus.directory} was encoded with another tokenizer than that of {target} ({sizes}); "
            "pass the text itself instead of --data",
        )
