"""How a GPU's memory is shared out when the weights do not fit: refused with limits that work, before anything is loaded."""

from __future__ import annotations

import re

import pytest

from outrider.config import EngineConfig
from outrider.engine.placing import Machine, plan_streaming
from outrider.errors import InvalidParameter
from outrider.model import LlamaShape, Rope

GIB = 2**30
LLAMA = {"architecture": "LlamaForCausalLM", "vocab": 128256, "context": 4096, "rope": Rope(500000.0), "dtype": "bfloat16"}
TARGET = LlamaShape(hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, ffn=14336, **LLAMA).spec()  # type: ignore[arg-type]
DRAFT = LlamaShape(hidden=2048, layers=16, heads=32, kv_heads=8, head_dim=64, ffn=8192, **LLAMA).spec()  # type: ignore[arg-type]
HOST = 64 * GIB
SIZES = EngineConfig(max_model_len=2048, max_num_seqs=4)


def asked_for(error: pytest.ExceptionInfo[InvalidParameter], name: str) -> int:
    """The size that a message names as enough, in bytes."""
    found = re.search(rf"{name} ([\d.]+) GiB", str(error.value))
    assert found is not None
    return int(float(found[1]) * GIB)


@pytest.mark.parametrize("others", [(), (DRAFT,)])
def test_a_limit_that_is_too_small_names_one_that_works(others: tuple[object, ...]) -> None:
    with pytest.raises(InvalidParameter, match="one sequence of 2048 tokens") as error:
        plan_streaming(SIZES, TARGET, others, Machine(2 * GIB, HOST))  # type: ignore[arg-type]
    least = asked_for(error, "the smallest limit that works is")
    plan = plan_streaming(SIZES, TARGET, others, Machine(least, HOST))  # type: ignore[arg-type]
    assert plan.placement is not None
    assert plan.pages * 64 >= 2048
    with pytest.raises(InvalidParameter):
        plan_streaming(SIZES, TARGET, others, Machine(int(0.98 * least), HOST))  # type: ignore[arg-type]


def test_a_shorter_context_is_offered_where_it_would_do() -> None:
    sizes = EngineConfig(max_model_len=131072)
    with pytest.raises(InvalidParameter, match="lower max_model_len to") as error:
        plan_streaming(sizes, TARGET, (), Machine(8 * GIB, HOST))
    found = re.search(r"max_model_len to (\d+)", str(error.value))
    assert found is not None
    plan_streaming(EngineConfig(max_model_len=int(found[1])), TARGET, (), Machine(8 * GIB, HOST))


def test_too_little_host_memory_names_a_limit_with_which_it_is_enough() -> None:
    with pytest.raises(InvalidParameter, match="pinned host memory") as error:
        plan_streaming(SIZES, TARGET, (), Machine(6 * GIB, 8 * GIB))
    plan = plan_streaming(SIZES, TARGET, (), Machine(asked_for(error, "raise memory to"), 8 * GIB))
    assert plan.placement is not None
    assert plan.placement.host <= 6 * GIB


def test_kv_gets_what_was_asked_for() -> None:
    """A token of the 8B shape takes 128 KiB."""
    sizes = EngineConfig(max_model_len=2048, max_num_seqs=4, kv_bytes=GIB)
    plan = plan_streaming(sizes, TARGET, (), Machine(8 * GIB, HOST))
    assert plan.pages * 64 * 128 * 1024 == GIB
    with pytest.raises(InvalidParameter, match="pass at least 268435456"):
        plan_streaming(EngineConfig(max_model_len=2048, kv_bytes=10**6), TARGET, (), Machine(8 * GIB, HOST))
    more = plan_streaming(EngineConfig(max_model_len=2048, max_num_seqs=4), TARGET, (), Machine(8 * GIB, HOST))
    assert more.placement is not None
    assert plan.placement is not None
    assert plan.pages <= more.pages * 4, "all sequences at full length"


def test_a_drafter_stays_on_the_device() -> None:
    sizes = EngineConfig(max_model_len=2048, max_num_seqs=1)
    alone = plan_streaming(sizes, TARGET, (), Machine(8 * GIB, HOST)).placement
    beside = plan_streaming(sizes, TARGET, (DRAFT,), Machine(8 * GIB, HOST)).placement
    assert alone is not None
    assert beside is not None
    embedding = DRAFT.vocab * DRAFT.hidden  # lies on the host
    assert alone.device - beside.device > 2 * (DRAFT.parameters - embedding)
