"""`outrider doctor --costs`: the controller's cost table of this machine and a model, as a table and a plot."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from outrider.charts import Series, legend, lines, page
from outrider.control import Controller, Costs
from outrider.engine.llm import LLM

__all__ = ["measured_costs", "show_costs", "write_plot"]

_BAR = 36  # characters
_WHOSE = {"*": "the mean of a layer", "": "of plain rounds"}


def measured_costs(model: str | None) -> Costs:
    """The cost table of a new calibration, which is also kept for later starts."""
    llm = LLM(model, speculation="auto", calibration_s=0)
    assert isinstance(llm.engine.policy, Controller)
    known = llm.engine.policy.costs
    llm.engine.policy.costs = Costs(known.sizes)
    llm.engine.policy.costs.bus_bytes = known.bus_bytes
    llm.measure_costs()
    return llm.engine.policy.costs


def show_costs(costs: Costs, console: Console) -> None:
    """Forwards by rows with bars, everything else in a round by sequences, then proposals by drafter, batch and nodes."""
    table = costs.as_dict()
    shown = Table("rows", "ms", "", title="the target's forward", title_justify="left")
    longest = max(table["forward"].values(), default=0.0)
    for rows, seconds in table["forward"].items():
        shown.add_row(rows, f"{1e3 * seconds:.2f}", "\u2588" * max(round(_BAR * seconds / longest), 1))
    console.print(shown)
    if bus := table.get("bus"):
        console.print(
            f"{bus['bytes'] / 2**30:.2f} GiB of weights cross the bus in every forward, however many rows it has: "
            f"{bus['bytes_per_s'] / 1e9:.1f} GB/s\n"
        )
    for name, counts in table.get("experts", {}).items():
        shown = Table("rows", "experts", title=f"experts that a round reads, {_WHOSE.get(name, name)}", title_justify="left")
        for rows, count in counts.items():
            shown.add_row(rows, f"{count:.1f}")
        console.print(shown)
    for part, size, title in (
        ("context", "context up to", "the additional cost of a longer context"),
        ("rest", "sequences", "everything else in a round"),
    ):
        if table[part]:
            shown = Table(size, "ms", title=title, title_justify="left")
            for number, seconds in table[part].items():
                shown.add_row(number, f"{1e3 * seconds:.2f}")
            console.print(shown)
    shown = Table("drafter", "sequences", "nodes", "ms", title="a proposal", title_justify="left")
    for name, curves in table["propose"].items():
        for batch, curve in curves.items():
            for nodes, seconds in curve.items():
                shown.add_row(name, batch, nodes, f"{1e3 * seconds:.2f}")
    console.print(shown)


def write_plot(costs: Costs, path: Path) -> None:
    """The costs of forwards and proposals as curves, in one HTML file."""
    table = costs.as_dict()
    content = "<h1>Costs</h1><section><h2>The target's forward</h2>"
    if table["forward"]:
        content += lines("A forward by rows", [Series("forward", 0, _points(table["forward"]))], ("rows", "ms"))
    content += "</section>"
    for batch in sorted({int(batch) for curves in table["propose"].values() for batch in curves}):
        by_drafter = {name: curves[str(batch)] for name, curves in table["propose"].items() if str(batch) in curves}
        drawn = [Series(name, i, _points(curve)) for i, (name, curve) in enumerate(by_drafter.items())]
        content += f"<section><h2>A proposal for {batch} sequences</h2>{legend(list(by_drafter))}"
        content += lines("A proposal by nodes", drawn, ("nodes", "ms")) + "</section>"
    path.write_text(page("Outrider costs", content), encoding="utf-8")


def _points(curve: Mapping[str, float]) -> list[tuple[float, float]]:
    return [(float(size), 1e3 * seconds) for size, seconds in curve.items()]
