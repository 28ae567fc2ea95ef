"""Pickled checkpoints become safetensors; whatever else a pickle does is an error that names it, and runs nothing."""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from outrider.errors import ModelError
from outrider.model.pickles import PickleConverter

TENSORS = {
    "half": torch.arange(6, dtype=torch.float16).view(2, 3),
    "turned": torch.arange(6.0).view(2, 3).T,
    "ids": torch.arange(4),
    "mask": torch.tensor([True, False]),
    "narrow": torch.arange(8.0).to(torch.bfloat16)[2:5],
}


@pytest.fixture(scope="module")
def converter() -> Iterator[PickleConverter]:
    converter = PickleConverter()
    yield converter
    converter.close()


def saved(path: Path, value: Any, is_zip: bool = True) -> Path:
    torch.save(value, path, _use_new_zipfile_serialization=is_zip)
    return path


@pytest.mark.parametrize("is_zip", [True, False])
def test_tensors_survive(is_zip: bool, converter: PickleConverter, tmp_path: Path) -> None:
    tied = TENSORS | {"tied": TENSORS["half"], "parameter": torch.nn.Parameter(torch.ones(3))}
    names = converter.convert(saved(tmp_path / "a.bin", tied, is_zip), tmp_path / "a.safetensors")
    loaded = load_file(tmp_path / "a.safetensors")
    assert sorted(names) == sorted(loaded) == sorted(tied)
    for name, tensor in tied.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)


class Runs:
    """A pickle that would create a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("is_zip", [True, False])
def test_code_is_not_run(is_zip: bool, converter: PickleConverter, tmp_path: Path) -> None:
    path = saved(tmp_path / "a.bin", {"a": torch.ones(2), "b": Runs(tmp_path / "made")}, is_zip)
    with pytest.raises(ModelError, match=r"a\.bin cannot be converted: it holds more than tensors .*posix\.mkdir"):
        converter.convert(path, tmp_path / "a.safetensors")
    assert not (tmp_path / "made").exists()
    assert not (tmp_path / "a.safetensors").exists()


def in_zip(path: Path, program: bytes) -> Path:
    """A file whose pickle is this program."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", program)
        archive.writestr("archive/version", "3\n")
    return path


DEEP = 300_000
PROGRAMS = {
    "a number": (b"\x80\x02K\x01.", "holds int"),
    "nothing": (b"\x80\x02}.", "holds dict"),
    "deep lists": (b"\x80\x02" + b"]" * DEEP + b"a" * (DEEP - 1) + b".", "holds list"),
    "a deep value": (b"\x80\x02}X\x01\x00\x00\x00a)" + b"\x85" * DEEP + b"s.", "'a' is tuple"),
    "a deep key": (b"\x80\x02})" + b"\x85" * DEEP + b"K\x01s.", "cannot be converted|crashes"),
    "an empty stack": (b"\x80\x02.", "cannot be converted"),
    "no end": (b"\x80\x02}", "cannot be converted"),
    "a claim of memory": (b"\x80\x02\x8b" + struct.pack("<i", 2**31 - 1) + b".", "cannot be converted"),
    "an extension": (b"\x80\x02\x82\x01.", "cannot be converted"),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_hostile_programs_are_named(name: str, converter: PickleConverter, tmp_path: Path) -> None:
    program, said = PROGRAMS[name]
    with pytest.raises(ModelError, match=said) as caught:
        converter.convert(in_zip(tmp_path / "a.bin", program), tmp_path / "a.safetensors")
    assert "a.bin" in str(caught.value)
    assert len(str(caught.value)) < 600


def test_a_crash_is_the_processes_and_the_next_file_is_read(converter: PickleConverter, tmp_path: Path) -> None:
    """Hashing a key that is nested without end overflows the interpreter's stack."""
    program = b"\x80\x02})" + b"\x85" * 3_000_000 + b"K\x01s."
    with pytest.raises(ModelError, match="reading it crashes or does not end"):
        converter.convert(in_zip(tmp_path / "a.bin", program), tmp_path / "a.safetensors")
    assert converter.convert(saved(tmp_path / "b.bin", TENSORS), tmp_path / "b.safetensors") == list(TENSORS)


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.3, 0.7, 0.98])
def test_truncated_files_are_named(is_zip: bool, share: float, converter: PickleConverter, tmp_path: Path) -> None:
    path = saved(tmp_path / "a.bin", {"a": torch.arange(4000.0), "b": torch.ones(8)}, is_zip)
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    with pytest.raises(ModelError, match=r"a\.bin cannot be converted"):
        converter.convert(path, tmp_path / "a.safetensors")


def test_claims_of_memory_are_refused(converter: PickleConverter, tmp_path: Path) -> None:
    """A row that is repeated without being stored, a storage that is not there, parts that inflate."""

    def refused(match: str) -> None:
        with pytest.raises(ModelError, match=match):
            converter.convert(path, tmp_path / "a.safetensors")

    path = saved(tmp_path / "a.bin", {"a": torch.ones(1).expand(10**6, 10**6)})
    refused("its tensors are more than 4 times as large as the file")
    path = saved(tmp_path / "a.bin", {"a": torch.zeros(4)}, is_zip=False)
    path.write_bytes(path.read_bytes().replace(b"K\x04N", b"\x8a\x06\x00\x00\x00\x00\x00\x10N"))
    refused("cannot be converted")
    buffer = io.BytesIO()
    torch.save({"a": torch.zeros(100_000)}, buffer)
    with zipfile.ZipFile(buffer) as archive, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for name in archive.namelist():
            packed.writestr(name, archive.read(name))
    refused("its parts are compressed")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([torch.ones(2)], "holds list"),
        ({1: torch.ones(2)}, "1 is Tensor"),
        ({"state_dict": {"a": torch.ones(2)}}, "'state_dict' is dict"),
        ({"a": torch.eye(3).to_sparse()}, "'a' is Tensor, not a tensor with a name"),
    ],
)
def test_other_contents_are_named(value: Any, said: str, converter: PickleConverter, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=said):
        converter.convert(saved(tmp_path / "a.bin", value), tmp_path / "a.safetensors")


def test_plain_pickles_and_other_files(converter: PickleConverter, tmp_path: Path) -> None:
    for content in (pickle.dumps({"a": 1}), b"", b"PK\x03\x04", b"garbage" * 100):
        (tmp_path / "a.bin").write_bytes(content)
        with pytest.raises(ModelError, match=r"a\.bin cannot be converted"):
            converter.convert(tmp_path / "a.bin", tmp_path / "a.safetensors")
    with pytest.raises(ModelError, match="cannot be read"):
        converter.convert(tmp_path / "none.bin", tmp_path / "a.safetensors")
