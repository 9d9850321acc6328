"""Decompresses a request's body by its `Content-Encoding` (RFC 9110, section 8.4), slice by slice."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from tsx_runtime.errors import BadRequest, UnsupportedEncoding

SLICE = 256 << 10  # bytes that are decompressed at once: less than a millisecond of the event loop
INPUT = 16 << 10  # bytes that are given to zlib at once, which copies what is behind each member
_WINDOWS = {b"gzip": 31, b"x-gzip": 31, b"deflate": 15}  # zlib's `wbits`


class Decompressed:
    """A `receive` of ASGI, around another one, that gives the decompressed body.

    Raises BadRequest for a body that cannot be decompressed.
    """

    def __init__(self, receive: Callable[[], Awaitable[MutableMapping[str, Any]]], window: int) -> None:
        self.more = True  # whether the sender may still be sending
        self.compressed = 0  # bytes so far
        self._receive = receive
        self._window = window
        self._inflater = zlib.decompressobj(window)
        self._waiting = memoryview(b"")
        self._full = self._begun = False

    async def __call__(self) -> MutableMapping[str, Any]:
        if not self._waiting and not self._full:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                return message
            self.more = message.get("more_body", False)
            self._waiting = memoryview(message.get("body", b""))
            self.compressed += len(self._waiting)
        try:
            part = self._inflate() if self._waiting or self._full else b""
            more = self.more or self._full or bool(self._waiting)
            if self._begun and not more and not self._inflater.eof:
                raise zlib.error("it ends too early")
        except zlib.error as error:
            text = f"The body is not what its Content-Encoding says: {error}."
            broken = BadRequest(f"{text} Send it again, or without Content-Encoding.")
            broken.more = self.more
            raise broken from None
        await asyncio.sleep(0)
        return {"type": "http.request", "body": part, "more_body": more}

    def _inflate(self) -> bytes:
        self._begun = True
        if self._inflater.eof:  # a file of gzip may have several members
            self._inflater = zlib.decompressobj(self._window)
        given = self._waiting[:INPUT]
        part = self._inflater.decompress(given, SLICE)
        left = len(self._inflater.unconsumed_tail) + len(self._inflater.unused_data)
        self._waiting = self._waiting[len(given) - left :]
        self._full = len(part) == SLICE and not self._inflater.eof
        return part


def window_of(codings: bytes) -> int | None:
    """Return zlib's window for a Content-Encoding, None for a body as it is.

    Raises UnsupportedEncoding.
    """
    names = [coding.strip() for coding in codings.lower().split(b",")]
    names = [name for name in names if name not in (b"", b"identity")]
    if not names:
        return None
    if len(names) > 1 or names[0] not in _WINDOWS:
        text = f"The Content-Encoding {codings.decode('latin-1')!r} is not read here."
        raise UnsupportedEncoding(f"{text} Send the body with gzip or deflate, or as it is.")
    return _WINDOWS[names[0]]
