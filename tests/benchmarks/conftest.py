"""Servers without torch for the tests of the benchmarks."""

from __future__ import annotations

import pytest

from benchmarks import servers


@pytest.fixture(autouse=True)
def light_servers(processes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start servers without torch, since these tests time nothing."""
    clean_environment = servers.clean_environment
    monkeypatch.setattr(
        servers,
        "clean_environment",
        lambda: clean_environment() | {"TSX_WORKER_PRELOAD": "false"},
    )
