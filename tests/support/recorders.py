"""Stands in for packages of hardware that this machine lacks: modules of `documented` with exactly
the documented signatures.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PLACE = Path(__file__).parent / "documented"


def documented(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, importable until the test ends."""

    def forget() -> None:
        for each in [each for each in sys.modules if each.partition(".")[0] == name]:
            del sys.modules[each]

    forget()
    monkeypatch.syspath_prepend(str(PLACE))
    yield importlib.import_module(name)
    forget()
