"""What the ranks of a model must have in common: the weights, the build, the libraries and the number of threads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from outrider._version import __version__
from outrider.engine.fingerprint import digest_of_files
from outrider.errors import RanksDiffer
from outrider.model.load import LoadOptions
from outrider.ops import find_core, serving_ops
from outrider.platform import cpu_name

__all__ = ["check_identities", "identity_of"]


def identity_of(directory: Path, options: LoadOptions) -> dict[str, str]:
    """What this process would load and compute with, by name."""
    core, reason = find_core()
    native = core is not None and serving_ops().core is not None
    return {
        "weights": digest_of_files(directory, repr(options)),
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
