"""The documentation as a site: MkDocs' hooks that bring in what lies outside of docs/, and the notebooks as pages.

Pages of docs/ link to files of the repository as they do on a code host. Each file that a page links to becomes a part of the
site, Markdown as a page and others as they are, and links are rewritten to where the files lie there. mkdocs.yml names this file.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.structure.files import Files

__all__ = ["as_markdown", "on_files", "on_page_markdown", "rewritten"]

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"\]\(([^)\s#]+)(#[^)\s]*)?\)")
_OUTSIDE = "repository"
_PAGES_OF_THE_ROOT = ["README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md"]


def on_files(files: Files, config: Any) -> Files:
    """Add the notebooks, the pages of the root, and every file that a page links to."""
    from mkdocs.structure.files import File

    pending = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md"))]
    pending += [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "examples").glob("*.ipynb"))]
    pending += _PAGES_OF_THE_ROOT
    seen = set(pending)
    while pending:
        origin = pending.pop()
        place = _place(origin)
        if files.get_file_from_path(place) is None:
            if origin.endswith(".ipynb"):
                files.append(File.generated(config, place, content=as_markdown(ROOT / origin)))
            else:
                files.append(File.generated(config, place, abs_src_path=str(ROOT / origin)))
        for target in _targets(origin):
            if target not in seen:
                seen.add(target)
                pending.append(target)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """A page with the links that lead where files lie in the site."""
    return rewritten(markdown, _origin(page.file.src_uri))


def rewritten(markdown: str, origin: str) -> str:
    """The text of a file of the repository with its links as they are in the site. A link to a folder leads to its README."""

    def moved(link: re.Match[str]) -> str:
        target = _resolved(origin, link[1])
        if target is None:
            return link[0]
        way = os.path.relpath(_place(target), os.path.dirname(_place(origin)) or ".")
        return f"]({way}{link[2] or ''})"

    return _LINK.sub(moved, markdown)


def as_markdown(notebook: Path) -> str:
    """A notebook's cells as a page."""
    parts = []
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
    return "\n\n".join([*parts, f"This page is the notebook `examples/{notebook.name}`; a test runs it.\n"])


def _targets(origin: str) -> list[str]:
    """The files of the repository that a file links to."""
    if not origin.endswith((".md", ".ipynb")):
        return []
    path = ROOT / origin
    text = as_markdown(path) if origin.endswith(".ipynb") else path.read_text(encoding="utf-8")
    return [target for link in _LINK.finditer(text) if (target := _resolved(origin, link[1])) is not None]


def _resolved(origin: str, link: str) -> str | None:
    """The file of the repository that a link of another one leads to; None where it leads elsewhere."""
    if re.match(r"[a-z]+:", link):
        return None
    path = ROOT / os.path.normpath(os.path.join(os.path.dirname(origin), link))
    path = path / "README.md" if path.is_dir() else path
    return path.relative_to(ROOT).as_posix() if path.is_file() and path.is_relative_to(ROOT) else None


def _place(origin: str) -> str:
    """Where a file of the repository lies in the site."""
    if origin.startswith("docs/"):
        return origin.removeprefix("docs/")
    return origin.replace(".ipynb", ".md") if origin.startswith("examples/") else f"{_OUTSIDE}/{origin}"


def _origin(place: str) -> str:
    """The file of the repository that lies there in the site."""
    if place.startswith("examples/"):
        return place.replace(".md", ".ipynb")
    return place.removeprefix(f"{_OUTSIDE}/") if place.startswith(f"{_OUTSIDE}/") else f"docs/{place}"
