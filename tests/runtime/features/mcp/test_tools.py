"""Models as tools of agents, called by the official SDK's client."""

from __future__ import annotations

import asyncio
import base64
import json
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tests.runtime.conftest import RunningServer, make_settings, running_server
from tests.support.models import make_model
from tests.support.servers import DEADLINE, serving
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.errors import BadRequest, PredictionFailed, SettingError
from tsx_runtime.features.mcp import feature
from tsx_runtime.features.mcp.feature import McpFeature

pytest.importorskip("mcp_types", reason="needs the extra mcp")
import httpx2
from mcp.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError

from tsx_runtime.features.mcp.results import ModelResponse

TOKEN = "inference-secret"
MODES = ["legacy", "auto"]  # the protocol with a handshake, and the one without (2026-07-28)
LABEL = {
    "type": "object",
    "properties": {"label": {"type": "string"}, "batch": {"type": "integer"}},
    "required": ["label"],
}
# A typed handler of objects; `file` waits for a file.
MOODS = """
import time
from pathlib import Path

class Moods:
    def initialize(self, context):
        self.signature = {
            "description": "Tell the mood of a text.",
            "input": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
            "output": OUTPUT,
        }

    def handle(self, data, context):
        return [self.tell(index, row["body"], context, len(data)) for index, row in enumerate(data)]

    def tell(self, index, body, context, batch):
        text = body["text"]
        if not isinstance(text, str):
            context.set_response_status(422, "", index)
            return {"detail": [{"loc": ["body", "text"], "msg": "Input should be a valid string"}]}
        if text == "raise":
            raise ValueError("no mood")
        if text == "headers":
            names = sorted(name.lower() for name in context.get_all_request_header(index))
            return {"label": " ".join(names)}
        if text.startswith("/"):
            Path(text + ".begun").touch()
            deadline = time.monotonic() + 60  # a failed test must not hold the worker
            while not Path(text).exists() and time.monotonic() < deadline:
                time.sleep(0.002)
        return {"label": text[:5], "batch": batch}
""".replace("OUTPUT", repr(LABEL))
# A typed handler of strings, which streams their words as server-sent events.
WORDS = """
import json, os
from ts.handler_utils.utils import send_intermediate_predict_response

class Words:
    def initialize(self, context):
        self.signature = {
            "input": {"$ref": "#/$defs/Text", "$defs": {"Text": {"type": "string"}}},
            "output": {"type": "string"},
            "streams": True,
        }

    def handle(self, data, context):
        context.set_response_content_type(0, "text/event-stream")
        for word in data[0]["body"].split():
            if word == "exit":
                os._exit(7)
            event = f"data: {json.dumps(word)}\\n\\n"
            send_intermediate_predict_response([event], {0: context.get_request_id(0)}, "", 200, context)
        return [""]
"""
UNTYPED = "def handle(data, context):\n    return data and ['untyped'] * len(data)\n"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("tools")
    make_model(store / "moods.mar", MOODS)
    make_model(store / "unloaded.mar", MOODS)
    make_model(store / "words.mar", WORDS)
    make_model(store / "on.mar", MOODS, config="mcp: true\n")
    make_model(store / "off.mar", MOODS, config="mcp: false\n")
    make_model(store / "untyped.mar", UNTYPED, config="mcp: true\n")
    return store


@pytest.fixture(scope="module")
def tools(processes: None, store: Path) -> Iterator[RunningServer]:
    """Run a server that offers all models; one is excluded, one untyped, one without workers."""
    settings = make_settings(store, mcp=True, inference_token=TOKEN, max_response_size=1000)
    with running_server(settings) as server:
        for name in ("moods", "words", "off", "untyped", "unloaded"):
            server.register(f"{name}.mar", initial_workers=1)
        server.call(lambda: server.registry.find("unloaded").scale(0, 0))
        yield server


def using(
    server: Any, use: Callable[[Client], Awaitable[Any]], mode: str = "auto", token: str = TOKEN
) -> Any:
    """Return what `use` returns for a client of the server."""

    async def run() -> Any:
        headers = {"authorization": f"Bearer {token or None}", "x-tenant": "blue"}
        async with httpx2.AsyncClient(headers=headers, timeout=DEADLINE) as http_client:
            transport = streamable_http_client(
                f"{server.addresses['inference']}/mcp", http_client=http_client
            )
            async with Client(transport, mode=mode) as client:
                return await use(client)

    return asyncio.run(run())


def call(
    server: Any, name: str, arguments: dict[str, Any], mode: str = "auto", **options: Any
) -> Any:
    return using(server, lambda client: client.call_tool(name, arguments, **options), mode)


def request(method: str, **params: Any) -> bytes:
    """Return an MCP request of a client that has no handshake."""
    return json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}).encode()


def headers(token: str = TOKEN) -> dict[str, str]:
    accepted = {"accept": "application/json, text/event-stream"}
    return accepted | {
        "content-type": "application/json",
        "authorization": f"Bearer {token or None}",
    }


@pytest.mark.parametrize("mode", MODES)
def test_models_with_a_signature_are_tools(tools, mode):
    moods, unloaded, words = using(tools, lambda client: client.list_tools(), mode).tools
    assert (moods.name, moods.description) == ("moods", "Tell the mood of a text.")
    assert moods.input_schema["properties"] == {"text": {"type": "string"}}
    assert moods.output_schema == unloaded.output_schema == LABEL
    assert (words.name, words.description) == ("words", "Run the model words.")
    assert words.input_schema == {
        "type": "object",
        "properties": {"input": {"$ref": "#/$defs/Text"}},
        "required": ["input"],
        "$defs": {"Text": {"type": "string"}},
    }
    assert words.output_schema is None
    assert "POST /mcp" in tools.inference.get("/").json()["paths"]


@pytest.mark.parametrize("mode", MODES)
def test_a_call_is_a_prediction(tools, mode):
    version = tools.registry.find("moods")
    count = version.stats.requests
    result = call(tools, "moods", {"text": "cheerful"}, mode)
    assert not result.is_error
    assert result.structured_content == {"label": "cheer", "batch": 1}
    assert json.loads(result.content[0].text) == result.structured_content
    assert version.stats.requests == count + 1


def test_a_model_gets_the_headers_of_the_client_without_those_of_mcp(tools):
    names = call(tools, "moods", {"text": "headers"}).structured_content["label"].split()
    assert {"x-tenant", "content-type", "content-length"} <= {*names}
    assert not {"accept", "authorization"} & {*names}
    assert not [name for name in names if name.startswith("mcp-")]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("moods", {"text": 4}, "Input should be a valid string"),
        ("moods", {"text": "raise"}, "no mood"),
        ("unloaded", {"text": "a"}, '"code": 503'),
        ("words", {"text": "a"}, "The argument 'input' is missing."),
        ("words", {"input": "one exit"}, "interrupted"),
        ("words", {"input": "0123456789 " * 99}, "max_response_size"),
    ],
)
def test_a_failed_prediction_is_a_result_with_its_error(tools, mode, name, arguments, text):
    result = call(tools, name, arguments, mode)
    assert result.is_error
    assert result.structured_content is None
    assert text in "".join(block.text for block in result.content)


@pytest.mark.parametrize("mode", MODES)
def test_a_stream_is_one_result_and_its_events_are_progress(tools, mode):
    parts = []

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        parts.append((progress, message))

    arguments = {"input": "one two"}
    result = call(tools, "words", arguments, mode, progress_callback=on_progress)
    assert [block.text for block in result.content] == ["onetwo"]
    assert parts == [(1, "one"), (2, "two")]
    assert not result.is_error


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["off", "untyped", "missing"])
def test_a_tool_that_is_not_offered_is_an_error_of_the_protocol(tools, mode, name):
    async def use(client: Client) -> None:
        with pytest.raises(MCPError, match=rf"no tool '{name}'.* moods, unloaded, words") as raised:
            await client.call_tool(name, {"text": "a"})
        assert raised.value.error.code == -32602

    using(tools, use, mode)


def test_the_error_for_an_unknown_tool_has_only_the_beginning_of_its_name(tools):
    async def use(client: Client) -> None:
        with pytest.raises(MCPError, match="no tool 'xxx") as raised:
            await client.call_tool("x" * 2000, {})
        assert len(str(raised.value)) < 500

    using(tools, use)


def test_tools_need_the_inference_token(tools):
    for token in ("", "wrong"):
        with pytest.raises(Exception, match=r"Unauthorized|TaskGroup"):
            using(tools, lambda client: client.list_tools(), token=token)
        answer = tools.inference.post("/mcp", content=request("tools/list"), headers=headers(token))
        assert (answer.status_code, answer.json()["type"]) == (401, "InvalidKeyException")
        assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("header", ["host", "origin"])
def test_pages_of_other_sites_are_refused(tools, header):
    foreign = {header: "evil.example" if header == "host" else "http://evil.example"}
    content = request("tools/list")
    answer = tools.inference.post("/mcp", content=content, headers=headers() | foreign)
    assert answer.status_code == 403


def test_requests_have_the_limits_of_the_server(tools):
    too_large = request("tools/list", text="x" * 100_000)
    assert tools.inference.post("/mcp", content=too_large, headers=headers()).status_code == 413
    answer = tools.inference.get("/mcp", headers=headers())
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


@pytest.mark.parametrize("version", ["2025-06-18", "2026-07-28"])
def test_a_call_whose_client_leaves_is_withdrawn(tools, until, tmp_path, version):
    gate = tmp_path / "gate"
    protocol = "io.modelcontextprotocol"
    meta = {f"{protocol}/protocolVersion": version, f"{protocol}/clientCapabilities": {}}
    content = request("tools/call", name="moods", arguments={"text": str(gate)}, _meta=meta)
    routing = {"mcp-protocol-version": version, "mcp-method": "tools/call", "mcp-name": "moods"}
    moods = tools.registry.find("moods")

    async def leave() -> None:
        async with httpx.AsyncClient(timeout=DEADLINE) as client:
            url = f"{tools.addresses['inference']}/mcp"
            calls = [
                asyncio.create_task(client.post(url, content=content, headers=headers() | routing))
                for _ in range(4)  # The worker may have some of them.
            ]
            await asyncio.to_thread(until, lambda: moods.pending)
            for task in calls:
                task.cancel()
            await asyncio.to_thread(until, lambda: not moods.pending)
            await asyncio.gather(*calls, return_exceptions=True)

    try:
        asyncio.run(leave())
    finally:
        gate.touch()


def test_a_model_can_be_offered_alone(processes, store, caplog):
    with running_server(make_settings(store)) as server:
        answer = server.inference.post("/mcp", content=request("tools/list"), headers=headers())
        assert answer.json() == server.inference.post("/none").json()
        assert "POST /mcp" not in server.inference.get("/").json()["paths"]
        for name in ("on", "moods", "untyped"):
            server.register(f"{name}.mar", initial_workers=1)
        assert [tool.name for tool in using(server, lambda client: client.list_tools()).tools] == [
            "on"
        ]
        assert call(server, "on", {"text": "a"}).structured_content == {"label": "a", "batch": 1}
    [warning] = [text for text in caplog.messages if "reports no signature" in text]
    assert "untyped" in warning


@pytest.mark.parametrize("mode", ["legacy", pytest.param("auto", marks=pytest.mark.nightly)])
def test_a_stopping_server_answers_running_calls(
    processes: None,
    store: Path,
    tmp_path: Path,
    user_environment: Mapping[str, str],
    until: Callable[[Callable[[], object]], None],
    mode: str,
) -> None:
    gate = tmp_path / "gate"
    arguments = ["serve", store / "moods.mar", "--set", "mcp=true"]
    with serving(arguments, tmp_path, user_environment) as running:
        server = SimpleNamespace(addresses={"inference": user_environment["TSX_INFERENCE_ADDRESS"]})

        async def use(client: Client) -> Any:
            await client.list_tools()  # The client would read the schema after the call.
            task = asyncio.create_task(client.call_tool("moods", {"text": str(gate)}))
            await asyncio.to_thread(until, gate.with_name("gate.begun").exists)
            running.process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(until, lambda: "stopping" in running.log)
            gate.touch()
            return await task

        assert using(server, use, mode).structured_content["batch"] == 1
        assert running.process.wait(DEADLINE) == 0
        assert "Traceback" not in running.log


def test_the_sdk_is_imported_only_for_requests(processes: None) -> None:
    modules = ", ".join(f"tsx_runtime.features.mcp.{name}" for name in ("feature", "routes"))
    code = f"import sys, {modules}; assert not {{'mcp', 'mcp_types'}} & {{*sys.modules}}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_missing_sdk_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(feature, "PACKAGE", "not_there")
    with pytest.raises(SettingError, match=r"pip install 'tsx-serve\[mcp\]'"):
        Registry(make_settings(tmp_path, mcp=True))
    version: Any = SimpleNamespace(name="m", config=SimpleNamespace(mcp=True))
    offer = McpFeature(Registry(make_settings(tmp_path)))
    with pytest.raises(BadRequest, match=r"model-config.yaml of m .*'tsx-serve\[mcp\]'"):
        offer.around(version, Any)


def result_of(content_type: str, *parts: bytes, status: int = 200) -> Any:
    async def report(progress: float, message: str) -> None:
        pass

    async def collect() -> ModelResponse:
        response = ModelResponse(1000, report)
        pairs = [(b"content-type", content_type.encode())]
        await response.send({"type": "http.response.start", "status": status, "headers": pairs})
        for part in parts:
            await response.send({"type": "http.response.body", "body": part, "more_body": True})
        await response.send({"type": "http.response.body", "body": b""})
        return response

    return asyncio.run(collect()).result(is_complete=True)


@pytest.mark.parametrize(
    ("content_type", "kind"),
    [("image/png", "image"), ("audio/wav", "audio"), ("application/octet-stream", "resource")],
)
def test_bytes_keep_their_type(content_type, kind):
    [block] = result_of(content_type, b"\xff\x00").content
    assert block.type == kind
    data = block.resource if kind == "resource" else block
    assert data.mime_type == content_type
    assert base64.b64decode(data.blob if kind == "resource" else data.data) == b"\xff\x00"


@pytest.mark.parametrize(
    ("content_type", "parts", "text", "value"),
    [
        ("text/plain; charset=utf-8", [b"caf\xc3", b"\xa9"], "café", None),
        ("application/json", [b'{"a": NaN}'], '{"a": NaN}', {"a": None}),
        ("application/json", [b"[1, 2]"], "[1, 2]", None),
        ("application/json", [b"[" * 200], "[" * 200, None),
        ("text/event-stream", [b'data: {"a": 1}\r\n\r', b"\ndata: 2"], '[{"a": 1}, 2]', None),
        ("text/event-stream", [b"event: word\ndata: on", b"e\n\ndata: [DONE]\n\n"], "one", None),
    ],
)
def test_text_is_read_by_its_type(content_type, parts, text, value):
    result = result_of(content_type, *parts)
    assert ([block.text for block in result.content], result.structured_content) == ([text], value)


def test_the_parts_of_a_response_have_a_limit():
    with pytest.raises(PredictionFailed, match="1000 bytes"):
        result_of("text/plain", b"x" * 600, b"x" * 600)
