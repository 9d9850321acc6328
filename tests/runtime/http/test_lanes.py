"""Both lanes answer alike: servers with and without the fast lane get the same bytes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import pytest
import uvicorn
import uvloop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kit.connections import connect_raw
from tests.runtime.conftest import RunningServer, make_settings, running_server
from tests.support.clients.rawhttp import Answer, chunked, request
from tests.support.models import make_model
from tsx_runtime.http.fast_lane.cased_protocol import CasedProtocol
from tsx_runtime.http.fast_lane.connection import FastLane
from tsx_runtime.settings.schema import ROLES

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


Lanes = dict[tuple[bool, bool], RunningServer]  # The keys are (has_token, is_fast).


def with_short_keep_alive(protocol: type[CasedProtocol]) -> Callable[[], Any]:
    """Return an `http_protocol` that closes connections after 2 s without a request."""

    def connect(config: uvicorn.Config, **arguments: Any) -> CasedProtocol:
        config.timeout_keep_alive = 2
        return protocol(config, **arguments)

    return lambda: connect


@pytest.fixture(scope="module")
def lanes(processes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lanes]:
    """Start servers with and without a token and the fast lane, on the product's event loop."""
    store = tmp_path_factory.mktemp("lanes")
    make_model(store / "echo.mar", ECHO)
    protected = {"inference_token": TOKEN.decode(), "management_token": "other"}
    policy = asyncio.get_event_loop_policy()
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    servers: Lanes = {}
    with contextlib.ExitStack() as stack:
        for has_token, fast in itertools.product((False, True), repeat=2):
            settings = make_settings(
                store, max_request_size=LIMIT, **(protected if has_token else {})
            )
            with pytest.MonkeyPatch.context() as patch:
                protocol = with_short_keep_alive(FastLane if fast else CasedProtocol)
                patch.setattr("tests.runtime.conftest.http_protocol", protocol)
                server = stack.enter_context(running_server(settings, [ROLES]))
            server.register("echo.mar", initial_workers=1)
            servers[has_token, fast] = server
        yield servers
    asyncio.set_event_loop_policy(policy)


class Sent(NamedTuple):
    """A request; with `waits`, its body is sent once the server has answered 100."""

    head: bytes
    body: bytes = b""
    waits: bool = False
    method: bytes = b"POST"


def echo(headers: Iterable[tuple[bytes, bytes]] = (), body: bytes | None = b"x") -> bytes:
    return request(target=b"/predictions/echo", headers=headers, body=body)


PATHS = b"""
/predictions/echo
/predictions/echo/1.0
/predictions/echo/1.0/
/predictions/echo/1.0/more/of%20it
/predictions/echo//more
/predictions/echo/
/predictions/echo/9.9
/predictions/ech%6F
/predictions/echo%2F1.0
/predictions/%ff
/predictions/echo/1.0/%E2%82%AC%00
/predictions/nobody
/predictions//
/predictions/
/predictions
//predictions/echo
/Predictions/echo
/x/../predictions/echo
http://127.0.0.1/predictions/echo
http://127.0.0.1/v2/models/nobody/infer
/explanations/echo
/explanations/echo/1.0
/v1/models/echo:predict
/v1/models/echo/versions/1.0:predict
/v1/models/echo/versions/7:predict
/v1/models/echo:explain
/v1/models/echo%3Apredict
/v1/models/nobody:predict
/v1/models/echo:learn
/v2/models/echo/infer
/v2/models/echo/versions/1.0/infer
/v2/models/echo/explain
/v2/models//infer
/v2/models/nobody/infer
/v2%2Fmodels/nobody/infer
/v2/models/echo/infer/
/invocations
/invocations/
/invocations/more
/ping
/models
/api-description
/nowhere
/nowhere/at%20all/
/
*
""".split()
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
    (name, value)
    for name, _, value in (
        line.partition(b": ")
        for line in b"""\
X-Do: raise
X-Do: status
X-Do: headers
X-Do: bad headers
X-Do: stream
X-Do: break
X-Do: empty
X-Do: bytes
X-Status: 204
X-Status: 304
X-Status: 599
X-Status: 199
Content-Type: application/json
Content-Type: text/plain; charset=latin-1
Content-Type: application/x-www-form-urlencoded
Content-Type: multipart/form-data; boundary=edge
Content-Type: Multipart/Form-Data; boundary=wrong
Connection: close
Connection: Keep-Alive
Connection: x, close
Authorization: Bearer open sesame
Authorization: bearer  open sesame
Authorization: Bearer wrong
Authorization: Bearer other
Origin: http://evil.org
Origin: http://localhost:3000
Origin: http://[::1].evil.org
Sec-Fetch-Site: cross-site
Sec-Fetch-Site: same-origin
Host: evil.org
Host: 127.0.0.1
Cookie: session=1
Proxy-Authorization: Basic eDp5
X-Request-Id: mine
Explain: maybe
Url_Path: /etc
X-TSX-Priority: 7
X-TSX-Priority: urgent
X-TSX-Timeout-Ms: 50000
X-TSX-Timeout-Ms: 0
X-Empty:\x20
X-Spaces:  \t a  b \t
X-Bytes: caf\xe9 \xff\x80
Accept-Encoding: gzip
Trailer: X-Sum
Content-Encoding: gzip""".splitlines()
    )
]
FORM = b'--edge\r\nContent-Disposition: form-data; name="data"; filename="a.txt"\r\n\r\nhi\r\n--edge--\r\n'
FORM_WITH_MODEL = (
    b'--edge\r\nContent-Disposition: form-data; name="model_name"\r\n\r\necho\r\n--edge--\r\n'
)
BODIES = st.one_of(
    st.sampled_from(
        [
            b"",
            b"{}",
            b'{"a": [1, 2]}',
            b"model_name=echo&x=1",
            FORM,
            FORM_WITH_MODEL,
            b"\r\n\r\n",
            b"GET / HTTP/1.1\r\n\r\n",
        ]
    ),
    st.binary(max_size=40),
    st.integers(LIMIT - 2, LIMIT + 300).map(lambda size: b"b" * size),
)
ECHO_HEAD = b"POST /predictions/echo HTTP/1.1\r\nHost: localhost\r\n"
MALFORMED = [
    b"GARBAGE\r\n\r\n",
    b"POST /predictions/echo\r\n\r\n",
    b"POST /predictions/echo HTTP/9.9\r\n\r\n",
    b"POST  /predictions/echo HTTP/1.1\r\n\r\n",
    b"POST /predictions/ec ho HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"POST /predictions/ech\xff HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"post /predictions/echo HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"POST /predictions/echo HTTP/1.1\r\nHost : x\r\n\r\n",
    ECHO_HEAD + b"No colon\r\n\r\n",
    ECHO_HEAD + b"X-Nul: a\0b\r\n\r\n",
    ECHO_HEAD + b"X-Folded: a\r\n b\r\n\r\n",
    ECHO_HEAD + b"Content-Length: many\r\n\r\n",
    ECHO_HEAD + b"Content-Length: -1\r\n\r\n",
    ECHO_HEAD + b"Content-Length: +2\r\n\r\nhi",
    ECHO_HEAD + b"Content-Length: 0x2\r\n\r\nhi",
    ECHO_HEAD + b"Content-Length:\r\n\r\n",
    ECHO_HEAD + b"Content-Length: 2, 2\r\n\r\nhi",
    ECHO_HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\nhi!",
    ECHO_HEAD + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\nhi",
    ECHO_HEAD + b"Content-Length: 99999999999999999999999\r\n\r\n",
    ECHO_HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ECHO_HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nhi\r\n0\r\n\r\n",
    ECHO_HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhi!\r\n0\r\n\r\n",
    ECHO_HEAD + b"Transfer-Encoding: gzip\r\n\r\n",
    b"POST /predictions/echo HTTP/1.1\nContent-Length: 2\n\nhi\r\n\r\n",
    ECHO_HEAD + b"Content-Length: 2\n\r\nhi\r\n\r\n",
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
    target = draw(st.sampled_from([*PATHS[:1] * 5, *PATHS])) + draw(st.sampled_from(QUERIES))
    headers = [
        (cased(draw, name), value)
        for name, value in draw(st.lists(st.sampled_from(HEADERS), max_size=4))
    ]
    # A HEAD is answered before its stream breaks; the connection then ends at an unknown time.
    if method == b"HEAD":
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
        chunks = [
            body[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(body)], strict=True)
        ]
        body = chunked(
            chunks,
            draw(st.sampled_from([b"", b";a=b"])),
            draw(st.sampled_from([b"", b"X-Sum: 1\r\n"])),
        )
        headers.append((cased(draw, b"Transfer-Encoding"), b"chunked"))
    if waits:
        headers.append(
            (cased(draw, b"Expect"), draw(st.sampled_from([b"100-continue", b"100-Continue"])))
        )
    return Sent(request(method, target, headers, version=version), body, waits, method)


MALFORMED_LAST = st.sampled_from(MALFORMED).map(Sent)
PLAN = st.tuples(
    st.lists(one_request(), min_size=1, max_size=5),
    st.one_of(st.none(), st.none(), MALFORMED_LAST),
    st.lists(st.integers(1, 400), max_size=8),  # sizes of the pieces that are sent
    st.booleans(),
)


def ask(
    server: RunningServer, requests: Iterable[Sent], cuts: Iterable[int], pipelined: bool
) -> list[Answer | None]:
    """Return all answers, including one to a final request; None is the end of the connection."""
    answers: list[Answer | None] = []

    def read() -> None:
        answers.extend(connection.answer(sent_request.method) for sent_request in unanswered)
        unanswered.clear()

    with connect_raw(server) as connection:
        unanswered: list[Sent] = []
        for sent_request in requests:
            if sent_request.waits:
                read()
                connection.send(*cut(sent_request.head, cuts))
                first = connection.answer(sent_request.method)
                answers.append(first)
                if first is not None and first.status == 100:
                    connection.send(*cut(sent_request.body, cuts))
                    answers.append(connection.answer(sent_request.method))
                elif not closes(first):
                    connection.send(sent_request.body)
            else:
                # uvicorn answers a malformed request before earlier ones and closes before it has
                # read the body. Answers would be lost; therefore such a request is sent alone.
                is_single = (
                    sent_request.head in MALFORMED
                    or b" HTTP/1.0\r" in sent_request.head
                    or b"close\r" in sent_request.head.lower()
                )
                if is_single:
                    read()
                unanswered.append(sent_request)
                connection.send(
                    *cut(sent_request.head + sent_request.body, [] if is_single else cuts)
                )
                if not pipelined:
                    read()
            if any(map(closes, answers)):
                break
        read()
        if not any(map(closes, answers)):
            connection.send(request(b"GET", b"/ping?last"))
        answers.append(connection.answer(b"GET"))
    return answers


def cut(data: bytes, sizes: Iterable[int]) -> list[bytes]:
    pieces = []
    for size in sizes:
        pieces.append(data[:size])
        data = data[size:]
    return [piece for piece in [*pieces, data] if piece]


def closes(answer: Answer | None) -> bool:
    return (
        answer is None
        or not answer.complete
        or b"close" in (answer.header(b"connection") or b"").lower()
    )


def check_alike(
    lanes: Lanes,
    *requests: Sent,
    cuts: Iterable[int] = (),
    token: bool = False,
    pipelined: bool = False,
) -> list[Answer | None]:
    """Check that both lanes give the same answers, and return these."""
    fast, asgi = (ask(lanes[token, fast], requests, cuts, pipelined) for fast in (True, False))
    assert fast == asgi
    return fast


@settings(suppress_health_check=list(HealthCheck))
@given(plan=PLAN, token=st.booleans())
def test_both_lanes_give_the_same_answers(lanes, plan, token):
    requests, malformed, cuts, pipelined = plan
    requests = [*requests, *filter(None, [malformed])]
    check_alike(lanes, *requests, cuts=cuts, token=token, pipelined=pipelined)


@pytest.mark.parametrize("raw", MALFORMED)
@pytest.mark.parametrize("is_last", [False, True], ids=["first", "after another"])
def test_both_lanes_give_the_same_answers_to_malformed_requests(lanes, raw, is_last):
    earlier_requests = [Sent(echo())] if is_last else []
    check_alike(lanes, *earlier_requests, Sent(raw), pipelined=True)


@pytest.mark.parametrize(
    ("raw", "cause"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "Use http:// instead of https://."),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "grpc_inference_port"),
        (b"LOAD / HTTP/1.1\r\n\r\n", "The method LOAD of the request is not known"),
        (b"post / HTTP/1.1\r\n\r\n", "Write it in upper case."),
        (
            b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n\x16z\r\n",
            "invalid character in chunk size",
        ),
        (b"GET / HTTP/9.9\r\n\r\n", "HTTP/1.1: invalid HTTP version."),
        (b"GET http://[::1 HTTP/1.1\r\nHost: a\r\n\r\n", "the URL of the request cannot be read"),
        (b"CONNECT a:443 HTTP/1.1\r\nHost: a\r\n\r\n", "This server is no proxy"),
    ],
    ids=str,
)
@pytest.mark.parametrize("fast", [False, True], ids=["ASGI", "fast"])
def test_invalid_http_is_answered_with_the_cause_as_json(lanes, raw, cause, fast):
    with connect_raw(lanes[False, fast]) as connection:
        connection.send(raw)
        answer, end = connection.answer(), connection.answer()
    assert (answer.status, end) == (400, None)
    assert answer.header(b"content-type") == b"application/json"
    assert answer.header(b"x-request-id") is not None
    error = json.loads(answer.body)
    assert (error["code"], error["type"]) == (400, "BadRequestException")
    assert cause in error["message"]


@pytest.mark.parametrize(
    "malformed_request", [b"GARBAGE", b"GET http://[::1 HTTP/1.1\r\nHost: a"], ids=str
)
def test_the_fast_lane_answers_a_malformed_request_in_order(lanes, malformed_request):
    """Test the first of three differences: uvicorn answers 400 instead of the due answer."""
    with connect_raw(lanes[False, True]) as connection:
        connection.send(echo() * 2 + malformed_request + b"\r\n\r\n")
        answers = [connection.answer() for _ in range(4)]
    assert [answer and answer.status for answer in answers] == [200, 200, 400, None]


@pytest.mark.parametrize(
    "last", [(b"HTTP/1.0", b"X: y"), (b"HTTP/1.1", b"Connection: close")], ids=str
)
def test_the_fast_lane_reads_a_refused_body_before_it_closes(lanes, last):
    """Read the body, since an early close resets the connection and loses unread answers."""
    large_request = echo([(b"X-Do", b"bytes")], None)
    refused_request = (
        b"POST /predictions/nobody %b\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n%b\r\n\r\n"
        % last
    )
    with connect_raw(lanes[False, True]) as connection:
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
        connection.send(large_request, large_request + refused_request, b"b" * 500, b"b" * 500)
        answers = [connection.answer() for _ in range(4)]
    assert [answer and (answer.status, answer.complete) for answer in answers] == [
        (200, True),
        (200, True),
        (404, True),
        None,
    ]


@pytest.mark.parametrize("upgrade", [b"h2c", b"websocket"])
def test_the_fast_lane_keeps_the_body_of_an_upgrade_request(lanes, upgrade):
    """Test the second difference: uvicorn's parser takes the body for the other protocol.

    Java's client offers h2c with each request.
    """
    offer = [
        (b"Connection", b"Upgrade, HTTP2-Settings"),
        (b"Upgrade", upgrade),
        (b"HTTP2-Settings", b"AAEAAEAA"),
    ]
    with connect_raw(lanes[False, True]) as connection:
        for pieces in ([0], [120], [200, 1]):
            connection.send(*cut(echo(offer, b"all of it"), pieces))
            answer = connection.answer()
            assert answer.status == 200
            assert b'{"body": "all of it"}' in answer.body


@pytest.mark.parametrize("lines", [b"\r\n", b"\n", b"\r\n\r\n", b"\r\n\n\r\n"])
@pytest.mark.parametrize("cuts", [[], [1] * 8, [2]], ids=str)
def test_empty_lines_between_requests_are_skipped(lanes, lines, cuts):
    ping, plain_request = request(b"GET", b"/ping"), echo()
    sent = [
        Sent(plain_request),
        Sent(lines + plain_request, lines),
        Sent(lines + ping, lines, method=b"GET"),
        Sent(plain_request, lines),
    ]
    for pipelined in (False, True):
        answers = check_alike(lanes, *sent, cuts=cuts, pipelined=pipelined)
        assert [answer and answer.status for answer in answers] == [200] * 5


@pytest.mark.parametrize("cuts", [[], [5, 1]], ids=str)
def test_both_lanes_send_100_continue_to_waiting_clients(lanes, cuts):
    def waiting(path: bytes, body: bytes, length: int | None = None) -> Sent:
        size = b"%d" % (len(body) if length is None else length)
        return Sent(
            request(target=path, headers=[(b"Expect", b"100-Continue"), (b"Content-Length", size)]),
            body,
            waits=True,
        )

    sent = [
        waiting(b"/predictions/echo", b"a body"),
        waiting(b"/predictions/echo", b""),
        waiting(b"/predictions/echo", b"b" * LIMIT),
    ]
    answers = check_alike(lanes, *sent, cuts=cuts)
    assert [answer and answer.status for answer in answers] == [100, 200, 100, 200, 100, 200, 200]
    for refused_request, status in (
        (waiting(b"/predictions/nobody", b"a body"), 404),
        (waiting(b"/predictions/echo", b"", LIMIT + 1), 413),
    ):
        answers = check_alike(lanes, refused_request, cuts=cuts)
        assert answers[0].status == status


def test_the_fast_lane_omits_100_continue_if_the_body_arrived(lanes):
    """Test the third difference: uvicorn sends 100 after the body (RFC 9110, 10.1.1)."""
    sent = echo([(b"Expect", b"100-continue")], b"all of it")
    statuses = {}
    for fast in (True, False):
        with connect_raw(lanes[False, fast]) as connection:
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
def test_both_lanes_check_the_host_and_origin_of_a_request(lanes, lines, status):
    for path in (b"/predictions/echo", b"/v2/models/echo/infer", b"/invocations"):
        sent = Sent(b"POST %b HTTP/1.1\r\n%bContent-Length: 2\r\n\r\n{}" % (path, lines))
        answers = check_alike(lanes, sent)
        assert answers[0].status == status
        if status == 403:
            assert b"allowed_hosts" in answers[0].body


def test_an_http_1_0_request_may_omit_the_host(lanes):
    for lines, status in ((b"", 200), (b"Host: a\r\nHost: b\r\n", 400)):
        sent = Sent(b"POST /predictions/echo HTTP/1.0\r\n%bContent-Length: 2\r\n\r\n{}" % lines)
        answers = check_alike(lanes, sent)
        assert answers[0].status == status


@pytest.mark.parametrize("token", [False, True])
def test_both_lanes_hide_the_callers_credentials_from_handlers(lanes, token):
    credential_headers = [
        (b"Authorization", b"Bearer " + TOKEN),
        (b"COOKIE", b"session=mine"),
        (b"Proxy-Authorization", b"Basic bWluZQ=="),
    ]
    sent = Sent(echo([*credential_headers, (b"X-Own", b"seen")]))
    answers = check_alike(lanes, sent, sent, token=token)
    assert b'"X-Own", "seen"' in answers[0].body
    body = answers[0].body.lower()
    assert not [text for text in (b"authorization", b"cookie", b"mine", TOKEN) if text in body]


def test_on_both_lanes_underscores_cannot_imitate_proxy_headers(lanes):
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
    # For the second path the server sets a header url_path.
    for path in (b"/v1/models/echo:predict", b"/predictions/echo/1.0/a/path"):
        sent = Sent(request(target=path, headers=headers, body=b"{}"))
        answers = check_alike(lanes, sent, sent)
        forged_names = {
            name for name, value in json.loads(answers[0].body)[1] if value == "planted"
        }
        assert forged_names - {"url-path"} == {"Cookie_", "ex_plain"}
    assert "url-path" not in forged_names


@pytest.mark.parametrize("path", sorted(set(PATHS)))
def test_both_lanes_have_the_same_routes(lanes, path):
    for method in (b"POST", b"GET", b"HEAD", b"OPTIONS"):
        requests = [
            Sent(request(method, path + query, body=b"{}"), method=method)
            for query in (b"", b"?model_name=echo", b"?%ff=%")
        ]
        check_alike(lanes, *requests)


@pytest.mark.parametrize("header", HEADERS)
def test_both_lanes_support_the_same_headers(lanes, header):
    headers = [header, (b"X-Do", b"status")] if header[0] == b"X-Status" else [header]
    for token in (False, True):
        for path in (b"/predictions/echo", b"/models"):
            sent = Sent(request(b"POST", path, headers, FORM))
            check_alike(lanes, sent, sent, token=token)


def test_the_comparison_also_covers_successful_answers(lanes):
    sent = [
        Sent(request(target=b"/predictions/echo/1.0/x?a=1", headers=[(b"X-A", b"b")], body=b"hi")),
        Sent(echo([(b"X-Do", b"stream")])),
        Sent(request(b"HEAD", b"/predictions/echo"), method=b"HEAD"),
        Sent(echo([(b"Transfer-Encoding", b"chunked")], None), chunked([b"a", b"bc"])),
        Sent(echo(body=b"b" * (LIMIT + 1))),
    ]
    answers = check_alike(lanes, *sent, cuts=[7, 1, 30], pipelined=True)
    assert [answer and answer.status for answer in answers] == [200, 200, 200, 200, 413, None]
    echo_body, stream_body, head_body, joined_body = (
        answer.body for answer in answers[:4] if answer is not None
    )
    assert int(answers[2].header(b"content-length") or 0) > 0
    assert b'"X-A", "b"' in echo_body
    assert b'"url_path", "x"' in echo_body
    assert stream_body == b"abcd"
    assert head_body == b""
    assert b"abc" in joined_body
