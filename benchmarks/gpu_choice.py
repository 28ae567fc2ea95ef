"""What the choice on a GPU costs, by what its rows ask for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from outrider.bench.bandwidth import device_seconds
from outrider.core import Request, Sequence
from outrider.sampling import SamplingParams

__all__ = ["measure_choice"]

_OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "top_p": {"top_p": 0.95},
    "top_k": {"top_k": 50},
    "top_k, top_p, min_p": {"top_k": 50, "top_p": 0.9, "min_p": 0.02},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.5},
}


def measure_choice(rows: tuple[int, ...] = (1, 16, 128), vocab: int = 128_256, text: int = 1000) -> Iterator[dict[str, Any]]:
    """Microseconds on the device for rows that all ask for the same, of sequences with a text that long."""
    from outrider.model.cuda_sampling_metadata import SamplingMetadata
    from outrider.ops.cuda.launch import AttentionMetadata

    sampling = SamplingMetadata(torch.device("cuda"))
    generator = torch.Generator("cuda").manual_seed(0)
    for count in rows:
        logits = torch.randn(count, vocab, device="cuda", generator=generator) * 3
        where = torch.arange(count, dtype=torch.int32, device="cuda")
        none = torch.zeros_like(where)
        for name, settings in _OPTIONS.items():
            params = SamplingParams(**{"temperature": 0.8, "max_tokens": 64} | settings)
            sampling.begin()
            param_rows: list[int] = []
            for i in range(count):
                prompt = tuple((i + 7919 * j) % vocab for j in range(text))
                table_rows = sampling.add(Sequence(Request(f"r{i}", prompt, params, i, frozenset(), 64)), (), ())
                param_rows += list(table_rows or [-1])
            sampling.send()
            places = torch.tensor(param_rows, dtype=torch.int32, device="cuda")
            temperatures = torch.full((count,), params.temperature, device="cuda")
            meta = AttentionMetadata(
                none, none, where, none, none, none, none[None], none[:, None], temperatures, where.long(), places
            )

            def choose(logits: torch.Tensor = logits, meta: AttentionMetadata = meta) -> None:
                sampling.table.choose(logits, meta)

            yield {"what": name, "rows": count, "us": round(device_seconds(choose) * 1e6, 1)}
