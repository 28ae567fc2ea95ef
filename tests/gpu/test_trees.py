"""Trees grown on the device are those of `draft.growth.grow`, the definition. These tests run in Triton's interpreter too."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.cache import KVPool
from outrider.config import EngineConfig
from outrider.control import FixedLength
from outrider.core import Batch, Drafts, PendingDrafts, Plan, Sequence, Tree
from outrider.draft import Drafter
from outrider.draft.draft_model import DraftModel
from outrider.draft.draft_temperature import DraftTemperature
from outrider.draft.eagle import EagleDrafter
from outrider.draft.growth import Growing, TreeShape, grow
from outrider.engine.engine import Engine
from outrider.heads import EagleHead
from outrider.model import Decoder, Feed
from outrider.ops import Blocked
from outrider.sampling import SamplingParams
from outrider.sampling.noise import prefix_of
from tests.support import NoDrafter, make_request, random_decoder, run, write_family
from tests.support.eagle import random_head

INTERPRETED = True
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGES, SIZE = 40, 16
TOKENS = 24 if DEVICE == "cuda" else 5  # the interpreter is slow
SHAPES = {
    "tree": TreeShape(beam=3, branch=4, depth=4),
    "one path with leaves": TreeShape(beam=1, branch=4),
    "more nodes than are kept": TreeShape(beam=8, branch=8, depth=3),
    "chain of a fixed depth": TreeShape(depth=3),
}


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    layers = 3 if DEVICE == "cuda" else 2
    folder = write_family(tmp_path_factory.mktemp("m"), "llama2", hidden_size=64, num_key_value_heads=2, num_hidden_layers=layers)
    return random_decoder(folder)


# --- the kernels alone -------------------------------------------------------------------------------------------------


def logits_after(path: list[int], vocab: int) -> Tensor:
    """Any fixed function of a path."""
    return torch.randn(vocab, generator=torch.Generator().manual_seed(hash(tuple(path)) % 2**40)) * 3


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize(
    ("shape", "rooms"), [("tree", (10, 40)), ("one path with leaves", (5, 3)), ("more nodes than are kept", (17, 9))]
)
def test_kernels_grow_what_the_definition_grows(shape: str, rooms: tuple[int, int], reduced: bool) -> None:
    """Nodes, survival, and at every level the rows that are run: tokens, positions, slots and ancestors."""
    from outrider.ops.cuda.launch import AttentionMetadata
    from outrider.ops.cuda.tree_launch import GrowingTrees
    from outrider.ops.cuda.tree_sizes import TreeSizes

    vocab, form = 1500, SHAPES[shape]
    ids = torch.randperm(vocab, generator=torch.Generator().manual_seed(0))[:1200].sort().values if reduced else None
    known = torch.arange(vocab) if ids is None else ids

    def over_vocab(path: list[int]) -> Tensor:
        logits = logits_after(path, vocab)
        return logits if ids is None else torch.full((vocab,), float("-inf")).index_copy(0, ids, logits[ids])

    sequences = [
        Sequence(make_request([1] * length, SamplingParams(temperature=heat, seed=7), f"r{length}"))
        for length, heat in ((20, 0.0), (30, 0.8))
    ]
    pages = [[4, 1, 6, 9], [2, 0, 7, 8]]
    growing = [Growing(seq, room, pages[b], len(seq.tokens)) for b, (seq, room) in enumerate(zip(sequences, rooms, strict=True))]
    levels: list[list[Any]] = []

    def start(active: Any) -> Tensor:
        return torch.stack([over_vocab([]) for _ in active])

    def extend(active: Any) -> Tensor:
        levels.append([(growing.index(draft), draft.feed()) for draft in active])
        return torch.stack([over_vocab(draft.tree.path(node)) for draft in active for node in draft.frontier])

    want = grow(growing, form, start, extend, DraftTemperature())
    depth = form.depth or max(rooms)
    sizes = TreeSizes(4, depth, form.beam, form.branch)  # two of the four are idle
    integers: dict[str, Any] = {"dtype": torch.int32, "device": DEVICE}
    trees = GrowingTrees(sizes, SIZE, 11 * SIZE, torch.device(DEVICE))
    ends = torch.tensor([19, 29, 0, 0], **integers)
    numbers = torch.arange(4, **integers)
    table = torch.tensor([*pages, [11] * 4, [11] * 4], **integers)
    meta = AttentionMetadata(
        numbers, numbers, ends, ends, torch.zeros(4, **integers), ends, table, ends[:, None],
        torch.tensor([0.0, 0.8, 0.0, 0.0], device=DEVICE),
        torch.tensor([0, prefix_of(7, 0) - (1 << 64 if prefix_of(7, 0) >= 1 << 63 else 0), 0, 0], device=DEVICE),
        torch.tensor([*rooms, 0, 0, *[depth] * 4], **integers), numbers,
    )  # fmt: skip
    trees.begin(meta)
    paths: list[list[int]] = [[]] * 4
    rows = 4
    for level in range(depth):
        logits = torch.stack([logits_after(path, vocab)[known] for path in paths])
        trees.add(level, logits.to(DEVICE).contiguous(), None if ids is None else ids.to(DEVICE))
        if level + 1 == depth:
            break
        sources, after = trees.expand(level).tolist(), trees.rows(level + 1)
        filled = [position > 0 for position in after.positions.tolist()]
        paths = [[*paths[sources[r]], int(after.tokens[r])] if filled[r] else [] for r in range(len(sources))]
        expected = dict(levels[level]) if level < len(levels) else {}
        for b in range(4):
            at = range(b * form.beam, (b + 1) * form.beam)
            feed = expected.get(b)
            rows = 0 if feed is None else len(feed.nodes)
            assert sum(filled[r] for r in at) == rows
            for i in range(rows):
                r, node, slots = at[i], feed.known + i, []
                assert int(after.tokens[r]) == feed.nodes[i]
                while node >= 0:
                    slots.insert(0, feed.start + node)
                    node = feed.parents[node]
                assert int(after.positions[r]) == feed.start - 1 + len(slots)
                listed = [pages[b][slot // SIZE] * SIZE + slot % SIZE for slot in slots]
                assert after.ancestors[r, : len(slots)].tolist() == listed
                assert int(after.slots[r]) == listed[-1]
                assert int(after.roots[r]) == feed.start - 1
    got = trees.read(trees.finish().cpu(), 2)
    for seq, tree in zip(sequences, got, strict=True):
        assert (tree[0], tree[1]) == want[seq][:2]
        assert tree[2] == pytest.approx(want[seq].survival, rel=1e-4)


def test_logits_that_leave_no_choice_are_a_fault() -> None:
    from outrider.ops.cuda.launch import AttentionMetadata
    from outrider.ops.cuda.tree_launch import GrowingTrees
    from outrider.ops.cuda.tree_sizes import TreeSizes

    integers: dict[str, Any] = {"dtype": torch.int32, "device": DEVICE}
    zeros = torch.zeros(2, **integers)
    meta = AttentionMetadata(
        zeros, zeros, zeros, zeros, zeros, zeros, torch.zeros(2, 4, **integers), zeros[:, None], torch.zeros(2, device=DEVICE),
        torch.zeros(2, dtype=torch.int64, device=DEVICE), torch.tensor([3, 3, 1, 1], **integers), zeros,
    )  # fmt: skip
    for value in (float("nan"), float("inf"), float("-inf")):
        trees = GrowingTrees(TreeSizes(2, 1, 2, 2), SIZE, 0, torch.device(DEVICE))
        trees.begin(meta)
        logits = torch.zeros(2, 40, device=DEVICE)
        logits[1] = value
        trees.add(0, logits, None)
        finished = trees.finish().cpu()
        assert trees.read(finished, 2) == []
        assert trees.read(finished, 1) == [([0, 1], [-1, -1], pytest.approx([1 / 40, 1 / 40]))]


def test_a_finished_tree_lies_over_the_forward_as_the_host_would_lay_it(decoder: Decoder) -> None:
    """Rows of two sequences with trees and of one between them without, one tree smaller than it might be."""
    from outrider.model.cuda_inputs import GraphInputs
    from outrider.model.cuda_runner import CudaRunner
    from outrider.ops.cuda.tree_launch import GrowingTrees
    from outrider.ops.cuda.tree_sizes import TreeSizes

    runner, sizes = CudaRunner(decoder, PAGES, SIZE, DEVICE), TreeSizes(4, 3, 2, 3)
    grown = [([7, 8, 9, 5, 6], [-1, -1, 0, 2, 0]), ([3, 2, 1], [-1, 0, 1])]
    trees = GrowingTrees(sizes, SIZE, (PAGES - 1) * SIZE, torch.device(DEVICE))
    tokens, parents, _, counts = torch.split(trees.finished, [4 * sizes.kept] * 3 + [4])
    for b, (ids, above) in enumerate(grown):
        tokens.view(4, -1)[b, : len(ids)] = torch.tensor(ids)
        parents.view(4, -1)[b, : len(ids)] = torch.tensor(above)
        counts[b] = len(ids)
    pages = [[4, 1, 6], [2, 0], [5, 3]]
    starts, rooms, roots = (30, 9, 14), (5, 0, 4), (0, 6, 7)
    feeds = [Feed(pages[i], starts[i], [10 + i]) for i in range(3)]
    laid, wanted = (GraphInputs(16, 16, runner.width, torch.device(DEVICE)) for _ in range(2))
    runner.fill(laid, [feed._replace(nodes=[0] * n, parents=range(-1, n - 1)) for feed, n in zip(feeds, rooms, strict=True)])
    runner.fill(wanted, [feed._replace(nodes=nodes, parents=above) for feed, (nodes, above) in zip(
        feeds, (grown[0], ([], []), grown[1]), strict=True
    )])  # fmt: skip
    for inputs in (laid, wanted):
        inputs.send()
    trees._params = torch.tensor([5, 4, 0, 0, *[3] * 4, roots[0], roots[2], -1, -1], dtype=torch.int32, device=DEVICE)
    trees.place(laid.meta)
    got, want = laid.meta, wanted.meta
    for name in ("tokens", "sequences", "positions", "firsts", "slots"):
        assert getattr(got, name)[:11].tolist() == getattr(want, name)[:11].tolist(), name
    assert got.roots[:11].tolist() == [30] * 6 + [9] + [14] * 4
    assert got.slots[11] == (PAGES - 1) * SIZE
    assert (got.positions[11], got.firsts[11]) == (0, 0)
    for row in (*range(1, 6), *range(8, 11)):
        depth = int(want.positions[row] - got.roots[row])
        assert got.ancestors[row, :depth].tolist() == _slots(want, row, depth, SIZE)


def _slots(meta: Any, row: int, depth: int, size: int) -> list[int]:
    """Where a row's path lies; a chain's rows list none."""
    if int(meta.roots[row]) < int(meta.positions[row]):
        return meta.ancestors[row, :depth].tolist()  # type: ignore[no-any-return]
    positions = range(int(meta.positions[row]) - depth + 1, int(meta.positions[row]) + 1)
    return [int(meta.table[int(meta.sequences[row]), at // size]) * size + at % size for at in positions]


# --- heads -------------------------------------------------------------------------------------------------------------


def eagle_drafter(target: Any, head: EagleHead, shape: TreeShape, on_device: bool = True) -> EagleDrafter:
    from outrider.heads.cuda_runners import CudaEagleRunner

    c, network = head.config.shape, CudaEagleRunner(head, target)
    network.grows_trees = on_device
    return EagleDrafter(head, KVPool(1, PAGES, c.kv_heads, SIZE, c.head_dim), Blocked(), shape, network)


def texts_and_trees(target: Any, drafter: Drafter, length: int) -> tuple[list[list[int]], list[Tree], list[Sequence]]:
    """What some requests emit together, every tree drafted meanwhile, and the sequences."""
    trees, propose = list[Tree](), drafter.propose

    def watched(drafts: Drafts) -> Drafts:
        trees.extend(drafts.per_sequence)
        return drafts

    def watching(batch: Batch, plan: Plan) -> Any:
        drafts = propose(batch, plan)
        if isinstance(drafts, PendingDrafts):
            return replace(drafts, resolve=lambda: watched(drafts.resolve()))
        return watched(drafts)

    drafter.propose = watching  # type: ignore[method-assign]
    params = [
        SamplingParams(temperature=0.0, max_tokens=TOKENS),
        SamplingParams(temperature=0.8, seed=5, max_tokens=TOKENS),
        SamplingParams(temperature=1.2, seed=6, presence_penalty=0.5, max_tokens=TOKENS),
    ]
    if DEVICE != "cuda":
        params = params[:2]
    requests = [make_request(list(range(5 + i, 25 - 8 * i)), p, f"r{i}") for i, p in enumerate(params)]
    config = EngineConfig(page_size=SIZE, max_num_seqs=3, max_batch_rows=24, prefix_cache=False)
    writers = run(Engine(target, None, drafter, FixedLength(length), config), requests)
    return [writer.seq.tokens for writer in writers], trees, [writer.seq for writer in writers]


_HEADS = [("eagle3 reduced", "tree"), ("mtp", "one path with leaves")]
_MORE_HEADS = [("eagle3", "more nodes than are kept"), ("eagle3.1", "chain of a fixed depth"), ("eagle1", "tree")]


@pytest.mark.parametrize(("form", "shape"), _HEADS + (_MORE_HEADS if DEVICE == "cuda" else []))
def test_a_head_grows_its_trees_on_the_device(decoder: Decoder, form: str, shape: str) -> None:
    """By one replay it grows what the definition grows from its logits, and no token changes."""
    from outrider.model.cuda_runner import CudaRunner

    head, target = random_head(decoder, form), CudaRunner(decoder, PAGES, SIZE, DEVICE)
    plain, _, _ = texts_and_trees(target, NoDrafter(), 0)
    grown = texts_and_trees(target, eagle_drafter(target, deepcopy(head), SHAPES[shape]), 5)
    defined = texts_and_trees(target, eagle_drafter(target, head, SHAPES[shape], on_device=False), 5)
    assert grown[0] == defined[0] == plain
    assert [seq.stats.fallback_reason for seq in grown[2]] == [None] * len(grown[2])
    assert all(seq.stats.drafted > 0 for seq in grown[2])
    greedy = [[tree for i, tree in enumerate(trees) if tree.tokens] for trees in (grown[1], defined[1])]
    assert greedy[0][0][:2] == greedy[1][0][:2]
    assert greedy[0][0].survival == pytest.approx(greedy[1][0].survival, rel=1e-3)


def test_a_draft_model_grows_its_trees_on_the_device(decoder: Decoder, tmp_path: Path) -> None:
    """Texts that lack more tokens than a graph takes are read before."""
    from outrider.model.cuda_runner import CudaRunner

    folder = write_family(tmp_path, "llama2", hidden_size=64, num_key_value_heads=2, num_hidden_layers=1)
    target = CudaRunner(decoder, PAGES, SIZE, DEVICE)
    plain, _, _ = texts_and_trees(target, NoDrafter(), 0)
    results = []
    for on_device in (True, False):
        draft = CudaRunner(random_decoder(folder, 3), PAGES, SIZE, DEVICE, target=target)
        draft.grows_trees = on_device
        results.append(texts_and_trees(target, DraftModel(draft, SHAPES["tree"]), 5))
    grown, defined = results
    assert grown[0] == defined[0] == plain
    assert [seq.stats.fallback_reason for seq in grown[2]] == [None] * len(grown[2])
    first, second = (next(tree for tree in trees if tree.tokens) for _, trees, _ in results)
    assert first[:2] == second[:2]
    assert first.survival == pytest.approx(second.survival, rel=1e-3)


def test_one_sampled_sequence_alone_has_its_noise_at_every_level() -> None:
    from outrider.ops.cuda.launch import AttentionMetadata
    from outrider.ops.cuda.tree_launch import GrowingTrees
    from outrider.ops.cuda.tree_sizes import TreeSizes

    zeros = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    meta = AttentionMetadata(
        zeros, zeros, zeros, zeros, zeros, zeros, zeros[:, None], zeros[:, None], torch.tensor([0.8], device=DEVICE),
        torch.tensor([77], device=DEVICE), torch.tensor([5, 2], dtype=torch.int32, device=DEVICE), zeros,
    )  # fmt: skip
    trees = GrowingTrees(TreeSizes(1, 2, 3, 3), SIZE, 0, torch.device(DEVICE))
    trees.begin(meta)
    rows = trees.rows(1)
    assert rows.temperatures.tolist() == pytest.approx([0.8] * 3)
    assert rows.prefixes.tolist() == [77] * 3
    assert rows.temperatures.is_contiguous()
    assert rows.prefixes.is_contiguous()
