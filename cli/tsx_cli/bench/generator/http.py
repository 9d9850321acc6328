"""Connections of the generator over TCP, TLS and unix sockets."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Sequence
from contextlib import suppress

from tsx_cli.bench.generator.connection import LoadConnection
from tsx_cli.bench.generator.load import Connect, Load, LoadClient
from tsx_cli.bench.generator.plan import LoadPlan
from tsx_cli.bench.workload.protocols import read_target, render
from tsx_cli.common.server_address import trusting

PATIENCE = 10.0  # seconds to wait for a connection


def rendered(plan: LoadPlan) -> Sequence[bytes]:
    return [
        render(plan.protocol, plan.url, plan.model, payload, plan.token, version=plan.version)
        for payload in plan.payloads
    ]


def context_of(plan: LoadPlan, spoken: str) -> ssl.SSLContext:
    """Who is trusted, and which protocol is to be spoken.

    Raises OSError where the certificate is none.
    """
    trusted = trusting(plan.certificate)
    trusted.set_alpn_protocols([spoken])
    return trusted


def connector(plan: LoadPlan) -> Connect:
    place, loop = read_target(plan.url), asyncio.get_running_loop()
    trusted = context_of(plan, "http/1.1") if place.secure else None

    async def connect(load: Load) -> LoadClient:
        made: tuple[asyncio.BaseTransport, LoadConnection]
        if place.socket:
            opening = loop.create_unix_connection(lambda: LoadConnection(load), place.socket)
        else:
            opening = loop.create_connection(
                lambda: LoadConnection(load), place.host, place.port, ssl=trusted
            )
        try:
            made = await asyncio.wait_for(opening, PATIENCE)
        except asyncio.TimeoutError as error:
            raise OSError(f"no connection within {PATIENCE:g} seconds") from error
        raw = made[0].get_extra_info("socket")
        if not place.socket and raw is not None:
            with suppress(OSError):  # the server has closed it already
                raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return made[1]

    return connect
