"""What was loaded, in one line, and what a model needs of the backends."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.model.backends import BACKENDS, CPU, CUDA, PLAIN
from outrider.model.runner import Runner
from outrider.model.spec import ModelSpec

__all__ = ["Wants", "amount", "loaded_line"]

_BYTES = {"float32": 4.0, "int8": 1.0, "int4": 0.6}  # of a weight; others have two


@dataclass(frozen=True, slots=True)
class Wants:
    """What serving a model takes, from its spec alone."""

    spec: ModelSpec

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights as config.json stores them."""
        return int(self.spec.parameters * _BYTES.get(self.spec.dtype, 2.0))

    @property
    def missing(self) -> dict[str, list[str]]:
        """Backend -> features of the model that it lacks."""
        return {backend.name: backend.missing(self.spec) for backend in BACKENDS}

    @property
    def verdict(self) -> str:
        """Where the model runs."""
        having = [name for name, lacking in self.missing.items() if not lacking and name != PLAIN.name]
        lacking = [f"{name} lacks {', '.join(names)}" for name, names in self.missing.items() if names]
        runs = f"runs on {' and '.join(having)}" if having else "runs on torch, slower"
        return "; ".join([runs, *lacking])

    @property
    def rotary(self) -> str:
        return ", ".join(dict.fromkeys(rope.kind for rope in self.spec.ropes)) or "none"

    @property
    def windows(self) -> str:
        """How many layers see how far."""
        windows = self.spec.windows
        counts = {window: windows.count(window) for window in dict.fromkeys(windows)}
        if set(counts) == {None}:
            return "none"
        return ", ".join(f"{'full' if window is None else window} in {count}" for window, count in counts.items()) + " layers"

    def as_dict(self) -> dict[str, object]:
        s = self.spec
        return {
            "family": s.family, "architecture": s.architecture, "parameters": s.parameters, "bytes": self.weight_bytes,
            "dtype": s.dtype, "layers": s.depth, "context": s.context, "rotary": self.rotary, "windows": self.windows,
            "state_bytes": s.state_bytes, "features": sorted(s.features()), "missing": self.missing, "verdict": self.verdict,
        }  # fmt: skip


def loaded_line(runner: Runner) -> str:
    """What was loaded and what serves it: family, parameters, bytes, dtype, and the backend of its features."""
    spec = runner.decoder.spec
    backend = CUDA if runner.device_name != "cpu" else PLAIN if runner.stack is None else CPU
    size = runner.weight_bytes or sum(parameter.nbytes for parameter in runner.decoder.parameters())
    features = ", ".join(sorted(spec.features())) or "those of a Llama layer"
    shared = f" in each of {runner.ranks} ranks (tensor parallel by gloo)" if runner.ranks > 1 else ""
    return (
        f"{spec.family} ({spec.architecture}), {amount(spec.parameters, 'B')} parameters, "
        f"{amount(size)}B of weights as {spec.dtype}{shared}; features by {backend.runs_on}: {features}"
    )


def amount(count: float, giga: str = "G") -> str:
    """A count with three digits and its power of a thousand; billions of parameters are called B."""
    for unit in ("", "k", "M", giga):
        if count < 999.5:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g}T"
