"""A byte-level BPE tokenizer for code, written in the layout Transformers reads.

Any text survives encoding and decoding unchanged. Indentation becomes single tokens, digits stay apart,
a word takes the one space or sign before it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import Sequence as Steps
from tokenizers.trainers import BpeTrainer

from outrider.errors import InvalidParameter, ModelError

__all__ = ["EOS", "SPECIAL", "TOKENIZER_FILES", "encode_documents", "load_tokenizer", "save_tokenizer", "train_tokenizer"]

EOS = "<|endoftext|>"  # ends every document; id 0
SPECIAL = (EOS, "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")

# One sign or space with letters; single digits; runs of signs; newlines; runs of spaces but the last.
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|[\r\n]+|[^\S\r\n]+(?!\S)|[^\S\r\n]+"
_BYTES = 256

_CHAT_TEMPLATE = """\
{%- if tools %}<|system|>
{%- for message in messages if message.role == "system" %}
{{ message.content }}
{%- endfor %}
Tools, one JSON object per line:
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
<|end|>
{% endif %}
{%- for message in messages %}
{%- if not (tools and message.role == "system") -%}
<|{{ message.role }}|>
{{ message.content or "" }}
{%- for call in message.tool_calls or [] %}
<|tool|>{{ (call.function or call) | tojson }}
{%- endfor %}<|end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>
{% endif %}"""


def train_tokenizer(texts: Iterable[str], vocab: int) -> Tokenizer:
    """Learn exactly `vocab` tokens, the special ones and the 256 bytes included."""
    if vocab < _BYTES + len(SPECIAL):
        raise InvalidParameter("vocab", f"{vocab} is too small; {_BYTES} bytes and {len(SPECIAL)} special tokens come first")
    tokenizer = Tokenizer(BPE())
    split = Split(Regex(_WORDS), behavior="isolated")
    tokenizer.pre_tokenizer = Steps([split, ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
        max_token_length=32,
    )
    tokenizer.train_from_iterator(texts, trainer)
    learned = tokenizer.get_vocab_size()
    if learned != vocab:
        raise InvalidParameter("vocab", f"the corpus holds only {learned} tokens; add text or pass --vocab {learned}")
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path, context: int) -> None:
    """Write the files that `AutoTokenizer.from_pretrained(directory)` reads."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "eos_token": EOS,
        "pad_token": EOS,
        "additional_special_tokens": list(SPECIAL[1:]),
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (directory / "chat_template.jinja").write_text(_CHAT_TEMPLATE)


def load_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of a model directory."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"{path} is missing: pass a directory with a tokenizer.json")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for every malformed file
        raise ModelError(f"{path} cannot be read: {error}") from None


def encode_documents(texts: Sequence[str], path: str, eos: int) -> list[npt.NDArray[np.uint32]]:
    """Ids of each text and the end-of-document id. Special tokens inside a text stay plain text."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # callers run one process per core
    tokenizer = _plain_tokenizer(path)
    return [np.array([*encoding.ids, eos], dtype=np.uint32) for encoding in tokenizer.encode_batch_fast(list(texts))]


@lru_cache(maxsize=1)
def _plain_tokenizer(path: str) -> Tokenizer:
    tokenizer = load_tokenizer(Path(path))
    tokenizer.encode_special_tokens = True
    return tokenizer
