"""Quantities as text: a time such as `10m`, a size such as `100MB`, a fraction such as `20%`.

All parsers raise ValueError for other text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

_NUMBER = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)\s*([A-Za-z]*)", re.ASCII)
_SECONDS = {
    "": 1.0,
    "us": 1e-6,
    "ms": 0.001,
    "s": 1.0,
    "m": 60.0,
    "min": 60.0,
    "h": 3600.0,
    "d": 86400.0,
}
_POWERS = {"": 0, "b": 0, "k": 1, "kb": 1, "m": 2, "mb": 2, "g": 3, "gb": 3, "t": 4, "tb": 4}


def parse_seconds(text: str) -> float:
    """Parse a time; a number without a unit is in seconds."""
    return _parse(
        text, _SECONDS, "it must be a number of seconds, or a string such as 30m, 12h or 7d"
    )


def parse_bytes(text: str, *, kilo: int = 1000) -> int:
    """Parse a size; `kilo` is the factor of kB, and KiB always means 1024."""
    sizes = {unit: kilo**power for unit, power in _POWERS.items()}
    sizes |= {f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)}
    return int(
        _parse(text, sizes, "it must be a number of bytes, or a string such as 100MB or 2GB")
    )


def parse_percent(text: str) -> float:
    """Parse a percentage: 20 for `20%` and `20`."""
    number = text.strip().removesuffix("%").rstrip()
    try:
        return int(number) if number.isdecimal() else _finite(number)
    except ValueError:
        raise ValueError("it must be a percentage such as 10%") from None


def parse_share(text: str) -> float:
    """Parse a fraction: 0.2 for `20%` and `0.2`."""
    try:
        return parse_percent(text) / 100 if text.strip().endswith("%") else _finite(text)
    except ValueError:
        raise ValueError("it must be a share such as 5% or 0.05") from None


def for_text(parse: Callable[[str], Any]) -> Callable[[Any], Any]:
    """Return a validator that parses text only, for pydantic fields that also take numbers."""
    return lambda value: parse(value) if isinstance(value, str) else value


def _parse(text: str, units: Mapping[str, float], usage: str) -> float:
    match = _NUMBER.fullmatch(text.strip())
    if match is None or match[2].lower() not in units:
        raise ValueError(usage)
    return float(match[1]) * units[match[2].lower()]


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number
