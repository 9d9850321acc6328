"""The client's original header names, in addition to ASGI's lower-case ones: TorchServe's handlers look them up that way."""

from __future__ import annotations

from tsx_runtime.api.headers import Pair
from tsx_runtime.http.semantics.messages import Scope

NAMES = "tsx.header_names"  # in the scope: the names of its headers, in their order


def as_sent(scope: Scope) -> list[Pair]:
    """The request's headers under the client's own names, where the server tells them."""
    headers: list[Pair] = scope["headers"]
    names: list[bytes] = scope.get(NAMES, ())
    if len(names) != len(headers):
        return headers
    return [(name, value) for name, (_, value) in zip(names, headers, strict=True)]
