"""Consoles without markup: names, paths and errors may hold brackets, which rich would interpret."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.status import Status
from rich.table import Table
from rich.text import Text

__all__ = ["PlainConsole", "print_checks", "print_error"]


class PlainConsole(Console):
    """A console without markup, highlighting and emoji codes. Coloured text is a `Text`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(markup=False, highlight=False, emoji=False, **settings)

    def status(self, status: RenderableType, **settings: Any) -> Status:
        return _PlainStatus(_plain(status), console=self, **settings)


class _PlainStatus(Status):
    def update(self, status: RenderableType | None = None, **settings: Any) -> None:
        super().update(None if status is None else _plain(status), **settings)


def print_error(error: object) -> None:
    """An error in one line, on standard error."""
    PlainConsole(stderr=True).print(Text.assemble(("error:", "bold red"), " ", str(error)), soft_wrap=True)


def print_checks(checks: Sequence[tuple[str, str, str, bool]]) -> None:
    """The doctor's report as one table."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    section = ""
    for group, name, value, good in checks:
        if group != section:
            section = group
            table.add_row(Text(group, style="bold"), "", "")
        table.add_row("", name, Text(value, style="" if good else "bold red"))
    PlainConsole().print(table)


def _plain(text: RenderableType) -> RenderableType:
    return Text(text) if isinstance(text, str) else text
