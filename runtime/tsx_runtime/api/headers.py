"""Header pairs that HTTP responses and gRPC metadata share: what a handler may set, what confines answers,
what keeps them out of caches, request ids."""

from __future__ import annotations

import itertools
import re
import uuid
from collections.abc import Iterable
from functools import lru_cache
from typing import TypeAlias

from tsx_runtime.errors import PredictionFailed

_drawn = str(uuid.uuid4())
_DRAWN = _drawn[:24].encode()
_count = itertools.count(int(_drawn[24:], 16) >> 1)  # half of the numbers are left to count through
Pair: TypeAlias = tuple[bytes, bytes]
NO_CACHE: tuple[Pair, ...] = (
    (b"pragma", b"no-cache"),
    (b"cache-control", b"no-cache; no-store, must-revalidate, private"),
    (b"expires", b"Thu, 01 Jan 1970 00:00:00 UTC"),
)


JSON: Pair = (b"content-type", b"application/json")
_OURS = {b"content-length", b"transfer-encoding", b"connection", b"keep-alive", b"upgrade", b"trailer", b"x-request-id"}
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_NOT_IN_VALUE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")


def is_header(name: bytes, value: bytes) -> bool:
    """Whether it is one line of a head, and nothing that would begin another."""
    return _NAME.fullmatch(name) is not None and not _NOT_IN_VALUE.search(value)


@lru_cache(maxsize=512)  # a handler's answers have mostly the same headers
def handler_headers(block: bytes) -> tuple[Pair, ...]:
    """What a handler's header block becomes in the answer: lower-case names, the framing left to the server, no caching."""
    pairs: list[Pair] = []
    names: set[bytes] = set()
    for line in block.split(b"\r\n"):
        if not line:
            continue
        name, _, value = line.partition(b": ")
        if not is_header(name, value):
            raise PredictionFailed(f"The handler set a header that HTTP does not allow: {line[:100]!r}")
        name = name.lower()
        names.add(name)
        if name not in _OURS:
            pairs.append((name, value))
    return (*pairs, *(pair for pair in NO_CACHE if pair[0] not in names))


_CONFINEMENT: tuple[Pair, ...] = (
    (b"x-content-type-options", b"nosniff"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"content-security-policy", b"sandbox; default-src 'none'"),
)
_BEYOND_ANSWER = frozenset(  # what changes more of a browser's state than this answer
    b"set-cookie clear-site-data strict-transport-security alt-svc refresh www-authenticate proxy-authenticate "
    b"service-worker-allowed report-to reporting-endpoints nel accept-ch critical-ch".split()
)


def answer_headers(status: int, headers: Iterable[Pair], *, confined: bool) -> tuple[Pair, ...]:
    """Return the headers of a model's answer: as they are, or `confined` where the address manages models.

    No browser shows a confined answer as a page, runs it, or lets it change anything else of its origin.
    """
    if not confined:
        return tuple(headers)
    left_out = _BEYOND_ANSWER.union(name for name, _ in _CONFINEMENT)
    if 300 <= status <= 399:  # a browser would repeat the request at any path of the address
        left_out |= {b"location"}
    return (*(pair for pair in headers if pair[0] not in left_out), *_CONFINEMENT)


def check_status(status: int) -> None:
    if not 200 <= status <= 599:
        raise PredictionFailed(f"The handler set the HTTP status {status}; it must lie between 200 and 599.")


def new_request_id() -> bytes:
    """A UUID of the random form (version 4): a part drawn when the process starts, then a count. A tenth of `uuid.uuid4`'s time."""
    return b"%b%012x" % (_DRAWN, next(_count))
