"""What the ranks of a model must have in common: the weights, the build, the libraries and the number of threads."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from outrider._version import __version__
from outrider.errors import RanksDiffer
from outrider.gguf import find_gguf
from outrider.model.load import LoadOptions
from outrider.ops import find_core, serving_ops
from outrider.platform import cpu_name

__all__ = ["check_identities", "identity_of"]

_SAMPLES, _SAMPLE = 16, 2**16  # pieces of a large file that are read, evenly spread, and the bytes of each


def identity_of(directory: Path, options: LoadOptions) -> dict[str, str]:
    """What this process would load and compute with, by name."""
    core, reason = find_core()
    native = core is not None and serving_ops().core is not None
    return {
        "weights": _digest(directory, options),
        "outrider": __version__,
        "native core": f"{core.name} {core.sources}" if native and core is not None else f"none: {reason}",
        "torch": str(torch.__version__),
        "processor": cpu_name(),
        "threads": str(torch.get_num_threads()),
    }


def check_identities(identities: Sequence[Mapping[str, str]]) -> None:
    """Raise where a rank differs from the first."""
    first = identities[0]
    for rank, other in enumerate(identities[1:], 1):
        different = [f"{name} ({first[name]} and {other.get(name)})" for name in first if first[name] != other.get(name)]
        if different:
            raise RanksDiffer(
                f"rank {rank} differs from rank 0 in {', '.join(different)}; start them from one installation of outrider, with "
                "one model that nothing writes to"
            )


def _digest(directory: Path, options: LoadOptions) -> str:
    """Of the files of a model: names, sizes, and of each file all or evenly spread pieces."""
    digest = hashlib.sha256(repr(options).encode())
    gguf = find_gguf(directory)
    files = [gguf] if gguf is not None else [*directory.glob("*.safetensors"), *directory.glob("*.json")]
    for path in sorted(files):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for start in _starts(size):
                file.seek(start)
                digest.update(file.read(_SAMPLE))
    return digest.hexdigest()[:16]


def _starts(size: int) -> list[int]:
    """Where pieces begin: everywhere in a small file, else evenly spread from the first bytes to the last."""
    if size <= _SAMPLES * _SAMPLE:
        return list(range(0, size, _SAMPLE))
    return [(size - _SAMPLE) * i // (_SAMPLES - 1) for i in range(_SAMPLES)]
