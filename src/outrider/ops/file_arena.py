"""Memory of packed weights in a mapped file, for models larger than the memory, and its reading ahead."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.errors import ModelError
from outrider.ops.packing import Arena

__all__ = ["FileArena"]

_CHUNK = 8 * 2**20  # bytes that are read ahead by one call
_TIMED = 4  # sections whose reading is timed
_PAGE = mmap.ALLOCATIONGRANULARITY


class _Part(NamedTuple):
    """A matrix in the file."""

    memory: mmap.mmap
    offset: int
    size: int


class FileArena(Arena):
    """Matrices in a file without a name: its memory is the kernel's page cache, and the file goes with the process.

    Matrices are taken section by section: those of a layer make one. `keep` says which sections stay in memory once they were
    read; of the others what was used is given up at once, or each would drive out the next.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._handle, name = tempfile.mkstemp(dir=folder, prefix="outrider-packed-")
            os.unlink(name)
        except OSError as error:
            raise ModelError(
                f"the model does not fit the memory, and its packed weights cannot be written to {folder}: "
                f"{error.strerror or error}; set OUTRIDER_CACHE to a folder on a disk with room for them"
            ) from None
        weakref.finalize(self, os.close, self._handle)
        self._sections: list[list[_Part]] = []
        self._size = 0
        self._kept = 0
        self._buffer = bytearray(_CHUNK)
        self._reader = ThreadPoolExecutor(1, "outrider-read-ahead")

    @property
    def sizes(self) -> list[int]:
        """Bytes of every section."""
        return [sum(part.size for part in parts) for parts in self._sections]

    def begin(self) -> None:
        """Matrices taken from now on belong to the next section."""
        self._sections.append([])

    def take(self, size: int) -> Tensor:
        whole = max(-(-size // _PAGE) * _PAGE, _PAGE)
        try:
            os.posix_fallocate(self._handle, self._size, whole)
            memory = mmap.mmap(self._handle, whole, mmap.MAP_SHARED, offset=self._size)
        except OSError as error:
            raise ModelError(
                f"the disk of the cache has no room for the packed weights ({self._size / 2**30:.2f} GiB are written): "
                f"{error.strerror or error}; set OUTRIDER_CACHE to a folder on a larger one"
            ) from None
        self._sections[-1].append(_Part(memory, self._size, whole))
        self._size += whole
        return torch.frombuffer(memory, dtype=torch.uint8)[:size]

    def give_back(self, taken: Tensor) -> None:
        """Return what was taken last."""
        part = self._sections[-1][-1]
        if taken.data_ptr() == torch.frombuffer(part.memory, dtype=torch.uint8).data_ptr():
            self._sections[-1].pop()
            self._size = part.offset

    def end(self) -> None:
        """Write the section to the disk and give its memory up."""
        for part in self._sections[-1]:
            part.memory.flush()
        self._drop(len(self._sections) - 1)

    def keep(self, sections: int) -> None:
        """Let the first sections stay in memory."""
        self._kept = sections

    def read_ahead(self, section: int) -> None:
        """Begin to read a section."""
        if section < len(self._sections):
            self._reader.submit(self._read, section)

    def give_up(self, section: int) -> None:
        """A section was used: unless it is kept, its memory is free for the next ones."""
        if section >= self._kept:
            self._drop(section)

    def bandwidth(self) -> float:
        """Bytes a second at which the disk gives a section that is in no cache: the best of a few, as writing may still go on."""
        return max(self._speed_of(section) for section in range(min(len(self._sections), _TIMED)))

    def _speed_of(self, section: int) -> float:
        self._drop(section)
        began = time.perf_counter()
        read = self._read_whole(section)
        seconds = time.perf_counter() - began
        self._drop(section)
        return read / max(seconds, 1e-9)

    def close(self) -> None:
        """Stop reading ahead."""
        self._reader.shutdown(wait=True, cancel_futures=True)

    def _read(self, section: int) -> None:
        """Read into the page cache. Advice to the kernel (WILLNEED) was four times slower than reading."""
        with suppress(OSError):  # it is read when it is used, then
            self._read_whole(section)

    def _read_whole(self, section: int) -> int:
        """Read a section into a buffer that is thrown away, which leaves it in the page cache. Returns its bytes."""
        count = 0
        for part in self._sections[section]:
            for start in range(part.offset, part.offset + part.size, _CHUNK):
                size = min(_CHUNK, part.offset + part.size - start)
                count += os.preadv(self._handle, [memoryview(self._buffer)[:size]], start)
        return count

    def _drop(self, section: int) -> None:
        for part in self._sections[section]:
            part.memory.madvise(mmap.MADV_DONTNEED)
            os.posix_fadvise(self._handle, part.offset, part.size, os.POSIX_FADV_DONTNEED)
