"""Tokenizers written as GGUF metadata and read back: every text has the ids that the tokenizers library gave it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from outrider.errors import ModelError
from outrider.gguf import Gguf, end_ids
from outrider.gguf.pretokenizers import PATTERNS
from outrider.text import TextStream
from outrider.text import Tokenizer as Served

gguf = pytest.importorskip("gguf", reason="the gguf package writes the files")

CORPUS = [
    "def add(a, b):\n    return a + b  # sums, don't they'll\n\n", "The year 2026 has 365 days, 52 weeks and 8760 hours.\r\n",
    "Größe, naïve café, Ελληνικά, кириллица, 中文字符, ひらがな, 🙂🙃 e\u0301",
    "HTTPServer getUserName camelCase WE'LL I'M  \t tabs",
] * 4  # fmt: skip
SPECIAL = ["<|begin|>", "<|end|>", "<|eot_id|>"]
# Written out as the models' own tokenizer.json has them; what PATTERNS makes must cut the same.
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?"
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+"
    r"[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split(pattern: str) -> Any:
    cut = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


CUTS = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    ),
    "llama-bpe": split(LLAMA3), "qwen2": split(QWEN2), "tekken": split(TEKKEN), "gpt-4o": split(GPT4O),
}  # fmt: skip


def texts(seed: int) -> list[str]:
    """Pieces of the corpus, of Unicode and of control tokens in random order."""
    rng = random.Random(seed)
    pieces = [
        *"".join(CORPUS[:4]).split(" "),
        *SPECIAL,
        "  ",
        "\n",
        " ",
        "",
        "\t\n ",
        "007",
        "\U0001f9ea",
        "\u00df\u0301",
        "<|end",
        "|>",
    ]
    return ["".join(rng.choice(pieces) + rng.choice(["", " ", ""]) for _ in range(rng.randrange(12))) for _ in range(300)]


def byte_level(name: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=name in ("llama-bpe", "tekken")))
    tokenizer.pre_tokenizer, tokenizer.decoder = CUTS[name], decoders.ByteLevel()
    tokenizer.normalizer = normalizers.NFC() if name == "qwen2" else None
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False))
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return tokenizer


def write(path: Path, **more: Any) -> Any:
    """A writer with a name of its architecture, which is closed by `close`."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in more.items():
        getattr(writer, f"add_{key}")(value)
    return writer


def close(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_byte_level(path: Path, tokenizer: Tokenizer, pre: str, **more: Any) -> None:
    import json

    state = json.loads(tokenizer.to_str())
    by_id = sorted(tokenizer.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1])
    added = {token["content"]: token["special"] for token in state["added_tokens"]}
    writer = write(path, tokenizer_model="gpt2", tokenizer_pre=pre, **more)
    writer.add_token_list([token for token, _ in by_id])
    writer.add_token_types([{None: 1, True: 3, False: 4}[added.get(token)] for token, _ in by_id])
    writer.add_token_merges([" ".join(pair) for pair in state["model"]["merges"]])
    close(writer)


@pytest.mark.parametrize("name", CUTS)
def test_byte_level_tokenizers(tmp_path: Path, name: str) -> None:
    tokenizer = byte_level(name)
    write_byte_level(tmp_path / "m.gguf", tokenizer, name, add_bos_token=False, eos_token_id=tokenizer.token_to_id("<|end|>"))
    served = Served.load(tmp_path / "m.gguf")
    assert served is not None
    for text in [*CORPUS, *texts(1)]:
        assert served.encode(text) == tokenizer.encode(text).ids, text
        ids = tokenizer.encode(text).ids
        assert served.decode(ids, skip_special_tokens=False) == tokenizer.decode(ids, skip_special_tokens=False)
        assert served.decode(ids) == tokenizer.decode(ids)
    assert served.table() == tokenizer.get_vocab(with_added_tokens=True)
    assert served.eos_id == tokenizer.token_to_id("<|end|>")


@pytest.mark.parametrize(("pre", "ids"), [("llama-bpe", [2]), ("gpt-2", [0, 1])])
def test_words_that_no_merge_makes(tmp_path: Path, pre: str, ids: list[int]) -> None:
    """Llama 3 takes them from the vocabulary, GPT-2 does not."""
    writer = write(tmp_path / "m.gguf", tokenizer_model="gpt2", tokenizer_pre=pre, add_bos_token=False, token_merges=["b a"])
    writer.add_token_list(["a", "b", "ab", "ba"])
    close(writer)
    served = Served.load(tmp_path / "m.gguf")
    assert served is not None
    assert served.encode("ab") == ids


def sentencepiece(prefix: bool) -> tuple[Tokenizer, list[tuple[str, float, int]]]:
    """A tokenizer as Transformers makes it of a SentencePiece model, and that model's pieces, scores and types."""
    from transformers.convert_slow_tokenizer import generate_merges

    learner = Tokenizer(models.BPE())
    learner.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    ascii_only = ["".join(c for c in text if ord(c) < 128) for text in CORPUS]  # other letters are spelled in bytes
    learner.train_from_iterator(ascii_only, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    learned = [token for token, _ in sorted(learner.get_vocab().items(), key=lambda item: item[1])]
    words, letters = [token for token in learned if len(token) > 1], [token for token in learned if len(token) == 1]
    pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    pieces += [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
    pieces += [(token, -float(i), 1) for i, token in enumerate([*words, *letters])]
    pieces += [("<|eot_id|>", -1000.0, 3), ("<think>", -1000.0, 4)]
    ids = {piece: i for i, (piece, _, _) in enumerate(pieces)}
    scores = {piece: score for piece, score, kind in pieces if kind == 1}
    model = models.BPE(
        ids, generate_merges({p: ids[p] for p in scores}, scores), unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    before = [normalizers.Prepend("\u2581")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", "\u2581")])
    after = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *after])
    for piece, _, kind in pieces:
        if kind in (2, 3, 4):
            tokenizer.add_tokens([AddedToken(piece, special=kind != 4, normalized=False)])
    return tokenizer, pieces


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_tokenizers(tmp_path: Path, prefix: bool) -> None:
    tokenizer, pieces = sentencepiece(prefix)
    options = {"tokenizer_model": "llama", "add_space_prefix": prefix, "bos_token_id": 1, "eos_token_id": 2, "unk_token_id": 0}
    writer = write(tmp_path / "m.gguf", **options)
    writer.add_token_list([piece for piece, _, _ in pieces])
    writer.add_token_scores([score for _, score, _ in pieces])
    writer.add_token_types([kind for _, _, kind in pieces])
    close(writer)
    served = Served.load(tmp_path / "m.gguf")
    assert served is not None
    for text in [*CORPUS, *texts(2)]:
        text = text.replace("<|begin|>", "<s>").replace("<|end|>", "</s>")
        ids = tokenizer.encode(text).ids
        assert served.encode_bare(text) == tuple(ids), text
        assert served.encode(text) == [1, *ids]
        assert served.decode(ids) == tokenizer.decode(ids)
        stream = TextStream(served, [], skip_special_tokens=False)
        assert "".join(map(stream.push, ids)) + stream.flush() == tokenizer.decode(ids, skip_special_tokens=False)
    assert len(served.byte_ids) == 256
    assert served.spellings()[3] == (False, b"\0")
    assert end_ids(Gguf(tmp_path / "m.gguf")) == (2, len(pieces) - 2)


def test_ends_chat_template_and_beginning_come_from_the_metadata(tmp_path: Path) -> None:
    tokenizer = byte_level("llama-bpe")
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL}
    template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}<|eot_id|>{% endfor %}"
    write_byte_level(
        tmp_path / "m.gguf",
        tokenizer,
        "llama-bpe",
        chat_template=template,
        bos_token_id=ids["<|begin|>"],
        eos_token_id=ids["<|end|>"],
    )
    served = Served.load(tmp_path / "m.gguf")
    assert served is not None
    assert served.bos_ids == [ids["<|begin|>"]], "Llama 3 begins with it unless the file says no"
    assert served.chat([{"role": "user", "content": "a day"}]) == [
        ids["<|begin|>"],
        *served.encode_bare("a day"),
        ids["<|eot_id|>"],
    ]
    assert end_ids(Gguf(tmp_path / "m.gguf")) == tuple(sorted((ids["<|end|>"], ids["<|eot_id|>"])))


def test_every_pattern_cuts_without_losing_text() -> None:
    for name, patterns in PATTERNS.items():
        cut = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns])
        for text in CORPUS:
            assert "".join(piece for piece, _ in cut.pre_tokenize_str(text)) == text, name


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"tokenizer_model": "bert"}, "tokenizer is of kind 'bert'; known: gpt2, llama"),
        ({"tokenizer_model": "gpt2", "tokenizer_pre": "new"}, r"'new' \(tokenizer.ggml.pre\)"),
        (
            {"tokenizer_model": "gpt2", "tokenizer_pre": "gpt-2", "token_merges": ["ab"]},
            "merges of its tokenizer are not two tokens",
        ),
        ({"tokenizer_model": "gpt2", "tokenizer_pre": "gpt-2", "token_merges": ["q r"]}, "does not fit together"),
        ({"tokenizer_model": "gpt2", "tokenizer_pre": "gpt-2", "token_types": [1]}, "1 types for 2 tokens"),
        ({"tokenizer_model": "llama", "token_scores": [1.0]}, "2 tokens, 1 scores"),
    ],
)
def test_tokenizers_that_do_not_fit_together(tmp_path: Path, more: dict[str, Any], message: str) -> None:
    writer = write(tmp_path / "m.gguf", **more)
    writer.add_token_list(["a", "b"])
    close(writer)
    with pytest.raises(ModelError, match=rf"m\.gguf.*{message}"):
        Served.load(tmp_path / "m.gguf")


def test_a_file_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    close(write(tmp_path / "m.gguf", context_length=5))
    assert Served.load(tmp_path / "m.gguf") is None
