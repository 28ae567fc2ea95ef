"""The libraries of the native core that were built, and which of them this processor runs. ops/native.py loads them."""

from __future__ import annotations

import hashlib
from pathlib import Path

from outrider.platform import cpu_flags

__all__ = ["NEEDED", "built", "digest_of_sources", "runnable"]

# Builds, best first, and the processor flags each needs; setup.py has the compiler's side of it.
_AVX512 = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"})
NEEDED: dict[str, frozenset[str]] = {
    "amx": _AVX512 | {"avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"},
    "avx512bf16": _AVX512 | {"avx512_vnni", "avx512_bf16"},
    "avx512": _AVX512,
    "avx2": frozenset({"avx2", "fma"}),
    "neonbf16": frozenset({"asimddp", "i8mm", "bf16"}),
    "neon": frozenset({"asimddp"}),
}
_FOLDER = Path(__file__).parent / "ops" / "cpu"


def built() -> dict[str, Path]:
    """The libraries by the instructions they are built for, best first."""
    return {name: path for name in NEEDED for path in sorted(_FOLDER.glob(f"_core_{name}.*so"))}


def runnable() -> list[str]:
    """Those for instructions that this processor has, best first."""
    return [name for name in built() if NEEDED[name] <= cpu_flags()]


def digest_of_sources() -> str:
    """The digest of the C++ sources that are installed beside the libraries, as setup.py computes it."""
    sources = sorted([*_FOLDER.glob("*.h"), *_FOLDER.glob("*.cpp")])
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
