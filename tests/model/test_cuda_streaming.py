"""Streaming of weights, on a simulated device that runs what may run next in any order: a missing wait reads wrong weights."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.model.cuda_streaming import PinnedMemory, WeightStream
from outrider.model.placement import BUFFERS, Placement, aligned

POISON = float("nan")


class Device:
    """Two queues of work and graphs; `run` executes all that was launched, in a random order that the dependencies allow."""

    def __init__(self, seed: int = 0) -> None:
        self.is_capturing = False
        self._random = random.Random(seed)
        self._work: list[tuple[Callable[[], object], set[int]]] = []
        self._done: set[int] = set()
        self._tails: dict[str, int | None] = {"compute": None, "copies": None}
        self._waits: set[int] = set()

    def launch(self, queue: str, work: Callable[[], object], after: set[int]) -> int:
        tail = self._tails[queue]
        self._work.append((work, after | ({tail} if tail is not None else set())))
        self._tails[queue] = len(self._work) - 1
        return len(self._work) - 1

    def compute(self, work: Callable[[], None]) -> int:
        waits, self._waits = self._waits, set()
        return self.launch("compute", work, waits)

    def mark(self) -> int:
        return self.compute(lambda: None)

    def wait(self, mark: int) -> None:
        self._waits.add(mark)

    def copy(self, target: Tensor, source: Tensor, after: int) -> int:
        self.launch("copies", lambda: target.fill_(255), {after})  # NaN, until the copy is complete
        return self.launch("copies", lambda: target.copy_(source), set())

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """A replay of what the work launches."""
        self.run()
        before, self._work, self._waits = (self._work, self._tails), [], set()
        self._tails, self.is_capturing = {"compute": None, "copies": None}, True
        work()
        nodes, self.is_capturing, (self._work, self._tails) = self._work, False, before

        def replay() -> None:
            start, base = self.mark(), len(self._work)
            for node, after in nodes:
                self._work.append((node, {base + i for i in after} | {start}))
            self._waits = {base + i for i in range(len(nodes))}
            self.mark()

        return replay

    def run(self) -> None:
        while waiting := [i for i in range(len(self._work)) if i not in self._done]:
            chosen = self._random.choice([i for i in waiting if self._work[i][1] <= self._done])
            self._work[chosen][0]()
            self._done.add(chosen)


@dataclass(frozen=True)
class Stored:
    """A matrix of one tensor or two."""

    tensors: tuple[Tensor, ...]

    def over(self, tensors: Sequence[Tensor]) -> Stored:
        assert [part.shape for part in tensors] == [part.shape for part in self.tensors]
        return Stored(tuple(tensors))


class FakeLayer:
    def __init__(self, number: int) -> None:
        sizes = (3, 5, 300, 70 + number)
        self.matrices: tuple[Any, ...] = tuple(
            Stored(
                (torch.full((size, 2), 100.0 * number + i), torch.full((size,), 0.5 + number, dtype=torch.float64)[: 1 + i % 2])
            )
            for i, size in enumerate(sizes)
        )

    def replace_matrices(self, change: Callable[[Any], Any]) -> None:
        self.matrices = tuple(change(matrix) for matrix in self.matrices)


def placement_of(streamed: Sequence[tuple[int, ...]]) -> Placement:
    layers = [FakeLayer(number) for number in range(len(streamed))]
    units = tuple(
        sum(aligned(tensor.nbytes) for i in places for tensor in layer.matrices[i].tensors)
        for layer, places in zip(layers, streamed, strict=True)
    )
    return Placement(tuple(streamed), units)


class Model:
    """Layers whose weights are streamed, and a forward that looks at all of them."""

    def __init__(self, streamed: Sequence[tuple[int, ...]], device: Device) -> None:
        self.device = device
        self.layers = [FakeLayer(number) for number in range(len(streamed))]
        self.expected = [[tensor.clone() for matrix in layer.matrices for tensor in matrix.tensors] for layer in self.layers]
        self.stream = WeightStream(placement_of(streamed), torch.device("cpu"), device)
        for index, layer in enumerate(self.layers):
            self.stream.take(index, layer)
        self.stream.open()
        self.read: list[bool] = []

    def forward(self, fail_at: int = -1) -> None:
        for index, layer in enumerate(self.stream.run(self.layers)):
            if index == fail_at:
                raise RuntimeError("a layer failed")
            self.device.compute(lambda layer=layer, index=index: self.look(layer, index))  # type: ignore[misc]

    def look(self, layer: FakeLayer, index: int) -> None:
        held = [tensor for matrix in layer.matrices for tensor in matrix.tensors]
        self.read.append(all(torch.equal(a, b) for a, b in zip(held, self.expected[index], strict=True)))

    def check(self, passes: int) -> None:
        self.device.run()
        assert self.read == [True] * (passes * len(self.layers))
        self.read.clear()


ALL = (0, 1, 2, 3)
SPLITS: list[list[tuple[int, ...]]] = [
    [ALL] * 5,
    [ALL] * 6,
    [(2,), (), (0, 1, 3), ALL, (), (3,), (2, 3)],
    [(), (), ALL, (1,)],
    [ALL],
    [(), ()],
]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("split", range(len(SPLITS)))
def test_every_layer_reads_its_weights(split: int, seed: int) -> None:
    model = Model(SPLITS[split], Device(seed))
    for _ in range(3):
        model.forward()
    model.check(3)
    replay = model.stream.around(model.device.capture(model.forward), 1)
    for call in (replay, replay, model.forward, replay, model.forward, model.forward, replay):
        call()
    model.check(7)


@pytest.mark.parametrize("seed", range(4))
def test_a_forward_that_fails_spoils_no_later_one(seed: int) -> None:
    model = Model(SPLITS[0], Device(seed))
    replay = model.stream.around(model.device.capture(model.forward), 1)
    for later in (model.forward, replay):
        with pytest.raises(RuntimeError):
            model.forward(fail_at=3)
        model.device.run()
        model.read.clear()
        later()
        model.check(1)


def test_bytes_over_the_bus_are_counted() -> None:
    model = Model(SPLITS[0], Device())
    replay = model.stream.around(model.device.capture(model.forward), 1)
    assert model.stream.crossed == 0, "a capture moves nothing"
    model.forward()
    replay()
    assert model.stream.crossed == 2 * model.stream.placement.pass_bytes
    few = Model([ALL, (), ALL], Device())
    few.forward()
    assert few.stream.crossed == 0, "the buffers hold all that is streamed"


def test_buffers_are_two_and_hold_one_unit_each() -> None:
    model = Model(SPLITS[2], Device())
    places = {
        tensor.untyped_storage().data_ptr()
        for layer, matrices in zip(model.layers, SPLITS[2], strict=True)
        for i in matrices
        for tensor in layer.matrices[i].tensors
    }
    assert len(places) == BUFFERS


def test_closing_leaves_nothing_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: set[int] = set()

    class Driver:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802 (the driver's)
            pinned.add(address)
            return 0

        def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
            pinned.remove(address)
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", Driver)
    memory, other = PinnedMemory(5000, pinned=True), PinnedMemory(10, pinned=True)
    assert len(pinned) == 2
    kept = memory.place([torch.arange(7)])[0]
    memory.close()
    memory.close()
    assert len(pinned) == 1
    assert kept.tolist() == list(range(7)), "the memory itself stays while it is in use"
    del other
    assert not pinned, "what is collected is unpinned too"


def test_memory_that_cannot_be_pinned_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from outrider.errors import ModelError

    class Driver:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
            return 2

    monkeypatch.setattr(torch.cuda, "cudart", Driver)
    with pytest.raises(ModelError, match="raise --memory"):
        PinnedMemory(5000, pinned=True)
