"""Lines over draft length: as block letters for a terminal, as SVG in a page that needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

__all__ = ["page", "spark", "svg_lines"]

_BLOCKS = "▁▂▃▄▅▆▇█"
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f3c8d", "#666666", "#b15928", "#111111")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _RIGHT = 760, 380, 48, 44, 230


def spark(values: Sequence[float], top: float | None = None) -> str:
    """One letter per value, from nothing to the top."""
    most = top or max(values, default=1.0) or 1.0
    return "".join(_BLOCKS[min(int(value / most * len(_BLOCKS)), len(_BLOCKS) - 1)] for value in values)


def svg_lines(title: str, lines: Mapping[str, Sequence[tuple[float, float]]], labels: tuple[str, str]) -> str:
    """A chart with one line per name, and a rule at 1, where drafting stops paying."""
    points = [point for line in lines.values() for point in line]
    right, top = max((x for x, _ in points), default=1.0), 1.1 * max([y for _, y in points] + [1.0])
    across, up = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _BOTTOM - 30

    def place(x: float, y: float) -> tuple[float, float]:
        return _LEFT + across * x / right, 30 + up * (1 - y / top)

    parts = [f'<text x="{_LEFT}" y="18" class="title">{escape(title)}</text>']
    step = next(own for own in (0.25, 0.5, 1, 2, 5, 10, 20, 50) if top / own <= 8)
    for i in range(int(top / step) + 1):
        _, y = place(0, i * step)
        parts.append(f'<line x1="{_LEFT}" x2="{_LEFT + across}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" class="end">{i * step:g}</text>')
    for i in range(9):
        value = right * i / 8
        x, y = place(value, 0)
        parts.append(f'<text x="{x:.1f}" y="{y + 16:.1f}" class="middle">{value:.0f}</text>')
    _, even = place(0, 1)
    parts.append(f'<line x1="{_LEFT}" x2="{_LEFT + across}" y1="{even:.1f}" y2="{even:.1f}" class="even"/>')
    for i, (name, line) in enumerate(lines.items()):
        colour = _COLOURS[i % len(_COLOURS)]
        path = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in line)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<rect x="{_LEFT + across + 12}" y="{32 + 18 * i}" width="12" height="3" fill="{colour}"/>')
        short = name if len(name) <= 28 else name[:27] + "…"
        parts.append(f'<text x="{_LEFT + across + 30}" y="{38 + 18 * i}"><title>{escape(name)}</title>{escape(short)}</text>')
    parts.append(f'<text x="{_LEFT + across / 2}" y="{_HEIGHT - 8}" class="middle">{escape(labels[0])}</text>')
    parts.append(
        f'<text x="12" y="{30 + up / 2}" class="middle" transform="rotate(-90 12 {30 + up / 2})">{escape(labels[1])}</text>'
    )
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'


def page(title: str, charts: Sequence[str], notes: Sequence[str], facts: str) -> str:
    """A self-contained page."""
    style = (
        "body{font:15px/1.5 system-ui,sans-serif;max-width:800px;margin:2em auto;padding:0 1em;color:#111;background:#fff}"
        "svg{width:100%;height:auto;margin:1em 0}text{font:12px system-ui,sans-serif;fill:#222}"
        ".title{font-weight:600;font-size:14px}.end{text-anchor:end}.middle{text-anchor:middle}.grid{stroke:#ddd}"
        ".even{stroke:#999;stroke-dasharray:4 3}"
        "pre{background:#f5f5f5;padding:1em;overflow:auto;font-size:12px}"
    )
    body = "".join(charts) + "".join(f"<pre>{escape(note)}</pre>" for note in notes) + f"<pre>{escape(facts)}</pre>"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{style}</style>'
        f"<h1>{escape(title)}</h1>{body}</html>\n"
    )
