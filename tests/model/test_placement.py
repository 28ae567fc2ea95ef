"""Where weights lie when they do not all fit a GPU: on paper, for many shapes and limits."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from outrider.model import LlamaShape, ModelSpec, Rope
from outrider.model.placement import BUFFERS, ModelSizes, Placement, aligned, place, sizes_of, smallest_room, weights_on_gpu

LLAMA = {"architecture": "LlamaForCausalLM", "vocab": 128256, "context": 4096, "rope": Rope(500000.0), "dtype": "bfloat16"}
SHAPES = {
    "8b": LlamaShape(hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, ffn=14336, **LLAMA).spec(),  # type: ignore[arg-type]
    "1b": LlamaShape(hidden=2048, layers=16, heads=32, kv_heads=8, head_dim=64, ffn=8192, **LLAMA).spec(),  # type: ignore[arg-type]
    "one layer": LlamaShape(hidden=512, layers=1, heads=8, kv_heads=8, head_dim=64, ffn=2048, **LLAMA).spec(),  # type: ignore[arg-type]
    "70b": LlamaShape(hidden=8192, layers=80, heads=64, kv_heads=8, head_dim=128, ffn=28672, **LLAMA).spec(),  # type: ignore[arg-type]
}
UNEVEN = ModelSizes(((10**6, 10**6, 8 * 10**6, 4 * 10**6), (10**6, 10**6, 10**6, 10**6)) * 5, 10**6, 10**6, 1000)
GB = 10**9


def every_size() -> list[ModelSizes]:
    tied = replace(SHAPES["8b"], tied=True)
    return [*map(sizes_of, (*SHAPES.values(), tied)), sizes_of(replace(SHAPES["70b"], dtype="int4")), UNEVEN]


def check(sizes: ModelSizes, placement: Placement, room: int) -> None:
    """Every byte is somewhere, and what is promised holds."""
    crossing = [sum(layer[i] for i in matrices) for layer, matrices in zip(sizes.layers, placement.streamed, strict=True)]
    assert placement.resident + sum(crossing) + placement.embedding_on_host * sizes.embedding == sizes.total
    assert placement.device == placement.resident + BUFFERS * max(placement.unit_bytes)
    assert placement.device <= room
    assert all(unit >= size for unit, size in zip(placement.unit_bytes, crossing, strict=True))
    assert placement.pass_bytes <= placement.host
    assert all(len(set(matrices)) == len(matrices) for matrices in placement.streamed)


@pytest.mark.parametrize("number", range(len(every_size())))
def test_within_the_limit_and_nothing_is_lost(number: int) -> None:
    sizes = every_size()[number]
    smallest = smallest_room(sizes)
    assert place(sizes, smallest - 1) is None
    before = sizes.total
    for share in range(21):
        room = smallest + share * (sizes.total - smallest) // 20
        placement = place(sizes, room)
        assert placement is not None
        check(sizes, placement, room)
        assert placement.pass_bytes <= before, "more room streams no more"
        before = placement.pass_bytes
    assert placement is not None
    assert placement.is_resident


def test_an_embedding_leaves_first() -> None:
    sizes = sizes_of(SHAPES["8b"])
    placement = place(sizes, sizes.total - 1)
    assert placement is not None
    assert placement.embedding_on_host
    assert placement.pass_bytes == 0, "its rows are read one by one"
    tied = sizes_of(replace(SHAPES["8b"], tied=True))
    streamed = place(tied, tied.total - 1)
    assert streamed is not None
    assert not streamed.embedding_on_host, "every forward reads a tied one whole"
    assert 0 < streamed.pass_bytes < GB // 4


def test_few_bytes_are_streamed_beyond_what_must_be() -> None:
    """The buffers cost room too; a layer is 0.44 GB."""
    sizes = sizes_of(SHAPES["8b"])
    for room in (4 * GB, 6 * GB, 8 * GB, 12 * GB):
        placement = place(sizes, room)
        assert placement is not None
        least = sizes.total - sizes.embedding - room
        assert least <= placement.pass_bytes <= least + 2 * placement.buffer + GB // 20


def test_layers_kept_whole_are_spread_evenly() -> None:
    sizes = sizes_of(SHAPES["70b"])
    placement = place(sizes, 60 * GB)
    assert placement is not None
    fewest = min(map(len, placement.streamed))
    kept = [i for i, matrices in enumerate(placement.streamed) if len(matrices) == fewest]
    gaps = {after - before for before, after in itertools.pairwise(kept)}
    assert max(gaps) - min(gaps) <= 1


def test_narrow_weights_take_less() -> None:
    spec: ModelSpec = SHAPES["8b"]
    wide, narrow = sizes_of(spec), sizes_of(replace(spec, layer_bytes=0.5))
    assert sum(map(sum, narrow.layers)) * 4 == sum(map(sum, wide.layers))
    assert narrow.output == wide.output
    own = sizes_of(replace(spec, tied=True, dtype="int8"))
    assert (own.output, own.embedding) == (wide.output // 2, wide.output), "an output matrix in a form of its own is no embedding"
    assert aligned(1) == aligned(256) == 256


def test_the_split_is_said_in_one_line() -> None:
    placement = place(sizes_of(SHAPES["8b"]), 8 * GB)
    assert placement is not None
    text = placement.describe(50e9)
    assert "32 in part" in text
    assert f"{50e9 / placement.pass_bytes:.1f} tok/s" in text
    assert "the embedding is read from host memory" in text


def test_quantised_weights_take_what_they_are_stored_in() -> None:
    spec = SHAPES["8b"]
    layers, table = sum(layer.parameters(spec.hidden) for layer in spec.layers), spec.vocab * spec.hidden
    assert weights_on_gpu(spec) == 2 * spec.parameters
    assert weights_on_gpu(replace(spec, layer_bytes=0.5)) == layers // 2 + 4 * table
    assert weights_on_gpu(replace(spec, dtype="int8")) == layers + 3 * table
    assert sizes_of(replace(spec, layer_bytes=0.5)).total < 0.4 * sizes_of(spec).total
