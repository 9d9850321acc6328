"""The benchmark record of an archive, as a server shows it: figures, configuration and machine."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any, NamedTuple

from tsx_runtime.core.placement.hardware import describe, hardware
from tsx_runtime.shared.log_format import rounded

FILE = "tsx-bench.json"  # in the archive
FORMAT = 1
LARGEST = 1 << 20  # bytes; more is not read
VARIANT = ("device", "precision", "compiled", "threads", "form")
_LONGEST = 200  # characters of a text

logger = logging.getLogger("tsx.server")


class BenchmarkRecord(NamedTuple):
    date: str  # 2026-11-21
    machine: str  # in words
    here: bool  # whether this machine computes alike
    configuration: str  # in words
    throughput: float  # accepted answers per second
    p99_ms: float
    slo: str | None  # the bounds that it was to keep
    curve: tuple[
        tuple[int, float], ...
    ] = ()  # of that configuration: sizes of batches and the seconds that one worker takes for them

    def __str__(self) -> str:
        bound = f" under {self.slo}" if self.slo else ""
        figures = (
            f"{rounded(self.throughput)} requests/s, p99 {rounded(self.p99_ms)} ms{bound}, with"
            f" {self.configuration}"
        )
        away = (
            ""
            if self.here
            else (
                "; this machine is different, so expect different figures (run `tsx bench` to"
                " measure here)"
            )
        )
        return f"measured {self.date} on {self.machine}: {figures}{away}"


def read_benchmark_record(directory: Path) -> BenchmarkRecord | None:
    """Of an unpacked archive.

    What cannot be read is logged and counts as absent: it came with the archive.
    """
    path = directory / FILE
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST + 1)
    except OSError:
        return None
    found = parse_measured(content)
    if found is None:
        logger.warning(
            "%s: %s is not a tsx bench measurement that this version can read; it is ignored",
            directory.name,
            FILE,
        )
    return found


def parse_measured(content: bytes) -> BenchmarkRecord | None:
    """None where it is none.

    The archive may come from anybody, so its texts are cut, and its numbers are looked at.
    """
    try:
        if len(content) > LARGEST:
            return None
        given = json.loads(content)
        if given["format"] != FORMAT:
            return None
        environment, best = given["environment"], given["best"]
        machine = describe(
            _text(environment["cpu"]),
            _number(environment["cores"]),
            tuple(map(_text, environment["gpus"]))[:16],
        )
        return BenchmarkRecord(
            _text(given["measured"])[:10],
            machine[:_LONGEST],
            environment["fingerprint"] == hardware().fingerprint,
            _text(best["describes"]),
            _number(best["throughput"]),
            _number(best["p99_ms"]),
            _text(given["slo"]) if given.get("slo") else None,
            _curve(given.get("curves") or [], best.get("configuration") or {}),
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def _curve(curves: list[Any], configuration: dict[str, Any]) -> tuple[tuple[int, float], ...]:
    """That of the configuration's variant of the model, if there is one."""
    for curve in curves:
        if all(curve.get(name) == configuration.get(name, curve.get(name)) for name in VARIANT):
            return tuple(
                (int(_number(point["batch_size"])), _number(point["median_ms"]) / 1000)
                for point in curve["points"][:_LONGEST]
            )
    return ()


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return "".join(char for char in value[:_LONGEST] if char.isprintable())


def _number(value: object) -> Any:
    if (
        not isinstance(value, (int, float))
        or isinstance(value, bool)
        or not math.isfinite(value)
        or value < 0
    ):
        raise TypeError(value)
    return value
