"""Priorities, deadlines, clients that leave, and full queues, on both lanes."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.connections import connect_raw
from tsx_runtime.api.request_options import PRIORITY, TIMEOUT, deadline, priority_and_timeout
from tsx_runtime.errors import BadRequest

LANES = {
    "fast": b"Content-Length: 1\r\n\r\nx",
    "asgi": b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n",
}


def a_request(lane, headers="x-do: bytes\r\n"):
    head = b"POST /predictions/talker HTTP/1.1\r\nHost: localhost\r\n"
    return head + headers.encode() + LANES[lane]


class Blocked:
    """A model whose only worker is busy until `gate` exists, with clients on raw sockets."""

    def __init__(self, server, gate, until, stack):
        self.server, self.gate, self.until, self.stack = server, gate, until, stack
        server.register("talker.mar", initial_workers=1, batch_size=1)
        self.version = server.registry.find("talker")
        while not self.version.pending:  # A request that the worker holds is not pending.
            self.ask("fast", f"x-do: wait\r\nx-file: {gate}\r\n")
        self.waiting = self.version.pending

    def ask(self, lane, headers="x-do: bytes\r\n", *, accepted=True):
        """Send a request, wait until it is in the queue, and return its connection."""
        requests_before = self.version.stats.requests
        connection = self.stack.enter_context(connect_raw(self.server))
        connection.send(a_request(lane, headers))
        if accepted:
            self.until(lambda: self.version.stats.requests == requests_before + 1)
            self.server.call(lambda: None)  # a turn of the loop
        return connection

    def refuse(self, lane, headers="x-do: bytes\r\n", *, accepted=True):
        """Send a request and return the status and body of its refusal."""
        answer = self.ask(lane, headers, accepted=accepted).answer()
        assert int(answer.header(b"retry-after")) >= 1
        return answer.status, json.loads(answer.body)

    def change(self, **limits):
        self.server.management.put("/models/talker", params=limits).raise_for_status()


@pytest.fixture
def blocked_model(empty, tmp_path, until):
    gate = tmp_path / "open"
    with contextlib.ExitStack() as stack:
        stack.callback(gate.touch)
        yield Blocked(empty, gate, until, stack)


def test_a_deadline_is_enforced_while_the_worker_is_busy(blocked_model):
    for lane in LANES:
        status, error = blocked_model.refuse(lane, "x-tsx-timeout-ms: 30\r\n")
        assert (status, error["type"]) == (503, "ServiceUnavailableException")
        assert "did not start the request" in error["message"]
    assert blocked_model.version.stats.refusals == {"DeadlinePassed": 2}


@pytest.mark.parametrize("lane", LANES)
def test_a_deadline_applies_to_a_running_request(empty, tmp_path, until, lane):
    """Drop the handler's late answer: the connection's next request gets its own."""
    gate = tmp_path / "open"
    empty.register("talker.mar", initial_workers=1, batch_size=2)
    version = empty.registry.find("talker")
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(connect_raw(empty))
        stack.callback(gate.touch)
        connection.send(
            a_request(lane, f"x-tsx-timeout-ms: 300\r\nx-do: wait\r\nx-file: {gate}\r\n")
        )
        answer = connection.answer()
        assert (answer.status, int(answer.header(b"retry-after")) >= 1) == (504, True)
        assert b"did not answer the request" in answer.body
        assert version.stats.refusals == {"AnswerLate": 1}
        connection.send(a_request(lane))
        until(lambda: version.stats.requests == 2)
        gate.touch()
        answer = connection.answer()
        assert (answer.status, answer.body) == (200, b"x")
        empty.call(version.dispatcher.wait_idle)
        assert (version.stats.answers, version.stats.refusals) == ({200: 1}, {"AnswerLate": 1})


def test_the_models_client_timeout_applies_if_it_is_earlier(blocked_model):
    blocked_model.change(client_timeout=30)
    for lane in LANES:
        assert blocked_model.refuse(lane)[0] == 503
        assert blocked_model.refuse(lane, "x-tsx-timeout-ms: 60000\r\n")[0] == 503
    blocked_model.change(client_timeout=0)
    unlimited_connections = [blocked_model.ask(lane) for lane in LANES]
    blocked_model.gate.touch()
    assert [connection.answer().status for connection in unlimited_connections] == [200, 200]


@pytest.mark.parametrize("lane", LANES)
def test_a_greater_priority_is_served_first(blocked_model, lane):
    connections = [
        blocked_model.ask(lane, f"x-tsx-priority: {priority}\r\n") for priority in (-5, 0, 7)
    ]
    queue = blocked_model.server.call(
        lambda: [job.priority for job in blocked_model.version.dispatcher.queue.jobs]
    )
    assert queue == [7] + [0] * (blocked_model.waiting + 1) + [-5]
    blocked_model.gate.touch()
    assert [connection.answer().status for connection in connections] == [200] * 3


@pytest.mark.parametrize("lane", LANES)
def test_the_waiting_request_of_a_client_that_leaves_is_dropped(blocked_model, lane, until):
    leaving_connection, staying_connection = blocked_model.ask(lane), blocked_model.ask(lane)
    assert blocked_model.version.pending == blocked_model.waiting + 2
    leaving_connection.sock.close()
    until(lambda: blocked_model.version.pending == blocked_model.waiting + 1)
    assert blocked_model.version.stats.refusals == {"ClientLeft": 1}
    blocked_model.gate.touch()
    assert staying_connection.answer().status == 200
    requests = blocked_model.version.stats.requests
    until(lambda: blocked_model.version.stats.answers[200] == requests - 1)
    blocked_model.server.call(blocked_model.version.dispatcher.wait_idle)


def test_a_full_queue_answers_503_or_the_configured_429(blocked_model):
    blocked_model.change(job_queue_size=blocked_model.waiting)
    for lane in LANES:
        status, error = blocked_model.refuse(lane, accepted=False)
        assert (status, error["type"]) == (503, "ServiceUnavailableException")
        assert error["message"].startswith(
            'Model "talker" has no worker to serve inference request'
        )
        assert "jobQueueSize" in error["message"]
    blocked_model.change(overload_status=429)
    for lane in LANES:
        status, error = blocked_model.refuse(lane, accepted=False)
        assert (status, error["type"]) == (429, "TooManyRequestsException")


def test_bytes_of_waiting_requests_are_limited(blocked_model):
    blocked_model.change(max_queue_bytes=blocked_model.waiting)
    for lane in LANES:
        status, error = blocked_model.refuse(lane, accepted=False)
        assert (status, "maxQueueBytes" in error["message"]) == (503, True)


@given(st.integers(-100, 100), st.integers(1, 86_400_000))
def test_valid_priority_and_timeout_headers_are_read(priority, timeout):
    headers = [
        (b"host", b"x"),
        (PRIORITY, str(priority).encode()),
        (TIMEOUT, str(timeout).encode()),
    ]
    assert priority_and_timeout(headers) == (priority, timeout)
    assert priority_and_timeout(headers[:1]) == (0, None)


@given(st.sampled_from([PRIORITY, TIMEOUT]), st.binary(max_size=30))
def test_an_invalid_priority_or_timeout_is_a_bad_request(name, value):
    try:
        priority, timeout = priority_and_timeout([(name, value)])
    except BadRequest:
        return
    assert -100 <= priority <= 100
    assert timeout is None or 1 <= timeout <= 86_400_000


@given(
    st.floats(0, 1e6), st.floats(0.001, 1e4) | st.just(0.0), st.none() | st.integers(1, 86_400_000)
)
def test_the_earlier_deadline_applies(now, client_timeout, timeout_ms):
    limits = [limit for limit in (client_timeout, timeout_ms and timeout_ms / 1000) if limit]
    assert deadline(now, client_timeout, timeout_ms) == (now + min(limits) if limits else None)
