"""uvicorn's own protocol, which also keeps the original case of header names."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tsx_runtime.http.semantics.messages import HEADER_NAMES


class CasedProtocol(HttpToolsProtocol):
    """It also tells how the names of headers were written: see `as_sent`."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        scope: dict[str, Any] = self.scope  # type: ignore[assignment]  # a TypedDict, which takes further keys all the same
        scope[HEADER_NAMES] = self._names = list[bytes]()

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._names.append(name)
