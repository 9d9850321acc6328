"""Doubles of packages for hardware that this machine lacks, with the documented signatures."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PLACE = Path(__file__).parent / "documented"


def documented(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield the module of this name, importable until the test ends."""

    def forget() -> None:
        for module in [key for key in sys.modules if key.partition(".")[0] == name]:
            del sys.modules[module]

    forget()
    monkeypatch.syspath_prepend(str(PLACE))
    yield importlib.import_module(name)
    forget()
