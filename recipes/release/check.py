"""The wheel, installed as a user installs it: in an empty virtual environment, without a compiler, away from the checkout."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import tempfile
import venv
import zipfile
from pathlib import Path

from recipes.release.wheel import run

__all__ = ["check_wheel"]

_BUILDS = ("neonbf16", "neon") if platform.machine() == "aarch64" else ("amx", "avx512bf16", "avx512", "avx2")
_MAX_MIB = 60  # of the wheel; the bundled model takes 46
_MAIN = """
from outrider import LLM, SamplingParams
llm, params = LLM(), SamplingParams(temperature=0.8, seed=1, max_tokens=40)
drafted, plain = (llm.generate("def f(x):", params, speculation=on)[0].outputs[0] for on in (True, False))
assert drafted.token_ids == plain.token_ids
print(type(llm.engine.runner.ops).__name__)
"""


def check_wheel(wheel: Path) -> None:
    """Print what holds, and end with an error where something does not."""
    wheel = wheel.resolve()
    _check_files(wheel)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        venv.create(home / "venv", with_pip=True)
        programs = home / "venv" / "bin"
        environment = _without_compiler(programs, home)
        constraints = Path("constraints.txt").resolve()
        pip: list[str | Path] = [programs / "pip", "install", "--quiet", "--only-binary", ":all:", "-c", constraints]
        run([*pip, f"{wheel}[serve]"], environment, home)
        version = run([programs / "outrider", "--version"], environment, home)
        assert f"built for {', '.join(_BUILDS)}" in version, version
        assert "wheel py3-none-" in version, version
        checks = json.loads(run([programs / "outrider", "doctor", "--json"], environment, home))
        assert all(check["good"] for check in checks), checks
        core = next(check["value"] for check in checks if "core" in check["name"])
        print(f"{wheel.name}: doctor passes {len(checks)} checks; core: {core}")
        print(
            "tokens with and without speculation are equal on", run([programs / "python", "-c", _MAIN], environment, home).strip()
        )


def _check_files(wheel: Path) -> None:
    """Every tracked file of the package is in the wheel, and a library for each instruction set."""
    listed = subprocess.run(["git", "ls-files", "src/outrider"], check=True, capture_output=True, text=True).stdout
    packed = set(zipfile.ZipFile(wheel).namelist())
    wanted = {path.removeprefix("src/") for path in listed.split()} | {f"outrider/ops/cpu/_core_{name}.so" for name in _BUILDS}
    assert wanted <= packed, f"missing: {sorted(wanted - packed)}"
    size = wheel.stat().st_size / 2**20
    assert size < _MAX_MIB, f"{size:.1f} MiB"
    print(f"{wheel.name}: {size:.1f} MiB, {len(packed)} files")


def _without_compiler(programs: Path, home: Path) -> dict[str, str]:
    """An environment in which no compiler is found, and nothing of the user's is read but where pip finds packages."""
    pip = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    nowhere = {"CC": "/nowhere/cc", "CXX": "/nowhere/c++"}
    return pip | nowhere | {"PATH": str(programs), "HOME": str(home), "OUTRIDER_CACHE": str(home / "cache")}
