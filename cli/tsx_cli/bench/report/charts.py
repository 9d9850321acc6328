"""Charts as SVG, without a library: lines and stacked bars in the colours of the page's theme."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 480, 300
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 12, 40
BAR_ROW_HEIGHT = 38  # height of a stacked bar and its name
GAP = 1.5  # space between the segments of a bar
MIN_DRAWN = 1e-9  # smallest value that is drawn
ERROR_CAP = 3.0  # half the length of an error bar's ends
# Extent of an axis for error bars, in multiples of the largest value; longer bars are cut off.
ERROR_BAR_ROOM = 1.4
MAX_LOG_RATIO = 1e6  # ratio of a logarithmic axis's ends; smaller values are drawn at its low end
LOG_RATIO = 5.0  # For a larger ratio of latencies, the axis is logarithmic.


class Axis(NamedTuple):
    label: str
    low: float
    high: float
    log: bool = False
    ticks: Sequence[tuple[float, str]] | None = None  # None: chosen by `ticks`


class Interval(NamedTuple):
    """A confidence interval; it is drawn as an error bar unless it is empty."""

    low: float
    high: float


class ChartMark(NamedTuple):
    x: float
    y: float
    hint: str
    hollow: bool = False
    x_interval: Interval | None = None
    y_interval: Interval | None = None
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
    """A marked section of the horizontal axis, such as a warm-up; `style` is a CSS class."""

    low: float
    high: float
    style: str
    hint: str


class Series(NamedTuple):
    """A line of marks; `style` is a CSS class: winner, baseline, s2 ..., other."""

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
    """Return an axis for values that are not negative.

    If `log` is None, the axis is logarithmic if the values differ by a factor of more than 20.
    Error bars (`bars`) extend it by at most `ERROR_BAR_ROOM`: the interval of two different rounds
    may be many times larger than their figures.
    """
    drawn_values = [value for value in values if value > MIN_DRAWN and math.isfinite(value)] or [
        1.0
    ]
    high = max(drawn_values)
    lowest = min(drawn_values)
    drawn_values += [
        min(bar.high, ERROR_BAR_ROOM * high)
        for bar in bars
        if bar is not None and math.isfinite(bar.high)
    ]
    drawn_values += [max(bar.low, lowest / ERROR_BAR_ROOM) for bar in bars if bar is not None]
    high = max(drawn_values)
    low = max(min(drawn_values), high / MAX_LOG_RATIO)
    if log if log is not None else high > 20 * low:
        return Axis(label, low / 1.15, high * 1.15, log=True)
    return Axis(label, 0.0, high * 1.06 or 1.0)


def latency_axis(
    label: str, marks: Sequence[ChartMark], extra_values: Sequence[float] = ()
) -> Axis:
    """Return the axis for marks and for other values such as bounds."""
    heights = [value for value in (*(mark.y for mark in marks), *extra_values) if value > 0]
    return axis(
        label,
        heights,
        log=bool(heights) and max(heights) > LOG_RATIO * min(heights),
        bars=[mark.y_interval for mark in marks],
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


def _fraction(value: float, scale: Axis) -> float:
    """Return the position of a value on the axis, from 0 to 1."""
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
    """Return the SVG of a chart; later series are drawn above earlier ones."""
    parts = [
        _svg_start(title, height),
        *(_axis_span(span, x, height) for span in spans),
        _axes(x, y, height),
    ]
    for rule in rules:
        parts.append(_reference_line(rule, y, height))
    for line in series:
        positions = [(_x_px(mark.x, x), _y_px(mark.y, y, height), mark) for mark in line.marks]
        path = " ".join(
            f"{'L' if index else 'M'}{x_px:.1f} {y_px:.1f}"
            for index, (x_px, y_px, _) in enumerate(positions)
        )
        elements = []
        if line.joined and len(positions) > 1:
            elements.append(f'<path class="line" d="{path}"/>')
        elements += [_error_bar(x_px, y_px, mark, x, y, height) for x_px, y_px, mark in positions]
        if line.dots or (line.joined and len(positions) == 1):
            elements += [_dot(x_px, y_px, mark, line) for x_px, y_px, mark in positions]
        parts.append(f'<g class="{line.style}">{"".join(elements)}</g>')
    return "".join([*parts, "</svg>"])


def _svg_start(title: str, height: float) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(title)}">'


def _x_px(value: float, scale: Axis) -> float:
    return LEFT + _fraction(value, scale) * (WIDTH - LEFT - RIGHT)


def _y_px(value: float, scale: Axis, height: float) -> float:
    return height - BOTTOM - _fraction(value, scale) * (height - TOP - BOTTOM)


def _axes(x: Axis, y: Axis, height: float) -> str:
    base_y, parts = height - BOTTOM, []
    for value, text in ticks(y):
        y_px = _y_px(value, y, height)
        parts.append(f'<path class="grid" d="M{LEFT} {y_px:.1f} H{WIDTH - RIGHT}"/>')
        parts.append(
            f'<text x="{LEFT - 7}" y="{y_px + 4:.1f}" text-anchor="end">{escape(text)}</text>'
        )
    last_x = -100.0
    for value, text in ticks(x):
        x_px = _x_px(value, x)
        if x_px - last_x < 6.2 * len(text) + 8:
            continue
        last_x = x_px
        parts.append(f'<path class="grid" d="M{x_px:.1f} {base_y} v5"/>')
        parts.append(
            f'<text x="{x_px:.1f}" y="{base_y + 18}" text-anchor="middle">{escape(text)}</text>'
        )
    parts.append(f'<path class="base" d="M{LEFT} {base_y} H{WIDTH - RIGHT}"/>')
    parts.append(
        f'<text class="label" x="{WIDTH - RIGHT}" y="{height - 5}"'
        f' text-anchor="end">{escape(x.label)}</text>'
    )
    middle = (TOP + base_y) / 2
    parts.append(
        f'<text class="label" transform="translate(12 {middle:g}) rotate(-90)"'
        f' text-anchor="middle">{escape(y.label)}</text>'
    )
    return "".join(parts)


def _axis_span(span: AxisSpan, x: Axis, height: float) -> str:
    start_x, end_x = (_x_px(min(max(end, x.low), x.high), x) for end in (span.low, span.high))
    return (
        f'<rect class="span {span.style}" x="{start_x:.1f}" y="{TOP}"'
        f' width="{max(0.0, end_x - start_x):.1f}"'
        f' height="{height - BOTTOM - TOP:g}"><title>{escape(span.hint)}</title></rect>'
    )


def _error_bar(x_px: float, y_px: float, mark: ChartMark, x: Axis, y: Axis, height: float) -> str:
    path = ""
    if mark.x_interval is not None and mark.x_interval.low < mark.x_interval.high:
        low, high = (_x_px(min(max(end, x.low), x.high), x) for end in mark.x_interval)
        path += f"M{low:.1f} {y_px:.1f} H{high:.1f} " + "".join(
            f"M{end:.1f} {y_px - ERROR_CAP:.1f} v{2 * ERROR_CAP:g} " for end in (low, high)
        )
    if mark.y_interval is not None and mark.y_interval.low < mark.y_interval.high:
        low, high = (_y_px(min(max(end, y.low), y.high), y, height) for end in mark.y_interval)
        path += f"M{x_px:.1f} {low:.1f} V{high:.1f} " + "".join(
            f"M{x_px - ERROR_CAP:.1f} {end:.1f} h{2 * ERROR_CAP:g} " for end in (low, high)
        )
    return f'<path class="error" d="{path.strip()}"/>' if path else ""


def _reference_line(rule: ReferenceLine, y: Axis, height: float) -> str:
    if not y.low <= rule.y <= y.high:
        return ""
    y_px = _y_px(rule.y, y, height)
    text = f'<text class="bound" x="{LEFT + 6}" y="{y_px - 6:.1f}">{escape(rule.label)}</text>'
    return f'<path class="bound" d="M{LEFT} {y_px:.1f} H{WIDTH - RIGHT}"/>{text}'


def _dot(x_px: float, y_px: float, mark: ChartMark, series: Series) -> str:
    hollow = (" hollow" if mark.hollow else "") + (" faint" if mark.faint else "")
    size = 5.0 if series.style == "winner" else 4.0
    hint = f"<title>{escape(mark.hint)}</title>"
    if series.style == "baseline":
        side = size * 1.8
        return (
            f'<rect class="dot{hollow}" x="{x_px - side / 2:.1f}" y="{y_px - side / 2:.1f}"'
            f' width="{side:g}" height="{side:g}">{hint}</rect>'
        )
    return (
        f'<circle class="dot{hollow}" cx="{x_px:.1f}" cy="{y_px:.1f}" r="{size:g}">{hint}</circle>'
    )


class BarSegment(NamedTuple):
    value: float
    style: str
    hint: str


def stacked(
    title: str, rows: Sequence[tuple[str, str, Sequence[BarSegment], Interval | None]]
) -> str:
    """Return the SVG of stacked bars on one scale that begins at 0.

    Each row has a name, a text at the end of the bar, the segments, and the interval of the bar's
    length.
    """
    longest_bar = max((sum(part.value for part in parts) for _, _, parts, _ in rows), default=0.0)
    full_scale = (
        axis("", [longest_bar], bars=[bar for *_, bar in rows], log=False).high / 1.06
        if longest_bar
        else 1.0
    )
    height = BAR_ROW_HEIGHT * len(rows) + 6
    drawn = [_svg_start(title, height)]
    width_px = WIDTH - 74
    for index, (name, end, parts, bar) in enumerate(rows):
        y_px, end_x = index * BAR_ROW_HEIGHT + 20, 0.0
        drawn.append(f'<text class="name" x="0" y="{y_px - 6}">{escape(name)}</text>')
        for part in parts:
            part_width = part.value / full_scale * width_px
            if part_width > 0.3:
                drawn_width = max(0.4, part_width - GAP)
                drawn.append(
                    f'<g class="{part.style}"><rect class="bar" x="{end_x:.1f}" y="{y_px}"'
                    f' width="{drawn_width:.1f}" height="12">'
                )
                drawn.append(f"<title>{escape(part.hint)}</title></rect></g>")
            end_x += part_width
        if bar is not None and bar.low < bar.high:
            low, high = (min(value / full_scale, 1.0) * width_px for value in bar)
            path = f"M{low:.1f} {y_px + 6} H{high:.1f}" + "".join(
                f" M{x_px:.1f} {y_px + 3} v6" for x_px in (low, high)
            )
            drawn.append(f'<path class="error on-bar" d="{path}"/>')
            end_x = max(end_x, high)
        drawn.append(f'<text class="end" x="{end_x + 6:.1f}" y="{y_px + 10}">{escape(end)}</text>')
    return "".join([*drawn, "</svg>"])
