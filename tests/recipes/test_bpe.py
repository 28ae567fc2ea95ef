"""Any text survives, code splits well, Transformers reads the files."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from outrider.errors import InvalidParameter, ModelError
from outrider.train.corpus import encode_documents, load_tokenizer
from recipes.pyrite.bpe import EOS, SPECIAL, save_tokenizer, train_tokenizer
from tests.support.corpus import module_text
from tests.support.examples import examples

_TEXTS = [module_text(i) for i in range(20)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(_TEXTS, 360)


@given(st.text(max_size=200) | st.sampled_from(_TEXTS))
@examples(200)
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_indentation_is_one_token_and_digits_stand_alone(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("        return 1234\n").tokens[:2] == ["ĠĠĠĠĠĠĠ", "Ġreturn"]
    assert [t for t in tokenizer.encode("x = 1234").tokens if t.isdigit()] == ["1", "2", "3", "4"]


def test_special_tokens_come_first(tokenizer: Tokenizer) -> None:
    assert [tokenizer.token_to_id(token) for token in SPECIAL] == list(range(len(SPECIAL)))
    assert tokenizer.get_vocab_size() == 360


def test_special_tokens_inside_documents_stay_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    save_tokenizer(tokenizer, tmp_path, 64)
    (ids,) = encode_documents([f"a{EOS}b"], tmp_path, 0)
    assert ids[-1] == 0
    assert 0 not in ids[:-1]
    assert tokenizer.decode(ids[:-1].tolist()) == f"a{EOS}b"


def test_transformers_reads_it(tokenizer: Tokenizer, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    save_tokenizer(tokenizer, tmp_path, 64)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs(_TEXTS[0]).input_ids == tokenizer.encode(_TEXTS[0]).ids
    assert theirs.decode(theirs(_TEXTS[0]).input_ids) == _TEXTS[0]
    assert (theirs.eos_token_id, theirs.model_max_length, len(theirs)) == (0, 64, 360)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    plain = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert plain == "<|system|>\nBe brief.<|end|>\n<|user|>\nHello<|end|>\n<|assistant|>\n"
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    rendered = theirs.apply_chat_template(messages, tools=tools, tokenize=False)
    assert rendered.count("<|system|>") == 1
    assert '"look"' in rendered
    assert rendered.endswith("<|user|>\nHello<|end|>\n")


def test_errors_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match="too small"):
        train_tokenizer(["text"], 100)
    with pytest.raises(InvalidParameter, match="add text or pass --vocab 2"):
        train_tokenizer(["text"], 4000)
    with pytest.raises(ModelError, match="is missing"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        load_tokenizer(tmp_path)
