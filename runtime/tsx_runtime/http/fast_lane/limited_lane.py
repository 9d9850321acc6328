"""The fast lane of a listener with limits per client (see `client_limits.py`).

Other listeners do not use it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from tsx_runtime.api.access.client_limits import HOLD, Client, ClientLimits
from tsx_runtime.core.scheduling.job import Route
from tsx_runtime.errors import InvalidToken, TooManyRequests
from tsx_runtime.http.fast_lane.heads import Head, RefusalRoute
from tsx_runtime.http.fast_lane.protocol import FastLane
from tsx_runtime.wire import Body

if TYPE_CHECKING:
    from uvicorn.config import Config
    from uvicorn.server import ServerState


class LimitedLane(FastLane):
    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        limits = self.lane.clients
        assert limits is not None
        self._limits: ClientLimits = limits
        self._peer: Client | None = (
            None  # None: a unix socket, or a proxy, whose requests are many clients'
        )
        self._is_proxy = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        if self.client is None:
            return
        self._is_proxy = self._limits.is_proxy(self.client[0])
        if self._is_proxy:
            return
        try:
            self._peer = self._limits.connect(self.client[0])
        except TooManyRequests as error:
            self._give_up(error)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._peer is not None:
            self._limits.disconnect(self._peer)
            self._peer = None
        super().connection_lost(exc)

    def _submit(self, head: Head, route: Route, body: Body) -> None:
        client = self._peer
        if self._is_proxy and self.client is not None:
            client = self._limits.caller(self.client[0], head.headers)
        if client is not None:
            route = self._allowed(client, route)
        super()._submit(head, route, body)

    def _allowed(self, client: Client, route: Route) -> Route:
        """Where the request goes to: a refusal where its client has sent too many."""
        try:
            self._limits.count_request(client)
            if (
                isinstance(route, RefusalRoute)
                and isinstance(route.error, InvalidToken)
                and route.error.given
            ):
                self._limits.count_failure(client)
        except TooManyRequests as error:
            return RefusalRoute(error, HOLD)
        return route
