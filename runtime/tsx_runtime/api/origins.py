"""Parses the host in `Host` and `Origin` strictly: a lenient parser may take another host for loopback."""

from __future__ import annotations

import re
from collections.abc import Iterable

from tsx_runtime.api.headers import Pair
from tsx_runtime.errors import BadRequest

_AUTHORITY = r"(?:\[([0-9A-Fa-f:.]{2,45})\]|([^\s/:\[\]@?#\\%\"<>^`{|}]+))(?::[0-9]{0,5})?"
_HOST = re.compile(_AUTHORITY)
_ORIGIN = re.compile(f"[A-Za-z][A-Za-z0-9+.-]*://{_AUTHORITY}")


def host_of(value: bytes) -> str | None:
    """The host of a `Host` header, in lower case, without port and brackets; None where the value is malformed."""
    return _host(_HOST, value)


def host_of_origin(value: bytes) -> str | None:
    """The same of an `Origin` header; None for `null` too."""
    return _host(_ORIGIN, value)


def names_one_host(headers: Iterable[Pair], version: str) -> bool:
    """RFC 9112, 3.2: one `Host` line; HTTP/1.0 may do without."""
    count = [name for name, _ in headers].count(b"host")
    return count == 1 or (count == 0 and version == "1.0")


def check_one_host(headers: Iterable[Pair], version: str) -> None:
    """Raises BadRequest."""
    if not names_one_host(headers, version):
        raise BadRequest(f"A request of HTTP/{version} must have exactly one Host header (RFC 9112, 3.2). Send one.")


def _host(pattern: re.Pattern[str], value: bytes) -> str | None:
    found = pattern.fullmatch(value.decode("latin-1"))
    return (found[1] or found[2]).lower() if found else None
