"""Kernels of recurrent layers against the mixer in torch, and the bits of their rows. Triton's interpreter runs them too."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from outrider.cache import SequenceState
from outrider.model import Feed
from outrider.model.memory import StateSizes
from outrider.model.recurrence import Mixer
from outrider.model.recurrent import Recurrent
from outrider.model.recurrent_rows import RecurrentRows
from outrider.ops import Plain

INTERPRETED = True
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
PAGE, VOCAB, PAGES = 8, 40, list(range(32))
SPEC = Recurrent("gated delta rule", 4, 10, 4, key_heads=2, key_dim=12, norm_eps=1e-6, norm_groups=4, norm_first=True)
WIDE = Recurrent(
    "gated delta rule", 4, 128, 4, key_heads=2, key_dim=128, conv_bias=True, norm_eps=1e-6, norm_groups=4, norm_first=True
)
SHORT = Recurrent("short convolution", 1, 40, 3, bias=True, conv_bias=True)
TREE = ([9, 3, 17, 21, 5], [-1, -1, 0, 0, 2])


def random_mixer(spec: Recurrent) -> Mixer:
    mixer = Mixer(spec, 16, 0, torch.float32).requires_grad_(False)
    generator = torch.Generator().manual_seed(4)
    for parameter in mixer.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return mixer


class PartsOnly:
    """In place of a model's kernels: products are what they are given."""

    dtype = torch.float32

    def parts(self, x: Tensor, _: object) -> Tensor:
        return x if x.dim() == 3 else x[None]


class OnDevice:
    """One mixer over a pool of states. What a row reads depends on its token."""

    def __init__(self, spec: Recurrent = SPEC, parts: int = 1) -> None:
        from outrider.model.cuda_recurrent import CudaRecurrent
        from outrider.model.cuda_states import DeviceStates
        from outrider.model.cuda_weights import Upload

        mixer = random_mixer(spec)
        self.pool = DeviceStates([spec], PAGE, StateSizes(20, 12, 40), DEVICE)
        self._mixer = CudaRecurrent(mixer, PartsOnly(), Upload(DEVICE, torch.float32))  # type: ignore[arg-type]
        self.table = torch.randn(parts, VOCAB, spec.width, generator=torch.Generator().manual_seed(2)).to(DEVICE)

    def rows(self, feeds: Sequence[Feed], graph: int = 0, times: int = 1) -> Tensor:
        """Results of all rows, with the room of a graph of so many rows or with just enough."""
        from outrider.model.cuda_states import RecurrentInputs, RowRoom

        room = RowRoom.of_graph(graph) if graph else RowRoom.of_feeds(feeds)
        inputs = RecurrentInputs(self.pool, room)
        inputs.fill(feeds)
        tokens = [token for feed in feeds for token in (*feed.tokens, *feed.nodes)]
        parts = self.table[:, tokens + [0] * (room.rows - len(tokens))].contiguous()
        for _ in range(times):
            inputs.send()
            out = self._mixer.forward(parts, SimpleNamespace(recurrent=inputs), None)[0]  # type: ignore[arg-type]
        return out[: len(tokens)].clone()


class InTorch:
    """The same by the reference."""

    def __init__(self, spec: Recurrent, table: Tensor) -> None:
        self._mixer = random_mixer(spec)
        self._table = table[0].cpu()
        for part in table[1:].cpu():
            self._table = self._table + part

    def rows(self, feeds: Sequence[Feed]) -> Tensor:
        rows = RecurrentRows(feeds, PAGE, self._mixer.spec.kernel)
        tokens = [token for feed in feeds for token in (*feed.tokens, *feed.nodes)]
        bias = 0.0 if self._mixer.read_bias is None else self._mixer.read_bias
        out = rows.run(self._mixer, self._table[tokens] + bias, Plain())
        rows.settle()
        return out


def rounds(seed: int = 0, count: int = 7) -> list[list[tuple[int, list[int], list[int], list[int], list[int]]]]:
    """Rounds of three sequences: each one's start, tokens, nodes, parents, and the path that is accepted."""
    rng, lengths, made = random.Random(seed), [0, 0, 0], []
    for _ in range(count):
        turn = []
        for b in range(3):
            tokens = [rng.randrange(VOCAB) for _ in range(1 if lengths[b] else rng.choice([1, 5, 19]))]
            parents = [rng.randrange(-1, i) for i in range(rng.randrange(5))]
            nodes = [rng.randrange(VOCAB) for _ in parents]
            path: list[int] = []
            for i, parent in enumerate(parents):
                if parent == (path[-1] if path else -1) and rng.random() < 0.6:
                    path.append(i)
            turn.append((lengths[b], tokens, nodes, parents, path))
            lengths[b] += len(tokens) + len(path)
        made.append(turn)
    return made


@pytest.mark.parametrize(("spec", "parts"), [(SPEC, 4), (WIDE, 1), (SHORT, 4)])
def test_prompts_trees_and_replays_agree_with_the_mixer_in_torch(spec: Recurrent, parts: int) -> None:
    device = OnDevice(spec, parts)
    reference = InTorch(spec, device.table)
    states = [[SequenceState(borders={}) for _ in range(3)] for _ in range(2)]
    for turn in rounds(count=7 if ON_GPU else 3 if spec is SPEC else 2):
        made = []
        for runner, own in ((device, states[0]), (reference, states[1])):
            feeds = [
                Feed(PAGES, start, tokens, nodes, parents, state=state)
                for (start, tokens, nodes, parents, _), state in zip(turn, own, strict=True)
            ]
            made.append(runner.rows(feeds).cpu())
            for (*_, path), state in zip(turn, own, strict=True):
                state.accept(path)
        torch.testing.assert_close(made[0], made[1], atol=2e-5, rtol=2e-4)
    assert [list(state.borders or ()) for state in states[0]] == [list(state.borders or ()) for state in states[1]]


@pytest.mark.parametrize("spec", [SPEC, SHORT])
def test_a_text_has_the_same_bits_in_one_piece_in_chunks_beside_others_and_as_nodes(spec: Recurrent) -> None:
    device, text = OnDevice(spec), [i * 7 % VOCAB for i in range(21)]
    whole = device.rows([Feed(PAGES, 0, text, state=SequenceState())])
    for size in (1, 2, 3, 5, 8, 20) if ON_GPU else (3, 8):
        state = SequenceState(borders={})
        beside = Feed(PAGES, 0, [3, 1, 4], [1, 5], [-1, -1])
        cuts = [*range(0, 21, size), 21]
        made = [device.rows([beside, Feed(PAGES, a, text[a:b], state=state)])[5:] for a, b in pairwise(cuts)]
        assert torch.equal(torch.cat(made), whole), size
    state = SequenceState()
    device.rows([Feed(PAGES, 0, text[:8], state=state)])
    nodes, parents = [9, text[9], 9, text[10], text[11], 7], [-1, -1, 0, 1, 3, 3]
    rows = device.rows([Feed(PAGES, 8, text[8:9], nodes, parents, state=state)], graph=16)
    assert torch.equal(rows[[0, 2, 4, 5]], whole[8:12])
    state.accept([1, 3, 4])
    rows = device.rows([Feed(PAGES, 12, text[12:13], text[13:15], [-1, 0], state=state)], graph=4)
    assert torch.equal(rows, whole[12:15])


def test_rows_go_on_from_the_ends_of_pages() -> None:
    device, text = OnDevice(), [i * 7 % VOCAB for i in range(30)]
    state = SequenceState(borders={})
    whole = device.rows([Feed(PAGES, 0, text, state=state)])
    cache, keys = device.pool.cache, [b"a", b"b", b"c"]
    cache.publish(state, keys)
    assert cache.usable(keys) == 3
    for pages in (1, 2, 3):
        resumed = cache.begin(keys[:pages], PAGE)
        assert torch.equal(device.rows([Feed(PAGES, pages * PAGE, text[pages * PAGE :], state=resumed)]), whole[pages * PAGE :])


def test_a_forward_may_run_again_and_may_be_asked_for_again() -> None:
    """A round that failed after its forward is run again from where it began, alone and without its draft."""
    device = OnDevice()
    tokens, parents = TREE
    state, text = SequenceState(), [1, 2, 3, 4, 5]
    whole = device.rows([Feed(PAGES, 0, [*text, 6, *tokens[:1], *tokens[2:3], 8, 9], state=SequenceState())])
    device.rows([Feed(PAGES, 0, text, state=state)], times=2)
    first = device.rows([Feed(PAGES, 5, [6], tokens, parents, state=state)], times=2)
    assert torch.equal(device.rows([Feed(PAGES, 5, [6], state=state)]), first[:1])
    assert torch.equal(device.rows([Feed(PAGES, 5, [6], tokens, parents, state=state)]), first)
    state.accept([0, 2])
    assert torch.equal(device.rows([Feed(PAGES, 8, [8], [9], [-1], state=state)]), whole[8:10])
    assert torch.equal(device.rows([Feed(PAGES, 8, [8], state=state)], times=2), whole[8:9])
    prompt = SequenceState()
    device.rows([Feed(PAGES, 0, text, state=prompt)])
    assert torch.equal(device.rows([Feed(PAGES, 4, text[4:], state=prompt)]), whole[4:5]), "from the last token of a prompt"


def test_levels_of_a_tree_are_fed_one_by_one() -> None:
    device = OnDevice()
    tokens, parents = TREE
    whole, state = SequenceState(), SequenceState()
    device.rows([Feed(PAGES, 0, [1, 2], state=whole)])
    rows = device.rows([Feed(PAGES, 2, [3], tokens, parents, state=whole)])
    device.rows([Feed(PAGES, 0, [1, 2], state=state)])
    made = [device.rows([Feed(PAGES, 2, [3], state=state)])]
    for known, stop in ((0, 2), (2, 4), (4, 5)):
        made.append(device.rows([Feed(PAGES, 3, (), tokens[known:stop], parents[:stop], known, state=state)]))
    assert torch.equal(torch.cat(made), rows)


def test_places_return_when_nobody_refers_to_them() -> None:
    device = OnDevice()
    pool = device.pool
    states, nodes = pool.states.free, pool.nodes.free
    state, text = SequenceState(), [5, 4, 3, 2]
    device.rows([Feed(PAGES, 0, text, state=state)])
    for i in range(9):
        device.rows([Feed(PAGES, 4 + 3 * i, [i], *TREE, state=state)])
        assert pool.nodes.free >= nodes - 2 * len(TREE[0])
        assert pool.states.free >= states - 3
        state.accept([0, 3])
        assert pool.nodes.free >= nodes - 4, "those that were replayed, and those that will be"
    state.restart()
    assert (pool.states.free, pool.nodes.free) == (states, nodes)


def test_states_at_the_ends_of_pages_leave_room_for_sequences_that_run() -> None:
    device = OnDevice()
    states = [SequenceState(borders={}) for _ in range(3)]
    device.rows([Feed(PAGES, 0, [1] * 96, state=states[0])])
    assert sorted(states[0].borders or ()) == [1, 3, 5, 7, 9, 11], "the last one, and others at equal distances"
    for state in states[1:]:  # nobody publishes those of the first: there is no room for more than twelve
        device.rows([Feed(PAGES, 0, [1] * 96, state=state)])
    assert sum(len(state.borders or ()) for state in states) == 12
    running = [SequenceState() for _ in range(7)]
    for one in running:
        device.rows([Feed(PAGES, 0, [1, 2], state=one)])
    device.pool.cache.publish(states[0], [bytes([i]) for i in range(12)])
    assert device.pool.cache.kept == 6
    device.rows([Feed(PAGES, 0, [1] * 96, state=states[2])])
    assert device.pool.cache.kept == 0, "older ones give way"
    with pytest.raises(MemoryError, match="lower max_num_seqs"):
        device.rows([Feed(PAGES, 0, [1, 2], state=one) for one in [SequenceState() for _ in range(15)]])


def test_every_tile_of_the_recurrence_gives_the_same_bits() -> None:
    from outrider.model.cuda_states import RecurrentInputs, RowRoom
    from outrider.ops.cuda.recurrence_launch import SCAN_TILES, run_paths

    device = OnDevice(WIDE)
    feeds = [Feed(PAGES, 0, [1, 2, 3, 4], state=SequenceState())]
    device.rows(feeds)
    inputs = RecurrentInputs(device.pool, RowRoom.of_feeds(feeds))
    inputs.fill(feeds)
    inputs.send()
    state, buffers = inputs.layer(0)
    generator = torch.Generator().manual_seed(3)
    for buffer in buffers[:5]:
        buffer.copy_(torch.rand(buffer.shape, generator=generator))
    made = []
    for tile in SCAN_TILES:
        run_paths(inputs.paths, state.memories, device._mixer._shape, buffers, tile)
        made.append(buffers.out.clone())
    assert all(torch.equal(one, made[0]) for one in made)
    assert float(made[0].abs().max()) > 0


@pytest.mark.parametrize("parts", [1, 4])
def test_the_output_gate_of_attention(parts: int) -> None:
    """It is the last columns of a product."""
    from outrider.ops.cuda.recurrence_launch import gate_heads

    generator = torch.Generator().manual_seed(1)
    x, product, bias = (torch.randn(shape, generator=generator) for shape in ((3, 72), (parts, 3, 110), (110,)))
    for added in (None, bias):
        made = x.clone().to(DEVICE)
        gate_heads(made, product.to(DEVICE), None if added is None else added.to(DEVICE))
        gate = (product.sum(0) + (0.0 if added is None else added))[:, -72:]
        torch.testing.assert_close(made.cpu(), x * torch.sigmoid(gate))
