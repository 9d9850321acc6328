"""Header names as the client wrote them, beside the lower-case ones of ASGI: TorchServe's handlers look them up that way."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tsx_runtime.http.asgi import Pair, Scope

NAMES = "tsx.header_names"  # in the scope: the names of its headers, in their order


class CasedProtocol(HttpToolsProtocol):
    """uvicorn's own protocol, which also tells how names were written."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        scope: dict[str, Any] = self.scope  # type: ignore[assignment]  # a TypedDict, which takes further keys all the same
        scope[NAMES] = self._names = list[bytes]()

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._names.append(name)


def as_sent(scope: Scope) -> list[Pair]:
    """The request's headers under the client's own names, where the server tells them."""
    headers: list[Pair] = scope["headers"]
    names: list[bytes] = scope.get(NAMES, ())
    if len(names) != len(headers):
        return headers
    return [(name, value) for name, (_, value) in zip(names, headers, strict=True)]
