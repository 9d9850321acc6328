"""Draws charts as SVG without a library: lines and stacked bars, with error bars, in the colours of
the page's theme.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 480, 300
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 12, 40
ROW = 38  # of a stacked bar, with its name above
GAP = 1.5  # between the parts of a bar
SMALLEST = 1e-9  # anything less is drawn as nothing
CAP = 3.0  # half the length of the ends of an error bar
# times the greatest value, that an axis reaches for the sake of error bars; what goes beyond is cut
# off
ROOM = 1.4
DECADES = 1e6  # that a logarithmic axis has at most; what is less lies at its end
WIDE = 5.0  # times: latencies that differ by more are drawn on a logarithmic axis


class Axis(NamedTuple):
    label: str
    low: float
    high: float
    log: bool = False
    ticks: Sequence[tuple[float, str]] | None = None  # where they are not to be found


class Interval(NamedTuple):
    """A confidence interval, drawn as an error bar; nothing where both ends are one."""

    low: float
    high: float


class ChartMark(NamedTuple):
    x: float
    y: float
    hint: str
    hollow: bool = False
    across: Interval | None = None  # of x
    upright: Interval | None = None  # of y
    faint: bool = False


class LegendEntry(NamedTuple):
    style: str
    name: str


class Chart(NamedTuple):
    title: str
    says: str
    svg: str
    legend: Sequence[LegendEntry] = ()


class AxisSpan(NamedTuple):
    """A part of the horizontal axis that is marked, such as a warm-up; `style` is a class of the
    page.
    """

    low: float
    high: float
    style: str
    hint: str


class Series(NamedTuple):
    """`style` is a class of the page: winner, baseline, s2 ..., other."""

    name: str
    style: str
    marks: Sequence[ChartMark]
    dots: bool = True
    joined: bool = True


class ReferenceLine(NamedTuple):
    """A horizontal line at a limit."""

    y: float
    label: str


def axis(
    label: str,
    values: Sequence[float],
    *,
    log: bool | None = None,
    bars: Sequence[Interval | None] = (),
) -> Axis:
    """Wide enough for the values, none of which is negative; logarithmic where they differ by more
    than 20 times and nothing else is asked.

    For error bars (`bars`) it is wider, but no more than by `ROOM`: two rounds that differ have an
    interval of many times their figures.
    """
    there = [value for value in values if value > SMALLEST and math.isfinite(value)] or [1.0]
    high = max(there)
    least = min(there)
    there += [
        min(bar.high, ROOM * high) for bar in bars if bar is not None and math.isfinite(bar.high)
    ]
    there += [max(bar.low, least / ROOM) for bar in bars if bar is not None]
    high = max(there)
    low = max(min(there), high / DECADES)
    if log if log is not None else high > 20 * low:
        return Axis(label, low / 1.15, high * 1.15, log=True)
    return Axis(label, 0.0, high * 1.06 or 1.0)


def latency_axis(label: str, marks: Sequence[ChartMark], others: Sequence[float] = ()) -> Axis:
    """Of the marks and of `others`, such as bounds."""
    heights = [value for value in (*(mark.y for mark in marks), *others) if value > 0]
    return axis(
        label,
        heights,
        log=bool(heights) and max(heights) > WIDE * min(heights),
        bars=[mark.upright for mark in marks],
    )


def ticks(scale: Axis) -> list[tuple[float, str]]:
    if scale.ticks is not None:
        return list(scale.ticks)
    if scale.log:
        first, last = math.floor(math.log10(scale.low)), math.ceil(math.log10(scale.high))
        steps = (1, 2, 5) if last - first <= 3 else (1,)
        values = [step * 10.0**power for power in range(first, last + 1) for step in steps]
        return [(value, _short(value)) for value in values if scale.low <= value <= scale.high]
    step = _step(scale.high - scale.low)
    first = math.ceil(scale.low / step - 1e-9)
    values = [index * step for index in range(first, math.floor(scale.high / step + 1e-9) + 1)]
    return [(value, _short(value)) for value in values]


def _step(span: float) -> float:
    raw = span / 5
    power = 10.0 ** math.floor(math.log10(raw))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.6g}"


def _at(value: float, scale: Axis) -> float:
    """From 0 to 1 along the axis."""
    if scale.log:
        value = max(value, scale.low)
        return (math.log(value) - math.log(scale.low)) / (
            math.log(scale.high) - math.log(scale.low)
        )
    return (value - scale.low) / ((scale.high - scale.low) or 1.0)


def plot(
    title: str,
    x: Axis,
    y: Axis,
    series: Sequence[Series],
    rules: Sequence[ReferenceLine] = (),
    *,
    spans: Sequence[AxisSpan] = (),
    height: int = HEIGHT,
) -> str:
    """Later series lie above earlier ones."""
    parts = [
        _open(title, height),
        *(_span(span, x, height) for span in spans),
        _frame(x, y, height),
    ]
    for rule in rules:
        parts.append(_rule(rule, y, height))
    for each in series:
        places = [(_across(mark.x, x), _down(mark.y, y, height), mark) for mark in each.marks]
        path = " ".join(
            f"{'L' if index else 'M'}{left:.1f} {top:.1f}"
            for index, (left, top, _) in enumerate(places)
        )
        drawn = []
        if each.joined and len(places) > 1:
            drawn.append(f'<path class="line" d="{path}"/>')
        drawn += [_error_bar(left, top, mark, x, y, height) for left, top, mark in places]
        if each.dots or (each.joined and len(places) == 1):
            drawn += [_dot(left, top, mark, each) for left, top, mark in places]
        parts.append(f'<g class="{each.style}">{"".join(drawn)}</g>')
    return "".join([*parts, "</svg>"])


def _open(title: str, height: float) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(title)}">'


def _across(value: float, scale: Axis) -> float:
    return LEFT + _at(value, scale) * (WIDTH - LEFT - RIGHT)


def _down(value: float, scale: Axis, height: float) -> float:
    return height - BOTTOM - _at(value, scale) * (height - TOP - BOTTOM)


def _frame(x: Axis, y: Axis, height: float) -> str:
    floor, parts = height - BOTTOM, []
    for value, text in ticks(y):
        top = _down(value, y, height)
        parts.append(f'<path class="grid" d="M{LEFT} {top:.1f} H{WIDTH - RIGHT}"/>')
        parts.append(
            f'<text x="{LEFT - 7}" y="{top + 4:.1f}" text-anchor="end">{escape(text)}</text>'
        )
    last = -100.0
    for value, text in ticks(x):
        left = _across(value, x)
        if left - last < 6.2 * len(text) + 8:
            continue
        last = left
        parts.append(f'<path class="grid" d="M{left:.1f} {floor} v5"/>')
        parts.append(
            f'<text x="{left:.1f}" y="{floor + 18}" text-anchor="middle">{escape(text)}</text>'
        )
    parts.append(f'<path class="base" d="M{LEFT} {floor} H{WIDTH - RIGHT}"/>')
    parts.append(
        f'<text class="label" x="{WIDTH - RIGHT}" y="{height - 5}"'
        f' text-anchor="end">{escape(x.label)}</text>'
    )
    middle = (TOP + floor) / 2
    parts.append(
        f'<text class="label" transform="translate(12 {middle:g}) rotate(-90)"'
        f' text-anchor="middle">{escape(y.label)}</text>'
    )
    return "".join(parts)


def _span(span: AxisSpan, x: Axis, height: float) -> str:
    left, right = (_across(min(max(end, x.low), x.high), x) for end in (span.low, span.high))
    return (
        f'<rect class="span {span.style}" x="{left:.1f}" y="{TOP}"'
        f' width="{max(0.0, right - left):.1f}"'
        f' height="{height - BOTTOM - TOP:g}"><title>{escape(span.hint)}</title></rect>'
    )


def _error_bar(left: float, top: float, mark: ChartMark, x: Axis, y: Axis, height: float) -> str:
    path = ""
    if mark.across is not None and mark.across.low < mark.across.high:
        low, high = (_across(min(max(end, x.low), x.high), x) for end in mark.across)
        path += f"M{low:.1f} {top:.1f} H{high:.1f} " + "".join(
            f"M{end:.1f} {top - CAP:.1f} v{2 * CAP:g} " for end in (low, high)
        )
    if mark.upright is not None and mark.upright.low < mark.upright.high:
        low, high = (_down(min(max(end, y.low), y.high), y, height) for end in mark.upright)
        path += f"M{left:.1f} {low:.1f} V{high:.1f} " + "".join(
            f"M{left - CAP:.1f} {end:.1f} h{2 * CAP:g} " for end in (low, high)
        )
    return f'<path class="error" d="{path.strip()}"/>' if path else ""


def _rule(rule: ReferenceLine, y: Axis, height: float) -> str:
    if not y.low <= rule.y <= y.high:
        return ""
    top = _down(rule.y, y, height)
    text = f'<text class="bound" x="{LEFT + 6}" y="{top - 6:.1f}">{escape(rule.label)}</text>'
    return f'<path class="bound" d="M{LEFT} {top:.1f} H{WIDTH - RIGHT}"/>{text}'


def _dot(left: float, top: float, mark: ChartMark, series: Series) -> str:
    hollow = (" hollow" if mark.hollow else "") + (" faint" if mark.faint else "")
    size = 5.0 if series.style == "winner" else 4.0
    hint = f"<title>{escape(mark.hint)}</title>"
    if series.style == "baseline":
        side = size * 1.8
        return (
            f'<rect class="dot{hollow}" x="{left - side / 2:.1f}" y="{top - side / 2:.1f}"'
            f' width="{side:g}" height="{side:g}">{hint}</rect>'
        )
    return (
        f'<circle class="dot{hollow}" cx="{left:.1f}" cy="{top:.1f}" r="{size:g}">{hint}</circle>'
    )


class BarSegment(NamedTuple):
    value: float
    style: str
    hint: str


def stacked(
    title: str, rows: Sequence[tuple[str, str, Sequence[BarSegment], Interval | None]]
) -> str:
    """Each row is its name, the text at the end of its bar, its parts, and the interval of its
    length. All have one scale from 0 on.
    """
    longest = max((sum(part.value for part in parts) for _, _, parts, _ in rows), default=0.0)
    widest = (
        axis("", [longest], bars=[bar for *_, bar in rows], log=False).high / 1.06
        if longest
        else 1.0
    )
    height = ROW * len(rows) + 6
    drawn = [_open(title, height)]
    room = WIDTH - 74
    for index, (name, end, parts, bar) in enumerate(rows):
        top, left = index * ROW + 20, 0.0
        drawn.append(f'<text class="name" x="0" y="{top - 6}">{escape(name)}</text>')
        for part in parts:
            width = part.value / widest * room
            if width > 0.3:
                shown = max(0.4, width - GAP)
                drawn.append(
                    f'<g class="{part.style}"><rect class="bar" x="{left:.1f}" y="{top}"'
                    f' width="{shown:.1f}" height="12">'
                )
                drawn.append(f"<title>{escape(part.hint)}</title></rect></g>")
            left += width
        if bar is not None and bar.low < bar.high:
            low, high = (min(value / widest, 1.0) * room for value in bar)
            path = (
                f"M{low:.1f} {top + 6} H{high:.1f} M{low:.1f} {top + 3} v6 M{high:.1f} {top + 3} v6"
            )
            drawn.append(f'<path class="error on-bar" d="{path}"/>')
            left = max(left, high)
        drawn.append(f'<text class="end" x="{left + 6:.1f}" y="{top + 10}">{escape(end)}</text>')
    return "".join([*drawn, "</svg>"])
