"""What this installation is: versions, builds of the native core, where the package comes from. Nothing heavy is imported."""

from __future__ import annotations

import json
import platform
from importlib.metadata import Distribution, PackageNotFoundError, distribution

from outrider._version import __version__
from outrider.cores import built, digest_of_sources, runnable

__all__ = ["build_details"]

_LIBRARIES = ("torch", "transformers", "tokenizers", "triton")


def build_details() -> str:
    """The version on a line of its own, then a line for each detail."""
    libraries = ", ".join(f"{name} {version}" for name in _LIBRARIES if (version := _version_of(name)))
    lines = {
        "core": _core(),
        "python": f"{platform.python_version()} ({platform.python_implementation()}) on {platform.system()} {platform.machine()}",
        "libraries": libraries,
        "installed": _origin(),
    }
    return "\n".join([__version__, *(f"{name:<10}{text}" for name, text in lines.items())])


def _core() -> str:
    if not built():
        return "none: torch computes, slower and with the same promises"
    here = ", ".join(runnable()) or "none of them"
    return f"built for {', '.join(built())} from sources {digest_of_sources()[:12]}; this processor runs {here}"


def _version_of(name: str) -> str | None:
    try:
        return distribution(name).version
    except PackageNotFoundError:
        return None


def _origin() -> str:
    """Whether the package is a wheel, an editable checkout, or a folder on the path."""
    try:
        package = distribution("outrider")
    except PackageNotFoundError:
        return "no: run from a folder"
    if _is_editable(package):
        return "editable, from a checkout"
    tags = [line.removeprefix("Tag: ") for line in (package.read_text("WHEEL") or "").splitlines() if line.startswith("Tag: ")]
    return f"wheel {', '.join(tags)}"


def _is_editable(package: Distribution) -> bool:
    address = json.loads(package.read_text("direct_url.json") or "{}")
    return bool(address.get("dir_info", {}).get("editable"))
