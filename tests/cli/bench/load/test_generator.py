"""The load generator's counts and times, against servers with scripted responses."""

from __future__ import annotations

import asyncio
import itertools
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import psutil
import pytest

from tests.support.clients.scripted import CLOSE, OK, Request, Step, scripted
from tsx_cli.bench.load.generator import LoadProgress, measure, run_load
from tsx_cli.bench.load.payloads import Payload
from tsx_cli.bench.load.plan import LoadPlan
from tsx_cli.bench.load.results import Round
from tsx_cli.common.failure import CliError

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="httptools is not there"),
    pytest.mark.slow,
]

BUSY = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n"
FAILED = b"HTTP/1.1 500 Internal Server Error\r\nconnection: close\r\ncontent-length: 1\r\n\r\nx"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nOK\r\n0\r\n\r\n"
PAYLOADS = (Payload(b'{"x":1}', "application/json"),)


def plan(url: str, **changes: Any) -> LoadPlan:
    fields: dict[str, Any] = {
        "model": "m",
        "payloads": PAYLOADS,
        "seconds": 0.3,
        "warm_up": 0.0,
        "grace": 30.0,
    }
    return LoadPlan(url=url, **fields | changes)


def run(url: str, **changes: Any) -> Round:
    return asyncio.run(run_load(plan(url, **changes)))


def count_outcomes(load_round: Round) -> int:
    return (
        load_round.ok + load_round.refused + sum(load_round.errors.values()) + load_round.unanswered
    )


def cut(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


def stalling(number: int, seconds: float) -> Any:
    """Return a script that answers no request for some seconds from request `number` on."""
    started: list[float] = []

    def script(count: int, request: Request) -> Sequence[Step]:
        if count == number:
            started.append(time.monotonic())
        delay = started[0] + seconds - time.monotonic() if started else 0.0
        return [delay, OK] if delay > 0 else [OK]

    return script


@pytest.mark.parametrize(
    "mode", [{"connections": 4}, {"connections": 60, "mode": "open", "rate": 300.0}]
)
def test_every_request_has_one_outcome_whatever_the_response(mode: dict[str, Any]) -> None:
    responses: list[list[Step]] = [
        [OK],
        [BUSY],
        [FAILED, CLOSE],
        [CLOSE],
        list(cut(OK, 7)),
        list(cut(CHUNKED, 5)),
        [b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\nno"],
        [b"HTTP/1.1 100 Continue\r\n\r\n", OK],
        [b"HTTP/1.1 200 OK\r\n\r\nuntil the end", CLOSE],
        [b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\ntoo short", CLOSE],
        [b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nOK, and more"],
        [b"no HTTP at all\r\n\r\n"],
        [OK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"), CLOSE],
        [b"HTTP/1.1 204 No Content\r\n\r\n"],
    ]
    with scripted(lambda number, _: responses[number % len(responses)]) as url:
        load_round = run(url, **mode)
    assert load_round.sent == count_outcomes(load_round)
    assert load_round.unanswered == 0
    assert set(load_round.errors) == {"500", "404", "closed", "malformed"}
    full_rounds = load_round.sent // len(responses)
    assert full_rounds >= 1
    is_about = lambda count, kind: kind * (full_rounds - 1) <= count <= kind * (full_rounds + 2)  # noqa: E731  # a round begins and ends anywhere
    assert is_about(load_round.ok, 7), load_round
    assert is_about(load_round.refused, 1)
    assert is_about(load_round.errors["closed"], 2)
    assert is_about(load_round.errors["malformed"], 2)
    assert load_round.latency.max_ms >= load_round.latency.p99_ms >= load_round.latency.p50_ms > 0
    assert sum(count for _, count in load_round.histogram) == load_round.ok


def test_latencies_equal_the_servers_delays_and_limit_the_rate() -> None:
    with scripted(lambda number, _: [0.02, OK]) as url:
        load_round = run(url, connections=4)
    assert load_round.latency.p50_ms >= 19.9
    assert load_round.throughput <= 4 / 0.0199
    assert load_round.ok > 0


@pytest.mark.parametrize(
    "mode", [{"connections": 3}, {"connections": 20, "mode": "open", "rate": 100.0}]
)
def test_latencies_are_grouped_by_the_size_of_the_input(mode: dict[str, Any]) -> None:
    payloads = (Payload(b"small"), Payload(b"much larger"))
    with scripted(
        lambda number, request: [0.03, OK] if request.body == b"much larger" else [OK]
    ) as url:
        small, large = run(url, payloads=payloads, **mode).by_size
    assert (small.smallest, large.largest) == (5, 11)
    assert small.ok + large.ok > 10
    assert small.p50_ms < 29 < large.p50_ms


def test_one_slow_response_in_ten_shows_in_the_high_percentiles() -> None:
    with scripted(lambda number, _: [0.1, OK] if number % 10 == 9 else [OK]) as url:
        load_round = run(url, connections=2)
    assert load_round.latency.p99_ms >= 99
    assert load_round.latency.mean_ms < load_round.latency.p95_ms


def test_a_stall_raises_the_latencies_of_all_open_loop_requests() -> None:
    with scripted(stalling(20, 0.4)) as url:
        load_round = run(
            url, connections=100, mode="open", rate=100.0, arrivals="constant", seconds=0.8
        )
    assert load_round.ok == load_round.sent == 80
    # At least 25 requests are sent in the first 300 ms of the stall.
    assert sum(count for upper, count in load_round.histogram if upper > 100) >= 25
    assert any(length > 0.3 for _, length in load_round.stalls), load_round.stalls
    assert load_round.corrected_p99_ms is None


def test_a_stall_is_reported_in_a_closed_loop() -> None:
    """Four requests wait for the end of the stall, too few to affect a percentile."""
    with scripted(stalling(10, 0.4)) as url:
        load_round = run(url, connections=4, seconds=0.8)
    assert any(length > 0.35 for _, length in load_round.stalls), load_round.stalls
    assert load_round.corrected_p99_ms is not None
    assert load_round.corrected_p99_ms > 200
    assert load_round.latency.max_ms > 390


def test_the_latency_of_a_waiting_request_counts_from_its_due_time() -> None:
    with scripted(lambda number, _: [0.3, OK] if number == 0 else [OK]) as url:
        load_round = run(
            url, connections=1, mode="open", rate=20.0, arrivals="constant", seconds=0.5
        )
    assert load_round.ok + load_round.unsent == 10
    assert load_round.generator.waited >= 4
    assert sum(count for upper, count in load_round.histogram if upper > 50) >= 4


def test_requests_are_counted_as_unsent_or_unanswered() -> None:
    with scripted(lambda number, _: [OK] if number < 10 else []) as url:
        load_round = run(
            url, connections=4, mode="open", rate=200.0, arrivals="constant", grace=0.0
        )
    assert (load_round.ok, load_round.unanswered, load_round.unsent) == (10, 4, 46)


def test_requests_to_a_silent_server_time_out() -> None:
    with scripted(lambda number, _: []) as url:
        load_round = run(url, connections=3, timeout=0.15, grace=1.0)
    assert load_round.ok == 0
    assert load_round.errors["timeout"] >= 3
    assert load_round.sent == count_outcomes(load_round)


def test_the_generator_reconnects_to_a_restarted_server(
    free_ports: Callable[[int], list[int]],
) -> None:
    has_left = threading.Event()

    def leave_after_20(number: int, _: Request) -> list[Step]:
        if number == 20:
            has_left.set()
        return [OK] if number < 20 else [CLOSE]

    (port,) = free_ports(1)
    results: list[Round] = []
    with scripted(leave_after_20, port=port) as url:
        thread = threading.Thread(
            target=lambda: results.append(run(url, connections=2, seconds=3.0))
        )
        thread.start()
        assert has_left.wait(60)
    with scripted(lambda *_: [OK], port=port):
        thread.join(120)
    load_round = results[0]
    assert load_round.sent == count_outcomes(load_round)
    assert load_round.errors["closed"] >= 1
    assert load_round.ok > 20


def test_a_refused_connection_is_reported_as_a_missing_server(
    free_ports: Callable[[int], list[int]],
) -> None:
    free_url = f"http://127.0.0.1:{free_ports(1)[0]}"
    with pytest.raises(CliError, match=f"no server answers at {free_url}"):
        run(free_url)


@pytest.mark.parametrize(
    "mode", [{"connections": 3}, {"connections": 3, "mode": "open", "rate": 50.0}]
)
def test_no_response_is_counted_if_the_server_closes_every_connection(
    mode: dict[str, Any],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def close() -> None:
            with suppress(OSError):
                while True:
                    server.accept()[0].close()

        threading.Thread(target=close, daemon=True).start()
        load_round = run(f"http://127.0.0.1:{server.getsockname()[1]}", **mode)
        server.shutdown(socket.SHUT_RDWR)
    assert load_round.ok == 0
    assert load_round.sent == count_outcomes(load_round)


@pytest.mark.parametrize(
    "mode", [{"connections": 2}, {"connections": 2, "mode": "open", "rate": 50.0}]
)
def test_no_response_is_counted_if_the_server_writes_first(mode: dict[str, Any]) -> None:
    async def run_against_server() -> Round:
        async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            # HTTP/2 and gRPC begin with these bytes.
            writer.write(b"\0\0\x12\4\0\0\0\0\0" + bytes(18))
            await reader.read()
            writer.close()

        async with await asyncio.start_server(greet, "127.0.0.1", 0) as listening:
            return await run_load(
                plan(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", **mode)
            )

    load_round = asyncio.run(run_against_server())
    assert load_round.ok == 0
    assert load_round.sent == count_outcomes(load_round)


def test_a_connection_that_closes_before_the_load_is_reopened() -> None:
    connection_numbers = itertools.count()

    async def run_against_server() -> Round:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                # The server closes the first connection at once.
                while next(connection_numbers) > 0:
                    await reader.readuntil(b'{"x":1}')
                    writer.write(OK)
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening:
            return await run_load(
                plan(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", connections=70)
            )

    load_round = asyncio.run(run_against_server())
    assert load_round.ok > 0
    assert load_round.sent == count_outcomes(load_round)
    assert set(load_round.errors) <= {"closed"}


@pytest.mark.usefixtures("processes")
def test_a_generator_without_a_plan_exits_silently() -> None:
    command = [sys.executable, "-c", "from tsx_cli.bench.load.generator import main; main()"]
    for cut in (b"", b'{"url"'):
        result = subprocess.run(command, input=cut, capture_output=True, timeout=60, check=False)
        assert (result.returncode, result.stdout, result.stderr) == (0, b"", b"")


def test_large_bodies_are_sent_and_received_completely() -> None:
    large = b"HTTP/1.1 200 OK\r\nContent-Length: 2000000\r\n\r\n" + bytes(2_000_000)
    sizes: set[int] = set()

    def answer(_: int, request: Request) -> list[Step]:
        sizes.add(len(request.body))
        return [large]

    with scripted(answer) as url:
        load_round = run(url, connections=2, payloads=(Payload(bytes(3_000_000)),))
    assert sizes == {3_000_000}
    assert (load_round.errors, load_round.unanswered) == ({}, 0)
    assert load_round.ok >= 2


@pytest.mark.parametrize(
    "mode", [{"connections": 1}, {"connections": 1, "mode": "open", "rate": 100.0}]
)
def test_inputs_are_sent_in_turn(mode: dict[str, Any]) -> None:
    requests: list[Request] = []
    payloads = [
        Payload(b"%d" % number, "text/plain", (("X-Own", "o"),), "a=1") for number in range(3)
    ]
    with scripted(lambda _, request: [requests.append(request) or OK]) as url:
        load_round = run(url, payloads=payloads, version="2.0", token="secret", **mode)
    assert [request.body for request in requests] == [
        b"%d" % (number % 3) for number in range(load_round.sent)
    ]
    assert {request.line for request in requests} == {b"POST /predictions/m/2.0?a=1 HTTP/1.1"}
    expected_headers = {
        b"authorization": b"Bearer secret",
        b"content-type": b"text/plain",
        b"x-own": b"o",
        b"content-length": b"1",
    }
    assert expected_headers.items() <= requests[0].headers.items()


def test_recorded_requests_keep_their_spacing() -> None:
    arrival_times: list[float] = []
    payloads = [Payload(b"x", None, (), "", at) for at in (0.0, 0.4, 0.6)]
    with scripted(lambda *_: [arrival_times.append(time.monotonic()) or OK]) as url:
        start = time.monotonic()
        load_round = run(
            url,
            connections=3,
            mode="open",
            arrivals="recorded",
            payloads=payloads,
            speed=2.0,
            seconds=0.4,
        )
    assert (load_round.ok, load_round.unsent) == (3, 0)
    offered_load = plan(
        "http://h", mode="open", arrivals="recorded", payloads=payloads, speed=2.0
    ).offered
    assert offered_load.rate == pytest.approx(2 * 2 / 0.6)
    # Requests may be sent late, but never early.
    assert arrival_times[2] - start >= 0.3


def test_the_warm_up_is_not_counted() -> None:
    with scripted(lambda number, _: [BUSY] if number < 5 else [OK]) as url:
        load_round = run(url, connections=1, warm_up=0.3, seconds=0.3)
    assert load_round.refused == 0
    assert load_round.warm_up_seconds >= 0.29


@pytest.mark.usefixtures("processes")
def test_a_generator_process_reports_progress_and_figures() -> None:
    progress_reports: list[LoadProgress] = []
    with scripted(lambda *_: [OK]) as url:
        measured = measure(
            plan(url, connections=2, seconds=1.1), on_progress=progress_reports.append
        )
    assert [progress.of for progress in progress_reports] == pytest.approx([1.1, 1.1])
    assert [progress.seconds for progress in progress_reports] == pytest.approx([0.5, 1.0])
    assert (
        measured.ok
        == sum(count for _, count in measured.histogram)
        >= progress_reports[-1].answers
        > 0
    )
    assert 0 < measured.generator.cpu <= 1.5
    with pytest.raises(CliError, match="no server answers"):
        measure(plan("http://127.0.0.1:9", seconds=0.1))


@pytest.mark.usefixtures("processes")
def test_connections_may_exceed_the_shells_soft_limit() -> None:
    """Only the generator uses descriptors, since the server accepts no connection."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    descriptor_limit = psutil.Process().num_fds() + 50
    if hard != resource.RLIM_INFINITY and hard < descriptor_limit + 100:
        pytest.skip("the system lets nobody have more")
    with socket.create_server(("127.0.0.1", 0), backlog=descriptor_limit + 20) as listening:
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptor_limit, hard))
        try:
            url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            assert (
                measure(
                    plan(url, connections=descriptor_limit + 20, seconds=0.1, grace=0.0)
                ).unanswered
                == descriptor_limit + 20
            )
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_unrequested_responses_close_the_connection() -> None:
    response_numbers = itertools.count()
    with scripted(lambda *_: [OK, 0.05, OK] if next(response_numbers) == 0 else [OK]) as url:
        load_round = run(
            url, connections=1, mode="open", rate=5.0, arrivals="constant", seconds=0.6
        )
    assert (load_round.ok, load_round.errors) == (3, {})
