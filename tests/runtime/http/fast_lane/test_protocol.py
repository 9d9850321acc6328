"""What the fast lane does beyond answering as the other lane does: heads, bodies in pieces, slow
clients, clients that leave.
"""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from uvicorn.server import ServerState

from tests.runtime.conftest import RunningServer
from tsx_runtime.api.access.auth import Guard
from tsx_runtime.api.access.tokens import BearerToken
from tsx_runtime.core.isolation.hidden_credentials import HiddenHeaders
from tsx_runtime.errors import InvalidToken, ModelNotFound, ResourceNotFound
from tsx_runtime.http.app import ServerApp
from tsx_runtime.http.fast_lane.connection import FastLane
from tsx_runtime.http.fast_lane.heads import REMEMBERED, Heads, RefusalRoute, parse
from tsx_runtime.metrics.response_counts import ResponseCounts
from tsx_runtime.settings.schema import Settings

PATH = "/predictions/talker"
MEASURE = """
def handle(data, context):
    return None if data is None else [describe(row["body"]) for row in data]


def describe(body):
    return f"{type(body).__name__} {len(body)} {sum(body[::4099])} {len(set(body))}"
"""
FLOOD = """
def handle(data, context):
    from ts.handler_utils.utils import send_intermediate_predict_response

    if data is None:
        return None
    for _ in range(COUNT):
        send_intermediate_predict_response(["x" * 65536], {0: context.get_request_id(0)}, "more", 200, context)
    return ["end"]
"""
ROUNDS = """
def handle(data, context):
    return None if data is None else [f"{len(data)} " + bytes(row["body"]).decode() for row in data]
"""


def connect(server: RunningServer) -> socket.socket:
    parts = urlsplit(str(server.inference.base_url))
    return socket.create_connection((parts.hostname or "", parts.port or 0), timeout=60)


def request(body: bytes, path: str = PATH, extra: bytes = b"", length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    return b"POST %b HTTP/1.1\r\nHost: localhost\r\n%bContent-Length: %d\r\n\r\n%b" % (
        path.encode(),
        extra,
        size,
        body,
    )


def read_answer(sock: socket.socket) -> tuple[int, dict[str, str], bytes]:
    received = b""
    while b"\r\n\r\n" not in received:
        received += sock.recv(65536) or pytest.fail(f"closed after {received!r}")
    head, _, body = received.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines[1:])
    while len(body) < int(headers["content-length"]):
        body += sock.recv(1 << 20) or pytest.fail("closed in the middle of a body")
    return int(lines[0].split()[1]), headers, body


# Heads


class Version:
    name = "digits"

    def by_head(self, headers: object) -> Version:
        return self


def make_heads(
    guard: Guard | None = None,
    limit: int = 100,
    missing: Callable[[str], ResourceNotFound | None] = lambda path: None,
) -> tuple[Heads, dict[str, object], Any]:
    versions: dict[str, object] = {"digits": Version()}

    def route(name: str, version: str | None, headers: object) -> object:
        if name not in versions:
            raise ModelNotFound(name)
        return versions[name]

    registry: Any = SimpleNamespace(
        route=route, on_change=[], models=versions, hidden_headers=HiddenHeaders(Settings())
    )
    return Heads(registry, guard, limit, 64 << 10, missing=missing), versions, registry


def test_a_head_is_read_once() -> None:
    heads, versions, _ = make_heads()
    raw = request(b"", "/predictions/digits?a=1", b"X-Own: 1\r\n", 7)
    head, version = heads.read(raw) or pytest.fail("not for this lane")
    assert heads.known[raw] == (head, version)
    assert version is versions["digits"]
    assert (head.length, head.keep_alive) == (7, True)
    assert (
        head.meta
        == b"\r\n\r\nHost: localhost\r\nX-Own: 1\r\nContent-Length: 7\r\nurl_path: \r\nexplain: False\r\n"
    )


@pytest.mark.parametrize(
    ("value", "waits"), [(b"100-continue", True), (b"100-Continue", True), (b"a-miracle", False)]
)
def test_a_head_says_whether_its_body_waits_for_a_go_ahead(value: bytes, waits: bool) -> None:
    heads, _, _ = make_heads()
    head, _ = heads.read(
        request(b"", "/predictions/digits", b"Expect: %b\r\n" % value, 7)
    ) or pytest.fail("not for this lane")
    assert head.waits_for_go == waits


def test_what_is_known_is_forgotten_when_models_change() -> None:
    heads, versions, registry = make_heads()
    raw = request(b"", "/predictions/new")
    refused = heads.read(raw) or pytest.fail("not for this lane")
    assert isinstance(refused[1], RefusalRoute)
    assert raw in heads.known
    versions["new"] = Version()
    for listener in registry.on_change:
        listener()
    assert raw not in heads.known
    found = heads.read(raw) or pytest.fail("not for this lane")
    assert found[1] is versions["new"]


def test_few_heads_are_remembered_and_none_that_is_long() -> None:
    heads, _, _ = make_heads()
    for number in range(REMEMBERED + 10):
        assert heads.read(request(b"", f"/predictions/digits?{number}")) is not None
    assert len(heads.known) <= REMEMBERED
    long = request(b"", "/predictions/digits", b"X-Long: %b\r\n" % (b"x" * 5000))
    assert heads.read(long) is not None
    assert long not in heads.known


@pytest.mark.parametrize(
    "raw",
    [
        b"HEAD /predictions/digits HTTP/1.1\r\nHost: a\r\n\r\n",
        b"OPTIONS /predictions/digits HTTP/1.1\r\nHost: a\r\n\r\n",
        b"POST /predictions/digits HTTP/1.0\r\nContent-Length: 1\r\n\r\n",
        b"POST /predictions/digits HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST /predictions/digits HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 0\r\n\r\n",
        b"POST /predictions/digits HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST /predictions/digits HTTP/1.1\r\nHost: a\r\nContent-Length: 101\r\n\r\n",
        b"POST /predictions/digits HTTP/1.1\r\nHost: a\r\nContent-Length: +1\r\n\r\n",
        b"POST /predictions/digits HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST /predictions/digits HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST /predictions/digits HTTP/1.1\r\nHost : a\r\n\r\n",
        b"POST /predictions/digits HTTP/1.1\nHost: a\n\nGET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\n",
        b"\r\n\r\n",
        b"junk\r\n\r\n",
        b"POST /predictions/nobody HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 1\r\n\r\n",
        b"GET http://host HTTP/1.1\r\nHost: a\r\n\r\n",
        b"POST /predictions/digits HTTP/1.1\r\nHost: a\r\nContent-Length: "
        + b"0" * 5000
        + b"5\r\n\r\n",
        b"POST /invocations HTTP/1.1\r\nHost: a\r\nContent-Type: multipart/form-data; boundary=a\r\n\r\n",
    ],
)
def test_what_is_not_plain_is_left_to_the_other_lane(raw: bytes) -> None:
    heads, _, _ = make_heads()
    assert heads.read(raw) is None


@pytest.mark.parametrize(
    ("path", "header", "status"),
    [
        ("/predictions/nobody", b"", 404),
        ("/predictions/%ff%fe", b"", 404),
        ("/predictions/", b"", 404),
        ("/predictions/digits", b"X-TSX-Priority: urgent\r\n", 400),
        ("/nowhere", b"", 404),
        ("/nowhere", b"X-TSX-Priority: urgent\r\n", 404),
    ],
)
def test_a_head_that_no_model_answers_is_remembered_with_its_refusal(
    path: str, header: bytes, status: int
) -> None:
    heads, _, _ = make_heads(
        missing=lambda path: ResourceNotFound("Nothing.") if path == "/nowhere" else None
    )
    raw = request(b"", path, header)
    _, route = heads.read(raw) or pytest.fail("not for this lane")
    assert isinstance(route, RefusalRoute)
    assert route.error.status == status
    assert heads.known[raw][1] is route


def test_a_head_without_its_token_is_refused_whatever_else_is_wrong_with_it() -> None:
    heads, _, _ = make_heads(Guard(BearerToken("secret")))
    for path in (PATH, "/predictions/digits", "/predictions/nobody"):
        for header in (b"", b"Authorization: Bearer wrong\r\n", b"X-TSX-Priority: urgent\r\n"):
            _, route = heads.read(request(b"", path, header)) or pytest.fail("not for this lane")
            assert isinstance(route, RefusalRoute)
            assert isinstance(route.error, InvalidToken)
    _, route = heads.read(
        request(b"", "/predictions/digits", b"Authorization: Bearer secret\r\n")
    ) or pytest.fail("not for this lane")
    assert isinstance(route, Version)


def test_a_flood_of_refusals_pushes_no_head_out() -> None:
    heads, _, _ = make_heads()
    quiet = request(b"", "/predictions/digits")
    known = heads.read(quiet)
    for number in range(2 * REMEMBERED):
        heads.read(request(b"", f"/predictions/nobody-{number}"))
        heads.read(request(b"", f"/ping?{number}"))
    assert heads.known[quiet] == known
    assert len(heads.known) <= REMEMBERED
    assert heads.read(request(b"", "/predictions/digits?late")) is not None
    assert request(b"", "/predictions/digits?late") in heads.known


@given(
    st.binary(max_size=60),
    st.lists(
        st.sampled_from(
            [b"\r\n", b"\n", b": ", b"Content-Length: 1", b"GET / HTTP/1.1", b"\x00", b"a"]
        ),
        max_size=12,
    ),
)
def test_one_head_or_none_is_read_from_any_bytes(first: bytes, parts: list[bytes]) -> None:
    found = parse(b"POST /predictions/digits HTTP/1.1\r\n" + first + b"".join(parts) + b"\r\n\r\n")
    assert found is None or (found.messages == 1 and not found.has_body)


# Bodies


@pytest.fixture(scope="module")
def measuring(start_server: Any) -> Iterator[RunningServer]:
    with start_server(max_request_size=12_000_000) as server:
        server.write_mar("measure.mar", handler=MEASURE)
        server.register("measure.mar", initial_workers=1, batch_size=4)
        yield server


def described(body: bytes) -> bytes:
    return f"bytearray {len(body)} {sum(body[::4099])} {len(set(body))}".encode()


@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 65_537, 300_000, 11_000_000])
def test_a_body_of_any_size_arrives_as_it_was_sent(measuring: RunningServer, size: int) -> None:
    body = (bytes(range(256)) * (size // 256 + 1))[:size]
    with connect(measuring) as sock:
        sock.sendall(request(body, "/predictions/measure"))
        assert read_answer(sock)[2] == described(body)
        sock.sendall(request(body[:9], "/predictions/measure"))
        assert read_answer(sock)[2] == described(body[:9])


def test_large_bodies_of_one_batch_do_not_mix(measuring: RunningServer) -> None:
    bodies = [bytes([number]) * (200_000 + number) for number in range(12)]
    socks = [connect(measuring) for _ in bodies]
    for sock, body in zip(socks, bodies, strict=True):
        sock.sendall(request(body, "/predictions/measure"))
    for sock, body in zip(socks, bodies, strict=True):
        assert read_answer(sock)[2] == described(body)
        sock.close()


def test_a_body_may_come_byte_by_byte(server: RunningServer) -> None:
    with connect(server) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in request(b"abc", extra=b"x-do: bytes\r\n"):
            sock.sendall(bytes([byte]))
        assert read_answer(sock)[2] == b"abc"


# Order


def test_requests_that_are_sent_ahead_are_answered_in_order_by_whichever_lane(
    server: RunningServer,
) -> None:
    ping = b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n"
    plain = request(b"p", extra=b"x-do: bytes\r\n")
    chunked = (
        b"POST %b HTTP/1.1\r\nHost: localhost\r\nx-do: bytes\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nc\r\n0\r\n\r\n"
        % PATH.encode()
    )
    last = request(b"e", extra=b"x-do: bytes\r\nConnection: close\r\n")
    with connect(server) as sock:
        sock.sendall(plain + ping + plain + chunked + chunked + plain + ping + ping + last + plain)
        received = b"".join(iter(lambda: sock.recv(65536), b""))
    bodies = re.findall(rb"\r\n\r\n(p|c|e|\{)", received)
    assert bodies == [
        b"p",
        b"{",
        b"p",
        b"c",
        b"c",
        b"p",
        b"{",
        b"{",
        b"e",
    ]  # and nothing after the client's word to close


def test_a_client_may_send_very_many_requests_ahead(server: RunningServer) -> None:
    count = 3000
    with connect(server) as sock:
        sender = threading.Thread(
            target=sock.sendall, args=(request(b"1", extra=b"x-do: bytes\r\n") * count,)
        )
        sender.start()
        received = b""
        while received.count(b"HTTP/1.1 200 OK") < count or not received.endswith(b"\r\n\r\n1"):
            received += sock.recv(1 << 20) or pytest.fail("closed too early")
        sender.join()
    assert received.count(b"HTTP/1.1 200 OK") == count


# Clients that leave, or are slow


def test_a_client_that_does_not_read_its_stream_holds_the_worker_not_the_memory(
    start_server: Any, until: Any
) -> None:
    with start_server(max_response_size=1_000_000) as server:
        server.write_mar("flood.mar", handler=FLOOD.replace("COUNT", "2000"))  # 131 MB
        server.register("flood.mar", initial_workers=1)
        version = server.registry.find("flood")
        before = psutil.Process().memory_info().rss
        with connect(server) as sock:
            sock.sendall(request(b"", "/predictions/flood"))
            assert sock.recv(100).startswith(b"HTTP/1.1 200 OK")
            (worker,) = version.workers
            until(lambda: worker.channel is not None and worker.channel.held)
            assert psutil.Process().memory_info().rss - before < 40_000_000
            received = 100
            while part := sock.recv(1 << 20):
                received += len(part)
                if part.endswith(b"3\r\nend\r\n0\r\n\r\n"):
                    break
            assert received > 2000 * 65536
        assert psutil.Process().memory_info().rss - before < 60_000_000


def test_a_client_that_leaves_a_stream_it_did_not_read_frees_the_worker(
    start_server: Any, until: Any
) -> None:
    with start_server() as server:
        server.write_mar("flood.mar", handler=FLOOD.replace("COUNT", "500"))
        server.register("flood.mar", initial_workers=1)
        version = server.registry.find("flood")
        with connect(server) as sock:
            sock.sendall(request(b"", "/predictions/flood"))
            (worker,) = version.workers
            until(lambda: worker.channel is not None and worker.channel.held)
        until(lambda: version.stats.answers)  # it had come to its end, or was stopped before it
        assert httpx.post(
            f"{server.inference.base_url}/predictions/flood", timeout=60
        ).text.endswith("end")


@pytest.mark.parametrize(
    ("last", "end"),
    [("return ['end']", b"3\r\nend\r\n0\r\n\r\n"), ("raise ValueError('broken')", b"")],
)
def test_a_stream_that_ended_while_its_client_was_slow_leaves_the_worker_free(
    start_server: Any, until: Any, last: str, end: bytes
) -> None:
    """The last frames of the worker come in one read: the client is behind, and the answer is
    over.
    """
    handler = FLOOD.replace("COUNT", "int(context.get_request_header(0, 'x-flood') or 0)").replace(
        'return ["end"]', last
    )
    with start_server() as server:
        server.write_mar("flood.mar", handler=handler)
        server.register("flood.mar", initial_workers=1, response_timeout=60)
        (worker,) = server.registry.find("flood").workers
        for count in range(
            200,
            210,
            # how many frames the last read holds is up to the kernel: one of these ends behind a
            # held one
        ):
            with socket.socket() as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                parts = urlsplit(str(server.inference.base_url))
                sock.connect((parts.hostname or "", parts.port or 0))
                sock.sendall(request(b"", "/predictions/flood", b"x-flood: %d\r\n" % count))
                until(lambda: worker.channel is not None and worker.channel.held)
                received = b""
                while not received.endswith(end or b"none"):
                    part = sock.recv(4096)
                    if not part:
                        break
                    received = received[-100:] + part
                assert received.endswith(end)
            assert httpx.post(
                f"{server.inference.base_url}/predictions/flood", timeout=90
            ).status_code in (200, 500)


class Unread(asyncio.Transport):
    """A connection whose client takes as much as the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.unsent = 0
        self.closing = self.aborted = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.aborted = True


def unread() -> tuple[FastLane, Unread]:
    transport = Unread()
    app = ServerApp("unread", ResponseCounts(), Settings.model_validate({"write_timeout": 3}))
    connection = FastLane(uvicorn.Config(app, lifespan="off", log_config=None), ServerState(), {})
    connection.connection_made(transport)
    return connection, transport


def test_what_a_client_was_slow_to_take_once_does_not_count_when_it_is_slow_again() -> None:
    async def main() -> None:
        connection, transport = unread()
        transport.unsent = 1000
        connection.pause_writing()
        connection.on_tick()
        connection.resume_writing()
        for _ in range(10):  # a long stream that is read well meanwhile
            connection.on_tick()
        transport.unsent = 2000
        connection.pause_writing()
        connection.on_tick()
        assert not transport.aborted
        for _ in range(5):
            connection.on_tick()
        assert transport.aborted

    asyncio.run(main())


def test_a_closed_connection_whose_client_takes_nothing_is_let_go() -> None:
    async def main() -> None:
        connection, transport = unread()
        transport.unsent = 1000  # too little for the transport to ask for a pause
        transport.close()
        for _ in range(6):
            connection.on_tick()
        assert transport.aborted

    asyncio.run(main())


class Written(Unread):
    """A connection whose client reads nothing but is told something."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


@pytest.mark.parametrize(
    ("each", "rate", "seconds"), [(1, 10, 3), (9, 10, 30), (10, 20, 6), (10, 10, None)]
)
def test_a_body_must_come_at_a_rate_however_steadily_it_comes(
    each: int, rate: int, seconds: int | None
) -> None:
    """After 3 s, which each may take, and the time that what came takes at that rate."""

    async def main() -> None:
        app = ServerApp("slow", ResponseCounts(), Settings(body_timeout=3))
        app.timeouts = app.timeouts._replace(body_rate=rate)
        connection, transport = (
            FastLane(uvicorn.Config(app, lifespan="off", log_config=None), ServerState(), {}),
            Written(),
        )
        connection.connection_made(transport)
        connection.data_received(b"POST /nowhere HTTP/1.1\r\nContent-Length: 100000\r\n\r\n")
        came = 0
        while not transport.closing and came < 100:
            came += 1
            connection.data_received(b"x" * each)
            connection.on_tick()
        assert (
            came < 100 and b"408" in transport.written and b"body_timeout" in transport.written
        ) == (seconds is not None)
        assert seconds is None or seconds <= came <= seconds + 2

    asyncio.run(main())


@pytest.mark.parametrize(
    ("framing", "rest"),
    [
        (b"Content-Length: 4\r\n\r\nab", b"cd"),
        (b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n", b"2\r\ncd\r\n0\r\n\r\n"),
    ],
)
def test_a_model_that_goes_while_the_body_comes_is_not_found_by_either_lane(
    empty: RunningServer, framing: bytes, rest: bytes
) -> None:
    empty.register("talker.mar", initial_workers=1)
    with connect(empty) as sock:
        sock.sendall(
            b"POST %b HTTP/1.1\r\nHost: localhost\r\nx-do: bytes\r\n" % PATH.encode() + framing
        )
        assert (
            empty.inference.post(PATH, content=b"x", headers={"x-do": "bytes"}).text == "x"
        )  # by now the server has read what came
        empty.call(lambda: empty.registry.unregister("talker"))
        sock.sendall(rest)
        status, _, body = read_answer(sock)
    assert (status, b"ModelNotFoundException" in body) == (404, True)
