"""Pictures as plain SVG text: no scripts, no fonts of its own, nothing from a network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 760
_LEFT, _RIGHT, _TOP, _BOTTOM = 150, 20, 34, 34
_ROW = 22
_COLORS = ("#2a6fb0", "#d1762c", "#3c8d4f", "#8a5aa8", "#b3434b", "#6b7280", "#97823a")
_INK, _FAINT, _PAPER = "#222", "#ddd", "#fff"


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """Maps values to pixels; logarithmic over positive values only."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def at(self, value: float) -> float:
        """Return the pixel of a value, clipped to the axis."""
        low, high = self._of(self.low), self._of(self.high)
        share = (self._of(max(value, self.low)) - low) / (high - low)
        return self.start + min(1.0, max(0.0, share)) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Return a handful of round values on the axis."""
        if self.is_log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            decades = range(first, last + 1)
            steps = (1, 2, 5) if last - first <= 2 else (1,)
            values = [step * 10.0**decade for decade in decades for step in steps]
        else:
            step = _round_step((self.high - self.low) / 5)
            count = int((self.high - self.low) / step + 1e-9)
            values = [self.low + step * i for i in range(count + 1)]
        return [v for v in values if self.low * (1 - 1e-9) <= v <= self.high * (1 + 1e-9)]

    def _of(self, value: float) -> float:
        return math.log10(value) if self.is_log else value


def linear(low: float, high: float, start: float, end: float) -> Axis:
    """Return an axis that is never of no length."""
    return Axis(low=low, high=high if high > low else low + 1.0, start=start, end=end)


def logarithmic(values: Sequence[float], start: float, end: float) -> Axis:
    """Return an axis around positive values."""
    positive = [value for value in values if value > 0] or [1.0]
    low, high = min(positive) / 1.3, max(positive) * 1.3
    return Axis(low=low, high=high, start=start, end=end, is_log=True)


def _round_step(rough: float) -> float:
    unit = 10.0 ** math.floor(math.log10(rough))
    return next(step * unit for step in (1, 2, 5, 10) if step * unit >= rough * (1 - 1e-9))


def color(index: int) -> str:
    """Return the color of the n-th thing that is compared."""
    return _COLORS[index % len(_COLORS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Strip:
    """One row of a picture of spreads: median, p99 and maximum, in seconds."""

    label: str
    p50_s: float
    p99_s: float
    max_s: float
    color: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line, or one cloud of points."""

    label: str
    points: Sequence[tuple[float, float]]
    color: str


def seconds(value: float) -> str:
    """Return a duration as people write it."""
    if value >= 1:
        return f"{value:.3g} s"
    return f"{value * 1e3:.3g} ms"


def spreads(title: str, strips: Sequence[Strip]) -> str:
    """Draw median (dot), p99 (bar) and maximum (line's end) of each row on one log axis."""
    height = _TOP + _ROW * len(strips) + _BOTTOM
    values = [v for strip in strips for v in (strip.p50_s, strip.p99_s, strip.max_s)]
    axis = logarithmic(values, _LEFT + 90, WIDTH - _RIGHT)
    parts = [_title(title), *_vertical_grid(axis, height, seconds)]
    for row, strip in enumerate(strips):
        y = _TOP + _ROW * row + _ROW / 2
        x50, x99, xmax = (axis.at(v) for v in (strip.p50_s, strip.p99_s, strip.max_s))
        parts += [
            _text(_LEFT + 82, y + 4, strip.label, anchor="end"),
            _line((x50, y), (xmax, y), strip.color, 1.5),
            f'<circle cx="{x50:.1f}" cy="{y:.1f}" r="4.5" fill="{strip.color}"/>',
            _line((x99, y - 6), (x99, y + 6), strip.color, 3),
            _line((xmax, y - 3), (xmax, y + 3), strip.color, 1.5),
        ]
    return _svg(height, parts, title)


def bars(title: str, rows: Sequence[tuple[str, float, str, str]]) -> str:
    """Draw rows of (label, value, what stands behind it, color), from zero."""
    height = _TOP + _ROW * len(rows) + 8
    axis = linear(0.0, max((value for _, value, _, _ in rows), default=1.0), _LEFT + 90, 600)
    parts = [_title(title)]
    for row, (label, value, note, ink) in enumerate(rows):
        y = _TOP + _ROW * row
        width = axis.at(value) - axis.start
        parts += [
            _text(_LEFT + 82, y + 15, label, anchor="end"),
            f'<rect x="{axis.start:.1f}" y="{y + 3:.1f}" width="{width:.1f}" height="15" '
            f'fill="{ink}"/>',
            _text(axis.start + width + 6, y + 15, note),
        ]
    return _svg(height, parts, title)


def steps(title: str, series: Sequence[Series], *, until_s: float) -> str:
    """Draw shares (0 to 1) that hold until they change, a panel for each series."""
    panel = 74
    height = _TOP + panel * len(series) + _BOTTOM
    x_axis = linear(0.0, until_s, _LEFT, WIDTH - _RIGHT)
    parts = [_title(title), *_vertical_grid(x_axis, height, lambda v: f"{v:g} s")]
    for index, each in enumerate(series):
        top = _TOP + panel * index + 8
        y_axis = linear(0.0, 1.0, top + panel - 16, top)
        parts += [
            _text(_LEFT - 42, top + 30, each.label, anchor="end"),
            *(_text(_LEFT - 6, y_axis.at(v) + 4, f"{v:.0%}", anchor="end") for v in (0.0, 1.0)),
            _line((_LEFT, y_axis.start), (WIDTH - _RIGHT, y_axis.start), _FAINT, 1),
            _line((_LEFT, y_axis.end), (WIDTH - _RIGHT, y_axis.end), _FAINT, 1),
            _area(each, x_axis, y_axis),
        ]
    return _svg(height, parts, title)


def _area(series: Series, x_axis: Axis, y_axis: Axis) -> str:
    if not series.points:
        return ""
    corners, level = [(series.points[0][0], 0.0)], 0.0
    for at_s, share in series.points:
        corners += [(at_s, level), (at_s, share)]
        level = share
    corners += [(corners[-1][0], 0.0)]
    path = " ".join(f"{x_axis.at(x):.1f},{y_axis.at(y):.1f}" for x, y in corners)
    return f'<polygon points="{path}" fill="{series.color}" fill-opacity="0.75"/>'


def clouds(
    title: str, series: Sequence[Series], *, until_s: float, marks: Sequence[Sequence[float]]
) -> str:
    """Draw durations over time on a log axis, a panel for each series; ``marks`` are instants."""
    panel = 108
    height = _TOP + panel * len(series) + _BOTTOM
    x_axis = linear(0.0, until_s, _LEFT, WIDTH - _RIGHT)
    values = [y for each in series for _, y in each.points]
    parts = [_title(title), *_vertical_grid(x_axis, height, lambda v: f"{v:g} s")]
    for index, (each, instants) in enumerate(zip(series, marks, strict=True)):
        top = _TOP + panel * index + 6
        y_axis = logarithmic(values, top + panel - 12, top)
        parts += [_text(_LEFT - 52, top + 46, each.label, anchor="end")]
        for tick in y_axis.ticks():
            y = y_axis.at(tick)
            parts += [
                _text(_LEFT - 6, y + 4, seconds(tick), anchor="end"),
                _line((_LEFT, y), (WIDTH - _RIGHT, y), _FAINT, 0.7),
            ]
        for at_s in instants:
            x = x_axis.at(at_s)
            parts.append(_line((x, top), (x, top + panel - 12), _INK, 1, dash="3 3"))
        dots = "".join(f"M{x_axis.at(x):.1f},{y_axis.at(y):.1f}h0" for x, y in each.points)
        parts.append(
            f'<path d="{dots}" stroke="{each.color}" stroke-width="3" stroke-linecap="round" '
            'fill="none"/>'
        )
    return _svg(height, parts, title)


def lines(title: str, series: Sequence[Series], *, levels: Sequence[tuple[str, float, str]]) -> str:
    """Draw durations over a rate in bytes/s, both logarithmic; ``levels`` go right across."""
    height = 260
    points = [point for each in series for point in each.points]
    x_axis = logarithmic([x for x, _ in points], _LEFT, WIDTH - 190)
    values = [y for _, y in points] + [value for _, value, _ in levels]
    y_axis = logarithmic(values, height - _BOTTOM, _TOP)
    parts = [_title(title), *_vertical_grid(x_axis, height, _rate)]
    for tick in y_axis.ticks():
        y = y_axis.at(tick)
        parts += [
            _text(_LEFT - 6, y + 4, seconds(tick), anchor="end"),
            _line((_LEFT, y), (x_axis.end, y), _FAINT, 0.7),
        ]
    labels = []
    for label, value, ink in levels:
        y = y_axis.at(value)
        parts.append(_line((_LEFT, y), (x_axis.end, y), ink, 1.5, dash="6 4"))
        labels.append((y + 4, label, ink))
    for each in series:
        pixels = [(x_axis.at(x), y_axis.at(y)) for x, y in each.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in pixels)
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{each.color}" stroke-width="2"/>'
        )
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{each.color}"/>' for x, y in pixels
        ]
        labels.append((max(pixels)[1] + 4, each.label, each.color))
    parts += _beside(labels, x_axis.end + 8)
    return _svg(height, parts, title)


def _beside(labels: Sequence[tuple[float, str, str]], x: float) -> list[str]:
    """Write labels (height, text, color) below one another, each near its height."""
    parts, least = [], 0.0
    for y, label, ink in sorted(labels):
        parts.append(_text(x, max(y, least), label, ink=ink))
        least = max(y, least) + 14
    return parts


def _rate(value: float) -> str:
    return f"{value / 1e6:g} MB/s"


def _vertical_grid(axis: Axis, height: float, tell: object) -> list[str]:
    assert callable(tell)
    parts = []
    for tick in axis.ticks():
        x = axis.at(tick)
        parts += [
            _line((x, _TOP), (x, height - _BOTTOM + 6), _FAINT, 0.7),
            _text(x, height - _BOTTOM + 22, str(tell(tick)), anchor="middle"),
        ]
    return parts


def _title(title: str) -> str:
    return _text(10, 18, title, weight="bold")


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", weight: str = "", ink: str = _INK
) -> str:
    bold = f' font-weight="{weight}"' if weight else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{ink}"{bold}>'
        f"{escape(text)}</text>"
    )


def _line(
    start: tuple[float, float], end: tuple[float, float], ink: str, width: float, *, dash: str = ""
) -> str:
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<line x1="{start[0]:.1f}" y1="{start[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}" '
        f'stroke="{ink}" '
        f'stroke-width="{width:g}"{dashed}/>'
    )


def _svg(height: float, parts: Sequence[str], title: str) -> str:
    body = "\n".join(part for part in parts if part)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" '
        f'width="{WIDTH}" height="{height:g}" role="img" aria-label="{escape(title)}" '
        'font-family="sans-serif" font-size="11">\n'
        f'<rect width="100%" height="100%" fill="{_PAPER}"/>\n{body}\n</svg>\n'
    )
