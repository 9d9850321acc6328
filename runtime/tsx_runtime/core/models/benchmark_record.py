"""The benchmark record in an archive, as the server reads it: figures, settings and machine."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any, NamedTuple

from tsx_runtime.core.placement.hardware import describe, hardware
from tsx_runtime.shared.log_format import rounded

FILE = "tsx-bench.json"  # name of the file in the archive
FORMAT = 1
MAX_RECORD_BYTES = 1 << 20  # bytes; a larger file is ignored
VARIANT_KEYS = ("device", "precision", "compiled", "threads", "form")
_MAX_CHARS = 200  # length to which texts are cut

logger = logging.getLogger("tsx.server")


class BenchmarkRecord(NamedTuple):
    date: str  # 2026-11-21
    machine: str  # a description
    here: bool  # whether it was measured on hardware like this machine's
    configuration: str  # a description
    throughput: float  # accepted answers per second
    p99_ms: float
    slo: str | None  # the limits that the measurement had to meet
    # Batch sizes, each with a worker's median seconds per batch, in that configuration.
    curve: tuple[tuple[int, float], ...] = ()

    def __str__(self) -> str:
        slo_text = f" under {self.slo}" if self.slo else ""
        figures = (
            f"{rounded(self.throughput)} requests/s, p99 {rounded(self.p99_ms)} ms{slo_text}, with"
            f" {self.configuration}"
        )
        machine_note = (
            ""
            if self.here
            else (
                "; this machine is different, so expect different figures (run `tsx bench` to"
                " measure here)"
            )
        )
        return f"measured {self.date} on {self.machine}: {figures}{machine_note}"


def read_benchmark_record(directory: Path) -> BenchmarkRecord | None:
    """Return the record of an unpacked archive, or None.

    An unreadable record is logged and ignored, since the model can be served without it.
    """
    path = directory / FILE
    try:
        with path.open("rb") as file:
            content = file.read(MAX_RECORD_BYTES + 1)
    except OSError:
        return None
    record = parse_benchmark_record(content)
    if record is None:
        logger.warning(
            "%s: %s is not a tsx bench measurement that this version can read; it is ignored",
            directory.name,
            FILE,
        )
    return record


def parse_benchmark_record(content: bytes) -> BenchmarkRecord | None:
    """Parse a record, or return None for anything else.

    Anybody may have made the archive, so texts are cut and numbers are checked.
    """
    try:
        if len(content) > MAX_RECORD_BYTES:
            return None
        document = json.loads(content)
        if document["format"] != FORMAT:
            return None
        environment, best = document["environment"], document["best"]
        machine = describe(
            _text(environment["cpu"]),
            _number(environment["cores"]),
            tuple(map(_text, environment["gpus"]))[:16],
        )
        return BenchmarkRecord(
            _text(document["measured"])[:10],
            machine[:_MAX_CHARS],
            environment["fingerprint"] == hardware().fingerprint,
            _text(best["describes"]),
            _number(best["throughput"]),
            _number(best["p99_ms"]),
            _text(document["slo"]) if document.get("slo") else None,
            _curve(document.get("curves") or [], best.get("configuration") or {}),
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def _curve(curves: list[Any], configuration: dict[str, Any]) -> tuple[tuple[int, float], ...]:
    """Return the curve that was measured for the configuration's variant, or an empty one."""
    for curve in curves:
        if all(
            curve.get(name) == configuration.get(name, curve.get(name)) for name in VARIANT_KEYS
        ):
            return tuple(
                (int(_number(point["batch_size"])), _number(point["median_ms"]) / 1000)
                for point in curve["points"][:_MAX_CHARS]
            )
    return ()


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return "".join(char for char in value[:_MAX_CHARS] if char.isprintable())


def _number(value: object) -> Any:
    if (
        not isinstance(value, (int, float))
        or isinstance(value, bool)
        or not math.isfinite(value)
        or value < 0
    ):
        raise TypeError(value)
    return value
