"""The checks of a request before it is routed: limits per client, `Host`, headers, and CORS."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from tsx_runtime.api.access.client_limits import (
    REFUSAL_DELAY_S,
    Caller,
    ClientLimits,
    client_limits,
    current_caller,
)
from tsx_runtime.api.access.origins import (
    check_one_host,
    cors_headers,
    is_preflight,
    with_cors_headers,
)
from tsx_runtime.api.headers import check_distinct
from tsx_runtime.api.messages import Message, Scope, Send
from tsx_runtime.api.urls import HEALTH_PATHS
from tsx_runtime.errors import TooManyRequests
from tsx_runtime.settings.addresses import parse_address
from tsx_runtime.settings.schema import Settings

# Probes and Prometheus request these paths, so they have no limit per client.
UNLIMITED_PATHS = frozenset({"/ping", "/livez", "/readyz", "/metrics", *HEALTH_PATHS})


class HttpAdmission:
    """The checks of the requests of one listener."""

    def __init__(self, settings: Settings, roles: Collection[str]) -> None:
        # It is None if no client is limited.
        self.clients = client_limits(
            settings,
            is_local=all(
                parse_address(getattr(settings, f"{role}_address")).is_local for role in roles
            ),
        )
        self.cors = cors_headers(settings)

    async def __call__(self, scope: Scope, send: Send) -> Send:
        """Check a request, and return the `send` for its response.

        Raises:
            TooManyRequests: The client has sent too many requests.
            BadRequest: `Host` is missing or repeated, or names of headers clash.
        """
        if self.clients is not None and scope.get("client"):
            send = await apply_client_limits(self.clients, scope, send)
        # On Lambda, AWS has parsed the request's head, and may have left out `Host`.
        if "aws.event" not in scope:
            check_one_host(scope["headers"], scope["http_version"])
        check_distinct(scope["headers"])
        return send

    def with_cors(self, send: Send) -> Send:
        """Return a `send` that adds the headers of CORS, if they are configured."""
        return with_cors_headers(send, self.cors) if self.cors else send

    def is_preflight(self, scope: Scope) -> bool:
        """Tell whether a request only asks for the headers of CORS."""
        return bool(self.cors) and is_preflight(scope)


async def apply_client_limits(limits: ClientLimits, scope: Scope, send: Send) -> Send:
    """Count a request, and return a `send` that delays the response to a wrong token.

    Raises:
        TooManyRequests: The client has sent too many requests; this is raised with a delay.
    """
    caller = Caller(limits, limits.caller(scope["client"][0], scope["headers"]))
    current_caller.set(caller)  # set only in the context of the request's task
    if scope["path"] not in UNLIMITED_PATHS:
        try:
            limits.count_request(caller.client)
        except TooManyRequests:
            await asyncio.sleep(REFUSAL_DELAY_S)
            raise

    async def delayed_send(message: Message) -> None:
        if caller.delay_s:
            await asyncio.sleep(caller.delay_s)
            caller.delay_s = 0.0
        await send(message)

    return delayed_send
