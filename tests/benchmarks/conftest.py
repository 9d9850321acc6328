"""The servers of these tests answer what needs no torch, and other tests count their lines."""

from __future__ import annotations

import pytest

from benchmarks import servers


@pytest.fixture(autouse=True)
def light_servers(processes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured is started as it is at anybody's; here only that it can be measured."""
    own = servers.clean_environment
    monkeypatch.setattr(
        servers, "clean_environment", lambda: own() | {"TSX_WORKER_PRELOAD": "false"}
    )
