"""Package manners."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import outrider

SOURCE = Path(outrider.__file__).parent


NEED_TRITON = (
    "outrider.ops.cuda",
    "outrider.model.cuda_",
    "outrider.heads.cuda_",
)


def modules() -> list[str]:
    """All modules that can be imported here. GPU modules need Triton, and one module needs Ray."""
    left_out = () if importlib.util.find_spec("triton") else NEED_TRITON
    if not importlib.util.find_spec("ray"):
        left_out = (*left_out, "outrider.serve.fleet.ray")
    names = [m.name for m in pkgutil.walk_packages([str(SOURCE)], "outrider.", onerror=lambda name: None)]
    return [name for name in names if not name.endswith("__main__") and not name.startswith(left_out)]


def test_every_all_names_what_exists() -> None:
    for name in modules():
        module = importlib.import_module(name)
        for public in getattr(module, "__all__", []):
            assert hasattr(module, public), f"{name}.{public}"


def test_the_package_lists_its_public_names() -> None:
    code = "import outrider; assert set(outrider.__all__) <= set(dir(outrider))"  # anew: here the lazy names may be loaded
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_consoles_print_text_as_it_stands() -> None:
    """Brackets in names, paths and errors are no markup: consoles come from one place."""
    for path in SOURCE.rglob("*.py"):
        if path.name != "terminal.py" or path.parent != SOURCE:
            assert not re.search(r"(?<!Plain)\bConsole\(", path.read_text()), f"{path}: take PlainConsole"


def test_every_module_says_what_it_is() -> None:
    for name in modules():
        assert importlib.import_module(name).__doc__ or name.endswith("_version"), name


def test_nothing_that_can_run_a_stranger_s_code() -> None:
    """No pickle, eval or torch.load anywhere in the package, but for the one that makes tensors alone."""
    modules = r"\b(pickle|cloudpickle|dill|torch\.load|yaml\.load|trust_remote_code=True)\b"
    calls = r"(?<![\w.])(?<!def )(eval|exec)\("
    forbidden = re.compile(f"{modules}|{calls}")
    for path in SOURCE.rglob("*.py"):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            restricted = path.name == "pickles.py" and line.count("torch.load") == line.count("weights_only=True") == 1
            assert not forbidden.search(line) or "is a pickle" in line or restricted, f"{path}:{number}: {line}"


def test_help_does_not_load_torch() -> None:
    code = "import sys, outrider.cli; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
