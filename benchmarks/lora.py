"""`python -m benchmarks.lora`: what different LoRA adapters in one batch add to a plain round.

Weights and adapters are random (synthetic): the time of a round does not depend on them.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import save_file

from benchmarks.command import close_report, run
from outrider.core import RoundReport
from outrider.engine.llm import LLM
from outrider.model import ModelSpec, compile_spec
from outrider.model.families import places_of
from outrider.options import Threads, set_threads
from outrider.sampling import SamplingParams

__all__ = ["measure_adapters", "write_adapter"]

SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632,
    "num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5, "dtype": "bfloat16",
}  # fmt: skip
_PARAMS = SamplingParams(temperature=0.0, ignore_eos=True)
_WARM_UP = 4
_LIMIT = 1.15  # of a round with adapters over one without


@dataclass(slots=True)
class _Rounds:
    """Listens for the seconds of decode rounds of a full batch."""

    batch: int
    seconds: list[float] = field(default_factory=list)

    def observe(self, report: RoundReport) -> None:
        if not report.prefill and len(report.batch.sequences) == self.batch:
            self.seconds.append(report.phases.wall)


def write_adapter(
    directory: Path,
    spec: ModelSpec,
    rank: int = 16,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    targets: Iterable[str] | None = None,
    **config: Any,
) -> Path:
    """A random adapter as PEFT stores it, on all linears of a spec, or on modules that end in one of `targets`."""
    generator, tensors = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
    for name, (columns, inner) in _linears(spec).items():
        if targets is None or name.endswith(tuple(targets)):
            down = torch.randn(rank, inner, generator=generator) * inner**-0.5
            tensors[f"base_model.model.{name}.lora_A.weight"] = down.to(dtype)
            tensors[f"base_model.model.{name}.lora_B.weight"] = (torch.randn(columns, rank, generator=generator) * 0.2).to(dtype)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none"} | config
    (directory / "adapter_config.json").write_text(json.dumps(settings))
    return directory


def _linears(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """The linears of the layers by stored name, with their columns and inner dimensions."""
    linears = {}
    for name, place in places_of(spec).items():
        _, _, last = place.parameter.partition(".")
        layer, _, product = last.partition(".")
        if product not in ("qkv", "out", "gate_up", "down"):
            continue
        a, m = spec.layers[int(layer)].attention, spec.layers[int(layer)].mlp
        shapes = {
            "qkv": (a.qkv_width, spec.hidden), "out": (spec.hidden, a.q_width), "gate_up": (m.up_width, spec.hidden),
            "down": (spec.hidden, m.width),
        }  # fmt: skip
        columns, inner = shapes[product]
        linears[name.removesuffix(".weight")] = (len(range(columns)[place.rows]), inner)
    return linears


def measure_adapters(llm: LLM, names: Sequence[str | None], tokens: int) -> dict[str, Any]:
    """Seconds of rounds without adapters and with them, which take turns: the median ratio of neighbours, and its spread."""
    prompts = [[1 + (7 * i + 11 * j) % 30 for j in range(24)] for i in range(len(names))]
    plain, adapted = _Rounds(len(names)), _Rounds(len(names))
    other = llm.beside("none")  # whose rounds alternate with the first one's
    stops = [llm.engine.listen(plain), other.engine.listen(adapted)]
    waiting = Thread(target=llm.generate, args=(prompts, _PARAMS), kwargs={"max_tokens": tokens})
    waiting.start()
    other.generate(prompts, _PARAMS, lora=names, max_tokens=tokens)
    waiting.join()
    for stop in stops:
        stop()
    pairs = list(zip(plain.seconds[_WARM_UP:], adapted.seconds[_WARM_UP:], strict=False))
    ratios = statistics.quantiles([slow / fast for fast, slow in pairs], n=10)
    fast, slow = (statistics.quantiles(seconds, n=10) for seconds in zip(*pairs, strict=True))
    return {
        "rounds": len(pairs),
        "plain_ms": {"median": fast[4] * 1e3, "tenth": fast[0] * 1e3},
        "adapted_ms": {"median": slow[4] * 1e3, "tenth": slow[0] * 1e3},
        "ratio": ratios[4],
        "ratio_of_tenths": slow[0] / fast[0],  # of undisturbed rounds
        "ratio_deciles": [round(ratio, 3) for ratio in ratios],
    }


def main(
    adapters: Annotated[int, typer.Option(min=1, help="Adapters, and sequences in the batch.")] = 8,
    rank: Annotated[int, typer.Option(min=1, help="Rank of each.")] = 16,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the 1.1B shape; fewer for a quick look.")] = 22,
    rounds: Annotated[int, typer.Option(min=4, help="Rounds of each kind.")] = 200,
    threads: Threads = 2,
    output: Annotated[Path | None, typer.Option(help="File for the report.")] = None,
) -> None:
    """Eight adapters of rank 16 on all linears of a 1.1B-shaped bf16 model, in a batch of eight."""
    set_threads(threads)
    with tempfile.TemporaryDirectory() as name:
        folder, shape = Path(name), SHAPE | {"num_hidden_layers": layers}
        (folder / "config.json").write_text(json.dumps(shape))
        spec = compile_spec(shape)
        paths = {f"adapter-{i}": write_adapter(folder / str(i), spec, rank, i) for i in range(adapters)}
        llm = LLM(folder, speculation="none", load_format="dummy", max_num_seqs=adapters, lora=paths, prefix_cache=False)
        with llm:
            report = measure_adapters(llm, list(paths), rounds + _WARM_UP + 1)
    settings = {"adapters": adapters, "rank": rank, "layers": layers, "threads": threads, "limit": _LIMIT}
    close_report(settings | report | {"passed": report["ratio"] <= _LIMIT}, output)


if __name__ == "__main__":
    run(main)
