"""What the choice on a GPU costs, by what its rows ask for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from outrider.bench.bandwidth import device_seconds
from outrider.core import Batch, Request, Sequence, Tree
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
    from outrider.model.cuda_inputs import GraphInputs
    from outrider.model.cuda_sampling_metadata import SamplingMetadata
    from outrider.ops.cuda.launch import AttentionMetadata

    sampling = SamplingMetadata(torch.device("cuda"))
    generator = torch.Generator("cuda").manual_seed(0)
    for count in rows:
        logits = torch.randn(count, vocab, device="cuda", generator=generator) * 3
        for name, settings in _OPTIONS.items():
            params = SamplingParams(**{"temperature": 0.8, "max_tokens": 64} | settings)
            prompts = [tuple((i + 7919 * j) % vocab for j in range(text)) for i in range(count)]
            sequences = [Sequence(Request(f"r{i}", prompt, params, i, frozenset(), 64)) for i, prompt in enumerate(prompts)]
            inputs = GraphInputs(count, 1, 1, torch.device("cuda"), 1)
            sampling.fill(inputs, Batch(sequences, [1] * count), [Tree([], [], [])] * count, range(count))
            inputs.fields[2] = inputs.order
            inputs.send()

            def choose(logits: torch.Tensor = logits, meta: AttentionMetadata = inputs.meta) -> None:
                sampling.table.choose(logits, meta)

            yield {"what": name, "rows": count, "us": round(device_seconds(choose) * 1e6, 1)}
