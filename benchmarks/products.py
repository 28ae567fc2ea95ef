"""`python -m benchmarks.products`: products of the native core by how their weights are stored, on one thread."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from benchmarks.command import run
from outrider.bench.environment import environment
from outrider.ops import Core, Grouped, PackedLinear, find_core

__all__ = ["bench_products"]

_MATRICES = 4  # of each kind, so that no level of cache near the core holds them all


def _symmetric(weight: Tensor, size: int, bits: int) -> Grouped:
    return Grouped.of(weight, size, bits)._replace(least=None, offset=2 ** (bits - 1))


KINDS: dict[str, Callable[[Core, Tensor], PackedLinear]] = {
    "bfloat16": lambda core, weight: PackedLinear(core, "bfloat16", weight),
    "int8": lambda core, weight: PackedLinear(core, "int8", weight),
    "Q8_0": lambda core, weight: PackedLinear(core, "int8", _symmetric(weight, 32, 8)),
    "Q6_K": lambda core, weight: PackedLinear(core, "int8", _symmetric(weight, 16, 8)),
    "Q4_K": lambda core, weight: PackedLinear(core, "int8", Grouped.of(weight, 32)),
    "Q4_0": lambda core, weight: PackedLinear(core, "int8", _symmetric(weight, 32, 4)),
    "groups of 128": lambda core, weight: PackedLinear(core, "int8", _symmetric(weight, 128, 4)),
}


def bench_products(width: int, rows: list[int], rounds: int) -> list[dict[str, Any]]:
    """The least seconds of this thread for products of each kind, in turns; and their ratio to one row in bfloat16."""
    core, reason = find_core()
    if core is None:
        raise typer.BadParameter(f"the native core is not in use: {reason}")
    core.threads = 1
    weight = torch.randn(width, width, generator=torch.Generator().manual_seed(0)) / width**0.5
    products = {name: [make(core, weight) for _ in range(_MATRICES)] for name, make in KINDS.items()}
    table: list[dict[str, Any]] = []
    for count in rows:
        x, least = torch.randn(count, width), dict.fromkeys(products, float("inf"))
        for _ in range(rounds):
            for name, matrices in products.items():
                began = time.process_time()  # a busy machine must not count
                for matrix in matrices:
                    matrix(x)
                least[name] = min(least[name], time.process_time() - began)
        table += [{"kind": name, "rows": count, "us": seconds / _MATRICES * 1e6} for name, seconds in least.items()]
    unit = table[0]["us"]
    sizes = {name: sum(matrix.bytes for matrix in matrices) / _MATRICES / weight.numel() for name, matrices in products.items()}
    for row in table:
        row |= {"of_bfloat16": round(row["us"] / unit, 3), "bytes_per_weight": round(sizes[row["kind"]], 3)}
    return table


def main(
    width: Annotated[int, typer.Option(min=64, help="Rows and columns of the matrix.")] = 2048,
    rows: Annotated[str, typer.Option(help="Comma-separated row counts.")] = "1,2,4,8,16",
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each kind; the least time counts.")] = 25,
) -> None:
    """How long products take by the format of their weights."""
    print(
        json.dumps(environment() | {"rows": bench_products(width, [int(count) for count in rows.split(",")], rounds)}, indent=1)
    )


if __name__ == "__main__":
    run(main)
