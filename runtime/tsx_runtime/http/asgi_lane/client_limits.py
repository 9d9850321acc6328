"""Limits per client on the ASGI lane: the same limits and answers as `limited_lane.py` has for the fast lane."""

from __future__ import annotations

import asyncio

from tsx_runtime.api.client_limits import HOLD, Caller, ClientLimits, calling
from tsx_runtime.errors import TooManyRequests
from tsx_runtime.http.routes import kserve
from tsx_runtime.http.semantics.messages import Message, Scope, Send

UNLIMITED = frozenset({"/ping", "/livez", "/readyz", "/metrics", *kserve.HEALTH})  # what probes and Prometheus ask


async def limited(limits: ClientLimits, scope: Scope, send: Send) -> Send:
    """Count the request. Returns the `send` that holds answers to wrong tokens back. Raises TooManyRequests, after a while."""
    caller = Caller(limits, limits.caller(scope["client"][0], scope["headers"]))
    calling.set(caller)  # of the request's own task
    if scope["path"] not in UNLIMITED:
        try:
            limits.count_request(caller.client)
        except TooManyRequests:
            await asyncio.sleep(HOLD)
            raise

    async def held(message: Message) -> None:
        if caller.hold:
            await asyncio.sleep(caller.hold)
            caller.hold = 0.0
        await send(message)

    return held
