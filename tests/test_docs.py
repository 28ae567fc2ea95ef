"""The docs are true: links lead somewhere, commands have the options they are shown with, the results page is current."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from outrider import SamplingParams
from outrider.cli import app

ROOT = Path(__file__).parent.parent
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if not link.startswith("http"):
            assert (page.parent / link).exists(), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_have_the_options_they_are_shown_with(page: Path) -> None:
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
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


def test_the_readme_s_drafter_runs_and_is_accepted_sometimes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.draft.registry._REGISTERED", {})  # it is registered for this test alone
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL) if "register_drafter" in block)
    names: dict[str, Any] = {}
    exec(code, names)
    output = (
        names["llm"].generate("for i in range(10):\n    print(i)\n", SamplingParams(temperature=0, max_tokens=60))[0].outputs[0]
    )
    assert output.speculation["accepted"] > 0
    assert output.speculation["fallback_reason"] is None


def test_pages_agree_on_where_never_slower_holds() -> None:
    """Each says where the promise does not hold, with the same numbers."""
    readme, gpu, choosing = (words(ROOT / name) for name in ("README.md", "docs/gpu.md", "docs/choosing.md"))
    rows = json.loads((ROOT / "results" / "never_slower.json").read_text(encoding="utf-8"))["rows"]
    ratios = [row["ratio"] for row in rows]
    assert f"the {len(rows)} medians of `outrider bench never-slower`" in readme
    assert f"between {min(ratios):.2f} and {max(ratios):.2f} of plain decoding" in readme
    fresh = re.search(r"from fresh starts `auto` gave ([\d.]+) to ([\d.]+) ", gpu)
    assert fresh is not None
    for page in (readme, choosing):
        assert f"{fresh[1]} to {fresh[2]} of plain decoding from fresh starts" in page
    assert "first start" in readme


def words(page: Path) -> str:
    return " ".join(page.read_text(encoding="utf-8").split())


@pytest.mark.parametrize("script", ["results_page.py", "claims_page.py"])
def test_pages_of_figures_are_what_the_files_say(script: str) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "recipes" / script), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
