"""The user's files as a corpus: what is read, what is refused, and the file in the cache that later starts map."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from outrider.core import Batch, Plan, Sequence
from outrider.draft.corpus import Corpus, open_corpus
from outrider.draft.corpus_files import corpus_files, corpus_paths
from outrider.draft.lookup import LookupDrafter
from outrider.draft.ngram import NGramDrafter
from outrider.draft.suffix import SuffixDrafter
from outrider.draft.suffix_array import SuffixArray
from outrider.errors import InvalidParameter
from outrider.model.bundled import bundled_model
from outrider.sampling import SamplingParams
from outrider.text import Tokenizer
from tests.support import make_request

TEXT = "def area(width, height):\n    return width * height\n"
VOCAB = 8192


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "corpus"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "texts"
    (root / "below").mkdir(parents=True)
    (root / "__pycache__").mkdir()
    (root / "a.py").write_text(TEXT)
    (root / "below" / "b.jsonl").write_text('{"text": "one line of text"}\n\n{"text": "another", "id": 3}\n')
    (root / "empty.txt").write_text("")
    (root / "image.png").write_bytes(b"\x89PNG\x00\xff\xfe")
    (root / "zeros.bin").write_bytes(b"\0" * 9)
    (root / "other.jsonl").write_text('{"messages": []}\n')
    (root / "__pycache__" / "a.pyc").write_text(TEXT)
    (root / ".hidden").write_text(TEXT)
    return root


def load_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer.load(Path(bundled_model()))
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer()


def occurs(corpus: Corpus, tokenizer: Tokenizer, text: str) -> bool:
    tokens = tokenizer.encode_bare(text)
    return corpus.text.find(tokens).length == len(tokens)


def test_a_folder_is_read_without_what_is_no_text(folder: Path, tokenizer: Tokenizer) -> None:
    corpus = open_corpus([folder], tokenizer, VOCAB)
    assert (corpus.files, corpus.skipped) == (3, 3)
    assert "3 files (3 that are no text left out)" in str(corpus)
    assert "built in" in str(corpus)
    for text in (TEXT, "one line of text", "another"):
        assert occurs(corpus, tokenizer, text)
    assert not occurs(corpus, tokenizer, "one line of textanother")


def test_the_next_start_maps_what_was_built_until_a_text_changes(folder: Path, tokenizer: Tokenizer, cache: Path) -> None:
    built = open_corpus([folder], tokenizer, VOCAB)
    again = open_corpus([folder], tokenizer, VOCAB)
    assert (built.was_built, again.was_built) == (True, False)
    assert str(again).endswith("reused")
    assert again.text.size == built.text.size
    (folder / "a.py").write_text(TEXT.replace("area", "volume"))
    changed = open_corpus([folder], tokenizer, VOCAB)
    assert changed.was_built
    assert occurs(changed, tokenizer, TEXT.replace("area", "volume"))
    assert not occurs(changed, tokenizer, TEXT)
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize("damage", ["cut", "flip", "foreign", "empty", "longer"])
def test_a_damaged_file_is_built_again(folder: Path, tokenizer: Tokenizer, cache: Path, damage: str) -> None:
    size = open_corpus([folder], tokenizer, VOCAB).text.size
    (path,) = cache.iterdir()
    data = bytearray(path.read_bytes())
    data[-3] ^= 64
    damaged = {
        "cut": data[:-5],
        "flip": data,
        "foreign": b"\x7fELF" + bytes(999),
        "empty": b"",
        "longer": path.read_bytes() + b"x",
    }
    path.write_bytes(damaged[damage])
    corpus = open_corpus([folder], tokenizer, VOCAB)
    assert corpus.was_built
    assert corpus.text.size == size
    assert occurs(corpus, tokenizer, TEXT)
    assert not open_corpus([folder], tokenizer, VOCAB).was_built


def build_often(folder: Path, cache: str, start: Barrier) -> None:
    os.environ["OUTRIDER_CACHE"] = cache
    tokenizer = load_tokenizer()
    start.wait(120)
    for _ in range(20):
        for path in Path(cache).glob("corpus/*.corpus"):
            path.unlink(missing_ok=True)
        assert occurs(open_corpus([folder], tokenizer, VOCAB), tokenizer, TEXT)


def test_processes_that_build_at_once_leave_one_whole_file(folder: Path, tokenizer: Tokenizer, cache: Path) -> None:
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(2)
    other = context.Process(target=build_often, args=(folder, str(cache.parent), start))
    other.start()
    build_often(folder, str(cache.parent), start)
    other.join(120)
    assert other.exitcode == 0
    assert [path.suffix for path in cache.iterdir()] == [".corpus"]
    assert not open_corpus([folder], tokenizer, VOCAB).was_built


def test_old_corpora_are_dropped_and_those_in_use_go_on(tmp_path: Path, tokenizer: Tokenizer, cache: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text(TEXT)
    first = open_corpus([file], tokenizer, VOCAB)
    for turn in range(9):
        file.write_text(f"{TEXT}{turn}")
        open_corpus([file], tokenizer, VOCAB)
    assert len(list(cache.iterdir())) == 8
    assert occurs(first, tokenizer, TEXT)


def test_a_cache_that_cannot_be_written_costs_the_next_start_only(
    folder: Path, tokenizer: Tokenizer, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.parent.write_text("a file where the folder should be")
    for _ in range(2):
        corpus = open_corpus([folder], tokenizer, VOCAB)
        assert corpus.was_built
        assert occurs(corpus, tokenizer, TEXT)
    assert "OUTRIDER_CACHE" in caplog.text


def test_ids_that_the_model_lacks_are_no_part_of_a_text(folder: Path, tokenizer: Tokenizer) -> None:
    corpus = open_corpus([folder], tokenizer, 300)
    assert max(token for place in range(corpus.text.size) for token in corpus.text.read(place, 1) or [0]) < 300


def test_long_texts_are_encoded_in_parts_of_one_document(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = tmp_path / "long.txt"
    file.write_text(TEXT * 1000)
    corpus = open_corpus([file], tokenizer, VOCAB)
    assert corpus.text.size == len(tokenizer.encode_bare(TEXT)) * 1000 + 2
    assert occurs(corpus, tokenizer, TEXT * 2)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("latin.txt", "é".encode("latin1"), "not UTF-8"),
        ("image.png", b"\0\1", "is no text"),
        ("chat.jsonl", b'{"messages": []}', 'a string "text"'),
        ("odd.jsonl", b"{", "not JSON"),
        ("empty.txt", b"", "hold no text"),
    ],
)
def test_a_named_file_that_cannot_be_read_is_refused(
    tmp_path: Path, tokenizer: Tokenizer, name: str, content: bytes, message: str
) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(InvalidParameter, match=message) as caught:
        open_corpus([file], tokenizer, VOCAB)
    assert caught.value.param == "corpus"
    assert "leave" in str(caught.value) or "pass" in str(caught.value)


def test_paths_are_one_or_several_with_commas(tmp_path: Path) -> None:
    assert corpus_paths("a.txt,b/") == corpus_paths(["a.txt", Path("b/")]) == (Path("a.txt"), Path("b"))
    with_comma = tmp_path / "a,b.txt"
    with_comma.write_text("x")
    assert corpus_paths([str(with_comma)]) == (with_comma,)
    assert [file.path for file in corpus_files([with_comma, tmp_path])] == [with_comma]
    for wrong in (3, [None], b"x", ["\ud800"]):
        with pytest.raises(InvalidParameter, match="corpus"):
            corpus_paths(wrong)
    with pytest.raises(InvalidParameter, match="does not exist"):
        corpus_files([tmp_path / "nothing"])
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidParameter, match="neither a file nor a folder"):
        corpus_files([tmp_path / "pipe"])


@pytest.mark.parametrize("kind", [SuffixDrafter, NGramDrafter])
def test_lookups_draft_from_the_corpus_for_everybody_under_match_alone(kind: type[LookupDrafter]) -> None:
    drafter = kind(corpus=SuffixArray.of([11, 12, 13, 14, 15, 16, 17], 64))
    for tenant in ("a", "b", None):
        seq = Sequence(make_request([3, 11, 12], SamplingParams(temperature=0.0), tenant=tenant))
        drafter.begin(seq)
        for rule, drafted in (("match", [13, 14, 15, 16]), ("rejection", []), ("block", []), ("lossy_typical", [])):
            assert drafter.propose(Batch([seq], [1]), Plan((4,), rule)).per_sequence[0].tokens == drafted
        seq.tokens += [13, 14]
        assert drafter.follow(seq, [15], 4).tokens == [16, 17]
        drafter.end(seq)
    assert not drafter._readers
    assert drafter._shared.sources() == set()
