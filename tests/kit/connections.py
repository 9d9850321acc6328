"""Raw connections to a server of the tests."""

from __future__ import annotations

import httpx

from tests.runtime.conftest import RunningServer
from tests.support.clients.rawhttp import RawConnection


def connect_raw(server: RunningServer, role: str = "inference") -> RawConnection:
    """Open a connection that lets the server read what was sent before it sends more."""
    url = httpx.URL(server.addresses[role])
    return RawConnection((url.host, url.port or 0), lambda: server.call(lambda: None))
