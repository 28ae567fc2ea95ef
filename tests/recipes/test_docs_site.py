"""The hooks that make a site of the documentation: links of all pages lead to what the site has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from recipes.docs_site import ROOT, as_markdown, rewritten


@pytest.mark.parametrize(
    ("origin", "link", "there"),
    [
        ("docs/serving.md", "../deploy/alerts.yml", "repository/deploy/alerts.yml"),
        ("docs/serving.md", "structured.md#a-grammar-after-reasoning", "structured.md#a-grammar-after-reasoning"),
        ("docs/README.md", "../ARCHITECTURE.md", "repository/ARCHITECTURE.md"),
        ("docs/notebook/gpu.md", "../../README.md", "../repository/README.md"),
        ("README.md", "docs/serving.md", "../serving.md"),
        ("README.md", "docs/compare.svg", "../compare.svg"),
        ("docs/README.md", "../examples/quick_start.ipynb", "examples/quick_start.md"),
        ("docs/README.md", "https://example.org/a.md", "https://example.org/a.md"),
        ("docs/README.md", "nowhere.md", "nowhere.md"),
    ],
)
def test_links_are_moved(origin: str, link: str, there: str) -> None:
    assert rewritten(f"see [it]({link}).", origin) == f"see [it]({there})."


def test_a_notebook_is_a_page() -> None:
    page = as_markdown(ROOT / "examples" / "quick_start.ipynb")
    assert page.startswith("# Quick start\n")
    assert "```python\nfrom outrider import LLM, SamplingParams\n" in page
    assert page.count("```") % 2 == 0


def test_every_page_is_in_the_navigation() -> None:
    text = re.sub(r"!!python\S+", "", (ROOT / "mkdocs.yml").read_text())
    named = set(re.findall(r": (\S+\.md)$", yaml.safe_dump(yaml.safe_load(text)["nav"]), re.MULTILINE))
    there = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert there - {name for name in named if "/" not in name} == set()
    assert {name for name in named if name.startswith("examples/")} == {
        f"examples/{path.stem}.md" for path in Path(ROOT / "examples").glob("*.ipynb")
    }
