"""Priorities, deadlines, clients that leave, full queues: over the fast lane with plain requests,
over the other with chunked ones.
"""

from __future__ import annotations

import contextlib
import socket
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tsx_runtime.api.request_options import PRIORITY, TIMEOUT, deadline, priority_and_timeout
from tsx_runtime.errors import BadRequest

LANES = {
    "fast": b"Content-Length: 1\r\n\r\nx",
    "framework": b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n",
}
both_lanes = pytest.mark.parametrize("lane", LANES)


class Blocked:
    """A model whose only worker has its hands full until `open`, and clients on sockets of their
    own.
    """

    def __init__(self, server, gate, until, stack):
        self.server, self.gate, self.until, self.stack = server, gate, until, stack
        server.register("talker.mar", initial_workers=1, batch_size=1)
        self.version = server.registry.find("talker")
        while not self.version.pending:  # what a worker holds does not wait
            self.ask("fast", f"x-do: wait\r\nx-file: {gate}\r\n")
        self.waiting = self.version.pending

    def ask(self, lane, headers="x-do: bytes\r\n", *, accepted=True):
        """Send a request, and do not wait for its answer."""
        before = self.version.stats.requests
        parts = urlsplit(str(self.server.inference.base_url))
        sock = self.stack.enter_context(
            socket.create_connection((parts.hostname, parts.port), timeout=60)
        )
        sock.sendall(
            b"POST /predictions/talker HTTP/1.1\r\nHost: localhost\r\n"
            + headers.encode()
            + LANES[lane]
        )
        if accepted:
            self.until(lambda: self.version.stats.requests == before + 1)
            self.server.call(
                lambda: None
            )  # a turn of the loop: it is with the worker now, or waits
        return sock

    def open(self):
        self.gate.touch()


def answer_on(sock):
    """Status, headers and body of the one answer."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += sock.recv(65536)
    head, _, body = received.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    headers = {
        name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])
    }
    while len(body) < int(headers["content-length"]):
        body += sock.recv(65536)
    return int(lines[0].split()[1]), headers, body.decode()


@pytest.fixture
def blocked(start_server, tmp_path, until):
    gate = tmp_path / "open"
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(start_server())
        stack.callback(gate.touch)
        yield Blocked(server, gate, until, stack)


@both_lanes
def test_a_deadline_is_kept_while_the_worker_is_busy(blocked, lane):
    late = blocked.ask(lane, "x-tsx-timeout-ms: 30\r\n")
    status, headers, body = answer_on(late)
    assert status == 503
    assert int(headers["retry-after"]) >= 1
    assert '"type": "ServiceUnavailableException"' in body
    assert "did not start the request before its deadline;" in body
    assert blocked.version.stats.refusals == {"DeadlinePassed": 1}


@both_lanes
def test_a_deadline_holds_for_a_request_that_runs(start_server, tmp_path, until, lane):
    """Its handler ends only after the answer, and nobody gets what that returns: the next one on
    the connection has its own.
    """
    gate, wait = tmp_path / "open", f"x-do: wait\r\nx-file: {tmp_path / 'open'}\r\n"
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(start_server())
        stack.callback(gate.touch)
        server.register("talker.mar", initial_workers=1, batch_size=2)
        version = server.registry.find("talker")
        host, port = server.inference.base_url.host, server.inference.base_url.port
        sock = stack.enter_context(socket.create_connection((host, port), timeout=60))
        sock.sendall(
            b"POST /predictions/talker HTTP/1.1\r\nHost: localhost\r\nx-tsx-timeout-ms: 300\r\n"
            + wait.encode()
            + LANES[lane]
        )
        status, headers, body = answer_on(sock)
        assert (status, int(headers["retry-after"]) >= 1) == (504, True)
        assert "did not answer the request before its deadline;" in body
        assert version.stats.refusals == {"AnswerLate": 1}
        sock.sendall(
            b"POST /predictions/talker HTTP/1.1\r\nHost: localhost\r\nx-do: bytes\r\n" + LANES[lane]
        )
        until(lambda: version.stats.requests == 2)
        gate.touch()
        assert answer_on(sock)[::2] == (200, "x")
        server.call(version.finished)
        assert (version.stats.answers, version.stats.refusals) == ({200: 1}, {"AnswerLate": 1})


@both_lanes
def test_the_models_own_limit_holds_where_it_is_the_sooner_one(blocked, lane):
    blocked.server.management.put("/models/talker", params={"client_timeout": 30})
    assert answer_on(blocked.ask(lane))[0] == 503
    assert answer_on(blocked.ask(lane, "x-tsx-timeout-ms: 60000\r\n"))[0] == 503
    blocked.server.management.put("/models/talker", params={"client_timeout": 0})
    patient = blocked.ask(lane)
    blocked.open()
    assert answer_on(patient)[0] == 200


@both_lanes
def test_a_greater_priority_is_served_first(blocked, lane):
    asked = [blocked.ask(lane, f"x-tsx-priority: {priority}\r\n") for priority in (-5, 0, 7)]
    queue = blocked.server.call(
        lambda: [job.priority for job in blocked.version._dispatcher.queue.jobs]
    )
    assert queue == [7] + [0] * (blocked.waiting + 1) + [-5]
    blocked.open()
    assert [answer_on(sock)[0] for sock in asked] == [200] * 3


@both_lanes
def test_a_client_that_leaves_takes_its_waiting_request_with_it(blocked, lane, until):
    leaving, staying = blocked.ask(lane), blocked.ask(lane)
    assert blocked.version.pending == blocked.waiting + 2
    leaving.close()
    until(lambda: blocked.version.pending == blocked.waiting + 1)
    assert blocked.version.stats.refusals == {"ClientLeft": 1}
    blocked.open()
    assert answer_on(staying)[0] == 200
    asked = blocked.version.stats.requests
    until(lambda: blocked.version.stats.answers[200] == asked - 1)
    blocked.server.call(blocked.version.finished)


@both_lanes
def test_a_full_queue_answers_429_by_setting_at_once(blocked, lane):
    blocked.server.management.put(
        "/models/talker", params={"job_queue_size": blocked.waiting, "overload_status": 429}
    )
    status, headers, body = answer_on(blocked.ask(lane, accepted=False))
    assert status == 429
    assert int(headers["retry-after"]) >= 1
    assert '"type": "TooManyRequestsException"' in body


@both_lanes
def test_bytes_that_wait_are_bounded(blocked, lane):
    blocked.server.management.put("/models/talker", params={"max_queue_bytes": blocked.waiting})
    status, _, body = answer_on(blocked.ask(lane, accepted=False))
    assert status == 503
    assert "maxQueueBytes" in body


@given(st.integers(-100, 100), st.integers(1, 86_400_000))
def test_the_headers_are_read_as_they_are_written(priority, timeout):
    headers = [
        (b"host", b"x"),
        (PRIORITY, str(priority).encode()),
        (TIMEOUT, str(timeout).encode()),
    ]
    assert priority_and_timeout(headers) == (priority, timeout)
    assert priority_and_timeout(headers[:1]) == (0, None)


@given(st.sampled_from([PRIORITY, TIMEOUT]), st.binary(max_size=30))
def test_any_other_value_is_a_bad_request(name, value):
    try:
        priority, timeout = priority_and_timeout([(name, value)])
    except BadRequest:
        return
    assert -100 <= priority <= 100
    assert timeout is None or 1 <= timeout <= 86_400_000


@given(
    st.floats(0, 1e6), st.floats(0.001, 1e4) | st.just(0.0), st.none() | st.integers(1, 86_400_000)
)
def test_the_sooner_deadline_holds(now, client_timeout, timeout_ms):
    limits = [
        *([client_timeout] if client_timeout else []),
        *([timeout_ms / 1000] if timeout_ms else []),
    ]
    assert deadline(now, client_timeout, timeout_ms) == (now + min(limits) if limits else None)
