"""GGUF files that are truncated, corrupt or hostile: a ModelError that names the file and the place, and nothing else.

Files are written here byte by byte, from the format's description, so that every field can be wrong.
"""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.errors import ModelError
from outrider.gguf import Gguf
from outrider.model import check_model, read_spec
from outrider.model.load import generation_defaults
from outrider.model.source import open_source
from outrider.text import Tokenizer

U32, F32, BOOL, STRING, ARRAY, U64 = 4, 6, 7, 8, 9, 10
MEGABYTES = 64 * 2**20


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def value(kind: int, data: Any) -> bytes:
    """A value with its type in front."""
    if kind == STRING:
        return struct.pack("<I", kind) + text(data)
    if kind == ARRAY:
        of, items = data
        packed = b"".join(text(item) if of == STRING else struct.pack({U32: "<I", F32: "<f"}[of], item) for item in items)
        return struct.pack("<IIQ", kind, of, len(items)) + packed
    return struct.pack("<I" + {U32: "I", F32: "f", BOOL: "?", U64: "Q"}[kind], kind, data)


def tensor(name: str, shape: tuple[int, ...], kind: int, offset: int, dims: int | None = None) -> bytes:
    sizes = struct.pack(f"<{len(shape)}Q", *shape[::-1])
    return text(name) + struct.pack("<I", len(shape) if dims is None else dims) + sizes + struct.pack("<IQ", kind, offset)


def file(
    metadata: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    data: int = 256,
    version: int = 3,
    keys: int | None = None,
) -> bytes:
    metadata, tensors = metadata or [], tensors or []
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata) if keys is None else keys)
    body = head + b"".join(metadata) + b"".join(tensors)
    return body + bytes(-len(body) % 32) + bytes(data)


HUGE = 2**64 - 1
BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "cannot be read"),
    "another format": (b"PK\3\4" * 9, "does not begin with 'GGUF'"),
    "three bytes": (b"GGU", "does not begin"),
    "only the magic": (b"GGUF", "truncated or corrupt: the version at byte 4 needs 4 bytes, 0 are left"),
    "version 1": (file(version=1), "its version is 1; known: 2 and 3"),
    "big-endian": (file(version=3 << 24), "big-endian"),
    "counts that overflow": (file(metadata=None, tensors=None) [:8] + struct.pack("<QQ", HUGE, HUGE), f"it has {HUGE} tensors"),
    "more keys than bytes": (file(keys=60000), "it has 60000 metadata"),
    "a string of gigabytes": (file([text("k") + struct.pack("<IQ", STRING, 2**33)]), "'k' says that it has 8589934592 bytes"),
    "a string beyond the end": (file([text("k") + struct.pack("<IQ", STRING, 2**20)]), "'k' at byte .* needs 1048576 bytes"),
    "a key of gigabytes": (file([struct.pack("<Q", 2**40) + b"k" * 64]), "a key says that it has 1099511627776 bytes"),
    "an unknown type of value": (file([text("k") + struct.pack("<I", 99)]), "'k' has a value of unknown type 99"),
    "a list of lists": (file([text("k") + struct.pack("<IIQ", ARRAY, ARRAY, 1)]), "'k' is a list of values of unknown type 9"),
    "a list that overflows": (file([text("k") + struct.pack("<IIQ", ARRAY, U64, 2**61)]), "values in 'k'"),
    "strings that overflow": (file([text("k") + struct.pack("<IIQ", ARRAY, STRING, 2**60)]), "strings in 'k'"),
    "a string in a list beyond the end": (
        file([text("k") + struct.pack("<IIQQ", ARRAY, STRING, 3, HUGE)]), "string 0 of 3 at byte .* reaches beyond its end",
    ),
    "a key twice": (file([text("k") + value(U32, 1)] * 2), "the key 'k' twice"),
    "an alignment of 24": (file([text("general.alignment") + value(U32, 24)]), "alignment must be a power of two, got 24"),
    "an alignment of 0": (file([text("general.alignment") + value(U32, 0)]), "must be a power of two, got 0"),
    "an alignment in words": (file([text("general.alignment") + value(STRING, "x")]), "must be a power of two, got 'x'"),
    "a tensor twice": (file(None, [tensor("a", (8,), 0, 0), tensor("a", (8,), 0, 32)]), "it holds 'a' twice"),
    "an unknown type": (file(None, [tensor("a", (8,), 77, 0)]), "'a' has the unknown type 77"),
    "no dimensions": (file(None, [tensor("a", (), 0, 0)]), "'a' has 0 dimensions"),
    "too many dimensions": (file(None, [tensor("a", (1, 1), 0, 0, dims=2**31)]), "'a' has 2147483648 dimensions"),
    "a size of 0": (file(None, [tensor("a", (0, 8), 0, 0)]), "'a' has the shape"),
    "sizes that overflow": (file(None, [tensor("a", (2**33, 2**33), 0, 0)]), "'a' has the shape"),
    "half a block": (file(None, [tensor("a", (2, 48), 8, 0)]), "rows of 'a' have 48 values, no multiple of the 32 of Q8_0"),
    "beyond the end": (file(None, [tensor("a", (80,), 0, 0)]), "'a' reaches 64 bytes beyond its end"),
    "an offset beyond the end": (file(None, [tensor("a", (8,), 0, 2**40)]), "'a' reaches .* bytes beyond its end"),
    "an offset that overflows": (file(None, [tensor("a", (8,), 0, HUGE - 31)]), "'a' reaches .* bytes beyond its end"),
    "misaligned": (file(None, [tensor("a", (8,), 0, 8)]), "'a' begins at 8, which is no multiple of 32"),
    "overlapping": (file(None, [tensor("b", (9,), 0, 32), tensor("a", (16,), 0, 0)]), "'b' overlaps 'a'"),
    "part 3 of 2": (file([text("split.no") + value(U32, 3), text("split.count") + value(U32, 2)]), "must be a part"),
    "a part by another name": (file([text("split.no") + value(U32, 0), text("split.count") + value(U32, 2)]), "is part 1 of 2"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused_with_the_place(tmp_path: Path, name: str) -> None:
    content, message = BAD[name]
    (tmp_path / "bad.gguf").write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match=rf"bad\.gguf.*{message}") as caught:
            Gguf(tmp_path / "bad.gguf")
        assert tracemalloc.get_traced_memory()[1] < MEGABYTES
    finally:
        tracemalloc.stop()
    assert len(str(caught.value)) < 400


def test_parts_that_do_not_belong_together(tmp_path: Path) -> None:
    def part(number: int, name: str, count: int = 2) -> bytes:
        keys = [text("split.no") + value(U32, number), text("split.count") + value(U32, count)]
        return file(keys, [tensor(name, (8,), 0, 0)])

    first, second = tmp_path / "m-00001-of-00002.gguf", tmp_path / "m-00002-of-00002.gguf"
    first.write_bytes(part(0, "a"))
    with pytest.raises(ModelError, match=r"m-00002-of-00002\.gguf does not exist"):
        Gguf(first)
    second.write_bytes(part(0, "b"))
    with pytest.raises(ModelError, match="does not say that it is part 2 of 2"):
        Gguf(first)
    second.write_bytes(part(1, "a"))
    with pytest.raises(ModelError, match=r"holds 'a', and so does m-00001"):
        Gguf(first)
    second.write_bytes(part(1, "b"))
    assert set(Gguf(first).tensors) == {"a", "b"}


def test_values_and_tensors_are_read(tmp_path: Path) -> None:
    keys = [
        text("u") + value(U32, 7),
        text("f") + value(F32, 0.5),
        text("b") + value(BOOL, True),
        text("s") + value(STRING, "süß"),
    ]
    keys += [
        text("n") + value(ARRAY, (U32, [1, 2, 3])),
        text("t") + value(ARRAY, (STRING, ["a", "", "ß"])),
        text("q") + value(U64, 2**40),
    ]
    content = file(keys, [tensor("a", (2, 3), 0, 0)], data=0) + np.arange(6, dtype=np.float32).tobytes()
    (tmp_path / "m.gguf").write_bytes(content)
    read = Gguf(tmp_path / "m.gguf")
    assert [read.metadata[key] for key in "ufbsq"] == [7, 0.5, True, "süß", 2**40]
    assert (read.numbers("n"), read.strings("t"), read.strings("none")) == ([1, 2, 3], ["a", "", "ß"], [])
    assert read.tensors["a"].shape == (2, 3)
    assert np.frombuffer(read.read("a", 4, 8), np.float32).tolist() == [1.0, 2.0]
    for use, key in ((read.strings, "n"), (read.numbers, "t"), (read.word, "u"), (read.index, "s")):
        with pytest.raises(ModelError, match=rf"m\.gguf: {key} must be"):
            use(key, 9) if use == read.index else use(key)  # type: ignore[operator]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small model with a tokenizer, as other tools write it."""
    pytest.importorskip("gguf", reason="the gguf package writes the file")
    from tests.model.formats.test_serving import SIZES, VOCAB, gguf_options
    from tests.support.families import build_reference
    from tests.support.gguf_files import write_gguf

    folder = tmp_path_factory.mktemp("model")
    sizes = SIZES | {"vocab_size": VOCAB + 101, "hidden_size": 32, "intermediate_size": 32, "head_dim": 8, "num_hidden_layers": 1}
    write_gguf(folder / "m.gguf", build_reference("llama", None, **sizes), "Q8_0", gguf_options(folder))
    return (folder / "m.gguf").read_bytes()


def use_all(path: Path) -> None:
    """Everything that a served model reads of its file."""
    check_model(path)
    Tokenizer.load(path)
    spec = read_spec(path)
    generation_defaults(path, spec)
    source = open_source(path, spec)
    for name in source.headers():
        source.tensor(name)


def survives(path: Path, content: bytes) -> bool:
    """Whether a file is read. Whatever is wrong with it is a ModelError, and needs little memory."""
    path.write_bytes(content)
    tracemalloc.start()
    try:
        use_all(path)
    except ModelError:
        return False
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < MEGABYTES
    return True


def test_the_model_itself_is_read(tmp_path: Path, model: bytes) -> None:
    assert survives(tmp_path / "m.gguf", model)


@pytest.mark.parametrize("share", [0.999, 0.9, 0.5, 0.2, 0.05, 0.001])
def test_truncated_models(tmp_path: Path, model: bytes, share: float) -> None:
    assert not survives(tmp_path / "m.gguf", model[: int(len(model) * share)])


EXTREMES = [0, 1, 2**7, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**63, HUGE]


@settings(max_examples=250)
@given(data=st.data())
def test_mutated_models(tmp_path_factory: pytest.TempPathFactory, model: bytes, data: st.DataObject) -> None:
    """Bytes flipped and sizes replaced, above all in the header."""
    end = model.index(b"output_norm") if b"output_norm" in model else len(model)
    changed = bytearray(model)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, min(end, len(model) - 8)))
        if data.draw(st.booleans()):
            changed[at] = data.draw(st.integers(0, 255))
        else:
            size = data.draw(st.sampled_from([4, 8]))
            changed[at : at + size] = (data.draw(st.sampled_from(EXTREMES)) % 2 ** (8 * size)).to_bytes(size, "little")
    survives(tmp_path_factory.getbasetemp() / "mutated.gguf", bytes(changed))


@settings(max_examples=300)
@given(content=st.binary(max_size=400))
def test_random_bytes_after_a_good_beginning(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    survives(tmp_path_factory.getbasetemp() / "random.gguf", b"GGUF\3\0\0\0" + content)
