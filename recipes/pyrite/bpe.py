"""Pyrite's tokenizer: byte-level BPE for code, written in the layout Transformers reads.

Encoding and decoding leave any text unchanged. A run of spaces is one token, every digit is a token, and a word includes
the one space or sign before it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import Sequence as Steps
from tokenizers.trainers import BpeTrainer

from outrider.errors import InvalidParameter

__all__ = ["EOS", "SPECIAL", "save_tokenizer", "train_tokenizer"]

EOS = "<|endoftext|>"  # ends every document; id 0
SPECIAL = (EOS, "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>")

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
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
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
