"""Decompresses a request's body by its `Content-Encoding` (RFC 9110, section 8.4), slice by
slice.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

from tsx_runtime.errors import BadRequest, UnsupportedEncoding

SLICE = 256 << 10  # bytes that are decompressed at once: less than a millisecond of the event loop
INPUT = 16 << 10  # bytes that are given to zlib at once, which copies what is behind each member
# Keys of a message: whether the sender may still be sending, and how many compressed bytes came so
# far.
SENDER_MORE, COMPRESSED = "tsx.sender_more", "tsx.compressed"
_WINDOWS = {b"gzip": 31, b"x-gzip": 31, b"deflate": 15}  # zlib's `wbits`


async def decompress(
    receive: Callable[[], Awaitable[MutableMapping[str, Any]]], window: int
) -> AsyncIterator[MutableMapping[str, Any]]:
    """Yield ASGI's messages of the decompressed body.

    Raises BadRequest for a body that cannot be decompressed.
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
            for start in range(0, len(body), INPUT):
                waiting: Any = body[start : start + INPUT]
                while waiting:
                    if inflater is None or inflater.eof:  # a file of gzip may have several members
                        inflater = zlib.decompressobj(window)
                    part = inflater.decompress(waiting, SLICE)
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
    """Return zlib's window for a Content-Encoding, None for a body as it is.

    Raises UnsupportedEncoding.
    """
    name = codings.lower().replace(b"identity", b"").strip(b", \t")
    if name and name not in _WINDOWS:
        text = f"The Content-Encoding {codings.decode('latin-1').strip(',')!r} is not read here."
        raise UnsupportedEncoding(
            f"{text} Send the body with gzip or deflate, or as it is.", more=more
        )
    return _WINDOWS.get(name)
