"""Random circuit diagrams with the box of each symbol, for training and measuring the detector.

    python examples/detector/drawings.py FOLDER

writes ten of the held-out ones, and their contents.
"""

import json
import math
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from PIL import Image, ImageDraw, ImageFont

SIZE = 384  # pixels of a side
FINE = 2  # factor of the drawn size; shrinking the drawing softens its edges
HELD_OUT_SEED = 1_000_000  # drawings from here on are never trained on

Point = tuple[float, float]
Stroke = list[Point]


class PlacedSymbol(NamedTuple):
    """A symbol's class and its box in pixels: left, top, right, bottom."""

    label: int
    box: tuple[float, float, float, float]


class Drawing(NamedTuple):
    image: Image.Image  # grey, dark ink on light paper
    symbols: list[PlacedSymbol]


class Symbol(NamedTuple):
    strokes: list[Stroke]  # coordinates in -1..1; wires come from left and right at y = 0
    terminals: list[Point]


def arc(x: float, y: float, radius: float, start: float = 0, end: float = 360) -> Stroke:
    """Return a circular arc; angles are in degrees, clockwise on the page."""
    steps = max(8, int(abs(end - start) / 15))
    angles = [math.radians(start + (end - start) * step / steps) for step in range(steps + 1)]
    return [(x + radius * math.cos(angle), y + radius * math.sin(angle)) for angle in angles]


def resistor(chance: random.Random) -> Symbol:
    if chance.random() < 0.5:
        strokes = [[(-1, -0.35), (1, -0.35), (1, 0.35), (-1, 0.35), (-1, -0.35)]]
    else:
        peaks = [(-0.75 + 0.3 * step, 0.35 if step % 2 else -0.35) for step in range(6)]
        strokes = [[(-1, 0), *peaks, (1, 0)]]
    return Symbol(strokes, [(-1, 0), (1, 0)])


def capacitor(chance: random.Random) -> Symbol:
    gap, plate = chance.uniform(0.15, 0.25), chance.uniform(0.6, 0.8)
    plates = [[(side * gap, -plate), (side * gap, plate)] for side in (-1, 1)]
    return Symbol([*plates, [(-1, 0), (-gap, 0)], [(gap, 0), (1, 0)]], [(-1, 0), (1, 0)])


def coil(chance: random.Random) -> Symbol:
    turns = chance.choice((3, 4))
    radius = 1 / turns
    return Symbol(
        [arc(-1 + radius * (2 * turn + 1), 0, radius, 180, 360) for turn in range(turns)],
        [(-1, 0), (1, 0)],
    )


def diode(chance: random.Random) -> Symbol:
    half = chance.uniform(0.5, 0.65)
    triangle = [(-half, -half), (half, 0), (-half, half), (-half, -half)]
    return Symbol(
        [triangle, [(half, -half), (half, half)], [(-1, 0), (-half, 0)], [(half, 0), (1, 0)]],
        [(-1, 0), (1, 0)],
    )


def lamp(chance: random.Random) -> Symbol:
    cross = math.sqrt(0.5)
    return Symbol(
        [arc(0, 0, 1), [(-cross, -cross), (cross, cross)], [(-cross, cross), (cross, -cross)]],
        [(-1, 0), (1, 0)],
    )


def source(chance: random.Random) -> Symbol:
    wave = [(step / 20, -0.35 * math.sin(math.pi * step / 10)) for step in range(-10, 11)]
    return Symbol([arc(0, 0, 1), wave], [(-1, 0), (1, 0)])


def switch(chance: random.Random) -> Symbol:
    lift = chance.uniform(0.45, 0.75)
    return Symbol(
        [
            arc(-0.55, 0, 0.12),
            arc(0.55, 0, 0.12),
            [(-0.5, -0.1), (0.5, -lift)],
            [(-1, 0), (-0.67, 0)],
            [(0.67, 0), (1, 0)],
        ],
        [(-1, 0), (1, 0)],
    )


def ground(chance: random.Random) -> Symbol:
    bars = [
        [(0.1 + 0.3 * step, -0.7 + 0.25 * step), (0.1 + 0.3 * step, 0.7 - 0.25 * step)]
        for step in range(3)
    ]
    return Symbol([[(-0.6, 0), (0.1, 0)], *bars], [(-0.6, 0)])


KINDS: dict[str, Callable[[random.Random], Symbol]] = {
    "resistor": resistor,
    "capacitor": capacitor,
    "coil": coil,
    "diode": diode,
    "lamp": lamp,
    "source": source,
    "switch": switch,
    "ground": ground,
}
NAMES = list(KINDS)


def draw(seed: int, size: int = SIZE) -> Drawing:
    """Draw the diagram of a seed: symbols that do not touch, wires and marks."""
    chance = random.Random(seed)
    paper, ink = chance.randint(228, 255), chance.randint(0, 80)
    width = chance.randint(3, 5)
    image = Image.new("L", (size * FINE, size * FINE), paper)
    pen = ImageDraw.Draw(image)
    placed = layout(chance, size)
    draw_wires(
        pen, chance, [terminal for _, symbol in placed for terminal in symbol.terminals], ink, width
    )
    placed_symbols = []
    for label, symbol in placed:
        box = bounds(symbol.strokes)
        pen.rectangle(fine(box), fill=paper)  # Wires pass under a symbol.
        for stroke in symbol.strokes:
            pen.line(
                [(x * FINE, y * FINE) for x, y in stroke], fill=ink, width=width, joint="curve"
            )
        if chance.random() < 0.5:
            pen.text(
                (box[0] * FINE, (box[3] + 3) * FINE),
                mark(chance),
                fill=ink,
                font=ImageFont.load_default(10 * FINE),
            )
        placed_symbols.append(PlacedSymbol(label, box))
    return Drawing(image.resize((size, size), Image.Resampling.BOX), placed_symbols)


def layout(chance: random.Random, size: int) -> list[tuple[int, Symbol]]:
    """Place up to twelve random symbols that do not touch, of random class, rotation and size."""
    placed: list[tuple[int, Symbol]] = []
    taken: list[tuple[float, ...]] = []
    most = max(3, round(chance.randint(6, 12) * (size / SIZE) ** 2))
    for _ in range(most * 4):
        label = chance.randrange(len(NAMES))
        symbol = turned(KINDS[NAMES[label]](chance), chance.randrange(4), chance.uniform(15, 30))
        left, top, right, bottom = bounds(symbol.strokes)
        x, y = (
            chance.uniform(4 - left, size - 4 - right),
            chance.uniform(4 - top, size - 4 - bottom),
        )
        room = (left + x - 8, top + y - 8, right + x + 8, bottom + y + 8)
        if all(
            room[2] < box[0] or box[2] < room[0] or room[3] < box[1] or box[3] < room[1]
            for box in taken
        ):
            taken.append(room)
            placed.append((label, moved(symbol, x, y)))
        if len(placed) == most:
            break
    return placed


def turned(symbol: Symbol, quarters: int, scale: float) -> Symbol:
    cos, sin = ((1, 0), (0, 1), (-1, 0), (0, -1))[quarters]
    return changed(
        symbol,
        lambda point: (
            scale * (cos * point[0] - sin * point[1]),
            scale * (sin * point[0] + cos * point[1]),
        ),
    )


def moved(symbol: Symbol, x: float, y: float) -> Symbol:
    return changed(symbol, lambda point: (point[0] + x, point[1] + y))


def changed(symbol: Symbol, change: Callable[[Point], Point]) -> Symbol:
    return Symbol(
        [[change(point) for point in stroke] for stroke in symbol.strokes],
        [change(point) for point in symbol.terminals],
    )


def bounds(strokes: Sequence[Stroke]) -> tuple[float, float, float, float]:
    across, down = zip(*(point for stroke in strokes for point in stroke), strict=True)
    return min(across), min(down), max(across), max(down)


def fine(box: Sequence[float]) -> list[float]:
    return [side * FINE for side in box]


def draw_wires(
    pen: ImageDraw.ImageDraw, chance: random.Random, terminals: list[Point], ink: int, width: int
) -> None:
    """Draw wires between random terminals, each with one corner, some with a dot."""
    ends = terminals[:]
    chance.shuffle(ends)
    for (x, y), (to_x, to_y) in zip(ends[::2], ends[1::2], strict=False):
        corner = (to_x, y) if chance.random() < 0.5 else (x, to_y)
        pen.line(
            [tuple(value * FINE for value in point) for point in ((x, y), corner, (to_x, to_y))],
            fill=ink,
            width=width,
        )
        if chance.random() < 0.2:
            pen.ellipse(
                fine((corner[0] - 3, corner[1] - 3, corner[0] + 3, corner[1] + 3)), fill=ink
            )


def mark(chance: random.Random) -> str:
    return f"{chance.choice('RCLDSQ')}{chance.randint(1, 40)}"


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(10):
        drawing = draw(HELD_OUT_SEED + number)
        drawing.image.save(folder / f"{number}.png", optimize=True)
        contents = [
            {NAMES[symbol.label]: [round(side, 1) for side in symbol.box]}
            for symbol in drawing.symbols
        ]
        (folder / f"{number}.json").write_text(json.dumps(contents) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
