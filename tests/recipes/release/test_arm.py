"""The recipe that runs the native core's tests on ARM under emulation."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from recipes.release import arm

ROOT = Path(__file__).parents[3]


def test_the_tests_it_runs_exist() -> None:
    assert not [path for path in arm._TESTS if not (ROOT / path).is_file()]


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="needs dpkg-deb")
def test_packages_of_python_are_found_in_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = "Package: other\nFilename: pool/o.deb\n\n" + "".join(
        f"Package: {name}\nVersion: 1\nDescription: of {name}\nFilename: pool/{name}.deb\n\n" for name in arm._PYTHON
    )
    fetched, unpacked = [], []
    monkeypatch.setattr(arm, "_read", lambda url: arm.lzma.compress(index.encode()))
    monkeypatch.setattr(arm.urllib.request, "urlretrieve", lambda url: (fetched.append(url) or url, None))
    monkeypatch.setattr(arm, "run", lambda command: unpacked.append(command[2]))
    assert arm._python(tmp_path) == tmp_path
    assert unpacked == fetched == [f"{arm._DEBIAN}/pool/{name}.deb" for name in arm._PYTHON]
