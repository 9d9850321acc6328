"""The hook for a hosting platform's own routes, which come before the server's routes on both lanes."""

from __future__ import annotations

from typing import Protocol
from urllib.parse import quote

from tsx_runtime.api.headers import Pair
from tsx_runtime.http.semantics.messages import Receive, Scope, Send


class Platform(Protocol):
    """An ASGI application that decides itself which requests it takes."""

    def wants(self, path: bytes, headers: list[Pair]) -> bool:
        """`path` is percent-encoded, without its query; names of headers are in lower case. The answer depends on nothing else."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...


def raw_path(scope: Scope) -> bytes:
    """The path as it was sent, as far as the server reports it."""
    path: bytes | None = scope.get("raw_path")
    return quote(scope["path"]).encode() if path is None else path
