"""Light servers for the tests of the benchmarks: no torch, and no count of lines."""

from __future__ import annotations

import pytest

from benchmarks import servers


@pytest.fixture(autouse=True)
def light_servers(processes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start servers without torch, since these tests time nothing."""
    environment_of_user = servers.clean_environment
    monkeypatch.setattr(
        servers,
        "clean_environment",
        lambda: environment_of_user() | {"TSX_WORKER_PRELOAD": "false"},
    )
