"""Rules for headers of HTTP and gRPC: what handlers read and set, confinement, request ids."""

from __future__ import annotations

import itertools
import re
import uuid
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from typing import TypeAlias

from tsx_runtime.core.hidden_credentials import tenant_header
from tsx_runtime.errors import BadRequest, PredictionFailed
from tsx_runtime.wire import SPAN_HEADER, TENANT_HEADER

_process_uuid = str(uuid.uuid4())
_PROCESS_PART = _process_uuid[:24].encode()
_count = itertools.count(
    int(_process_uuid[24:], 16) >> 1
)  # starts in the lower half of the numbers, so that it cannot overflow
Pair: TypeAlias = tuple[bytes, bytes]
NO_CACHE: tuple[Pair, ...] = (
    (b"pragma", b"no-cache"),
    (b"cache-control", b"no-cache; no-store, must-revalidate, private"),
    (b"expires", b"Thu, 01 Jan 1970 00:00:00 UTC"),
)


JSON: Pair = (b"content-type", b"application/json")
# Headers of servers, proxies and credentials. Handlers do not see a spelling with "_" for "-".
_RESERVED = frozenset(
    b"proxy-authorization content-type content-length transfer-encoding x-request-id x-real-ip".split()
)
_FRAMING = frozenset(
    (b"content-length", b"transfer-encoding", b"connection", b"keep-alive", b"upgrade", b"trailer")
)
_SERVER_HEADERS = {*_FRAMING, b"x-request-id", SPAN_HEADER.encode()}
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_NOT_IN_VALUE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")


def clashing_names(headers: Iterable[Pair]) -> list[str]:
    """Return names that differ only in "_" and "-", because WSGI and CGI do not tell them apart."""
    names = {name for name, _ in headers}
    if not any(b"_" in name for name in names):
        return []
    counts = Counter(name.replace(b"_", b"-") for name in names)
    return sorted(name.decode("latin-1") for name in names if counts[name.replace(b"_", b"-")] > 1)


def check_distinct(headers: Iterable[Pair]) -> None:
    """Refuse a request with clashing names.

    Raises:
        BadRequest: Two names differ only in "_" and "-".
    """
    if names := clashing_names(headers):
        raise BadRequest(
            "The request has headers whose names differ only in '_' and '-':"
            f" {', '.join(names[:5])}. Send one of them."
        )


def shown_headers(headers: Sequence[Pair], hidden_names: Collection[bytes]) -> list[Pair]:
    """Return the headers without `hidden_names`, whether spelled with "_" or "-".

    If these have `TENANT_HEADER`, the server's own header of this name is added.
    """
    hidden = {name.replace(b"_", b"-") for name in hidden_names}
    shown = [pair for pair in headers if not _is_hidden(pair[0].lower(), hidden)]
    return [*shown, tenant_header(headers)] if TENANT_HEADER in hidden else shown


def _is_hidden(name: bytes, hidden: Collection[bytes]) -> bool:
    hyphenated = name.replace(b"_", b"-")
    is_reserved = hyphenated in _RESERVED or hyphenated.startswith(b"x-forwarded-")
    return hyphenated in hidden or (hyphenated != name and is_reserved)


def is_header(name: bytes, value: bytes) -> bool:
    """Tell whether name and value form exactly one header line."""
    return _NAME.fullmatch(name) is not None and not _NOT_IN_VALUE.search(value)


@lru_cache(maxsize=512)  # Most responses of a handler have the same headers.
def handler_headers(block: bytes) -> tuple[Pair, ...]:
    """Return the headers of a response for a handler's header block.

    Names become lower case, framing is left to the server, and caching is off unless it is set.

    Raises:
        PredictionFailed: HTTP forbids one of the headers.
    """
    pairs: list[Pair] = []
    names: set[bytes] = set()
    for line in block.split(b"\r\n"):
        if not line:
            continue
        name, _, value = line.partition(b": ")
        if not is_header(name, value):
            raise PredictionFailed(
                f"The handler set a header that HTTP does not allow: {line[:100]!r}"
            )
        name = name.lower()
        names.add(name)
        if name not in _SERVER_HEADERS:
            pairs.append((name, value))
    return (*pairs, *(pair for pair in NO_CACHE if pair[0] not in names))


_CONFINEMENT: tuple[Pair, ...] = (
    (b"x-content-type-options", b"nosniff"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"content-security-policy", b"sandbox; default-src 'none'"),
)
# Headers that change a browser's state for the whole origin.
_STATEFUL_HEADERS = frozenset(
    b"set-cookie clear-site-data strict-transport-security alt-svc refresh www-authenticate"
    b" proxy-authenticate service-worker-allowed report-to reporting-endpoints nel accept-ch"
    b" critical-ch".split()
)


def answer_headers(status: int, headers: Iterable[Pair], *, is_confined: bool) -> tuple[Pair, ...]:
    """Return the headers of a model's response; `is_confined` if its address also manages models.

    A browser does not show a confined response as a page, and runs no script of it. The response
    cannot change the browser's state for its origin.
    """
    if not is_confined:
        return tuple(headers)
    hidden_names = _STATEFUL_HEADERS.union(name for name, _ in _CONFINEMENT)
    if 300 <= status <= 399:  # A browser would repeat the request at any path of the address.
        hidden_names |= {b"location"}
    return (*(pair for pair in headers if pair[0] not in hidden_names), *_CONFINEMENT)


def header_pairs(block: bytes) -> list[Pair]:
    """Return the headers of a block."""
    return [
        (name, value)
        for line in block.split(b"\r\n")
        if line
        for name, _, value in [line.partition(b": ")]
    ]


def stored_headers(block: bytes) -> list[Pair]:
    """Return a stored response's headers without framing, which other writers might add."""
    return [
        pair for pair in header_pairs(block) if is_header(*pair) and pair[0].lower() not in _FRAMING
    ]


def check_status(status: int) -> None:
    """Check the status of a handler.

    Raises:
        PredictionFailed: The status is not between 200 and 599.
    """
    if not 200 <= status <= 599:
        raise PredictionFailed(
            f"The handler set the HTTP status {status}; it must lie between 200 and 599."
        )


def new_request_id() -> bytes:
    """Return a UUID (version 4): a random part for the process, then a counter.

    This takes a tenth of the time of `uuid.uuid4`.
    """
    return b"%b%012x" % (_PROCESS_PART, next(_count))
