"""Completion in shells: the scripts, and what they ask the program."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FISH = {"_TYPER_COMPLETE_ARGS": "outrider gen", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
MAIN = "import sys; sys.argv[0] = 'outrider'; from outrider.cli import main; main()"


def asked(**variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", MAIN], env=os.environ | variables, capture_output=True, text=True, check=False, timeout=60
    )
    assert "OUTRIDER" not in done.stderr, "its own variables are not reported as unknown settings"
    return done.stdout


def test_bash_completes_in_a_real_shell(tmp_path: Path) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash on this machine")
    program = tmp_path / "outrider"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{MAIN}" "$@"\n')
    program.chmod(0o755)
    ask = 'COMP_WORDS=(outrider serve --max-q) COMP_CWORD=2\n_outrider_completion outrider\necho "${COMPREPLY[@]}"\n'
    lines = f"{asked(_OUTRIDER_COMPLETE='source_bash')}\n{ask}"
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run([bash, "-c", lines], env=env, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["--max-queue"]


@pytest.mark.parametrize(
    ("shell", "variables", "marks"),
    [
        ("zsh", {}, ["#compdef outrider"]), ("fish", {}, ["complete --command outrider"]),
        ("zsh", {"_TYPER_COMPLETE_ARGS": "outrider gen"}, ['"generate":"Continue a prompt."']),
        ("fish", FISH, ["generate\tContinue a prompt."]),
    ],
)  # fmt: skip
def test_zsh_and_fish_get_their_script_and_answers(shell: str, variables: dict[str, str], marks: list[str]) -> None:
    said = asked(_OUTRIDER_COMPLETE=f"{'complete' if variables else 'source'}_{shell}", **variables)
    assert all(mark in said for mark in marks), said
