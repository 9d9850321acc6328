"""The MCP server: each model is a tool, and a call of the tool is a prediction.

Only this module imports the official SDK.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from typing import Any

import mcp_types as types
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.shared.exceptions import MCPError

from tsx_runtime.api.access_log import BREAK_REASON, SERVED_ROUTE
from tsx_runtime.api.headers import JSON
from tsx_runtime.api.messages import (
    COUNTED_BYTES,
    HEADER_NAMES,
    Receive,
    Scope,
    Send,
    never,
    with_body,
)
from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.workers.signature import ModelSignature
from tsx_runtime.features.mcp.results import ModelResponse
from tsx_runtime.http.app import ServerApp
from tsx_runtime.version import __version__

ARGUMENT = "input"  # the only argument of a tool whose model takes no JSON object
# Headers of an MCP request that describe its body or the response, or belong to the protocol.
OWN_HEADERS = (b"content-", b"accept", b"expect", b"prefer", b"transfer-", b"mcp-", b"last-event")


class ToolServer:
    """The tools of a listener."""

    def __init__(self, app: ServerApp, versions: Callable[[], Sequence[ModelVersion]]) -> None:
        # The SDK logs each start of a manager.
        logging.getLogger("mcp").setLevel(logging.WARNING)
        self._app = app
        self._versions = versions
        self._server = Server(
            "tsx", version=__version__, on_list_tools=self._list, on_call_tool=self._call
        )

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer an MCP request; its checks of `Host` and of the token have passed."""
        limit = self._app.context.settings.max_request_size
        # A manager for each request stores nothing, and needs no task beside the request's.
        manager = StreamableHTTPSessionManager(
            self._server, stateless=True, max_request_body_size=limit
        )
        async with manager.run():
            await manager.handle_request(scope, receive, send)

    def _tools(self) -> dict[str, tuple[ModelVersion, ModelSignature]]:
        return {
            version.name: (version, signature)
            for version in self._versions()
            if (signature := version.signature) is not None
        }

    async def _list(self, context: ServerRequestContext[Any, Any], params: Any) -> Any:
        tools = [
            types.Tool(
                name=name,
                description=signature.description or f"Run the model {name}.",
                input_schema=input_schema(signature),
                output_schema=signature.output if _has_object_output(signature) else None,
            )
            for name, (_, signature) in sorted(self._tools().items())
        ]
        return types.ListToolsResult(tools=tools)

    async def _call(
        self, context: ServerRequestContext[Any, Any], params: types.CallToolRequestParams
    ) -> types.CallToolResult:
        tools = self._tools()
        if params.name not in tools:
            names = ", ".join(sorted(tools)) or "none"
            text = f"There is no tool {params.name!r:.200}. The tools are: {names}."
            raise MCPError(types.INVALID_PARAMS, text)
        version, signature = tools[params.name]
        body: Any = params.arguments or {}
        if not _takes_object(signature):
            if ARGUMENT not in body:
                text = f"The argument {ARGUMENT!r} is missing."
                return types.CallToolResult(content=[types.TextContent(text=text)], is_error=True)
            body = body[ARGUMENT]
        response = ModelResponse(version.max_response_size, context.session.report_progress)
        request: Any = context.request
        is_complete = await self._predict(
            request.scope, version.name, json.dumps(body).encode(), response.send
        )
        return response.result(is_complete=is_complete)

    async def _predict(self, scope: Scope, model: str, body: bytes, send: Send) -> bool:
        """Run a model as `/predictions/MODEL` does, and tell whether the response is complete.

        The inner request has the other headers of the MCP request, such as its token. The bytes and
        the client of the MCP request are counted already.
        """
        path = f"/predictions/{model}"
        own_headers = [JSON, (b"content-length", b"%d" % len(body))]
        passed_headers = [pair for pair in scope["headers"] if not pair[0].startswith(OWN_HEADERS)]
        inner_scope = {
            **{key: scope[key] for key in scope if key not in (COUNTED_BYTES, HEADER_NAMES)},
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [*passed_headers, *own_headers],
        }
        app = self._app.model_app(inner_scope)
        assert app is not None
        await app(inner_scope, with_body(body, never), send)
        if SERVED_ROUTE in inner_scope:  # The access log names the model.
            scope[SERVED_ROUTE] = inner_scope[SERVED_ROUTE]
        return BREAK_REASON not in inner_scope


def input_schema(signature: ModelSignature) -> dict[str, Any]:
    """Return the schema of a tool's arguments, which MCP requires to be an object."""
    if _takes_object(signature):
        return signature.input
    argument = dict(signature.input)
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {ARGUMENT: argument},
        "required": [ARGUMENT],
    }
    if "$defs" in argument:  # References to definitions begin at the root.
        schema["$defs"] = argument.pop("$defs")
    return schema


def _takes_object(signature: ModelSignature) -> bool:
    return signature.input.get("type") == "object"


def _has_object_output(signature: ModelSignature) -> bool:
    return signature.output.get("type") == "object" and not signature.streams
