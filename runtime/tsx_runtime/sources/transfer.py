"""The rules of a transfer, for all protocols."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from tsx_runtime.sources.urls import ModelUrl

CHUNK = 1 << 20


class Rules(NamedTuple):
    """The rules of one transfer. `check` raises where a URL, also that of a redirect, is not allowed."""

    check: Callable[[ModelUrl], None]
    private: bool  # whether addresses that are not public may be connected to
    most: int  # bytes
    headers: Mapping[str, str] = {}
    stopped: Callable[[], bool] = lambda: False
    pause: float = 0.5  # seconds before the second try; it doubles
    patience: float = 60.0  # seconds after which a transfer must have brought as much as a slow one would
