"""Servers with models."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.runtime.conftest import RunningServer, make_settings, running_server


@contextlib.contextmanager
def a_server(
    store: Path, models: Mapping[str, str | Mapping[str, str]], **settings: Any
) -> Iterator[RunningServer]:
    """Serve each model by one worker; a model is its handler, or what `make_model` takes."""
    with running_server(make_settings(store, **settings)) as server:
        for name, model in models.items():
            parts = {"handler": model} if isinstance(model, str) else model
            server.write_mar(f"{name}.mar", **parts)
            server.register(f"{name}.mar", initial_workers=1)
        yield server
