"""Both lanes answer alike: the same bytes to two servers over one registry, one with the fast lane
and one with FastAPI alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import uvicorn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.clients.rawhttp import TIMEOUT, Answer, RawConnection, chunked, request
from tests.support.models import make_model
from tsx_runtime.core.models.plan import RegisterOrder
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.http.app import build_apps
from tsx_runtime.http.fast_lane.cased_protocol import CasedProtocol
from tsx_runtime.http.fast_lane.connection import FastLane
from tsx_runtime.settings.schema import ROLES, Settings

pytestmark = pytest.mark.slow


ECHO = """
import json

def handle(data, context):
    return None if data is None else [act(index, row, context) for index, row in enumerate(data)]

def act(index, row, context):
    headers = context.get_all_request_header(index)
    word = context.get_request_header(index, "x-do") or ""
    if word == "raise":
        raise RuntimeError("no such image")
    if word == "status":
        context.set_response_status(int(context.get_request_header(index, "x-status") or 418), "Own words", index)
    if word == "headers":
        context.set_response_content_type(index, "text/csv")
        context.set_response_header(index, "X-Own", "1")
        context.set_response_header(index, "Cache-Control", "max-age=60")
        context.set_response_header(index, "Content-Length", "3")
        context.set_response_header(index, "Connection", "close")
        context.set_response_header(index, "X-Request-Id", "mine")
    if word == "bad headers":
        context.set_response_header(index, "X Own", "1")
    if word in ("stream", "break"):
        from ts.handler_utils.utils import send_intermediate_predict_response

        for part in ("a", "bc", ""):
            send_intermediate_predict_response([part], {index: context.get_request_id(index)}, "Intermediate", 200, context)
        if word == "break":
            raise RuntimeError("in the middle")
        return "d"
    if word == "empty":
        return ""
    if word == "bytes":
        return bytes(range(256)) * 300
    shown = {name: value.decode("latin-1") if isinstance(value, (bytes, bytearray)) else value for name, value in row.items()}
    headers = {name: value for name, value in headers.items() if name.lower() != "x-request-id"}
    return json.dumps([shown, sorted(headers.items())])
"""
LIMIT = 1000
TOKEN = b"open sesame"


# Two servers for each of two settings


@dataclass
class Lanes:
    """Addresses by (with a token, fast)."""

    addresses: dict[tuple[bool, bool], tuple[str, int]]
    turn: Callable[[], object]


class Announced(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()


@pytest.fixture(scope="module")
def lanes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lanes]:
    store = tmp_path_factory.mktemp("lanes")
    make_model(store / "echo.mar", ECHO)
    common: dict[str, Any] = {
        "model_store": store,
        "cache_dir": store / "cache",
        "worker_preload": False,
        "max_request_size": LIMIT,
    }
    protected = {"inference_token": TOKEN.decode(), "management_token": "other"}
    kinds = {
        (token, fast): Settings(**common, **(protected if token else {}))
        for token in (False, True)
        for fast in (False, True)
    }
    sockets = {kind: socket.create_server(("127.0.0.1", 0)) for kind in kinds}
    started: list[Any] = []
    ready = threading.Event()

    async def main() -> None:
        registry = Registry(Settings(**common))
        servers = []
        for (token, fast), own in kinds.items():
            (app,) = build_apps(registry, own, [ROLES])
            http: Any = FastLane if fast else CasedProtocol
            config = uvicorn.Config(
                app,
                http=http,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
            )
            config.timeout_keep_alive = 2
            servers.append((Announced(config), sockets[token, fast]))
        await registry.register(RegisterOrder(url="echo.mar", initial_workers=1))
        running = [asyncio.create_task(server.serve([sock])) for server, sock in servers]
        for server, _ in servers:
            await server.up.wait()
        started.extend([asyncio.get_running_loop(), [server for server, _ in servers]])
        ready.set()
        await asyncio.gather(*running)
        await registry.close()

    addresses = {kind: sock.getsockname() for kind, sock in sockets.items()}
    # A daemon, so that a start that fails is a failure and not a run without end.
    thread = threading.Thread(target=lambda: _run(main()), name="lanes", daemon=True)
    thread.start()
    assert ready.wait(TIMEOUT)
    loop, servers = started
    try:
        yield Lanes(
            addresses,
            lambda: asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(TIMEOUT),
        )
    finally:
        for server in servers:
            server.should_exit = True
        thread.join(TIMEOUT)
        assert not thread.is_alive()


def _run(main: Any) -> None:
    with contextlib.suppress(ImportError):
        import uvloop  # not for Windows

        return uvloop.run(main)
    return asyncio.run(main)


# Requests


class Sent(NamedTuple):
    """One request. `body` is sent once the server said to go on, where the request waits for
    that.
    """

    method: bytes
    head: bytes
    body: bytes = b""
    waits: bool = False


PATHS = [
    *[b"/predictions/echo"] * 6,
    b"/predictions/echo/1.0",
    b"/predictions/echo/1.0/",
    b"/predictions/echo/1.0/more/of%20it",
    b"/predictions/echo//more",
    b"/predictions/echo/",
    b"/predictions/echo/9.9",
    b"/predictions/ech%6F",
    b"/predictions/echo%2F1.0",
    b"/predictions/%ff",
    b"/predictions/echo/1.0/%E2%82%AC%00",
    b"/predictions/nobody",
    b"/predictions//",
    b"/predictions/",
    b"/predictions",
    b"//predictions/echo",
    b"/Predictions/echo",
    b"/x/../predictions/echo",
    b"http://127.0.0.1/predictions/echo",
    b"http://127.0.0.1/v2/models/nobody/infer",
    b"/explanations/echo",
    b"/explanations/echo/1.0",
    b"/v1/models/echo:predict",
    b"/v1/models/echo/versions/1.0:predict",
    b"/v1/models/echo/versions/7:predict",
    b"/v1/models/echo:explain",
    b"/v1/models/echo%3Apredict",
    b"/v1/models/nobody:predict",
    b"/v1/models/echo:learn",
    b"/v2/models/echo/infer",
    b"/v2/models/echo/versions/1.0/infer",
    b"/v2/models/echo/explain",
    b"/v2/models//infer",
    b"/v2/models/nobody/infer",
    b"/v2%2Fmodels/nobody/infer",
    b"/v2/models/echo/infer/",
    b"/invocations",
    b"/invocations/",
    b"/invocations/more",
    b"/ping",
    b"/models",
    b"/api-description",
    b"/nowhere",
    b"/nowhere/at%20all/",
    b"/",
    b"*",
]
QUERIES = [
    b"",
    b"",
    b"",
    b"?",
    b"?a=1&a=2&b",
    b"?model_name=echo",
    b"?model_name=nobody",
    b"?%ff=%",
    b"??x=/y",
    b"?a=1#b",
]
HEADERS = [
    (b"X-Do", b"raise"),
    (b"X-Do", b"status"),
    (b"X-Do", b"headers"),
    (b"X-Do", b"bad headers"),
    (b"X-Do", b"stream"),
    (b"X-Do", b"break"),
    (b"X-Do", b"empty"),
    (b"X-Do", b"bytes"),
    (b"X-Status", b"204"),
    (b"X-Status", b"304"),
    (b"X-Status", b"599"),
    (b"X-Status", b"199"),
    (b"Content-Type", b"application/json"),
    (b"Content-Type", b"text/plain; charset=latin-1"),
    (b"Content-Type", b"application/x-www-form-urlencoded"),
    (b"Content-Type", b"multipart/form-data; boundary=edge"),
    (b"Content-Type", b"Multipart/Form-Data; boundary=wrong"),
    (b"Connection", b"close"),
    (b"Connection", b"Keep-Alive"),
    (b"Connection", b"x, close"),
    (b"Authorization", b"Bearer " + TOKEN),
    (b"Authorization", b"bearer  " + TOKEN),
    (b"Authorization", b"Bearer wrong"),
    (b"Authorization", b"Bearer other"),
    (b"Origin", b"http://evil.org"),
    (b"Origin", b"http://localhost:3000"),
    (b"Origin", b"http://[::1].evil.org"),
    (b"Sec-Fetch-Site", b"cross-site"),
    (b"Sec-Fetch-Site", b"same-origin"),
    (b"Host", b"evil.org"),
    (b"Host", b"127.0.0.1"),
    (b"Cookie", b"session=1"),
    (b"Proxy-Authorization", b"Basic eDp5"),
    (b"X-Request-Id", b"mine"),
    (b"Explain", b"maybe"),
    (b"Url_Path", b"/etc"),
    (b"X-TSX-Priority", b"7"),
    (b"X-TSX-Priority", b"urgent"),
    (b"X-TSX-Timeout-Ms", b"50000"),
    (b"X-TSX-Timeout-Ms", b"0"),
    (b"X-Empty", b""),
    (b"X-Spaces", b" \t a  b \t"),
    (b"X-Bytes", b"caf\xe9 \xff\x80"),
    (b"Accept-Encoding", b"gzip"),
    (b"Trailer", b"X-Sum"),
    (b"Content-Encoding", b"gzip"),
]
FORM = b'--edge\r\nContent-Disposition: form-data; name="data"; filename="a.txt"\r\n\r\nhi\r\n--edge--\r\n'
NAMED = b'--edge\r\nContent-Disposition: form-data; name="model_name"\r\n\r\necho\r\n--edge--\r\n'
BODIES = st.one_of(
    st.sampled_from(
        [
            b"",
            b"{}",
            b'{"a": [1, 2]}',
            b"model_name=echo&x=1",
            FORM,
            NAMED,
            b"\r\n\r\n",
            b"GET / HTTP/1.1\r\n\r\n",
        ]
    ),
    st.binary(max_size=40),
    st.integers(LIMIT - 2, LIMIT + 300).map(lambda size: b"b" * size),
)
MALFORMED = [
    b"GARBAGE\r\n\r\n",
    b"POST /predictions/echo\r\n\r\n",
    b"POST /predictions/echo HTTP/9.9\r\n\r\n",
    b"POST  /predictions/echo HTTP/1.1\r\n\r\n",
    b"POST /predictions/ec ho HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"POST /predictions/ech\xff HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"post /predictions/echo HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"POST /predictions/echo HTTP/1.1\r\nHost : x\r\n\r\n",
    b"POST /predictions/echo HTTP/1.1\r\nHost: localhost\r\nNo colon\r\n\r\n",
    b"POST /predictions/echo HTTP/1.1\r\nHost: localhost\r\nX-Nul: a\0b\r\n\r\n",
    b"POST /predictions/echo HTTP/1.1\r\nHost: localhost\r\nX-Folded: a\r\n b\r\n\r\n",
    b"POST /predictions/echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: many\r\n\r\n",
    b"POST /predictions/echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
    b"POST /predictions/echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: +2\r\n\r\nhi",
    b"POST /predictions/echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0x2\r\n\r\nhi",
    b"POST /predictions/echo HTTP/1.1\r\nHost: localhost\r\nContent-Length:\r\n\r\n",
    b"POST /predictions/echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2, 2\r\n\r\nhi",
    b"POST /predictions/echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nhi!",
    b"POST /predictions/echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\nhi",
    b"POST /predictions/echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999999999999999\r\n\r\n",
    b"POST /predictions/echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST /predictions/echo HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nhi\r\n0\r\n\r\n",
    b"POST /predictions/echo HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi!\r\n0\r\n\r\n",
    b"POST /predictions/echo HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip\r\n\r\n",
    b"POST /predictions/echo HTTP/1.1\nContent-Length: 2\n\nhi\r\n\r\n",
    b"POST /predictions/echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\n\r\nhi\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00",
    b"\0",
    b"POST /predictions/echo HTTP/1.1\nContent-Length: 2\n\nhi",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
]


def cased(draw: st.DrawFn, name: bytes) -> bytes:
    return draw(st.sampled_from([name, name, name.lower(), name.upper(), name.swapcase()]))


@st.composite
def one_request(draw: st.DrawFn) -> Sent:
    method = draw(
        st.sampled_from(
            [*[b"POST"] * 6, b"GET", b"PUT", b"PATCH", b"DELETE", b"HEAD", b"OPTIONS", b"PROPFIND"]
        )
    )
    target = draw(st.sampled_from(PATHS)) + draw(st.sampled_from(QUERIES))
    headers = [
        (cased(draw, name), value)
        for name, value in draw(st.lists(st.sampled_from(HEADERS), max_size=4))
    ]
    if (
        method == b"HEAD"
        # its answer is whole before the stream behind it breaks and ends the connection, sooner or
        # later
    ):
        headers = [pair for pair in headers if pair[1] != b"break"]
    version = draw(st.sampled_from([b"1.1"] * 8 + [b"1.0"]))
    framing = draw(st.sampled_from(["length", "length", "length", "zeros", "chunked", "none"]))
    body = b"" if framing == "none" else draw(BODIES)
    waits = framing != "none" and version == b"1.1" and draw(st.integers(0, 9)) == 0
    if framing == "length":
        headers.insert(
            draw(st.integers(0, len(headers))), (cased(draw, b"Content-Length"), b"%d" % len(body))
        )
    elif framing == "zeros":
        headers.append((b"Content-Length", b"000%d" % len(body)))
    elif framing == "chunked":
        cuts = sorted(draw(st.lists(st.integers(0, len(body)), max_size=4)))
        parts = [body[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(body)], strict=True)]
        body = chunked(
            parts,
            draw(st.sampled_from([b"", b";a=b"])),
            draw(st.sampled_from([b"", b"X-Sum: 1\r\n"])),
        )
        headers.append((cased(draw, b"Transfer-Encoding"), b"chunked"))
    if waits:
        headers.append(
            (cased(draw, b"Expect"), draw(st.sampled_from([b"100-continue", b"100-Continue"])))
        )
    return Sent(method, request(method, target, headers, version=version), body, waits)


MALFORMED_LAST = st.sampled_from(MALFORMED).map(lambda raw: Sent(b"POST", raw))
PLAN = st.tuples(
    st.lists(one_request(), min_size=1, max_size=5),
    st.one_of(st.none(), st.none(), MALFORMED_LAST),
    st.lists(st.integers(1, 400), max_size=8),  # where the stream of bytes is cut
    st.booleans(),
)


def ask(
    lanes: Lanes, token: bool, fast: bool, requests: list[Sent], cuts: list[int], pipelined: bool
) -> list[Answer | None]:
    """Each answer, then that to a last request, or None where the connection had ended."""
    answers: list[Answer | None] = []
    with RawConnection(lanes.addresses[token, fast], lanes.turn) as connection:
        waiting: list[Sent] = []
        for sent in requests:
            if sent.waits:
                answers += read(connection, waiting)
                connection.send(*cut(sent.head, cuts))
                first = connection.answer(sent.method)
                answers.append(first)
                if first is not None and first.status == 100:
                    connection.send(*cut(sent.body, cuts))
                    answers.append(connection.answer(sent.method))
                elif first is not None and not closes(first):
                    connection.send(sent.body)
            else:
                # uvicorn answers what is malformed before those that it took, and closes before it
                # has read a body: answers are lost
                alone = (
                    sent.head in MALFORMED
                    or b" HTTP/1.0\r" in sent.head
                    or b"close\r" in sent.head.lower()
                )
                if alone:
                    answers += read(connection, waiting)
                waiting.append(sent)
                connection.send(*cut(sent.head + sent.body, [] if alone else cuts))
                if not pipelined:
                    answers += read(connection, waiting)
            if any(answer is None or closes(answer) for answer in answers):
                break
        answers += read(connection, waiting)
        if all(answer is not None and not closes(answer) for answer in answers):
            connection.send(request(b"GET", b"/ping?last"))
        answers.append(connection.answer(b"GET"))
    return answers


def read(connection: RawConnection, waiting: list[Sent]) -> list[Answer | None]:
    answers = []
    while waiting:
        answers.append(connection.answer(waiting.pop(0).method))
    return answers


def cut(data: bytes, sizes: list[int]) -> list[bytes]:
    pieces = []
    for size in sizes:
        pieces.append(data[:size])
        data = data[size:]
    return [piece for piece in [*pieces, data] if piece]


def closes(answer: Answer) -> bool:
    return not answer.complete or b"close" in (answer.header(b"connection") or b"").lower()


def check_alike(
    lanes: Lanes, token: bool, requests: list[Sent], cuts: list[int], pipelined: bool
) -> list[Answer | None]:
    fast = ask(lanes, token, True, requests, cuts, pipelined)
    assert fast == ask(lanes, token, False, requests, cuts, pipelined)
    return fast


@settings(suppress_health_check=list(HealthCheck))
@given(plan=PLAN, token=st.booleans())
def test_both_lanes_answer_alike(lanes: Lanes, plan: Any, token: bool) -> None:
    requests, malformed, cuts, pipelined = plan
    check_alike(lanes, token, [*requests, *([malformed] if malformed else [])], cuts, pipelined)


@pytest.mark.parametrize("raw", MALFORMED)
@pytest.mark.parametrize("after", [False, True], ids=["first", "after another"])
def test_both_lanes_say_the_same_of_what_is_wrong(lanes: Lanes, raw: bytes, after: bool) -> None:
    before = [Sent(b"POST", request(target=b"/predictions/echo", body=b"x"))] if after else []
    check_alike(lanes, False, [*before, Sent(b"POST", raw)], [], pipelined=True)


@pytest.mark.parametrize(
    ("raw", "cause"),
    [
        (
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
            "the client began a TLS connection. Use http:// instead of https://.",
        ),
        (
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            "Use HTTP/1.1; the ports for gRPC are those of grpc_inference_port and",
        ),
        (b"LOAD / HTTP/1.1\r\n\r\n", "The method LOAD of the request is not known. Use GET,"),
        (
            b"post / HTTP/1.1\r\n\r\n",
            "The method post of the request is not known. Write it in upper case.",
        ),
        (
            b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n\x16z\r\n",
            "HTTP/1.1: invalid character in chunk size.",
        ),
        (b"GET / HTTP/9.9\r\n\r\n", "HTTP/1.1: invalid HTTP version."),
        (
            b"GET http://[::1 HTTP/1.1\r\nHost: a\r\n\r\n",
            "HTTP/1.1: the URL of the request cannot be read.",
        ),
        (b"CONNECT a:443 HTTP/1.1\r\nHost: a\r\n\r\n", "This server is no proxy"),
    ],
    ids=str,
)
@pytest.mark.parametrize("fast", [False, True], ids=["ASGI", "fast"])
def test_bytes_that_are_not_http_are_answered_with_the_cause_as_json(
    lanes: Lanes, raw: bytes, cause: str, fast: bool
) -> None:
    with RawConnection(lanes.addresses[False, fast], lanes.turn) as connection:
        connection.send(raw)
        answer, end = connection.answer(), connection.answer()
    assert answer is not None
    assert (answer.status, end) == (400, None)
    assert answer.header(b"content-type") == b"application/json"
    assert answer.header(b"x-request-id") is not None
    error = json.loads(answer.body)
    assert (error["code"], error["type"]) == (400, "BadRequestException")
    assert cause in error["message"]


@pytest.mark.parametrize("wrong", [b"GARBAGE", b"GET http://[::1 HTTP/1.1\r\nHost: a"], ids=str)
def test_on_the_fast_lane_what_is_wrong_waits_for_the_answers_before_it(
    lanes: Lanes, wrong: bytes
) -> None:
    """One of three differences: uvicorn answers 400 at once, in the place of the answer that is
    due.
    """
    with RawConnection(lanes.addresses[False, True]) as connection:
        connection.send(request(target=b"/predictions/echo", body=b"x") * 2 + wrong + b"\r\n\r\n")
        answers = [connection.answer() for _ in range(4)]
    assert [answer and answer.status for answer in answers] == [200, 200, 400, None]


@pytest.mark.parametrize(
    "last", [(b"HTTP/1.0", b"X: y"), (b"HTTP/1.1", b"Connection: close")], ids=str
)
def test_on_the_fast_lane_a_refusal_before_the_body_closes_the_connection_behind_the_body(
    lanes: Lanes, last: tuple[bytes, bytes]
) -> None:
    """Closed before, it would be reset, and the client would lose the answers that it has yet to
    read.
    """
    large = request(target=b"/predictions/echo", headers=[(b"X-Do", b"bytes")])
    refused = (
        b"POST /predictions/nobody %b\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n%b\r\n\r\n"
        % last
    )
    with RawConnection(lanes.addresses[False, True], lanes.turn) as connection:
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
        connection.send(large, large + refused, b"b" * 500, b"b" * 500)
        answers = [connection.answer() for _ in range(4)]
    assert [answer and (answer.status, answer.complete) for answer in answers] == [
        (200, True),
        (200, True),
        (404, True),
        None,
    ]


@pytest.mark.parametrize("upgrade", [b"h2c", b"websocket"])
def test_on_the_fast_lane_an_offer_of_another_protocol_costs_no_body(
    lanes: Lanes, upgrade: bytes
) -> None:
    """The second difference: uvicorn's parser takes what follows such a head for that protocol.

    Java's client offers h2c each time.
    """
    offer = [
        (b"Connection", b"Upgrade, HTTP2-Settings"),
        (b"Upgrade", upgrade),
        (b"HTTP2-Settings", b"AAEAAEAA"),
    ]
    with RawConnection(lanes.addresses[False, True], lanes.turn) as connection:
        for pieces in ([0], [120], [200, 1]):
            connection.send(
                *cut(request(target=b"/predictions/echo", headers=offer, body=b"all of it"), pieces)
            )
            answer = connection.answer()
            assert answer is not None
            assert answer.status == 200
            assert b'{"body": "all of it"}' in answer.body


@pytest.mark.parametrize("lines", [b"\r\n", b"\n", b"\r\n\r\n", b"\r\n\n\r\n"])
@pytest.mark.parametrize("cuts", [[], [1] * 8, [2]], ids=str)
def test_empty_lines_between_requests_are_nothing(
    lanes: Lanes, lines: bytes, cuts: list[int]
) -> None:
    ping, plain = request(b"GET", b"/ping"), request(target=b"/predictions/echo", body=b"x")
    sent = [
        Sent(b"POST", plain),
        Sent(b"POST", lines + plain, lines),
        Sent(b"GET", lines + ping, lines),
        Sent(b"POST", plain, lines),
    ]
    for pipelined in (False, True):
        answers = check_alike(lanes, False, sent, cuts, pipelined)
        assert [answer and answer.status for answer in answers] == [200] * 5


@pytest.mark.parametrize("cuts", [[], [5, 1]], ids=str)
def test_who_waits_to_be_notified_to_go_on_is_notified_by_both_lanes(
    lanes: Lanes, cuts: list[int]
) -> None:
    def waiting(path: bytes, body: bytes, length: int | None = None) -> Sent:
        size = b"%d" % (len(body) if length is None else length)
        return Sent(
            b"POST",
            request(target=path, headers=[(b"Expect", b"100-Continue"), (b"Content-Length", size)]),
            body,
            waits=True,
        )

    sent = [
        waiting(b"/predictions/echo", b"a body"),
        waiting(b"/predictions/echo", b""),
        waiting(b"/predictions/echo", b"b" * LIMIT),
    ]
    answers = check_alike(lanes, False, sent, cuts, pipelined=False)
    assert [answer and answer.status for answer in answers] == [100, 200, 100, 200, 100, 200, 200]
    for refused, status in (
        (waiting(b"/predictions/nobody", b"a body"), 404),
        (waiting(b"/predictions/echo", b"", LIMIT + 1), 413),
    ):
        answers = check_alike(lanes, False, [refused], cuts, pipelined=False)
        assert answers[0] is not None
        assert answers[0].status == status


def test_on_the_fast_lane_who_does_not_wait_to_be_reported_to_go_on_is_not_reported(
    lanes: Lanes,
) -> None:
    """The third difference: uvicorn tells it also of a body that has come already, which RFC 9110
    (10.1.1) leaves open.
    """
    sent = request(
        target=b"/predictions/echo", headers=[(b"Expect", b"100-continue")], body=b"all of it"
    )
    statuses = {}
    for fast in (True, False):
        with RawConnection(lanes.addresses[False, fast]) as connection:
            connection.send(sent + request(b"GET", b"/ping", [(b"Connection", b"close")]))
            statuses[fast] = [answer.status for answer in iter(connection.answer, None)]
    assert statuses == {True: [200, 200], False: [100, 200, 200]}


HOSTS = [
    (b"", 400),
    (b"Host: 127.0.0.1\r\nHost: 127.0.0.1\r\n", 400),
    (b"Host: 127.0.0.1\r\nhost: evil.org\r\n", 400),
    (b"Host: localhost:8080\r\n", 200),
    (b"Host: [::1]:8080\r\n", 200),
    (b"Host: evil.org\r\n", 403),
    (b"Host: [::1].evil.org\r\n", 403),
    (b"Host:\r\n", 403),
    (b"Host: localhost\r\nOrigin: http://evil.org\r\n", 403),
    (b"Host: localhost\r\nOrigin: null\r\n", 403),
    (b"Host: localhost\r\nOrigin: http://localhost:3000\r\nSec-Fetch-Site: cross-site\r\n", 200),
    (b"Host: localhost\r\nSec-Fetch-Site: cross-site\r\n", 403),
    (b"Host: localhost\r\nSec-Fetch-Site: none\r\nSec-Fetch-Mode: navigate\r\n", 200),
]


@pytest.mark.parametrize(("lines", "status"), HOSTS)
def test_both_lanes_look_where_a_request_comes_from(
    lanes: Lanes, lines: bytes, status: int
) -> None:
    for path in (b"/predictions/echo", b"/v2/models/echo/infer", b"/invocations"):
        sent = Sent(b"POST", b"POST %b HTTP/1.1\r\n%bContent-Length: 2\r\n\r\n{}" % (path, lines))
        answers = check_alike(lanes, False, [sent], [], pipelined=False)
        assert answers[0] is not None
        assert answers[0].status == status
        if status == 403:
            assert b"allowed_hosts" in answers[0].body


def test_http_1_0_may_do_without_a_host_and_with_no_two(lanes: Lanes) -> None:
    for lines, status in ((b"", 200), (b"Host: a\r\nHost: b\r\n", 400)):
        sent = Sent(
            b"POST", b"POST /predictions/echo HTTP/1.0\r\n%bContent-Length: 2\r\n\r\n{}" % lines
        )
        answers = check_alike(lanes, False, [sent], [], pipelined=False)
        assert answers[0] is not None
        assert answers[0].status == status


@pytest.mark.parametrize("token", [False, True])
def test_on_both_lanes_no_handler_gets_its_callers_credentials(lanes: Lanes, token: bool) -> None:
    secret = [
        (b"Authorization", b"Bearer " + TOKEN),
        (b"COOKIE", b"session=mine"),
        (b"Proxy-Authorization", b"Basic bWluZQ=="),
    ]
    sent = Sent(
        b"POST",
        request(target=b"/predictions/echo", headers=[*secret, (b"X-Own", b"seen")], body=b"x"),
    )
    answers = check_alike(lanes, token, [sent, sent], [], pipelined=False)
    assert answers[0] is not None
    assert b'"X-Own", "seen"' in answers[0].body
    assert not any(
        word in answers[0].body.lower() for word in (b"authorization", b"cookie", b"mine", TOKEN)
    )


@pytest.mark.parametrize(
    "headers",
    [
        [(b"x_user", b"a"), (b"x-user", b"b")],
        [(b"X-User-Id", b"a"), (b"X_USER-ID", b"b")],
        [(b"x_a-b", b"a"), (b"x-a_b", b"b")],
        [(b"content_length", b"9"), (b"x-a", b"b")],
    ],
)
@pytest.mark.parametrize("token", [False, True])
def test_both_lanes_refuse_headers_that_differ_only_in_underscores(
    lanes: Lanes, headers: list[tuple[bytes, bytes]], token: bool
) -> None:
    credential = [(b"Authorization", b"Bearer " + TOKEN)]
    for path in (b"/predictions/echo", b"/models", b"/nowhere"):
        sent = Sent(b"POST", request(target=path, headers=[*credential, *headers], body=b"{}"))
        answers = check_alike(lanes, token, [sent, sent], [], pipelined=False)
        assert [answer and answer.status for answer in answers[:2]] == [400, 400]
        assert answers[0] is not None
        assert b"differ only in '_' and '-'" in answers[0].body


def test_on_both_lanes_no_underscore_makes_a_header_that_a_server_or_proxy_sets(
    lanes: Lanes,
) -> None:
    names = (
        b"Proxy_Authorization",
        b"X_Forwarded_For",
        b"x_forwarded-proto",
        b"Content_Type",
        b"X_Request_Id",
        b"Cookie_",
        b"ex_plain",
    )
    headers = [*((name, b"planted") for name in names), (b"url-path", b"planted")]
    for path in (
        b"/v1/models/echo:predict",
        b"/predictions/echo/1.0/a/path",
    ):  # the second has a header url_path of the server's
        sent = Sent(b"POST", request(target=path, headers=headers, body=b"{}"))
        answers = check_alike(lanes, False, [sent, sent], [], pipelined=False)
        assert answers[0] is not None
        planted = {name for name, value in json.loads(answers[0].body)[1] if value == "planted"}
        assert planted - {"url-path"} == {"Cookie_", "ex_plain"}
    assert "url-path" not in planted


@pytest.mark.parametrize("path", sorted(set(PATHS)))
@pytest.mark.parametrize("method", [b"POST", b"GET", b"HEAD", b"OPTIONS"])
def test_both_lanes_have_the_same_routes(lanes: Lanes, path: bytes, method: bytes) -> None:
    requests = [
        Sent(method, request(method, path + query, body=b"{}")) for query in sorted(set(QUERIES))
    ]
    check_alike(lanes, False, requests, [], pipelined=False)


@pytest.mark.parametrize("header", HEADERS)
def test_both_lanes_heed_the_same_headers(lanes: Lanes, header: tuple[bytes, bytes]) -> None:
    own = [header, (b"X-Do", b"status")] if header[0] == b"X-Status" else [header]
    for token in (False, True):
        for path in (b"/predictions/echo", b"/v1/models/echo:predict", b"/invocations", b"/models"):
            for body in (FORM, None):
                sent = Sent(b"POST", request(b"POST", path, own, body))
                check_alike(lanes, token, [sent, sent], [], pipelined=False)


def test_the_harness_sees_what_it_compares(lanes: Lanes) -> None:
    """The comparison means nothing if both sides refuse everything."""
    sent = [
        Sent(
            b"POST",
            request(target=b"/predictions/echo/1.0/x?a=1", headers=[(b"X-A", b"b")], body=b"hi"),
        ),
        Sent(
            b"POST",
            request(target=b"/predictions/echo", headers=[(b"X-Do", b"stream")], body=b"hi"),
        ),
        Sent(b"HEAD", request(b"HEAD", b"/predictions/echo")),
        Sent(
            b"POST",
            request(target=b"/predictions/echo", headers=[(b"Transfer-Encoding", b"chunked")]),
            chunked([b"a", b"bc"]),
        ),
        Sent(b"POST", request(target=b"/predictions/echo", body=b"b" * (LIMIT + 1))),
    ]
    answers = check_alike(lanes, False, sent, [7, 1, 30], pipelined=True)
    assert [answer and answer.status for answer in answers] == [200, 200, 200, 200, 413, None]
    echoed, streamed, head, whole = (answer.body for answer in answers[:4] if answer is not None)
    assert b'"X-A", "b"' in echoed
    assert b'"url_path", "x"' in echoed
    assert streamed == b"abcd"
    assert head == b""
    assert b"abc" in whole
