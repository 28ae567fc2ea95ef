"""The device to train on, and the size of a step there: tokens of a row, rows of a step, and rows that fit its memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.errors import InvalidParameter
from outrider.model import ModelSpec
from outrider.ops.products import emulates_bf16
from outrider.platform import memory_bytes

__all__ = ["StepSize", "autocast", "evaluation_rows", "pick_device", "resolve_step", "training_bytes", "uses_compiler"]

# A CPU trains some hundred tokens a second, so a step of 2,048 tokens takes seconds and a run of a minute has several.
_CPU_TOKENS = 2048
_CPU_CONTEXT = 512  # and tokens of a forward: a step can end after each, where the time is up
_MEMORY_SHARE = 0.25  # of the device's memory, for the activations of one forward and backward
_FLOAT = 4  # bytes
_HELD_OUT_CPU = 8


@dataclass(frozen=True, slots=True)
class StepSize:
    """Rows of `context` tokens. 0 means: not set."""

    context: int
    rows: int
    micro_rows: int = 0


def resolve_step(device: torch.device, wanted: StepSize, full: StepSize, token_bytes: float) -> StepSize:
    """The sizes the user set; for the others `full` on a GPU and steps of seconds on a CPU. Micro rows always fit the memory.

    `token_bytes` is the memory that one token takes in a forward and backward. It depends on the machine alone, not
    on what else runs there, so that a run of a number of steps stays deterministic.
    """
    on_cpu = device.type == "cpu"
    context = wanted.context or (min(full.context, _CPU_CONTEXT) if on_cpu else full.context)
    rows = wanted.rows or (max(_CPU_TOKENS // context, 1) if on_cpu else full.rows)
    memory = _MEMORY_SHARE * _memory(device)
    fitting = int(memory / (token_bytes * context))
    if not fitting:
        need, has = token_bytes * context / 2**30, memory / 2**30
        raise InvalidParameter(
            "context",
            f"a row of {context} tokens needs about {need:.1f} GiB to train on, and {has:.1f} are available; lower --context",
        )
    at_once = max(_CPU_CONTEXT // context, 1) if on_cpu else rows
    return StepSize(context, rows, wanted.micro_rows or min(rows, at_once, fitting))


def training_bytes(trained: ModelSpec, vocab: int, depths: int = 1) -> float:
    """Bytes that one token takes while a model or head of this shape is trained: activations, and three copies of the logits."""
    layer = 10 * trained.hidden + 4 * trained.ffn
    return float(_FLOAT * depths * (trained.depth * layer + 3 * vocab))


def evaluation_rows(device: torch.device, rows: int) -> int:
    """Rows to evaluate on: fewer on a CPU, where they would take longer than the training."""
    return min(rows, _HELD_OUT_CPU) if device.type == "cpu" else rows


def uses_compiler(device: torch.device, wanted: bool | None) -> bool:
    """Whether to use torch.compile: on a CPU it takes minutes and gains little, so it needs --compile."""
    return device.type != "cpu" if wanted is None else wanted


def pick_device(name: str) -> torch.device:
    """The device of a name; "auto" is CUDA where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cpu", "cuda"):
        raise InvalidParameter("device", f"unknown {name!r}; known: auto, cpu, cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise InvalidParameter("device", "no CUDA device here; pass --device cpu")
    return torch.device(name)


def autocast(device: torch.device) -> torch.autocast:
    """bf16 products where the device has instructions for them; a CPU without trains in float32."""
    able = device.type == "cuda" or not emulates_bf16()
    return torch.autocast(device.type, torch.bfloat16, enabled=able)


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return memory_bytes()
