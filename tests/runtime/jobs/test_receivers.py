"""Receivers of callbacks: a few calls at a time, and none for a while where calls keep failing."""

from __future__ import annotations

import math

from tests.kit.clock import Clock
from tsx_runtime.jobs.receivers import (
    MAX_CALLS,
    MAX_FAILING,
    MAX_FAILURES,
    MAX_PAUSE_S,
    Receivers,
    receiver_of,
)

A, B = "https://a.example/", "https://b.example:8443/"


def call(receivers: Receivers, receiver: str, *, failed: bool) -> None:
    receivers.begin(receiver)
    receivers.end(receiver, failed=failed)


def test_a_receiver_is_the_beginning_of_its_urls() -> None:
    assert receiver_of("https://b.example:8443/done/x?y=/") == B


def test_a_receiver_gets_a_few_calls_at_a_time_and_one_where_the_last_failed() -> None:
    receivers = Receivers(Clock(0.0))
    for _ in range(MAX_CALLS):
        assert receivers.pauses() == {}
        receivers.begin(A)
    assert receivers.pauses() == {A: math.inf}
    receivers.end(A, failed=True)
    assert receivers.pauses() == {A: math.inf}
    receivers.end(A, failed=False)
    assert receivers.pauses() == {}


def test_a_receiver_that_keeps_failing_is_left_alone_for_longer_and_longer() -> None:
    clock = Clock(0.0)
    receivers = Receivers(clock)
    for _ in range(MAX_FAILURES - 1):
        call(receivers, A, failed=True)
        assert receivers.pauses() == {}
    pauses = []
    # A float holds no power of two that large.
    for _ in range(1100):
        call(receivers, A, failed=True)
        pauses.append(receivers.pauses()[A])
        call(receivers, B, failed=False)
        clock.now += pauses[-1]
        assert receivers.pauses() == {}
    assert pauses[:3] == [2.0**MAX_FAILURES, 2.0 ** (MAX_FAILURES + 1), 2.0 ** (MAX_FAILURES + 2)]
    assert pauses[-1] == MAX_PAUSE_S
    call(receivers, A, failed=False)
    call(receivers, A, failed=True)
    assert receivers.pauses() == {}


def test_a_bounded_number_of_failing_receivers_is_remembered() -> None:
    receivers = Receivers(Clock(0.0))
    names = [f"https://{number}.example/" for number in range(MAX_FAILING + 1)]
    for name in names:
        for _ in range(MAX_FAILURES):
            call(receivers, name, failed=True)
    assert list(receivers.pauses()) == names[1:]
