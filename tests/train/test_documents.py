"""Users' text: JSONL, text files and folders become documents; tokens are those of the target; a part is held out."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from outrider.errors import InvalidParameter, OutriderError
from outrider.text import Tokenizer
from outrider.train.corpus import HELDOUT_SHARE, TokenCorpus, choose_packages, hold_out, tokenize, write_corpus
from outrider.train.documents import Document, find_files, read_documents

MESSAGES = [{"role": "user", "content": "Sort it."}, {"role": "assistant", "content": "Done. <|end|>"}]


def read(*paths: Path, suffixes: tuple[str, ...] = (".txt",), skip: bool = False) -> tuple[list[Document], dict[str, int]]:
    return read_documents(find_files(paths, suffixes), skip)


def write_lines(path: Path, *lines: object) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_line_is_a_text_a_completion_or_a_conversation(tmp_path: Path) -> None:
    lines = ({"text": "one"}, {"prompt": "a ", "completion": "b"}, {"messages": MESSAGES}, {"text": "two", "package": "p"})
    documents, dropped = read(write_lines(tmp_path / "chat.jsonl", *lines))
    assert [document.text for document in documents] == ["one", "a b", "", "two"]
    assert documents[2].messages == tuple(MESSAGES)
    assert [document.package for document in documents] == ["chat-1", "chat-2", "chat-3", "p"]
    assert dropped == {}


def test_folders_give_their_text_and_jsonl_files(tmp_path: Path) -> None:
    for name in ("a/one.txt", "a/b/two.txt", "three.txt", "skipped.bin", ".hidden/four.txt", "a/__pycache__/five.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    write_lines(tmp_path / "a" / "six.jsonl", {"text": "six"})
    documents, _ = read(tmp_path)
    assert {(document.package, document.text) for document in documents} == {
        ("a", "a/one.txt"), ("a", "a/b/two.txt"), ("three", "three.txt"), ("six-1", "six"),
    }  # fmt: skip
    assert read(tmp_path / "skipped.bin")[0] == [Document("skipped", "skipped.bin")]  # a file that is named is read


def test_duplicates_and_empty_texts_are_left_out_and_counted(tmp_path: Path) -> None:
    lines = ({"text": "one"}, {"text": " "}, {"prompt": "o", "completion": "ne"}, {"messages": MESSAGES}, {"messages": MESSAGES})
    documents, dropped = read(write_lines(tmp_path / "x.jsonl", *lines))
    assert len(documents) == 2
    assert dropped == {"empty": 1, "duplicate": 2}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: not an object"),
        ('{"body": "x"}', 'line 2: not an object with "text", "prompt" and "completion", or "messages"'),
        ('{"completion": "x"}', "line 2: has no 'prompt'"),
        ('{"prompt": "x"}', "line 2: has no 'completion'"),
        ('{"text": 3}', "line 2: 'text' is not a string"),
        ('{"messages": "hello"}', 'line 2: "messages" is not a list'),
        ('{"messages": []}', 'line 2: "messages" is not a list'),
    ],
)
def test_a_line_that_is_no_document_is_named(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(OutriderError) as raised:
        read(path)
    assert message in str(raised.value)


def test_unreadable_files_stop_or_are_counted(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere.txt")
    (tmp_path / "good.txt").write_text("good")
    for _ in range(2):
        with pytest.raises(OutriderError, match=r"(gone|latin)\.txt .*--skip-unreadable"):
            read(tmp_path)
    documents, dropped = read(tmp_path, skip=True)
    assert [document.text for document in documents] == ["good"]
    assert dropped == {"unreadable": 2}
    with pytest.raises(InvalidParameter, match="does not exist"):
        read(tmp_path / "missing")


def test_tokens_are_those_that_the_target_serves(target: Path) -> None:
    """Text keeps special tokens as letters; a conversation is what the chat template makes of it; both end once."""
    documents = [Document("a", "x = 1 <|end|>"), Document("b", messages=tuple(MESSAGES)), Document("c", "y")]
    text, chat, last = tokenize(documents, target)
    tokenizer = Tokenizer.load(target)
    assert tokenizer is not None
    end = tokenizer.fast.token_to_id("<|end|>")
    assert tokenizer.decode(text[:-1].tolist()) == "x = 1 <|end|>"
    assert end not in text
    assert chat[:-1].tolist() == tokenizer.chat(MESSAGES, add_generation_prompt=False)
    assert chat.tolist().count(end) == 2  # one for each turn, none for the letters of a message
    assert [ids[-1] for ids in (text, chat, last)] == [0, 0, 0]
    assert all(0 not in ids[:-1] for ids in (text, chat, last))


def test_held_out_text_is_whole_packages_or_the_end_of_a_single_text() -> None:
    ids = [np.arange(100) + 100 * i for i in range(100)]
    splits = hold_out([f"p{i // 2}" for i in range(100)], ids)
    assert sum(len(part) for _, part in splits["heldout"]) == pytest.approx(HELDOUT_SHARE * 10_000, abs=200)
    assert not {package for package, _ in splits["train"]} & {package for package, _ in splits["heldout"]}
    assert len(splits["train"]) + len(splits["heldout"]) == 100

    single = hold_out(["book", "note"], [np.arange(1000), np.arange(5)], ())
    (_, book), (_, tail) = single["train"][0], single["heldout"][0]
    assert [*book, *tail] == list(range(1000))
    assert len(tail) == int(HELDOUT_SHARE * 1005)

    named = hold_out(["a", "b", "c"], ids[:3], ["b"])
    assert [package for package, _ in named["heldout"]] == ["b"]
    with pytest.raises(InvalidParameter, match="no text is named 'x'; known: a, b"):
        hold_out(["a", "b"], ids[:2], ["x"])


def test_packages_are_chosen_by_hash_and_no_large_one() -> None:
    sizes = {f"package{i}": 100 for i in range(200)} | {"huge": 20_000}
    chosen = choose_packages(sizes, 800)
    assert chosen == choose_packages(dict(reversed(sizes.items())), 800)
    assert sum(sizes[name] for name in chosen) == 800
    assert "huge" not in chosen


def test_a_corpus_reads_back(target: Path, tmp_path: Path) -> None:
    documents = [Document(f"p{i}", f"value_{i} = {i}\n" * 20) for i in range(60)]
    lines: list[str] = []
    write_corpus(documents, target, tmp_path, log=lines.append)
    corpus = TokenCorpus.open(tmp_path)
    assert (corpus.vocab, corpus.eos) == (320, 0)
    assert corpus.store("train").documents + corpus.heldout().documents == 60
    assert corpus.heldout().documents > 0
    assert "60 documents" in lines[0]
