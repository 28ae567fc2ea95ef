"""`python -m benchmarks.larger_than_memory`: a model on the processor with half of its size as memory, by a cgroup.

A random model is written to a folder. It decodes once without a limit and once in a cgroup whose memory is half of the files'
size: the ids must be equal, and the speed is compared with what the disk gives. Making cgroups needs root.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import save_file

from benchmarks.command import close_report, run
from outrider.errors import OutriderError
from outrider.model import LlamaShape, ModelSpec, Rope
from outrider.model.load import write_config

_CGROUPS = Path("/sys/fs/cgroup")
_BAR = 0.7  # of the speed that the disk's sequential read allows
_PROMPT = [(7 * i) % 1000 for i in range(16)]


def spec_of(gigabytes: float) -> ModelSpec:
    """A model of about so many bytes in bf16, with layers of 100 MB."""
    layers = max(round(gigabytes * 1e9 / 101e6), 4)
    shape = LlamaShape("LlamaForCausalLM", 4096, 2048, layers, 16, 8, 128, 6144, 1024, Rope(1e4), dtype="bfloat16")
    return shape.spec()


def write_model(spec: ModelSpec, folder: Path) -> int:
    """Random weights, a file for each layer; returns their bytes."""
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator).mul_(columns**-0.5).bfloat16()

    h, a, m = spec.hidden, spec.attention, spec.layers[0].mlp
    shared = {
        "self_attn.q_proj": matrix(a.q_width, h), "self_attn.k_proj": matrix(a.kv_width, h),
        "self_attn.v_proj": matrix(a.kv_width, h), "self_attn.o_proj": matrix(h, a.q_width), "mlp.gate_proj": matrix(m.width, h),
        "mlp.up_proj": matrix(m.width, h), "mlp.down_proj": matrix(h, m.width),
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(spec.depth):
        tensors = {f"model.layers.{i}.{name}.weight": tensor.roll(i, 0).contiguous() for name, tensor in shared.items()}
        norms = {f"model.layers.{i}.{name}.weight": torch.ones(h) for name in ("input_layernorm", "post_attention_layernorm")}
        save_file(tensors | norms, folder / f"layer-{i:03d}.safetensors")
    tables = {name: matrix(spec.vocab, h) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    save_file(tables | {"model.norm.weight": torch.ones(h)}, folder / "tables.safetensors")
    write_config(spec, folder)
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def decode(folder: Path, tokens: int) -> dict[str, Any]:
    """Greedy ids of a prompt, and seconds a token after the first; in this process."""
    from outrider import LLM, SamplingParams

    with LLM(folder, speculation="none", device="cpu", max_num_seqs=1, max_model_len=256, calibration_s=0) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        out = llm.generate([_PROMPT], params)[0].outputs[0]
        seconds = (out.timings.total_s - out.timings.first_token_s) / (tokens - 1)
        return {"ids": list(out.token_ids), "seconds": seconds}


@contextmanager
def limited(limit: int) -> Iterator[list[Path]]:
    """A new cgroup with so much memory (v1 or v2): the files that take the processes which enter it."""
    is_first = (_CGROUPS / "memory").is_dir()
    place = (_CGROUPS / "memory" if is_first else _CGROUPS) / f"outrider-{os.getpid()}"
    try:
        place.mkdir()
        (place / ("memory.limit_in_bytes" if is_first else "memory.max")).write_text(str(limit))
    except OSError as error:
        raise OutriderError(f"no cgroup with a limit of memory can be made here: {error}") from None
    try:
        yield [place / "cgroup.procs"]
    finally:
        place.rmdir()


def child(folder: Path, tokens: int, enter: list[Path]) -> dict[str, Any]:
    """`decode` in a process of its own, inside a cgroup."""
    command = [sys.executable, "-m", "benchmarks.larger_than_memory", "--inside", str(folder), "--tokens", str(tokens)]

    def inside() -> None:
        for procs in enter:
            procs.write_text(str(os.getpid()))

    done = subprocess.run(command, preexec_fn=inside, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OutriderError(f"decoding failed ({done.returncode}): {done.stderr[-800:]}")
    words = [line for line in done.stderr.splitlines() if "read from the disk" in line]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found | {"said": " ".join(words)}


def disk_speed(folder: Path, most: int = 2 * 10**9) -> float:
    """Bytes a second of reading the model's files in order, from no cache."""
    read, seconds = 0, 0.0
    for path in sorted(folder.glob("layer-*.safetensors")):
        with path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            began = time.perf_counter()
            while part := file.read(8 * 2**20):
                read += len(part)
            seconds += time.perf_counter() - began
        if read > most:
            break
    return read / seconds


def main(
    gigabytes: Annotated[float, typer.Option(min=0.4, help="Size of the model's files.")] = 2.5,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens to decode.")] = 8,
    folder: Annotated[Path | None, typer.Option(help="Where the model is written. Default: a temporary folder.")] = None,
    inside: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Decoding with half of a model's size as memory, beside decoding without a limit and the speed of the disk."""
    if inside is not None:
        import logging

        logging.basicConfig(level=logging.WARNING)
        print(json.dumps(decode(inside, tokens)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        model = folder or Path(temporary) / "model"
        size = write_model(spec_of(gigabytes), model)
        free = child(model, tokens, [])
        with limited(size // 2) as enter:
            tight = child(model, tokens, enter)
        speed = disk_speed(model)
    allowed = size / speed  # seconds of a token if all of the file were read from the disk
    ratio = allowed / tight["seconds"]
    report = {
        "file_bytes": size, "limit_bytes": size // 2, "same_ids": tight["ids"] == free["ids"], "unlimited_s": free["seconds"],
        "limited_s": tight["seconds"], "disk_gb_s": speed / 1e9, "disk_s": allowed, "of_disk_speed": ratio, "said": tight["said"],
        "passed": tight["ids"] == free["ids"] and ratio >= _BAR,
    }  # fmt: skip
    close_report(report)


if __name__ == "__main__":
    run(main)
