"""Converts a call's metadata to request headers, and answer headers to metadata."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable
from urllib.parse import quote

from tsx_runtime.api.headers import NO_CACHE, Pair, handler_headers
from tsx_runtime.wire import TENSORS_HEAD

Metadata = tuple[tuple[str, str], ...]

_KEY = re.compile(rb"[0-9a-z_.-]+")
_OURS = ("grpc-", "content-type", TENSORS_HEAD.decode())  # what frames the call, or its body on the way to the worker
_FRAMING = (b"grpc-", b"content-", TENSORS_HEAD)
_PRINTABLE = "".join(chr(code) for code in range(0x20, 0x7F))


def as_headers(metadata: Iterable[tuple[str, str | bytes]]) -> list[Pair]:
    """What the client sent beside its message. Binary values become base64."""
    pairs = []
    for key, value in metadata:
        if not key.startswith(_OURS):
            pairs.append((key.encode(), base64.b64encode(value) if isinstance(value, bytes) else value.encode("latin-1", "replace")))
    return pairs


def from_block(block: bytes) -> Metadata:
    """A handler's header block. Raises `PredictionFailed` for what not even HTTP allows; a name that gRPC does not is left out."""
    if not block:
        return ()
    own = (pair for pair in handler_headers(block) if pair not in NO_CACHE)
    return tuple((name.decode(), _value(value)) for name, value in own if _KEY.fullmatch(name) and not name.startswith(_FRAMING))


def _value(value: bytes) -> str:
    text = value.decode("latin-1")
    return text if text.isascii() and text.isprintable() else quote(text, safe=_PRINTABLE)
