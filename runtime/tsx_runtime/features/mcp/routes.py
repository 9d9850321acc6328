"""The ASGI app of `/mcp`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from tsx_runtime.api.messages import Receive, Scope, Send, read_body, with_body
from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.errors import MethodNotAllowed
from tsx_runtime.http.app import ServerApp

if TYPE_CHECKING:
    from tsx_runtime.features.mcp.tools import ToolServer


class McpRoute:
    """The route of a listener; unless `always`, it exists only while a model is offered."""

    def __init__(
        self, app: ServerApp, versions: Callable[[], Sequence[ModelVersion]], *, always: bool
    ) -> None:
        self._app = app
        self._versions = versions
        self._always = always
        self._tools: ToolServer | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._always and not self._versions():
            raise self._app.not_found(scope["path"])
        # Without sessions, a client has nothing to listen to by GET, and nothing to DELETE.
        if scope["method"] != "POST":
            raise MethodNotAllowed(allowed=("POST",))
        body = await read_body(scope, receive, self._app.context.settings.max_request_size)
        if self._tools is None:
            # The import of the SDK takes half a second.
            module = await asyncio.to_thread(import_module, "tsx_runtime.features.mcp.tools")
            self._tools = module.ToolServer(self._app, self._versions)
        await self._tools.answer(scope, with_body(body, receive), send)
