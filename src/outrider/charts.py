"""Small SVG charts (grouped bars, lines, stacked bars) and the HTML page they stand in, which needs no other file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

__all__ = ["Series", "bars", "legend", "lines", "page", "stacked"]

_WIDTH, _HEIGHT = 460.0, 250.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 46.0, 10.0, 26.0, 40.0
_COLOURS = 10
_MAX_DOTS = 100  # points of a line above which it has no dots


@dataclass(frozen=True, slots=True)
class Series:
    """One method's points: (x, y) for lines; for bars x is the group's number. `spread` is low and high of each y."""

    name: str
    colour: int
    points: Sequence[tuple[float, float]]
    spread: Sequence[tuple[float, float]] = field(default=())


@dataclass(frozen=True, slots=True)
class _Frame:
    """From data to places in the picture."""

    x: tuple[float, float]
    y: tuple[float, float]
    height: float = _HEIGHT
    left: float = _LEFT
    width: float = _WIDTH

    def across(self, value: float) -> float:
        low, high = self.x
        return self.left + (value - low) / (high - low or 1.0) * (self.width - self.left - _RIGHT)

    def up(self, value: float) -> float:
        low, high = self.y
        return self.height - _BOTTOM - (value - low) / (high - low or 1.0) * (self.height - _BOTTOM - _TOP)


def legend(names: Sequence[str], kind: str = "c") -> str:
    """Coloured names; `kind` is the family of colour variables."""
    items = (f'<li><i style="background:var(--{kind}{i % _COLOURS})"></i>{escape(name)}</li>' for i, name in enumerate(names))
    return f'<ul class="legend">{"".join(items)}</ul>'


def page(title: str, content: str) -> str:
    """One HTML file that needs nothing else."""
    style = Path(__file__).with_suffix(".css").read_text(encoding="utf-8")
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{style}</style><main>{content}</main></html>"
    )


def bars(title: str, groups: Sequence[str], series: Sequence[Series], unit: str, top: float) -> str:
    """Grouped bars with whiskers up to `top`, and a line at 1, which everything is compared with."""
    top = _nice_top(max(top, 1.0))
    many = len(groups) > 6
    frame = _Frame((0.0, float(len(groups))), (0.0, top), width=2.1 * _WIDTH if many else _WIDTH)
    width = min((frame.across(1) - frame.across(0)) * 0.8 / max(len(series), 1), 30.0)
    parts = [*_grid(frame, top, unit)]
    for i, group in enumerate(groups):
        parts.append(_text(frame.across(i + 0.5), _HEIGHT - _BOTTOM + 16 + 13 * (many and i % 2), group, "middle", 20))
    for number, line in enumerate(series):
        for place, (x, y) in enumerate(line.points):
            left = frame.across(x + 0.5) + (number - len(series) / 2) * width
            low, high = line.spread[place] if line.spread else (y, y)
            label = f"{line.name}, {groups[int(x)]}: {y:.2f} {unit}" + (f" ({low:.2f} to {high:.2f})" if high > low else "")
            parts.append(
                f'<g class="mark"><title>{escape(label)}</title>'
                f'<rect x="{left + 1:.1f}" y="{frame.up(y):.1f}" width="{width - 2:.1f}" '
                f'height="{frame.up(0) - frame.up(y):.1f}" rx="2" fill="var(--c{line.colour % _COLOURS})"/>'
                + (_whisker(left + width / 2, frame.up(low), frame.up(high)) if high > low else "")
                + "</g>"
            )
    parts.append(_rule(frame, 1.0))
    return _svg(title, parts, width=frame.width)


def lines(title: str, series: Sequence[Series], labels: tuple[str, str], line_at: float | None = None, top: float = 0.0) -> str:
    """Lines with a dot at every point, unless they are many; `labels` name the axes."""
    xs = [x for line in series for x, _ in line.points]
    ys = [y for line in series for _, y in line.points]
    top = top or _nice_top(max([*ys, line_at or 0.0]))
    frame = _Frame((min(xs), max(xs)) if max(xs) > min(xs) else (xs[0] - 1, xs[0] + 1), (0.0, top))
    parts = [*_grid(frame, top, labels[1])]
    for x in _spaced(sorted(set(xs)), frame):
        parts.append(_text(frame.across(x), _HEIGHT - _BOTTOM + 15, f"{x:g}", "middle"))
    parts.append(_text(frame.across(sum(frame.x) / 2), _HEIGHT - 8, labels[0], "middle"))
    if line_at is not None:
        parts.append(_rule(frame, line_at))
    for line in series:
        colour = f"var(--c{line.colour % _COLOURS})"
        path = " ".join(f"{frame.across(x):.1f},{frame.up(y):.1f}" for x, y in line.points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2" stroke-linejoin="round"/>')
        for x, y in line.points if len(line.points) <= _MAX_DOTS else ():
            parts.append(
                f'<circle class="mark" cx="{frame.across(x):.1f}" cy="{frame.up(y):.1f}" r="3.5" fill="{colour}">'
                f"<title>{escape(f'{line.name}, {labels[0]} {x:g}: {y:.3g} {labels[1]}')}</title></circle>"
            )
    return _svg(title, parts)


def stacked(title: str, rows: Sequence[tuple[str, Sequence[float], str]], names: Sequence[str], unit: str) -> str:
    """Horizontal stacked bars: a label, its parts in the order of `names`, and a note at the end."""
    longest = max(sum(parts) for _, parts, _ in rows)
    height, left, room = 22.0 * len(rows) + 40, 132.0, 84.0
    scale = (_WIDTH - left - room) / longest
    parts: list[str] = []
    for value in _ticks(_nice_top(longest)):
        if value <= longest:
            x = left + value * scale
            parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height - 34:.1f}"/>')
            parts.append(_text(x, height - 20, f"{value:g}", "middle"))
    for i, (label, values, note) in enumerate(rows):
        y, x = 4 + 22.0 * i, left
        parts.append(_text(left - 6, y + 12, label, "end", 20))
        for number, value in enumerate(values):
            hint, width = escape(f"{label}, {names[number]}: {value:.3g} {unit}"), max(value * scale, 0.0)
            parts.append(
                f'<rect class="mark" x="{x:.1f}" y="{y}" width="{width:.1f}" height="16" fill="var(--p{number})">'
                f"<title>{hint}</title></rect>"
            )
            x += width
        parts.append(_text(x + 5, y + 12, note, "start"))
    parts.append(_text((left + _WIDTH - room) / 2, height - 5, unit, "middle"))
    return _svg(title, parts, height)


def _grid(frame: _Frame, top: float, unit: str) -> Iterator[str]:
    for value in _ticks(top):
        y = frame.up(value)
        yield f'<line class="grid" x1="{frame.left}" x2="{frame.width - _RIGHT:g}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield _text(frame.left - 6, y + 4, f"{value:g}", "end")
    yield _text(2, 10, unit, "start")


def _rule(frame: _Frame, value: float) -> str:
    y = frame.up(value)
    return f'<line class="rule" x1="{frame.left}" x2="{frame.width - _RIGHT:g}" y1="{y:.1f}" y2="{y:.1f}"/>'


def _whisker(x: float, low: float, high: float) -> str:
    return f'<path class="whisker" d="M{x:.1f} {low:.1f}V{high:.1f}M{x - 3:.1f} {low:.1f}h6M{x - 3:.1f} {high:.1f}h6"/>'


def _text(x: float, y: float, text: str, anchor: str, limit: int = 40) -> str:
    short = text if len(text) <= limit else text[: limit - 1] + "…"
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(short)}</text>'


def _svg(title: str, parts: Sequence[str], height: float = _HEIGHT, width: float = _WIDTH) -> str:
    drawn, kind = "".join(parts), ' class="whole"' if width > _WIDTH else ""
    return (
        f'<figure{kind}><figcaption>{escape(title)}</figcaption><svg role="img" aria-label="{escape(title)}" '
        f'viewBox="0 0 {width:g} {height:g}">{drawn}</svg></figure>'
    )


def _nice_top(value: float) -> float:
    """The last tick of an axis that holds a value."""
    step = _step(value)
    return max(math.ceil(value / step - 1e-9) * step, step)


def _ticks(top: float) -> list[float]:
    step = _step(top)
    return [round(i * step, 10) for i in range(round(top / step) + 1)]


def _step(value: float) -> float:
    """1, 2 or 5 times a power of ten, about four of them in a value."""
    if value <= 0:
        return 1.0
    rough = value / 4
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)


def _spaced(values: Sequence[float], frame: _Frame) -> list[float]:
    """Values whose labels do not touch. The last one is always among them."""
    kept = [values[-1]]
    for value in values[:-1]:
        if all(abs(frame.across(value) - frame.across(other)) > 24 for other in kept):
            kept.append(value)
    return kept
