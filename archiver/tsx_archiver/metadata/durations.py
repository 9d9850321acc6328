"""Times as text, such as `10m`: in model-config.yaml, in settings and on the command line."""

from __future__ import annotations

import re
from collections.abc import Mapping

_NUMBER = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)\s*([A-Za-z]*)", re.ASCII)
_SECONDS = {"": 1.0, "us": 1e-6, "ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def parse_seconds(text: str) -> float:
    """A number without a unit is one of seconds. Raises ValueError."""
    return parse_quantity(text, _SECONDS, "it must be a number of seconds, or a string such as 30m, 12h or 7d")


def parse_quantity(text: str, units: Mapping[str, float], usage: str) -> float:
    found = _NUMBER.fullmatch(text.strip())
    if found is None or found[2].lower() not in units:
        raise ValueError(usage)
    return float(found[1]) * units[found[2].lower()]
