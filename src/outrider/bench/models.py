"""`outrider models`: the families, which features each backend has, and what the model in a directory needs."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from rich.table import Table

from outrider.bench.feature_specs import FEATURE_SPECS
from outrider.errors import ModelError
from outrider.model import locate, read_spec
from outrider.model.backends import BACKENDS, CPU, CUDA
from outrider.model.families import FAMILIES
from outrider.model.listing import Wants, amount
from outrider.model.source import open_source
from outrider.terminal import PlainConsole

__all__ = ["as_dict", "families_page", "features_table", "show_directory", "show_families"]


def as_dict() -> dict[str, Any]:
    """All families, and by feature whether each backend has it."""
    families = [{"name": f.name, "models": f.models, "architectures": list(f.architectures)} for f in FAMILIES]
    return {"families": families, "features": {name: _support(name) for name in _features()}}


def show_families(console: PlainConsole) -> None:
    families = Table("family", "models", "architectures", box=None, padding=(0, 2, 0, 0), header_style="bold")
    for family in FAMILIES:
        families.add_row(family.name, family.models, ", ".join(family.architectures))
    names = (backend.name for backend in BACKENDS)
    features = Table("beyond a Llama layer", *names, box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in _features():
        features.add_row(name, *("yes" if has else "not yet" for has in _support(name).values()))
    console.print(families)
    console.print()
    console.print(features)


def show_directory(model: str, console: PlainConsole) -> dict[str, Any]:
    """What a model needs; also printed where there is a console."""
    path = locate(model)
    wants, stored = Wants(read_spec(path)), _stored(path)
    s, table = wants.spec, Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row("family", f"{s.family} ({s.architecture})")
    table.add_row("size", f"{amount(s.parameters, 'B')} parameters, {amount(wants.weight_bytes)}B as {s.dtype}, {s.depth} layers")
    if stored:
        table.add_row("stored", f"{', '.join(stored)}, decoded when it is loaded")
    table.add_row("context", f"{s.context:,} positions; rotary: {wants.rotary}; windows: {wants.windows}")
    if s.recurrent:
        table.add_row("state", f"{amount(s.state_bytes)}B of each sequence, in {len(s.recurrent)} recurrent layers")
    table.add_row("features", ", ".join(sorted(s.features())) or "those of a Llama layer")
    table.add_row("verdict", wants.verdict)
    console.print(table)
    return wants.as_dict() | {"quantised": stored}


def _stored(path: Path) -> list[str]:
    """The quantised formats of a model's weights, where there are weights."""
    with contextlib.suppress(ModelError):
        source = open_source(path, read_spec(path))
        source.close()
        return list(source.decoded)
    return []


def features_table() -> str:
    """In Markdown, features by where they run; README.md has it."""
    rows: dict[tuple[bool, bool], list[str]] = {}
    for name in _features():
        support = _support(name)
        rows.setdefault((support[CPU.name], support[CUDA.name]), []).append(name)
    lines = ["| | CPU, native core (x86-64, ARM) | CPU, torch | NVIDIA GPU (8.0 and newer) |", "|---|---|---|---|"]
    lacking = sorted((support for support in rows if not all(support)), reverse=True)
    lines.append(f"| layers of all {len(FAMILIES)} families{', but for what follows' if lacking else ''} | yes | yes | yes |")
    for cpu, cuda in lacking:
        names = ", ".join(rows[cpu, cuda])
        lines.append(f"| {names} | {'yes' if cpu else 'by torch'} | yes | {'yes' if cuda else 'not yet'} |")
    return "\n".join(lines)


def families_page() -> str:
    """In Markdown, the tables of docs/models.md."""
    rows = [f"| `{f.name}` | {f.models} | {', '.join(f'`{name}`' for name in f.architectures)} |" for f in FAMILIES]
    beyond = f"What they have beyond Llama's layers: {', '.join(_features())}."
    return "\n".join(["| family | models | architectures |", "|---|---|---|", *rows, "", beyond, "", features_table()])


def _features() -> list[str]:
    return sorted(frozenset[str]().union(*(spec.features() for spec in FEATURE_SPECS.values())))


def _support(name: str) -> dict[str, bool]:
    return {backend.name: name not in backend.lacks for backend in BACKENDS}
