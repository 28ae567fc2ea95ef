"""Weights stay in their mapped files until they are packed, one layer at a time, and what is served is the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef  # type: ignore[attr-defined]
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from outrider.cache import KVPool
from outrider.engine.llm import LLM
from outrider.heads import Borrowed
from outrider.model import Decoder, Feed, LoadOptions, Runner, load_decoder, open_decoder, save_decoder, write_config
from outrider.ops import Blocked, find_core
from outrider.ops.packing import _ARENA
from tests.support import random_decoder, write_family, write_tokenizer

needs_core = pytest.mark.skipif(find_core()[0] is None, reason="the native core is not built")
SIZES = {"hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 6, "vocab_size": 700, "dtype": "bfloat16"}


@pytest.fixture(scope="module", params=[False, True], ids=["own output", "tied"])
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("streaming")
    decoder = random_decoder(write_family(root / "config", "llama2", tie_word_embeddings=request.param, **SIZES))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outrider.model.load._SHARD_BYTES", 300_000)
        save_decoder(decoder, root / "model")
    write_config(decoder.spec, root / "model")
    return root / "model"


class Allocations(TorchDispatchMode):
    """The bytes of all tensors that operations made and that are still held, but for mapped files and packed weights."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, tuple[Any, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta and not mapped(tensor):
                storage = tensor.untyped_storage()
                if storage.nbytes() >= _ARENA:  # views of memory that holds packed weights
                    continue
                self._seen[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self.held())
        return made

    def held(self) -> int:
        self._seen = {key: (ref, size) for key, (ref, size) in self._seen.items() if not ref.expired()}
        return sum(size for _, size in self._seen.values())


def mapped(tensor: torch.Tensor) -> bool:
    address = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(".safetensors"):
            first, last = (int(part, 16) for part in line.split()[0].split("-"))
            if first <= address < last:
                return True
    return False


def runner_of(decoder: Decoder, ops: Any = None) -> Runner:
    c = decoder.spec
    return Runner(decoder, KVPool(c.depth, 4, c.kv_heads, 16, c.head_dim), ops)


@needs_core
@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float32"])
def test_no_more_than_two_tensors_are_held_beside_what_stays(stored: Path, dtype: str) -> None:
    """Packed matrices lie in mapped memory of the core's, which torch does not allocate."""
    with Allocations() as allocations:
        runner = runner_of(open_decoder(stored, LoadOptions(dtype)))
    largest = max(parameter.numel() for parameter in runner.decoder.parameters()) * 2
    stays = allocations.held()
    assert runner.stack is not None
    assert stays < allocations.peak <= stays + 2 * largest
    assert all(parameter.is_meta for layer in runner.decoder.layers for parameter in layer.parameters())
    assert runner.decoder.embedding.is_meta, "the core reads its rows from the packed matrix"
    with Allocations() as before:
        runner_of(load_decoder(stored, LoadOptions(dtype)))
    assert before.peak > allocations.peak + 2 * largest, "a decoder that was held as a whole is seen"


@needs_core
@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float32"])
def test_streamed_weights_give_the_same_logits(stored: Path, dtype: str) -> None:
    feed = Feed([0, 1, 2], 0, [i * 37 % 700 for i in range(40)])
    streamed, whole = (runner_of(read(stored, LoadOptions(dtype))) for read in (open_decoder, load_decoder))
    assert torch.equal(*(runner.logits(runner.forward([feed]).last, range(40)) for runner in (streamed, whole)))


def test_what_torch_serves_is_held_in_memory(stored: Path) -> None:
    streamed, whole = runner_of(open_decoder(stored), Blocked()).decoder, load_decoder(stored)
    assert streamed.source is None
    for (name, a), (_, b) in zip(streamed.named_parameters(), whole.named_parameters(), strict=True):
        assert torch.equal(a, b), name
        assert a.dtype == b.dtype


def test_heads_read_the_output_matrix_when_they_share_it(stored: Path) -> None:
    runner, whole = runner_of(open_decoder(stored)), load_decoder(stored)
    runner.decoder.close()
    assert torch.equal(Borrowed.of(runner.decoder, with_output=False).embedding, whole.embedding)
    assert torch.equal(Borrowed.of(runner.decoder).output, Borrowed.of(whole).output)


def test_files_may_go_once_a_model_is_loaded(stored: Path, tmp_path: Path) -> None:
    for file in stored.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    write_tokenizer(tmp_path)
    llm = LLM(tmp_path, speculation="none", max_model_len=64)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    assert len(llm.generate([[1, 2, 3]], max_tokens=4)[0].outputs[0].token_ids) == 4
