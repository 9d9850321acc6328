"""A flame graph as one SVG, without scripts, from what cProfile has written: who called whom, each as wide as its time.

cProfile knows how long a function took for each of its callers, not for each way to them. Where a function has several callers, its time
under one of them is shared out to what it calls in proportion.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping
from pathlib import Path
from pstats import Stats
from typing import Any, NamedTuple, TypeAlias

WIDTH, ROW, LEFT, TOP = 1200.0, 18, 8, 34  # pixels
NARROWEST = 0.0008  # of the whole: what is less is left out
DEEPEST = 80
LETTER = 6.6  # pixels
COLORS = {"native": "#8fb3d9", "python": "#f0b27a", "own": "#e8836b"}  # built-in functions, modules, what lies in the model's directory

Function: TypeAlias = tuple[str, int, str]  # file, line, name


class Box(NamedTuple):
    """`start` and `share` are of the whole, `depth` from 0."""

    label: str
    where: str
    kind: str
    seconds: float
    start: float
    share: float
    depth: int


def boxes_of(profile: Path, own: Path | None = None) -> list[Box]:
    """`own` is the model's directory. Raises OSError, and ValueError where there is nothing in it."""
    try:
        stats: Mapping[Function, Any] = Stats(str(profile)).stats  # type: ignore[attr-defined]  # documented by its use only
    except (EOFError, TypeError, ValueError) as error:
        raise ValueError(f"{profile.name} is no profile of cProfile") from error
    called: dict[Function, list[tuple[Function, float]]] = {}
    for function, (_, _, _, _, callers) in stats.items():
        for caller, (_, _, _, seconds) in callers.items():
            called.setdefault(caller, []).append((function, seconds))
    roots = [(function, row[3]) for function, row in stats.items() if not row[4] and row[3] > 0]
    whole = sum(seconds for _, seconds in roots)
    if whole <= 0:
        raise ValueError(f"{profile.name} has no function in it")
    place, found = 0.0, list[Box]()
    for function, seconds in sorted(roots, key=lambda root: -root[1]):
        found += _below(function, seconds, place, 0, whole, stats, called, own, frozenset())
        place += seconds
    return found


def _below(
    function: Function,
    seconds: float,
    place: float,
    depth: int,
    whole: float,
    stats: Mapping[Function, Any],
    called: Mapping[Function, list[tuple[Function, float]]],
    own: Path | None,
    above: frozenset[Function],
) -> Iterator[Box]:
    if seconds < NARROWEST * whole or depth == DEEPEST:
        return
    yield Box(*_names(function, own), seconds, place / whole, seconds / whole, depth)
    inner = [(callee, spent) for callee, spent in called.get(function, ()) if callee not in above and callee != function]
    total = max(stats[function][3], sum(spent for _, spent in inner))
    if total <= 0:
        return
    for callee, spent in sorted(inner, key=lambda pair: -pair[1]):
        part = spent * seconds / total
        yield from _below(callee, part, place, depth + 1, whole, stats, called, own, above | {function})
        place += part


def _names(function: Function, own: Path | None) -> tuple[str, str, str]:
    file, line, name = function
    if file == "~":
        return name.removeprefix("<built-in method ").removeprefix("<method ").removesuffix(">"), "built in", "native"
    path = Path(file)
    kind = "own" if own is not None and own in path.parents else "python"
    return name, f"{path.parent.name}/{path.name}:{line}", kind


def svg_of(boxes: list[Box], title: str) -> str:
    height = TOP + ROW * (1 + max(box.depth for box in boxes)) + 26
    size = f"0 0 {WIDTH + 2 * LEFT:g} {height}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}" role="img" aria-label="{html.escape(title)}">',
        "<style>text{font:11px ui-monospace,monospace;fill:#222}.t{font-size:14px}rect.p{fill:#fff}"
        "@media(prefers-color-scheme:dark){rect.p{fill:#16181d}.t{fill:#ddd}}</style>",
        f'<rect class="p" width="100%" height="100%"/><text class="t" x="{LEFT}" y="22">{html.escape(title)}</text>',
    ]
    for box in boxes:
        x, width, y = LEFT + box.start * WIDTH, box.share * WIDTH, TOP + box.depth * ROW
        told = html.escape(f"{box.label} ({box.where}): {box.seconds:.3g} s, {box.share:.1%}")
        shown = int((width - 6) / LETTER)
        text = html.escape(box.label if len(box.label) <= shown else box.label[: max(0, shown - 2)] + "..") if shown > 3 else ""
        parts.append(
            f'<g><title>{told}</title><rect x="{x:.1f}" y="{y}" width="{max(0.4, width - 0.5):.1f}" height="{ROW - 1}" rx="2" '
            f'fill="{COLORS[box.kind]}"/>' + (f'<text x="{x + 3:.1f}" y="{y + 12}">{text}</text>' if text else "") + "</g>"
        )
    key = "red: the model's own files; orange: other Python; blue: built-in functions, torch's operations among them"
    return "\n".join([*parts, f'<text class="t" style="font-size:11px" x="{LEFT}" y="{height - 8}">{key}</text>', "</svg>", ""])
