"""The tokenizer in a GGUF file's metadata, as the tokenizers library runs it.

Two kinds: "gpt2" is byte-level BPE with its merges, "llama" is SentencePiece's BPE, whose merges follow from the scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from outrider.errors import ModelError
from outrider.gguf.file import Gguf
from outrider.gguf.pretokenizers import IGNORE_MERGES, PATTERNS, UNICODE_FORMS

__all__ = ["end_ids", "read_tokenizer"]

_KINDS = ("gpt2", "llama")
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6  # types of tokens; 1 is a piece of text, 5 is unused
_SPACE = "\u2581"
# How models spell the end of a turn, where the metadata names only the end of a text.
_ENDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>", "<EOT>",
    "<|return|>",
)  # fmt: skip
_LONGEST_TOKEN = 1024  # letters


def read_tokenizer(gguf: Gguf) -> Any | None:
    """The tokenizer as Transformers wraps it, with its special tokens and chat template; None where the file has none."""
    kind, tokens = gguf.word("tokenizer.ggml.model", "none"), gguf.strings("tokenizer.ggml.tokens")
    if kind in ("none", "no_vocab") or not tokens:
        return None
    if kind not in _KINDS:
        raise _error(gguf, f"its tokenizer is of kind {kind!r}; known: {', '.join(_KINDS)}")
    longest = max(map(len, tokens))
    if longest > _LONGEST_TOKEN:
        raise _error(gguf, f"its tokenizer has a token of {longest} letters")
    kinds = gguf.numbers("tokenizer.ggml.token_type")
    if kinds and len(kinds) != len(tokens):
        raise _error(gguf, f"it has {len(kinds)} types for {len(tokens)} tokens")
    try:
        tokenizer = _byte_level(gguf, tokens) if kind == "gpt2" else _sentencepiece(gguf, tokens, kinds)
        tokenizer.add_tokens(_added(tokens, kinds))
        tokenizer.post_processor = _ends_around(gguf, tokens, kind)
    except ModelError:
        raise
    except Exception as error:  # the library raises plain Exceptions about vocabularies and merges that do not fit
        raise _error(gguf, f"its tokenizer does not fit together: {error}") from None
    return _wrapped(gguf, tokenizer, tokens)


def end_ids(gguf: Gguf) -> tuple[int, ...]:
    """Tokens that end a text or a turn."""
    tokens = gguf.strings("tokenizer.ggml.tokens")
    named = {gguf.index(f"tokenizer.ggml.{name}_token_id", len(tokens)) for name in ("eos", "eot", "eom")} - {None}
    kinds = gguf.numbers("tokenizer.ggml.token_type")
    control = {i for i, kind in enumerate(kinds[: len(tokens)]) if kind == _CONTROL and tokens[i] in _ENDS}
    return tuple(sorted(named | control))  # type: ignore[arg-type]


def _byte_level(gguf: Gguf, tokens: Sequence[str]) -> Tokenizer:
    name = gguf.word("tokenizer.ggml.pre", "default")
    if name not in PATTERNS:
        known = ", ".join(sorted(PATTERNS))
        raise _error(
            gguf, f"its tokenizer cuts text in the way {name!r} (tokenizer.ggml.pre), which is not known; known: {known}"
        )
    lines = gguf.strings("tokenizer.ggml.merges")
    merges = [(left, right) for left, space, right in (line.partition(" ") for line in lines) if space and " " not in right]
    if len(merges) < len(lines):
        raise _error(gguf, f"{len(lines) - len(merges)} merges of its tokenizer are not two tokens and a space")
    model = models.BPE(_vocabulary(tokens), merges, ignore_merges=name in IGNORE_MERGES)
    tokenizer = Tokenizer(model)
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PATTERNS[name]]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    if UNICODE_FORMS.get(name) == "NFC":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(gguf: Gguf, tokens: Sequence[str], kinds: Sequence[int]) -> Tokenizer:
    scores = gguf.numbers("tokenizer.ggml.scores")
    if len(scores) != len(tokens) or not kinds:
        raise _error(gguf, f"its tokenizer has {len(tokens)} tokens, {len(scores)} scores and {len(kinds)} types of tokens")
    vocabulary = _vocabulary(tokens)
    texts = {token: scores[i] for token, i in vocabulary.items() if kinds[i] not in (_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE)}
    unknown = next((tokens[i] for i, kind in enumerate(kinds) if kind == _UNKNOWN), None)
    has_bytes = any(kind == _BYTE for kind in kinds)
    merges = _merges(texts, vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=has_bytes))
    prefix = gguf.flag("tokenizer.ggml.add_space_prefix", True)
    before = [normalizers.Prepend(_SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", _SPACE)])
    after = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *after])
    return tokenizer


def _vocabulary(tokens: Sequence[str]) -> dict[str, int]:
    """Ids of tokens. Of equal ones the first counts."""
    return {token: i for i, token in reversed(list(enumerate(tokens)))}


def _merges(scores: Mapping[str, float], ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Every way to join two tokens to a third, best score of the joined one first."""
    joined = [
        (-score, ids[token], ids[token[:cut]], ids[token[cut:]], token[:cut], token[cut:])
        for token, score in scores.items()
        for cut in range(1, len(token))
        if token[:cut] in scores and token[cut:] in scores
    ]
    return [(left, right) for *_, left, right in sorted(joined)]


def _added(tokens: Sequence[str], kinds: Sequence[int]) -> list[AddedToken]:
    """Tokens that are found in text before it is cut: control tokens, and those of the model's makers."""
    named = (_CONTROL, _USER_DEFINED, _UNKNOWN)
    found = ((token, kind) for token, kind in zip(tokens, kinds, strict=False) if token and kind in named)
    return [AddedToken(token, normalized=False, special=kind != _USER_DEFINED) for token, kind in found]


def _ends_around(gguf: Gguf, tokens: Sequence[str], kind: str) -> Any:
    """What is put before and after a prompt."""
    begins = kind == "llama" or gguf.word("tokenizer.ggml.pre", "default") in IGNORE_MERGES
    bos = _token(gguf, tokens, "bos") if gguf.flag("tokenizer.ggml.add_bos_token", begins) else None
    eos = _token(gguf, tokens, "eos") if gguf.flag("tokenizer.ggml.add_eos_token", False) else None
    around = [token for token in (bos, "$A", eos) if token is not None]
    special = [(token, _vocabulary(tokens)[token]) for token in (bos, eos) if token is not None]
    return processors.TemplateProcessing(single=around, pair=[*around, "$B"], special_tokens=special)


def _token(gguf: Gguf, tokens: Sequence[str], role: str) -> str | None:
    index = gguf.index(f"tokenizer.ggml.{role}_token_id", len(tokens))
    return None if index is None else tokens[index] or None


def _wrapped(gguf: Gguf, tokenizer: Tokenizer, tokens: Sequence[str]) -> Any:
    from transformers import PreTrainedTokenizerFast

    roles = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    special = {f"{name}_token": token for role, name in roles.items() if (token := _token(gguf, tokens, role))}
    template = gguf.word("tokenizer.chat_template") or None
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=template, clean_up_tokenization_spaces=False, **special
    )


def _error(gguf: Gguf, why: str) -> ModelError:
    return ModelError(f"{gguf.path}: {why}; pass the folder of the original model")
