"""What tests of several rooms need."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import ExitStack

import pytest


@pytest.fixture(scope="session")
def free_ports() -> Callable[[int], list[int]]:
    """So many ports of loopback that nothing listens on."""

    def find(count: int) -> list[int]:
        with ExitStack() as held:
            sockets = [held.enter_context(socket.socket()) for _ in range(count)]
            for each in sockets:
                each.bind(("127.0.0.1", 0))
            return [each.getsockname()[1] for each in sockets]

    return find
