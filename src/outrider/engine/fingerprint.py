"""What equal tokens depend on: the weights, the build, the device, and the numbers of threads and of processes.

Two replicas with one fingerprint give a request the same tokens. Under `match` the drafter is no part of it.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from outrider._version import __version__
from outrider.ops import find_core, threads_used
from outrider.platform import cpu_name

if TYPE_CHECKING:
    from outrider.engine.build import Target

__all__ = ["Fingerprint", "digest_of_files", "fingerprint_of"]

_SAMPLES, _SAMPLE = 16, 64 * 2**10  # pieces read of each weight file, evenly spread, and their bytes
_SUFFIXES = (".safetensors", ".gguf")
_CONFIGS = ("config.json", "quantize_config.json", "tokenizer.json")


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """One replica's conditions of the same-tokens promise."""

    weights: str  # a digest of the model's files: of large ones, their size and evenly spread samples
    build: str
    device: str
    dtype: str
    threads: int  # of the processor; 0 on a GPU
    ranks: int = 1  # processes that share the model

    @property
    def digest(self) -> str:
        """The fingerprint in twelve letters."""
        return hashlib.sha256(repr(sorted(asdict(self).items())).encode()).hexdigest()[:12]

    def as_dict(self) -> dict[str, str | int]:
        return {"digest": self.digest, **asdict(self)}


def fingerprint_of(target: Target) -> Fingerprint:
    """The fingerprint of a loaded model."""
    build, options = f"outrider {__version__}, torch {torch.__version__}", target.load_options
    if target.device.is_gpu:
        device, threads = torch.cuda.get_device_name(), 0
    else:
        core = find_core()[0]
        build += ", no native core" if core is None else f", native core {core.name} {core.sources[:12]}"
        device, threads = cpu_name(), threads_used()
    kv = "" if target.sizes.kv_dtype == "auto" else f", KV in {target.sizes.kv_dtype}"
    weights, dtype = (
        digest_of_files(target.directory, options.load_format),
        f"{options.dtype}{', widened' if options.widen else ''}{kv}",
    )
    return Fingerprint(weights, build, device, dtype, threads, target.runner.ranks)


def digest_of_files(place: Path, settings: str) -> str:
    """A digest of settings and of a model's files: names, sizes, and of each file all or evenly spread pieces."""
    digest = hashlib.sha256(settings.encode())
    candidates = [place] if place.is_file() else sorted(path for path in place.iterdir() if path.is_file())
    for path in candidates:
        if path.suffix in _SUFFIXES or path.name in _CONFIGS:
            size = path.stat().st_size
            digest.update(f"{path.name} {size}\n".encode())
            with path.open("rb") as file:
                for start in _starts(size):
                    file.seek(start)
                    digest.update(file.read(_SAMPLE))
    return digest.hexdigest()[:16]


def _starts(size: int) -> list[int]:
    """Where samples begin: everywhere in a small file, else evenly spread, the first and the last bytes included."""
    if size <= _SAMPLES * _SAMPLE:
        return list(range(0, size, _SAMPLE))
    return [(size - _SAMPLE) * i // (_SAMPLES - 1) for i in range(_SAMPLES)]
