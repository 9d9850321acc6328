"""Decompression of a request's body by its `Content-Encoding` (RFC 9110, section 8.4)."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

from tsx_runtime.errors import BadRequest, UnsupportedEncoding

MAX_OUTPUT_BYTES = 256 << 10  # output of one step, which takes less than 1 ms
# Input of one step. At the end of each gzip member, zlib copies the unused input.
MAX_INPUT_BYTES = 16 << 10
# keys of a message: whether compressed bytes follow, and their number so far
SENDER_MORE, COMPRESSED = "tsx.sender_more", "tsx.compressed"
_WINDOWS = {b"gzip": 31, b"x-gzip": 31, b"deflate": 15}  # zlib's `wbits`


async def decompress(
    receive: Callable[[], Awaitable[MutableMapping[str, Any]]], window: int
) -> AsyncIterator[MutableMapping[str, Any]]:
    """Yield ASGI's messages of the decompressed body.

    Raises:
        BadRequest: The body cannot be decompressed.
    """
    inflater, more, compressed = None, True, 0
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            yield message
        more = message.get("more_body", False)
        body = memoryview(message.get("body", b""))
        compressed += len(body)
        try:
            for start in range(0, len(body), MAX_INPUT_BYTES):
                waiting: Any = body[start : start + MAX_INPUT_BYTES]
                while waiting:
                    # A gzip file may have several members.
                    if inflater is None or inflater.eof:
                        inflater = zlib.decompressobj(window)
                    part = inflater.decompress(waiting, MAX_OUTPUT_BYTES)
                    waiting = inflater.unconsumed_tail or inflater.unused_data
                    counts = {SENDER_MORE: more, COMPRESSED: compressed}
                    yield {"type": "http.request", "body": part, "more_body": True, **counts}
                    await asyncio.sleep(0)
            if not more and inflater is not None and not inflater.eof:
                raise zlib.error("it ends too early")
        except zlib.error as error:
            text = f"The body is not what its Content-Encoding says: {error}."
            raise BadRequest(
                f"{text} Send it again, or without Content-Encoding.", more=more
            ) from None
    yield {"type": "http.request"}


def window_of(codings: bytes, *, more: bool) -> int | None:
    """Return zlib's `wbits` for a Content-Encoding, or None for a body without compression.

    Raises:
        UnsupportedEncoding: The encoding is neither gzip nor deflate.
    """
    name = codings.lower().replace(b"identity", b"").strip(b", \t")
    if name and name not in _WINDOWS:
        text = f"The Content-Encoding {codings.decode('latin-1').strip(',')!r} is not read here."
        raise UnsupportedEncoding(
            f"{text} Send the body with gzip or deflate, or as it is.", more=more
        )
    return _WINDOWS.get(name)
