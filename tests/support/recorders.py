"""Test doubles of packages for missing hardware, with their documented signatures."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

DOUBLES_DIRECTORY = Path(__file__).parent / "documented"


def documented(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield the double of this package, which can be imported until the test ends."""

    def forget() -> None:
        for module in [key for key in sys.modules if key.partition(".")[0] == name]:
            del sys.modules[module]

    forget()
    monkeypatch.syspath_prepend(str(DOUBLES_DIRECTORY))
    yield importlib.import_module(name)
    forget()
