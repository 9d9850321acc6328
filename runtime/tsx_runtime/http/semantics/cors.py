"""CORS: the three `cors_allowed_...` settings on every answer, and preflight requests."""

from __future__ import annotations

from tsx_runtime.api.headers import Pair
from tsx_runtime.http.semantics.messages import Message, Scope, Send
from tsx_runtime.settings.schema import Settings

_HEADERS = {
    "cors_allowed_origin": b"access-control-allow-origin",
    "cors_allowed_methods": b"access-control-allow-methods",
    "cors_allowed_headers": b"access-control-allow-headers",
}


def cors_headers(settings: Settings) -> tuple[Pair, ...]:
    return tuple((header, value.encode()) for name, header in _HEADERS.items() if (value := getattr(settings, name)))


def missing(pairs: tuple[Pair, ...], cors: tuple[Pair, ...]) -> tuple[Pair, ...]:
    """Of `cors`, what the answer does not say itself: a browser takes none that is there twice."""
    if not cors:
        return ()
    own = {name for name, _ in pairs}
    return tuple(pair for pair in cors if pair[0] not in own)


def is_preflight(scope: Scope) -> bool:
    """A browser's question before the request itself; it carries no token."""
    if scope["method"] != "OPTIONS":
        return False
    names = {name for name, _ in scope["headers"]}
    return b"origin" in names and b"access-control-request-method" in names


def adding(send: Send, cors: tuple[Pair, ...]) -> Send:
    async def added(message: Message) -> None:
        if message["type"] == "http.response.start":
            pairs = tuple(message["headers"])
            message["headers"] = [*pairs, *missing(pairs, cors)]
        await send(message)

    return added
