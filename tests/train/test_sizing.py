"""Steps fit the device: a CPU gets steps of seconds, memory bounds the rows of a forward, and the user's sizes count."""

from __future__ import annotations

import pytest
import torch

from outrider.errors import InvalidParameter
from outrider.train import sizing
from outrider.train.shapes import DecoderShape
from outrider.train.sizing import StepSize, evaluation_rows, resolve_step, training_bytes, uses_compiler

CPU = torch.device("cpu")
FULL = StepSize(2048, 64)
NOTHING = StepSize(0, 0)


@pytest.fixture(autouse=True)
def _memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "_memory", lambda device: 4 * 2**30)


def test_a_cpu_trains_on_short_rows_and_few_of_them() -> None:
    assert resolve_step(CPU, NOTHING, FULL, token_bytes=1000.0) == StepSize(512, 4, 1)
    assert resolve_step(CPU, NOTHING, StepSize(128, 64), token_bytes=1000.0) == StepSize(128, 16, 4)


def test_a_gpu_trains_on_full_rows() -> None:
    assert resolve_step(torch.device("cuda"), NOTHING, FULL, token_bytes=1000.0) == StepSize(2048, 64, 64)


def test_memory_bounds_the_rows_of_a_forward() -> None:
    size = resolve_step(torch.device("cuda"), NOTHING, FULL, token_bytes=2**30 / 2048 / 3)
    assert size == StepSize(2048, 64, 3)
    with pytest.raises(InvalidParameter, match="lower --context"):
        resolve_step(torch.device("cuda"), NOTHING, FULL, token_bytes=2**30 / 2047)


def test_what_the_user_sets_stays() -> None:
    assert resolve_step(CPU, StepSize(64, 8, 2), FULL, token_bytes=1000.0) == StepSize(64, 8, 2)


def test_larger_models_take_more_memory() -> None:
    small, large = (training_bytes(DecoderShape(layers=layers).config(0), 8192) for layers in (2, 12))
    assert small < large
    assert training_bytes(DecoderShape().config(0), 8192, depths=6) == 6 * training_bytes(DecoderShape().config(0), 8192)


def test_a_cpu_compiles_on_request_alone_and_evaluates_on_few_rows() -> None:
    assert [uses_compiler(CPU, wanted) for wanted in (None, True, False)] == [False, True, False]
    assert uses_compiler(torch.device("cuda"), None)
    assert evaluation_rows(CPU, 96) == 8
    assert evaluation_rows(torch.device("cuda"), 96) == 96
