"""A row of attention has the same bits alone, in a batch, in a prompt, as a node of a tree and at every place of its keys.

These run in Triton's interpreter too (TRITON_INTERPRET=1), with shorter blocks and products of a fixed order (`conftest.py`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from outrider.ops.cuda import segments

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy in the interpreter, about NaN
INTERPRETED = True
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_GPU = DEVICE == "cuda"
BLOCK, SEGMENT = (64, 256) if ON_GPU else (16, 64)
LENGTH = 2 * SEGMENT + BLOCK + 6
NEAR = 4 if ON_GPU else 1  # positions on both sides of a border
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
FEW = (0, BLOCK - 1, BLOCK, SEGMENT - 1, SEGMENT, SEGMENT + 1, 2 * SEGMENT, LENGTH - 1)
POSITIONS = tuple(range(LENGTH)) if ON_GPU else FEW  # the interpreter is slow
RATIOS = [(heads * kv, kv) for heads in (1, 2, 3, 5, 6, 7, 8, 71) for kv in ((2,) if heads < 8 and ON_GPU else (1,))]
WIDTHS = (16, 48, 80, 96, 112, 128, 256)
WINDOWS = (None, 1, BLOCK + 6, SEGMENT + 20) if ON_GPU else (None, BLOCK + 6)


@pytest.fixture(autouse=True)
def _fixed_order(products_of_fixed_order: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's products do not depend on the number of rows."""
    monkeypatch.setattr(segments, "BLOCK", BLOCK)
    monkeypatch.setattr(segments, "SEGMENT", SEGMENT)


class At(NamedTuple):
    """A row: its sequence, its position, the last position in the page table, the slots of those after."""

    sequence: int
    position: int
    root: int | None = None
    path: tuple[int, ...] = ()
    first: int = 0


class Scene:
    """Sequences whose keys and values lie in pages of a pool. What no sequence holds is NaN."""

    def __init__(
        self, heads: int = 4 if ON_GPU else 2, kv_heads: int = 2 if ON_GPU else 1, head: int = 32, page: int = 64,
        dtype: torch.dtype = DTYPE, lengths: tuple[int, ...] = (LENGTH,), seed: int = 0,
    ) -> None:  # fmt: skip
        from outrider.ops.cuda import launch

        self.launch, self.page, self.lengths = launch, page, lengths
        self.sinks: Tensor | None = None
        self.kernels = launch.Kernels(launch.Shape(heads, kv_heads, head, page), dtype)
        if not ON_GPU:
            self.kernels._attention._merged = 2
        generator = torch.Generator().manual_seed(seed)
        self.keys, self.values = (
            [torch.randn(length, kv_heads, head, generator=generator).to(dtype) for length in lengths] for _ in range(2)
        )
        self.queries = [torch.randn(length, heads * head, generator=generator).to(dtype) for length in lengths]
        widths = [-(-length // page) for length in lengths]
        order = torch.randperm(sum(widths) + 2, generator=generator).int()
        self.free = [int(page) for page in order[sum(widths) :]]
        self.table = torch.full((len(lengths), max(widths)), self.free[-1], dtype=torch.int32)
        shape = (len(order), kv_heads, page, head)
        self.pool = tuple(torch.full(shape, float("nan"), dtype=dtype) for _ in range(2))
        for s, width in enumerate(widths):
            self.table[s, :width], order = order[:width], order[width:]
            for position in range(lengths[s]):
                self.write(self.slot(s, position), s, position)

    def slot(self, sequence: int, position: int) -> int:
        return int(self.table[sequence, position // self.page]) * self.page + position % self.page

    def write(self, slot: int, sequence: int, position: int) -> None:
        for part, source in zip(self.pool, (self.keys, self.values), strict=True):
            part[slot // self.page, :, slot % self.page] = source[sequence][position]

    def on_device(self) -> tuple[Tensor, Tensor]:
        return self.pool[0].to(DEVICE), self.pool[1].to(DEVICE)

    def metadata(self, rows: list[At]) -> Any:
        def ints(values: list[Any]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=DEVICE)

        depth = max(1, *(len(row.path) for row in rows)) if rows else 1
        zero = ints([0] * len(rows))
        return self.launch.AttentionMetadata(
            zero, ints([row.sequence for row in rows]), ints([row.position for row in rows]),
            ints([row.position if row.root is None else row.root for row in rows]), ints([row.first for row in rows]), zero,
            self.table.to(DEVICE), ints([[*row.path] + [0] * (depth - len(row.path)) for row in rows]), zero.float(), zero.long(),
        )  # fmt: skip

    def attend(self, rows: list[At], window: int | None = None, soft_cap: float | None = None, meta: Any = None) -> Tensor:
        q = torch.stack([self.queries[row.sequence][row.position] for row in rows]).to(DEVICE)
        out = torch.full_like(q, float("nan"))
        self.kernels.attend_rows(q, self.on_device(), meta or self.metadata(rows), out, window, soft_cap, self.sinks)
        return out.cpu()

    def alone(self, rows: list[At], window: int | None = None, soft_cap: float | None = None) -> Tensor:
        return torch.cat([self.attend([row], window, soft_cap) for row in rows])

    def prompt(
        self, starts: list[tuple[int, int]], window: int | None = None, soft_cap: float | None = None, first: int = 0
    ) -> Tensor:
        """Rows of the first sequence, by chunks of (first position, tokens)."""
        q = torch.cat([self.queries[0][start : start + tokens] for start, tokens in starts]).to(DEVICE)
        chunks, row = [], 0
        for start, tokens in starts:
            chunks.append((row, tokens, start, 0, first))
            row += tokens
        out = torch.full_like(q, float("nan"))
        listed = torch.tensor(chunks, dtype=torch.int32, device=DEVICE)
        self.kernels.attend_chunks(q, self.on_device(), self.table.to(DEVICE), listed, out, window, soft_cap, self.sinks)
        return out.cpu()

    def reference(self, rows: list[At], window: int | None = None, soft_cap: float | None = None) -> Tensor:
        outs = []
        for row in rows:
            low = max(row.first, 0 if window is None else row.position - window + 1)
            keys, values = (part[row.sequence][low : row.position + 1].double() for part in (self.keys, self.values))
            q = self.queries[row.sequence][row.position].double().view(keys.shape[1], -1, keys.shape[2])
            scores = torch.einsum("kgh,nkh->kgn", q, keys) * keys.shape[2] ** -0.5
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            if self.sinks is not None:
                sinks = self.sinks.cpu().double().view(*scores.shape[:2], 1)
                scores, values = torch.cat((scores, sinks), -1), torch.cat((values, torch.zeros_like(values[:1])))
            outs.append(torch.einsum("kgn,nkh->kgh", scores.softmax(-1), values).flatten())
        return torch.stack(outs)


def assert_near(got: Tensor, want: Tensor) -> None:
    bound = 1e-5 if got.dtype == torch.float32 else 1e-2
    assert (got.double() - want).norm() / want.norm() < bound


def chunked(length: int, tokens: int, start: int = 0) -> list[tuple[int, int]]:
    return [(i, min(tokens, length - i)) for i in range(start, length, tokens)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_alone_in_a_batch_and_in_a_prompt(window: int | None, soft_cap: float | None, dtype: torch.dtype) -> None:
    scene = Scene(dtype=dtype)
    rows = [At(0, position) for position in POSITIONS]
    want = scene.alone(rows, window, soft_cap)
    assert_near(want, scene.reference(rows, window, soft_cap))
    assert torch.equal(scene.attend(rows, window, soft_cap), want)
    assert torch.equal(scene.attend(rows[::-3], window, soft_cap), want.flip(0)[::3])
    for tokens in (scene.kernels.chunk_tokens, 7) if ON_GPU else (scene.kernels.chunk_tokens,):
        got = scene.prompt(chunked(LENGTH, tokens), window, soft_cap)
        assert torch.equal(got[list(POSITIONS)], want)


@pytest.mark.parametrize(("heads", "kv_heads"), RATIOS)
def test_ratios_of_query_to_kv_heads(heads: int, kv_heads: int) -> None:
    check_shape(Scene(heads, kv_heads, 16))


@pytest.mark.parametrize("head", WIDTHS)
def test_head_widths(head: int) -> None:
    check_shape(Scene(2, 1, head))


@pytest.mark.parametrize("window", WINDOWS[::2])
def test_sinks(window: int | None) -> None:
    """Each head's sink joins the sum once, after all segments: alone, in a tile, in a prompt and as a node of a tree."""
    scene, seen = Scene(), Scene()
    scene.sinks = torch.linspace(-2.0, 3.0, scene.queries[0].shape[1] // 32, device=DEVICE)
    rows = [At(0, position) for position in POSITIONS]
    want = scene.alone(rows, window)
    assert_near(want, scene.reference(rows, window))
    assert not torch.allclose(want, seen.alone(rows, window), atol=1e-2)
    assert torch.equal(scene.attend(rows, window), want)
    got = scene.prompt(chunked(LENGTH, scene.kernels.chunk_tokens), window)
    assert torch.equal(got[list(POSITIONS)], want)


def check_shape(scene: Scene) -> None:
    """Decode rows around a segment border alone, in a tile and in a prompt, against the reference."""
    rows = [At(0, position) for position in range(SEGMENT - NEAR, SEGMENT + NEAR)]
    want = scene.alone(rows)
    assert_near(want, scene.reference(rows))
    assert torch.equal(scene.attend(rows), want)
    for tokens in (1, 3, scene.kernels.chunk_tokens) if ON_GPU else (3,):
        got = scene.prompt(chunked(SEGMENT + NEAR, min(tokens, scene.kernels.chunk_tokens), SEGMENT - NEAR))
        assert torch.equal(got, want)


@pytest.mark.parametrize("tokens", range(1, 33) if ON_GPU else (1, 9))
def test_prompt_chunks_of_every_length(tokens: int) -> None:
    scene = Scene(lengths=(SEGMENT + BLOCK + 2,))
    for start in (0, 37, BLOCK - 1, BLOCK, SEGMENT - 1, SEGMENT) if ON_GPU else (13, SEGMENT - 1):
        tokens = min(tokens, scene.kernels.chunk_tokens)
        end = min(start + 2 * tokens, SEGMENT + BLOCK + 2)
        want = scene.attend([At(0, position) for position in range(start, end)])
        assert torch.equal(scene.prompt(chunked(end, tokens, start)), want)


@pytest.mark.parametrize("page", [8, 16, 64, 128])
def test_pages_lie_anywhere(page: int) -> None:
    length = SEGMENT + 91
    rows = [At(0, position) for position in (SEGMENT - 1, SEGMENT + 20, length - 1)]
    other = Scene(lengths=(length,), page=32)
    want, prompt = other.alone(rows), other.prompt([(SEGMENT - 10, 32)])
    scene = Scene(lengths=(length, 30), page=page)
    scene.keys[0], scene.values[0], scene.queries[0] = other.keys[0], other.values[0], other.queries[0]
    for position in range(length):
        scene.write(scene.slot(0, position), 0, position)
    assert torch.equal(scene.attend(rows), want)
    assert torch.equal(scene.prompt([(SEGMENT - 10, 32)]), prompt)


PARENTS = {"chain": [-1, 0, 1, 2, 3, 4, 5], "comb": [-1, 0, 0, 1, 1, 3, 3], "bushy": [-1, -1, -1, 0, 1, 1, 4]}


@pytest.mark.parametrize("window", [None, 3, SEGMENT] if ON_GPU else [None, 3])
@pytest.mark.parametrize("shape", PARENTS if ON_GPU else ["comb"])
@pytest.mark.parametrize("root", [5, BLOCK - 3, SEGMENT - 3, 2 * SEGMENT - 1] if ON_GPU else [BLOCK - 3, SEGMENT - 3])
def test_nodes_of_a_tree(root: int, shape: str, window: int | None) -> None:
    """Every node has the bits of the same tokens decoded one by one. Slots of its siblings hold NaN for it alone to miss."""
    scene = Scene(lengths=(LENGTH, LENGTH), seed=3)
    parents, rows, plain = PARENTS[shape], [At(0, root, root)], [At(0, root)]
    paths: list[tuple[int, ...]] = []
    for node, parent in enumerate(parents):
        slot = scene.free[0] * scene.page + node
        path = (*(paths[parent] if parent >= 0 else ()), slot)
        paths.append(path)
        scene.write(slot, 0, root + len(path))  # siblings hold equal keys, so that one sequence is the reference of all
        rows.append(At(0, root + len(path), root, path))
        plain.append(At(0, root + len(path)))
    want = scene.attend(plain, window)
    others = [At(1, 40), At(1, 41)]
    assert torch.equal(scene.attend(rows, window), want)
    assert torch.equal(scene.attend([*others, *rows, *others], window)[2:-2], want)
    leaf = rows[-1]
    spoiled = {slot for path in paths for slot in path} - set(leaf.path)
    for slot in spoiled:
        for part in scene.pool:
            part[slot // scene.page, :, slot % scene.page] = float("nan")
    assert torch.equal(scene.attend(rows, window)[-1], want[-1])


def test_values_that_are_not_finite_reach_the_rows_that_see_them_alone() -> None:
    scene = Scene()
    rows = [At(0, position) for position in range(SEGMENT, SEGMENT + 30)]
    want = scene.attend(rows)
    for value in (float("nan"), float("inf")):
        slot = scene.slot(0, SEGMENT + 10)
        for part in scene.pool:
            part[slot // scene.page, :, slot % scene.page] = value
        for got in (scene.attend(rows), scene.prompt([(SEGMENT, 30)])):
            assert torch.equal(got[:10], want[:10])
            assert not got[10:].isfinite().any()


def test_a_prefix_that_is_not_there() -> None:
    """Positions before `first` hold nothing."""
    scene = Scene()
    for position in range(SEGMENT + 21):
        slot = scene.slot(0, position)
        for part in scene.pool:
            part[slot // scene.page, :, slot % scene.page] = float("nan")
    rows = [At(0, position, first=SEGMENT + 21) for position in range(2 * SEGMENT + 1, 2 * SEGMENT + 10)]
    want = scene.alone(rows)
    assert_near(want, scene.reference(rows))
    assert torch.equal(scene.attend(rows), want)
    assert torch.equal(scene.prompt([(2 * SEGMENT + 1, 9)], first=SEGMENT + 21), want)


def mixed_batch() -> tuple[Scene, list[At]]:
    scene = Scene(lengths=(LENGTH, 3, BLOCK + 6, LENGTH - 9, SEGMENT))
    chains = [(0, 2 * SEGMENT - 2, 6), (1, 2, 1), (2, BLOCK + 2, 3), (3, LENGTH - 14, 5), (4, SEGMENT - 1, 1)]
    return scene, [At(s, start + i) for s, start, count in chains for i in range(count)]


@pytest.mark.parametrize(("slots", "programs"), [(8192, 1), (8192, 1056), (1, 3)])
def test_neither_slots_nor_programs_change_bits(monkeypatch: pytest.MonkeyPatch, slots: int, programs: int) -> None:
    """With few slots, rows fold segments in order; the tile of the first sequence does so for all its rows."""
    from outrider.ops.cuda import attention_launch

    scene, rows = mixed_batch()
    want = scene.alone(rows)
    monkeypatch.setattr(segments, "MAX_SLOTS", slots)
    monkeypatch.setattr(attention_launch, "_PROGRAMS", programs)
    for share in (1, 2, 4) if ON_GPU else (1, 3):
        monkeypatch.setattr(segments, "MIN_SHARE", share)
        assert torch.equal(scene.attend(rows), want)


def test_shared_segments_are_read_once() -> None:
    """The items of a batch: shared segments once for a tile, all others once for a row; every slot is used once."""
    scene, rows = mixed_batch()
    meta = scene.metadata(rows).for_forward()
    scene.attend(rows, meta=meta)
    ((slots, alone, together),) = meta.work.values()
    singles, tiles = (items[1 : 1 + 4 * int(items[0])].view(-1, 4).tolist() for items in (alone, together))
    tile = scene.kernels._attention._rows
    assert tiles[0][:3] == [0, 0, 1]
    assert len({slot for *_, slot in singles}) == len(singles)
    covered = []
    for leader, first, end, _ in tiles:
        same = [
            r
            for r in range(leader // tile * tile, min(len(rows), (leader // tile + 1) * tile))
            if rows[r].sequence == rows[leader].sequence
        ]
        covered += [(r, s) for r in same for s in range(first, end)]
    covered += [(row, s) for row, first, end, _ in singles for s in range(first, end)]
    assert sorted(covered) == [(r, s) for r, row in enumerate(rows) for s in range(row.position // SEGMENT + 1)]
    assert slots[0].tolist() == [sum(row.position // SEGMENT + 1 for row in rows[:r]) for r in range(len(rows))]


def test_work_is_listed_again_for_rows_that_changed() -> None:
    scene = Scene()
    meta = scene.metadata([At(0, 20)])
    scene.attend([At(0, 20)], meta=meta)
    meta.positions.fill_(SEGMENT + 20)
    meta.roots.fill_(SEGMENT + 20)
    row = At(0, SEGMENT + 20)
    assert torch.equal(scene.attend([row], meta=meta), scene.alone([row]))
