"""The native core for ARM (aarch64): cross-built, and its tests in a Python for ARM under qemu-user.

Needs g++-aarch64-linux-gnu, qemu-user-static and dpkg-deb. Debian's packages of Python are unpacked into the folder and not
installed. Emulation shows that results are right; it says nothing about speed, and nothing about the order in which threads of
an ARM processor see each other's writes.
"""

from __future__ import annotations

import lzma
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

from recipes.release.wheel import run

__all__ = ["build_for_arm", "run_on_arm"]

_DEBIAN = "http://deb.debian.org/debian"
_PYTHON = (
    "libbz2-1.0", "libc6", "libcrypt1", "libdb5.3", "libexpat1", "libffi8", "libgcc-s1", "liblzma5", "libncursesw6", "libnsl2",
    "libpython3.11-minimal", "libpython3.11-stdlib", "libreadline8", "libsqlite3-0", "libssl3", "libstdc++6", "libtinfo6",
    "libtirpc3", "libuuid1", "python3.11-minimal", "zlib1g",
)  # fmt: skip
_TORCH = "torch==2.9.1"  # wheels for ARM on PyPI: the later ones are for GPUs and four times as large
_NEEDED = (
    "numpy", "transformers", "tokenizers", "safetensors", "huggingface_hub", "typer", "rich", "tqdm", "prompt_toolkit", "pytest",
    "pytest-xdist", "hypothesis", "gguf", "llguidance", "sympy", "networkx", "jinja2", "filelock", "typing_extensions", "fsspec",
)  # fmt: skip
_WHEELS = ("manylinux_2_28_aarch64", "manylinux_2_27_aarch64", "manylinux2014_aarch64", "manylinux_2_17_aarch64")
_PROCESSORS = ("neoverse-n1", "max")  # with dot products alone, and with i8mm and bf16
_TESTS = (
    "tests/ops/test_native.py", "tests/ops/test_native_calls.py", "tests/ops/test_int8_kv.py", "tests/ops/test_groups.py",
    "tests/ops/test_columns.py", "tests/ops/test_blocks.py", "tests/ops/test_adapters.py", "tests/ops/test_packing.py",
    "tests/ops/test_scan.py", "tests/sampling/test_choice.py", "tests/draft/test_grown_trees.py",
)  # fmt: skip
_WHO = "from outrider.ops import find_core; core, reason = find_core(); assert core, reason; print(reason)"


def build_for_arm(out: Path) -> Path:
    """Build the package with its libraries into a folder. Returns the folder to put on Python's path."""
    compiler = "aarch64-linux-gnu-gcc"
    cross = {"CC": compiler, "CXX": "aarch64-linux-gnu-g++", "LDSHARED": f"{compiler} -shared"}
    environment = os.environ | cross | {"_PYTHON_HOST_PLATFORM": "linux-aarch64"}
    library = out / "lib"
    run([sys.executable, "setup.py", "-q", "build", "--build-lib", library, "--build-temp", out / "temp"], environment)
    built = sorted(path.name for path in library.glob("outrider/ops/cpu/*.so"))
    assert built == ["_core_neon.so", "_core_neonbf16.so"], f"not built: {built}"
    return library


def run_on_arm(out: Path, tests: list[str]) -> None:
    """Build, and run the tests on every build; by default those of the native core."""
    library, root, packages = build_for_arm(out), _python(out / "root"), _packages(out / "packages")
    paths = os.pathsep.join(map(str, (library, Path.cwd(), packages)))
    settings = {"LD_LIBRARY_PATH": "/usr/lib/aarch64-linux-gnu", "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}

    def python(processor: str, *arguments: str) -> list[str | Path]:
        passed = [part for name, value in settings.items() for part in ("-E", f"{name}={value}")]
        return ["qemu-aarch64-static", "-cpu", processor, "-L", root, *passed, root / "usr/bin/python3.11", *arguments]

    for processor in _PROCESSORS:
        print(f"{processor}: {run(python(processor, '-c', _WHO)).strip()}", flush=True)
    arguments = ("-m", "pytest", "-n0", "-p", "no:cacheprovider", "--quick-grids", *(tests or _TESTS))
    sys.exit(subprocess.run(list(map(str, python("max", *arguments))), check=False).returncode)


def _python(root: Path) -> Path:
    """Debian's Python for ARM, unpacked."""
    if (root / "usr/bin/python3.11").exists():
        return root
    index = lzma.decompress(_read(f"{_DEBIAN}/dists/bookworm/main/binary-arm64/Packages.xz")).decode()
    for name in _PYTHON:
        place = re.search(rf"^Package: {re.escape(name)}\n(?:.+\n)*?Filename: (.+)$", index, re.MULTILINE)
        assert place is not None, f"Debian has no {name}"
        package, _ = urllib.request.urlretrieve(f"{_DEBIAN}/{place[1]}")
        run(["dpkg-deb", "-x", package, root])
    return root


def _read(url: str) -> bytes:
    with urllib.request.urlopen(url) as answer:
        return bytes(answer.read())


def _packages(folder: Path) -> Path:
    """Packages for ARM that the tests import."""
    if not (folder / "torch").exists():
        platforms = [part for name in _WHEELS for part in ("--platform", name)]
        pip: list[str | Path] = [sys.executable, "-m", "pip", "install", "--quiet", "--target", folder, *platforms]
        pip += ["--python-version", "3.11", "--implementation", "cp", "--only-binary", ":all:"]
        run([*pip, *_NEEDED])
        run([*pip, "--no-deps", _TORCH])
    return folder
