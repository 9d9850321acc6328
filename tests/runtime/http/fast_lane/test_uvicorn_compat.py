"""The parts of uvicorn that the fast lane uses, and a uvicorn that lacks them."""

from __future__ import annotations

import ast
import asyncio
import inspect
import logging
import types
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http import httptools_impl
from uvicorn.server import ServerState

from tests.kit.transports import FakeTransport
from tsx_runtime.http.fast_lane import (
    cased_protocol,
    connection,
    exchange,
    lane,
    observed_exchange,
    read_flow,
    uvicorn_compat,
)
from tsx_runtime.http.fast_lane.cased_protocol import CasedProtocol
from tsx_runtime.http.fast_lane.connection import FastLane
from tsx_runtime.http.fast_lane.uvicorn_compat import (
    REQUIRED_MEMBERS,
    http_protocol,
    members_of,
    missing_members,
)

MODULES = [connection, cased_protocol]
LANE = (FastLane, CasedProtocol)


def source_of(file: str | None) -> str:
    """Read the source of a module, compiled or not."""
    path = Path(str(file))
    return path.with_name(f"{path.name.partition('.')[0]}.py").read_text()


def names_used(source: str, *owners: str) -> set[str]:
    """Return the attributes that the source accesses on owners such as `connection.flow`."""
    nodes = ast.walk(ast.parse(source))
    return {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in owners
    }


def own_parts() -> set[str]:
    """Return the attributes that the fast lane defines itself."""
    classes = (*LANE, exchange.Exchange, lane.Lane, read_flow.ReadFlow)
    return {name for kind in classes for name in (*vars(kind), *code_names(kind))}


def code_names(kind: type) -> set[str]:
    tree = ast.parse(source_of(inspect.getfile(kind)))
    body = next(
        node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == kind.__name__
    )
    targets = [
        target
        for node in ast.walk(body)
        if isinstance(node, (ast.Assign, ast.AnnAssign))
        for target in ast.walk(node)
    ]
    assigned_names = {
        node.attr
        for node in targets
        if isinstance(node, ast.Attribute)
        and ast.unparse(node.value) == "self"
        and isinstance(node.ctx, ast.Store)
    }
    return assigned_names - members_of(httptools_impl.HttpToolsProtocol)


def test_the_installed_uvicorn_satisfies_the_fast_lane():
    assert missing_members(httptools_impl) == []
    assert http_protocol() is FastLane


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "owners", "modules"),
    [
        ("HttpToolsProtocol", ("self", "super()"), MODULES),
        ("HttpToolsProtocol", ("connection", "self.connection"), [exchange, observed_exchange]),
        ("RequestResponseCycle", ("self.cycle",), MODULES),
        ("FlowControl", ("self.flow",), MODULES),
    ],
)
def test_every_part_of_uvicorn_that_the_fast_lane_uses_is_declared(kind, owners, modules):
    used_names = {
        name for module in modules for name in names_used(source_of(module.__file__), *owners)
    }
    uvicorn_names = (
        used_names & members_of(getattr(httptools_impl, kind))
        if kind == "HttpToolsProtocol"
        else used_names
    )
    assert uvicorn_names - own_parts() - set(REQUIRED_MEMBERS[kind]) <= {"__init__"}


def test_missing_parts_of_uvicorn_are_listed():
    class Protocol:
        def __init__(self, config: object, server_state: object) -> None:
            self.flow = config

        def shutdown(self) -> None: ...

    module = types.ModuleType("other")
    module.HttpToolsProtocol = Protocol
    missing = missing_members(module)
    assert {
        "FlowControl",
        "RequestResponseCycle",
        "HttpToolsProtocol.cycle",
        "HttpToolsProtocol.on_body",
    } <= set(missing)
    assert not {"HttpToolsProtocol.flow", "HttpToolsProtocol.shutdown"} & set(missing)
    assert missing[-1] == "HttpToolsProtocol(config, server_state, app_state, _loop)"


@pytest.mark.parametrize("missing", ["a part", "the module"])
def test_an_unknown_uvicorn_uses_its_own_protocol_with_one_warning(missing, monkeypatch, caplog):
    if missing == "a part":
        monkeypatch.setitem(REQUIRED_MEMBERS, "FlowControl", ("levitate",))
    else:
        monkeypatch.setattr(uvicorn_compat, "MODULE", "uvicorn.protocols.http.telepathy")
    with caplog.at_level(logging.WARNING):
        assert http_protocol() == (CasedProtocol if missing == "a part" else "auto")
    (record,) = caplog.records
    assert ("FlowControl.levitate" if missing == "a part" else "telepathy") in record.getMessage()


class RecordingProtocol(httptools_impl.HttpToolsProtocol):
    """uvicorn's protocol, extended to record the calls of its methods."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.calls: list[str] = []
        self.answered = asyncio.Event()

    def on_message_begin(self) -> None:
        self.calls.append("begin")
        super().on_message_begin()

    def on_message_complete(self) -> None:
        self.calls.append("complete")
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self.calls.append("answered")
        super().on_response_complete()
        self.answered.set()


async def ok(scope: Any, receive: Any, send: Any) -> None:
    await receive()
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]}
    )
    await send({"type": "http.response.body", "body": b""})


def connect() -> tuple[RecordingProtocol, FakeTransport]:
    config = uvicorn.Config(ok, ws="none", lifespan="off", log_config=None)
    config.load()
    connection = RecordingProtocol(config, ServerState(), {}, asyncio.get_running_loop())
    transport = FakeTransport()
    connection.connection_made(transport)
    return connection, transport


@pytest.mark.anyio
async def test_bytes_are_parsed_on_arrival_and_answers_end_with_a_callback():
    connection, transport = connect()
    state = connection.server_state
    assert state.connections == {connection}
    assert connection.cycle is None
    connection.data_received(b"POST / HTTP/1.1\r\nContent-Length: 2\r\n\r\n")
    assert connection.calls == ["begin"]
    assert not connection.cycle.response_complete
    connection.data_received(b"hi")
    assert connection.calls == ["begin", "complete"]
    await asyncio.wait_for(connection.answered.wait(), 30)
    assert connection.calls == ["begin", "complete", "answered"]
    assert connection.cycle.response_complete
    assert connection.cycle.response_started
    assert not connection.pipeline
    assert connection.timeout_keep_alive_task is not None
    connection._unset_keepalive_if_required()
    assert connection.timeout_keep_alive_task is None
    assert transport.written.startswith(b"HTTP/1.1 200 OK\r\n")
    assert not transport.is_closing()
    connection.shutdown()
    assert transport.is_closing()
    connection.connection_lost(None)
    assert state.connections == set()


@pytest.mark.anyio
async def test_garbage_is_answered_at_once_and_closes_the_connection():
    connection, transport = connect()
    connection.data_received(b"GARBAGE\r\n\r\n")
    assert transport.written.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert transport.is_closing()
