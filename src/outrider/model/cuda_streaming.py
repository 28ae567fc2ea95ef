"""Weights that cross the bus in every forward: pinned host memory, two buffers on the device, and the copies between them.

Streamed matrices of a layer are one unit, copied by one call. Units take turns in the buffers, so unit u + 2 is copied once the
layer of unit u has run, and the layer of u + 2 waits for it. The first two units are copied behind the forward before, which
hides them behind whatever runs between two forwards. A captured forward holds the other copies as nodes of its graph.
"""

from __future__ import annotations

import itertools
import mmap
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from outrider.errors import ModelError
from outrider.model.placement import BUFFERS, Placement, aligned

if TYPE_CHECKING:
    from outrider.ops.cuda.matrix import Matrix

__all__ = ["CopyQueue", "CudaCopies", "DirectCopies", "PinnedMemory", "StreamedLayer", "WeightStream", "bus_bandwidth"]

_PROBE_BYTES, _PROBES = 64 * 2**20, 8
T = TypeVar("T")
Mark = Any  # a place in the device's queue of work; None where everything before it is done


class StreamedLayer(Protocol):
    """A layer whose matrices can lie elsewhere; see `CudaLayer`."""

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """All its matrices, in the order of `placement.matrices_of`."""

    def replace_matrices(self, change: Callable[[Matrix], Matrix]) -> None:
        """Use what `change` makes of each matrix, in their order."""


class CopyQueue(Protocol):
    """Copies beside the forward's own queue of work."""

    def mark(self) -> Mark:
        """A mark behind all that the forward has launched."""

    def copy(self, target: Tensor, source: Tensor, after: Mark) -> Mark:
        """Copy to the device once a mark is reached; returns a mark behind the copy."""

    def wait(self, mark: Mark) -> None:
        """Make what the forward launches from now on wait for a mark."""

    @property
    def is_capturing(self) -> bool:
        """Whether what is launched becomes part of a graph."""


class CudaCopies:
    """Copies on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def mark(self) -> Mark:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def copy(self, target: Tensor, source: Tensor, after: Mark) -> Mark:
        self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            return self.mark()

    def wait(self, mark: Mark) -> None:
        torch.cuda.current_stream().wait_event(mark)

    @property
    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()


class DirectCopies:
    """Copies at once, where the device is the processor."""

    is_capturing = False

    def mark(self) -> Mark:
        return None

    def copy(self, target: Tensor, source: Tensor, after: Mark) -> Mark:  # noqa: ARG002 (the signature of CopyQueue)
        target.copy_(source)

    def wait(self, mark: Mark) -> None:
        """Nothing is ever in flight."""


class PinnedMemory:
    """Host memory of an exact size that a device reads by itself. It is unpinned when this object is closed or collected.

    torch's own pinned memory is filled up to a power of two, and stays with the process.
    """

    def __init__(self, size: int, pinned: bool) -> None:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = torch.frombuffer(pages, dtype=torch.uint8)
        self._unpin: Callable[[], object] | None = None
        if pinned:
            address = self.bytes.data_ptr()
            code = int(torch.cuda.cudart().cudaHostRegister(address, size, 0))  # type: ignore[no-untyped-call]
            if code:
                raise ModelError(
                    f"{size / 2**30:.2f} GiB of host memory cannot be pinned for the GPU (CUDA error {code}); raise --memory, "
                    "so that more of the model stays on the GPU, or give this process more host memory"
                )
            self._unpin = weakref.finalize(self, _unpin, pages, address)

    @property
    def is_pinned(self) -> bool:
        return self._unpin is not None

    def close(self) -> None:
        """Unpin it. The memory itself is free once no tensor lies in it."""
        unpin, self._unpin = self._unpin, None
        if unpin is not None:
            unpin()

    def place(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors, copied here one behind the other."""
        views = views_in(self.bytes, tensors)
        for view, tensor in zip(views, tensors, strict=True):
            view.copy_(tensor)
        return views


def bus_bandwidth(device: str = "cuda") -> float:
    """Bytes a second from pinned host memory to a GPU, of the quickest of a few copies."""
    memory = PinnedMemory(_PROBE_BYTES, pinned=True)
    target = torch.empty(_PROBE_BYTES, dtype=torch.uint8, device=device)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(_PROBES + 1)]  # type: ignore[no-untyped-call]
    for mark in marks[:-1]:
        mark.record()
        target.copy_(memory.bytes, non_blocking=True)
    marks[-1].record()
    torch.cuda.synchronize(device)
    memory.close()
    quickest: float = min(first.elapsed_time(second) for first, second in itertools.pairwise(marks))
    return 1e3 * _PROBE_BYTES / quickest


def _unpin(pages: mmap.mmap, address: int) -> None:  # noqa: ARG001 (kept until here)
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


def size_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors one behind the other."""
    return sum(aligned(tensor.nbytes) for tensor in tensors)


def views_in(memory: Tensor, like: Iterable[Tensor]) -> list[Tensor]:
    """Tensors of the same shapes, dtypes and strides, one behind the other in bytes of memory. None has gaps."""
    views, start = [], 0
    for tensor in like:
        part = memory[start : start + tensor.nbytes].view(tensor.dtype)
        views.append(part.as_strided(tensor.shape, tensor.stride(), part.storage_offset()))
        start += aligned(tensor.nbytes)
    return views


class _Unit(NamedTuple):
    """The streamed matrices of a layer."""

    layer: StreamedLayer
    places: tuple[int, ...]  # of the matrices in the layer
    memory: PinnedMemory


class WeightStream:
    """Streams the weights of a decoder's layers, in their order, through buffers on the device."""

    def __init__(self, placement: Placement, device: torch.device, copies: CopyQueue | None = None) -> None:
        self.placement = placement
        self.passes = 0  # forwards so far, launched or captured
        self.crossed = 0  # bytes over the bus so far
        self._device, self._pinned = device, device.type == "cuda"
        self._copies: CopyQueue = copies or (CudaCopies(device) if self._pinned else DirectCopies())
        self._units: dict[int, _Unit] = {}  # by layer
        self._order: list[int] = []  # layers that have a unit
        self._buffers: list[Tensor] = []
        self._arrived: dict[int, Mark] = {}  # by layer: marks behind copies
        self._is_ready = False  # whether the buffers hold the first units, or will
        self._memories: list[PinnedMemory] = []

    def take(self, index: int, layer: StreamedLayer) -> None:
        """Move a layer's streamed matrices from the device to pinned host memory."""
        places = self.placement.streamed[index]
        if not places:
            return
        tensors = [tensor for place in places for tensor in layer.matrices[place].tensors]
        memory = self._pin(size_of(tensors))
        self._bind(layer, places, memory.place(tensors))
        self._units[index] = _Unit(layer, places, memory)

    def take_embedding(self, embedding: Tensor) -> Tensor:
        """The embedding in pinned host memory, where kernels read single rows of it."""
        return self._pin(size_of([embedding])).place([embedding])[0]

    def open(self) -> None:
        """Allocate the buffers, once all layers are taken, and copy the first units into them."""
        self._order = sorted(self._units)
        largest = max((len(unit.memory.bytes) for unit in self._units.values()), default=0)
        self._buffers = [torch.empty(largest, dtype=torch.uint8, device=self._device) for _ in self._order[:BUFFERS]]
        for number, index in enumerate(self._order):
            unit = self._units[index]
            held = [tensor for place in unit.places for tensor in unit.layer.matrices[place].tensors]
            self._bind(unit.layer, unit.places, views_in(self._buffers[number % BUFFERS], held))
        self._copy_first()

    def run(self, layers: Iterable[T]) -> Iterator[T]:
        """The layers of one forward in order, each once its weights are there."""
        captured = self._copies.is_capturing
        self.passes += 1
        if not captured:
            self._begin()
        first = set(self._order[:BUFFERS])
        behind = dict(zip(self._order, self._order[BUFFERS:], strict=False))  # the unit that follows into the same buffer
        for index, layer in enumerate(layers):
            if index in self._units and index not in first:
                self._copies.wait(self._arrived[index])
            yield layer
            if index in behind:
                self._copy(behind[index], self._copies.mark())
        if not captured:
            self._end()

    def around(self, replay: Callable[[], None], passes: int) -> Callable[[], None]:
        """A replay of a graph that holds so many forwards: its first units are copied behind the replay before it."""
        if not passes or not self._order:
            return replay
        assert passes == 1, "a graph holds one forward of a model whose weights are streamed"

        def run() -> None:
            self._begin()
            replay()
            self._end()

        return run

    def close(self) -> None:
        """Give the pinned memory back. Nothing may run any more."""
        if self._pinned:
            torch.cuda.synchronize(self._device)
        for memory in self._memories:
            memory.close()
        for part in (self._memories, self._units, self._order, self._buffers):
            part.clear()

    def _pin(self, size: int) -> PinnedMemory:
        self._memories.append(PinnedMemory(size, self._pinned))
        return self._memories[-1]

    def _begin(self) -> None:
        """Wait for the first units. A forward that failed has left others in the buffers."""
        if not self._is_ready:
            self._copy_first()
        self._is_ready = len(self._order) <= BUFFERS
        for index in self._order[:BUFFERS]:
            self._copies.wait(self._arrived[index])

    def _end(self) -> None:
        """Count a forward, and copy the first units for the next one."""
        if not self._is_ready:
            self.crossed += self.placement.pass_bytes
            self._copy_first()

    def _copy_first(self) -> None:
        mark = self._copies.mark()
        for index in self._order[:BUFFERS]:
            self._copy(index, mark)
        self._is_ready = True

    def _copy(self, index: int, after: Mark) -> None:
        source = self._units[index].memory.bytes
        buffer = self._buffers[self._order.index(index) % BUFFERS]
        self._arrived[index] = self._copies.copy(buffer[: len(source)], source, after)

    @staticmethod
    def _bind(layer: StreamedLayer, places: Sequence[int], tensors: Sequence[Tensor]) -> None:
        """Have some of a layer's matrices lie in these tensors."""
        rest, number = list(tensors), -1

        def change(matrix: Matrix) -> Matrix:
            nonlocal number
            number += 1
            if number not in places:
                return matrix
            count = len(matrix.tensors)
            own, rest[:count] = rest[:count], []
            return matrix.over(own)

        layer.replace_matrices(change)
