"""The docs are true: links lead somewhere, commands have the options they are shown with, the results page is current."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from outrider.cli import app

ROOT = Path(__file__).parent.parent
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]
COMMANDS = sorted(path.stem for path in (ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if not link.startswith("http"):
            assert (page.parent / link).exists(), link


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_have_the_options_they_are_shown_with(name: str) -> None:
    text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8").replace("\\\n", " ")
    for line in re.findall(r"^ {4,}(outrider .*)$", text, flags=re.MULTILINE):
        command, words = typer.main.get_command(app), shlex.split(line.split(" #")[0])[1:]
        while words and hasattr(command, "commands"):
            known = command.commands
            step = words[0] if words[0] in known else "run"
            assert step in known, line
            command, words = known[step], words[1:] if words[0] in known else words
        if hasattr(command, "commands"):
            command = command.commands["run"]
        options = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        given = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert given <= options, line


def test_the_results_page_is_what_the_files_say() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "recipes" / "results_page.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
