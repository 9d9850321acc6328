"""The access log's line for an answer over ASGI."""

from __future__ import annotations

import time

from tsx_runtime.api.access_log import AccessLog
from tsx_runtime.http.semantics.messages import Message, Scope, Send

SERVED = "tsx.served"  # in a request's scope: where it was submitted, and the job
ENDED = "tsx.ended"  # in the same: why its answer has no end, where that is not its client
LEFT = "the client disconnected"
BROKEN = "the answer was interrupted"


class LoggedResponse:
    """The `send` of one request, which writes its line once the answer is out. `close` writes that of an answer that breaks off."""

    def __init__(self, log: AccessLog, scope: Scope, send: Send) -> None:
        self._log = log
        self._scope = scope
        self._send = send
        self._began = time.monotonic()
        self._status = 0  # 0: no answer has begun, or its line is written
        self._request_id = b""

    async def __call__(self, message: Message) -> None:
        await self._send(message)
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._request_id = next((value for name, value in message["headers"] if name == b"x-request-id"), b"")
        elif not message.get("more_body", False):
            self._tell(self._scope.get(ENDED, ""))

    def close(self) -> None:
        if self._status:
            self._tell(self._scope.get(ENDED, LEFT))

    def _tell(self, broken: str) -> None:
        scope, status, self._status = self._scope, self._status, 0
        served = _served(scope)
        self._log.add(scope.get("client"), _request_line(scope), status, self._began, time.monotonic(), self._request_id, *served, broken)


def _served(scope: Scope) -> tuple[str, str]:
    """The name and the version of the model that a request was for."""
    if SERVED not in scope:
        return "", ""
    route, job = scope[SERVED]
    return route.name, getattr(job.routed or route, "version", "")


def _request_line(scope: Scope) -> str:
    path = scope.get("raw_path") or scope["path"].encode()
    query = b"?" + scope["query_string"] if scope["query_string"] else b""
    return f"{scope['method']} {str(path + query, 'latin-1')} HTTP/{scope['http_version']}"
