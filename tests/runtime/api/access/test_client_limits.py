"""The limits per client, tested with a fake clock and through both HTTP lanes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.clock import Clock
from tests.runtime.conftest import RunningServer
from tests.support.clients.rawhttp import Answer, RawConnection
from tsx_runtime.api.access.client_limits import (
    DEFAULT_CONNECTIONS,
    DEFAULT_FAILURES,
    DEFAULT_REQUESTS,
    ClientLimits,
    client_limits,
)
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.errors import TooManyRequests
from tsx_runtime.http.build import build_apps
from tsx_runtime.server.listeners import Listener, listeners
from tsx_runtime.settings.schema import Settings
from tsx_runtime.targets.image.environment import ModelLocation, read_settings
from tsx_runtime.targets.sagemaker.environment import read_environment

BODIES = {
    "fast": b"Content-Length: 1\r\n\r\nx",
    "framework": b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n",
}
both_lanes = pytest.mark.parametrize("lane", BODIES)


def forwarded_header(text: str) -> list[tuple[bytes, bytes]]:
    return [(b"x-forwarded-for", text.encode("latin-1"))]


@given(st.integers(1, 50), st.lists(st.floats(0, 2), max_size=200))
def test_no_client_gets_more_than_its_burst_plus_its_rate(rate: int, gaps: list[float]) -> None:
    clock = Clock()
    limits = ClientLimits(requests=rate, clock=clock)
    begin, accepted = clock.now, 0
    for gap in gaps:
        clock.now += gap
        with contextlib.suppress(TooManyRequests):
            limits.count_request(limits.caller("10.0.0.1", ()))
            accepted += 1
        assert accepted <= rate + rate * (clock.now - begin) + 1e-3


@given(st.integers(1, 50), st.integers(1, 100))
def test_a_client_within_its_rate_is_never_refused(rate: int, count: int) -> None:
    clock = Clock()
    limits = ClientLimits(requests=rate, clock=clock)
    client = limits.caller("10.0.0.1", ())
    for _ in range(count):
        limits.count_request(client)
        clock.now += 1 / rate
    clock.now += 1
    # The burst is the number of requests of one second.
    for _ in range(rate):
        limits.count_request(client)


def test_a_refused_client_gets_retry_after() -> None:
    clock = Clock()
    limits = ClientLimits(failures=2, clock=clock)
    client = limits.caller("10.0.0.1", ())
    for _ in range(4):
        limits.count_failure(client)
    with pytest.raises(TooManyRequests, match="max_failed_tokens") as exc_info:
        limits.count_failure(client)
    assert exc_info.value.retry_after == 30
    clock.now += exc_info.value.retry_after
    limits.count_failure(client)


def test_disabled_limits_refuse_nothing() -> None:
    limits = ClientLimits(clock=Clock())
    client = limits.connect("10.0.0.1")
    for _ in range(10_000):
        limits.connect("10.0.0.1")
        limits.count_request(client)
        limits.count_failure(client)


@given(st.lists(st.tuples(st.integers(0, 40), st.booleans()), max_size=200))
def test_the_client_table_is_bounded_but_keeps_connected_clients(
    events: list[tuple[int, bool]],
) -> None:
    limits = ClientLimits(connections=2, max_idle_clients=5, clock=Clock())
    connected: dict[int, list[Any]] = {}
    for number, is_connect in events:
        host, connections = f"10.0.0.{number}", connected.setdefault(number, [])
        if is_connect and len(connections) < 2:
            connections.append(limits.connect(host))
        elif is_connect:
            with pytest.raises(TooManyRequests, match="max_connections_per_client"):
                limits.connect(host)
        elif connections:
            limits.disconnect(connections.pop())
        else:
            limits.caller(host, ())
        assert len(limits) <= 5 + sum(1 for clients in connected.values() if clients)
        for known, clients in connected.items():
            assert all(client is limits.caller(f"10.0.0.{known}", ()) for client in clients)


@pytest.mark.parametrize(
    ("first", "second", "is_same"),
    [
        ("10.0.0.1", "10.0.0.2", False),
        ("10.0.0.1", "::ffff:10.0.0.1", True),
        ("2001:db8:1:2::1", "2001:db8:1:2:ffff::9", True),
        ("2001:db8:1:2::1", "2001:db8:1:3::1", False),
        ("testclient", "testclient", True),
    ],
)
def test_a_client_is_an_ipv4_address_or_a_network_of_ipv6(
    first: str, second: str, is_same: bool
) -> None:
    limits = ClientLimits(clock=Clock())
    assert (limits.connect(first) is limits.connect(second)) is is_same


@pytest.mark.parametrize(
    ("peer", "header", "client"),
    [
        ("10.0.0.1", "", "10.0.0.1"),
        ("10.0.0.1", "203.0.113.9", "203.0.113.9"),
        ("10.0.0.1", "203.0.113.9:4711", "203.0.113.9"),
        ("10.0.0.1", "[2001:db8::1]:4711", "2001:db8::1"),
        ("10.0.0.1", "2001:db8::1", "2001:db8::1"),
        # The client has invented the first address, so only the last one counts.
        ("10.0.0.1", "1.1.1.1, 203.0.113.9", "203.0.113.9"),
        ("10.0.0.1", "1.1.1.1, 203.0.113.9, 10.0.0.2", "203.0.113.9"),
        ("10.0.0.1", "10.0.0.3,10.0.0.2", "10.0.0.3"),
        ("10.0.0.1", "203.0.113.9, unknown", "10.0.0.1"),
        ("10.0.0.1", "," * 1000, "10.0.0.1"),
        ("10.0.0.1", "1.1.1.1," * 5000 + "10.0.0.2," * 5000, "10.0.0.1"),
        # This peer is no trusted proxy.
        ("203.0.113.7", "1.1.1.1", "203.0.113.7"),
        ("203.0.113.7", "10.0.0.1", "203.0.113.7"),
    ],
)
def test_the_client_is_the_last_forwarded_address_that_is_not_a_proxy(
    peer: str, header: str, client: str
) -> None:
    limits = ClientLimits(proxies=["10.0.0.0/8"], clock=Clock())
    assert limits.caller(peer, forwarded_header(header)) is limits.caller(client, ())


def test_several_forwarded_headers_are_joined() -> None:
    limits = ClientLimits(proxies=["10.0.0.1"], clock=Clock())
    headers = [*forwarded_header("1.1.1.1"), *forwarded_header("203.0.113.9")]
    assert limits.caller("10.0.0.1", headers) is limits.caller("203.0.113.9", ())


def test_limits_are_on_by_default_only_on_open_addresses() -> None:
    def numbers(*, is_local: bool, **settings: int) -> tuple[int, int, int] | None:
        limits = client_limits(Settings.model_validate(settings), is_local=is_local)
        return None if limits is None else limits.numbers

    assert numbers(is_local=True) is None
    assert numbers(is_local=False) == (DEFAULT_CONNECTIONS, DEFAULT_REQUESTS, DEFAULT_FAILURES)
    overrides = {"max_connections_per_client": 3, "max_failed_tokens": 0}
    assert numbers(is_local=False, **overrides) == (3, DEFAULT_REQUESTS, 0)
    assert numbers(is_local=True, max_requests_per_client=7) == (0, 7, 0)
    names = ("max_connections_per_client", "max_requests_per_client", "max_failed_tokens")
    assert numbers(is_local=False, **dict.fromkeys(names, 0)) is None


def test_behind_a_load_balancer_only_wrong_tokens_are_limited(tmp_path: Path) -> None:
    def container(**variables: str) -> Settings:
        return read_settings(variables, ModelLocation(tmp_path, None), None, [])

    limits = client_limits(container(), is_local=False)
    assert limits is not None
    assert limits.numbers == (0, 0, DEFAULT_FAILURES)
    assert container(TSX_MAX_REQUESTS_PER_CLIENT="7").max_requests_per_client == 7
    names = ("MAX_CONNECTIONS_PER_CLIENT", "MAX_REQUESTS_PER_CLIENT", "MAX_FAILED_TOKENS")
    assert [read_environment({}).variables[f"TSX_{name}"] for name in names] == ["0", "0", "0"]


def test_each_listener_is_limited_by_its_own_address(tmp_path: Any) -> None:
    settings = Settings(
        inference_address="http://0.0.0.0:0",
        inference_token="secret",
        management_address="http://127.0.0.1:0",
        metrics_address=f"unix:{tmp_path}/metrics",
    )

    async def build(bound_listeners: list[Listener]) -> list[Any]:
        return build_apps(
            Registry(settings), settings, [listener.roles for listener in bound_listeners]
        )

    with listeners(settings) as bound_listeners:
        apps = asyncio.run(build(bound_listeners))
        is_limited = {
            listener.roles[0]: app.admission.clients is not None
            for listener, app in zip(bound_listeners, apps, strict=True)
        }
    assert is_limited == {"inference": True, "management": False, "metrics": False}


@pytest.fixture(scope="module")
def clock() -> Clock:
    return Clock()


def use_clock(patch: pytest.MonkeyPatch, clock: Clock) -> None:
    """Make servers that start from now on use this clock for their client limits."""

    def with_clock(settings: Settings, *, is_local: bool) -> ClientLimits | None:
        limits = client_limits(settings, is_local=is_local)
        if limits is not None:
            limits.clock = clock
        return limits

    patch.setattr("tsx_runtime.http.admission.client_limits", with_clock)
    for module in ("http.fast_lane.connection", "http.admission", "api.access.client_limits"):
        patch.setattr(f"tsx_runtime.{module}.REFUSAL_DELAY_S", 0.02)


@pytest.fixture(scope="module")
def limits_server(start_server: Any, clock: Clock) -> Iterator[RunningServer]:
    """Run a server behind a proxy at 127.0.0.1, so that each test has its own clients."""
    with pytest.MonkeyPatch.context() as patch:
        use_clock(patch, clock)
        with start_server(
            inference_token="secret",
            max_requests_per_client=30,
            max_failed_tokens=2,
            trusted_proxies=["127.0.0.1"],
        ) as server:
            server.register("talker.mar", initial_workers=1)
            yield server


def connect(server: RunningServer) -> RawConnection:
    url = server.inference.base_url
    return RawConnection((url.host, url.port))


def ask(
    server: RunningServer,
    lane: str,
    client: str,
    token: str = "secret",
    path: str = "/predictions/talker",
    count: int = 1,
) -> list[Answer]:
    """Send `count` requests of one client over one connection."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nX-Do: bytes\r\n"
        f"X-Forwarded-For: {client}\r\nAuthorization: Bearer {token}\r\n"
    )
    answers = []
    with connect(server) as connection:
        for _ in range(count):
            connection.send(head.encode() + BODIES[lane])
            answers.append(connection.answer())
    return answers


def statuses(server: RunningServer, lane: str, client: str, **request: Any) -> list[int]:
    return [answer.status for answer in ask(server, lane, client, **request)]


@both_lanes
def test_requests_beyond_the_limit_are_answered_429(
    limits_server: RunningServer, clock: Clock, lane: str
) -> None:
    client = {"fast": "203.0.113.1", "framework": "203.0.113.2"}[lane]
    answers = ask(limits_server, lane, client, count=32)
    assert [answer.status for answer in answers] == [200] * 30 + [429] * 2
    assert answers[-1].header(b"retry-after") == b"1"
    assert b"max_requests_per_client" in answers[-1].body
    assert statuses(limits_server, lane, "203.0.113.3") == [200]
    headers = {"x-forwarded-for": client, "authorization": "Bearer secret"}
    for probe in ("/ping", "/v2/health/ready"):
        assert limits_server.inference.get(probe, headers=headers).status_code == 200
    clock.now += 0.1
    assert statuses(limits_server, lane, client, count=4) == [200] * 3 + [429]


def test_both_lanes_send_the_same_refusal_and_share_the_limits(
    limits_server: RunningServer,
) -> None:
    """Compare the refusals; `Answer` leaves out the date and the request id."""
    ask(limits_server, "fast", "203.0.113.10", count=29)
    assert statuses(limits_server, "framework", "203.0.113.10") == [200]
    fast_answer, asgi_answer = (ask(limits_server, lane, "203.0.113.10")[0] for lane in BODIES)
    assert fast_answer == asgi_answer
    assert fast_answer.status == 429
    for status in (400, 400, 429):
        fast_answer, asgi_answer = (
            ask(limits_server, lane, "203.0.113.11", "wrong")[0] for lane in BODIES
        )
        assert fast_answer == asgi_answer
        assert fast_answer.status == status


@both_lanes
def test_too_many_wrong_tokens_are_answered_429_but_the_right_one_is_accepted(
    limits_server: RunningServer, lane: str
) -> None:
    client = {"fast": "203.0.113.21", "framework": "203.0.113.22"}[lane]
    answers = ask(limits_server, lane, client, "wrong", count=6)
    assert [answer.status for answer in answers] == [400] * 4 + [429] * 2
    assert b"max_failed_tokens" in answers[-1].body
    assert answers[-1].header(b"retry-after") == b"30"
    assert statuses(limits_server, lane, client) == [200]
    unknown = {"token": "wrong", "path": "/predictions/nobody"}
    assert statuses(limits_server, lane, "203.0.113.23", **unknown) == [400]


def test_a_pipelined_wrong_token_is_counted_once_across_lanes(limits_server: RunningServer) -> None:
    head = (
        b"Host: localhost\r\nX-Forwarded-For: 203.0.113.24\r\n"
        b"Authorization: Bearer wrong\r\nX-Number: %d\r\n"
    )
    # The numbers differ; therefore the server cannot reuse a parsed head.
    requests = b"GET /ping HTTP/1.1\r\n" + head % 0 + b"\r\n"
    for number in range(1, 6):
        requests += b"POST /predictions/talker HTTP/1.1\r\n" + head % number + BODIES["fast"]
    with connect(limits_server) as connection:
        connection.send(requests)
        assert [connection.answer().status for _ in range(6)] == [200] + [400] * 4 + [429]


def test_requests_without_a_token_do_not_count_as_wrong_tokens(
    limits_server: RunningServer,
) -> None:
    head = (
        b"POST /predictions/talker HTTP/1.1\r\nHost: localhost\r\nX-Forwarded-For: 203.0.113.31\r\n"
    )
    with connect(limits_server) as connection:
        for body in [*BODIES.values()] * 6:
            connection.send(head + body)
            assert connection.answer().status == 400


@both_lanes
def test_forwarded_addresses_of_untrusted_clients_are_ignored(
    start_server: Any, monkeypatch: pytest.MonkeyPatch, lane: str
) -> None:
    use_clock(monkeypatch, Clock())
    with start_server(max_requests_per_client=3, trusted_proxies=["10.0.0.0/8"]) as server:
        answers = [
            ask(server, lane, f"203.0.113.{number}", path="/predictions/nobody")[0]
            for number in range(5)
        ]
    assert [answer.status for answer in answers] == [404] * 3 + [429] * 2


def test_connections_beyond_the_limit_are_answered_429_and_closed(
    start_server: Any, until: Any
) -> None:
    def ping(connection: RawConnection) -> int:
        connection.send(b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = connection.answer()
        return answer.status if answer is not None else 0

    with start_server(max_connections_per_client=2) as server, contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(connect(server)) for _ in range(2))
        assert [ping(first), ping(second)] == [200, 200]
        third = stack.enter_context(connect(server))
        refusal = third.answer()
        assert refusal is not None
        assert (refusal.status, refusal.header(b"connection")) == (429, b"close")
        assert refusal.header(b"retry-after") == b"1"
        assert b"max_connections_per_client" in refusal.body
        assert third.answer() is None
        assert ping(first) == 200
        first.sock.shutdown(socket.SHUT_RDWR)

        def has_room() -> bool:
            with connect(server) as connection, contextlib.suppress(OSError):
                return ping(connection) == 200
            return False

        until(has_room)
