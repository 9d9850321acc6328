"""The hosts in `Host` and `Origin`, and CORS.

Hosts are parsed strictly, because a lenient parser may take another host for loopback.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from tsx_runtime.api.headers import Pair
from tsx_runtime.api.messages import Message, Scope, Send
from tsx_runtime.errors import BadRequest
from tsx_runtime.settings.schema import Settings

_AUTHORITY = r"(?:\[([0-9A-Fa-f:.]{2,45})\]|([^\s/:\[\]@?#\\%\"<>^`{|}]+))(?::[0-9]{0,5})?"
_HOST = re.compile(_AUTHORITY)
_ORIGIN = re.compile(f"[A-Za-z][A-Za-z0-9+.-]*://{_AUTHORITY}")
_CORS = {
    "cors_allowed_origin": b"access-control-allow-origin",
    "cors_allowed_methods": b"access-control-allow-methods",
    "cors_allowed_headers": b"access-control-allow-headers",
}


def host_of(value: bytes) -> str | None:
    """Return the host of a `Host` header in lower case without port, or None if it is malformed."""
    return _host(_HOST, value)


def host_of_origin(value: bytes) -> str | None:
    """Return the host of an `Origin` header, or None for `null` or a malformed one."""
    return _host(_ORIGIN, value)


def has_one_host(headers: Iterable[Pair], version: str) -> bool:
    """Tell whether there is exactly one `Host` line (RFC 9112, 3.2); HTTP/1.0 may have none."""
    count = [name for name, _ in headers].count(b"host")
    return count == 1 or (count == 0 and version == "1.0")


def check_one_host(headers: Iterable[Pair], version: str) -> None:
    """Check that there is exactly one `Host` line; HTTP/1.0 may have none.

    Raises:
        BadRequest: `Host` is missing or repeated.
    """
    if not has_one_host(headers, version):
        raise BadRequest(
            f"A request of HTTP/{version} must have exactly one Host header (RFC 9112, 3.2). Send"
            " one."
        )


def _host(pattern: re.Pattern[str], value: bytes) -> str | None:
    match = pattern.fullmatch(value.decode("latin-1"))
    return (match[1] or match[2]).lower() if match else None


def cors_headers(settings: Settings) -> tuple[Pair, ...]:
    return tuple(
        (header, value.encode())
        for name, header in _CORS.items()
        if (value := getattr(settings, name))
    )


def missing_cors_headers(pairs: tuple[Pair, ...], cors: tuple[Pair, ...]) -> tuple[Pair, ...]:
    """Return the headers of `cors` that a response lacks, because browsers reject repeated ones."""
    if not cors:
        return ()
    names = {name for name, _ in pairs}
    return tuple(pair for pair in cors if pair[0] not in names)


def is_preflight(scope: Scope) -> bool:
    """Tell whether a request is a browser's preflight, which carries no token."""
    if scope["method"] != "OPTIONS":
        return False
    names = {name for name, _ in scope["headers"]}
    return b"origin" in names and b"access-control-request-method" in names


def with_cors_headers(send: Send, cors: tuple[Pair, ...]) -> Send:
    async def send_with_cors(message: Message) -> None:
        if message["type"] == "http.response.start":
            pairs = tuple(message["headers"])
            message["headers"] = [*pairs, *missing_cors_headers(pairs, cors)]
        await send(message)

    return send_with_cors
