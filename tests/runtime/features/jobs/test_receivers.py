"""Callback receivers: few calls at a time, and a pause where calls keep failing."""

from __future__ import annotations

import math

from tests.kit.clock import Clock
from tsx_runtime.features.jobs.receivers import (
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


def test_a_receiver_is_the_origin_of_its_urls() -> None:
    assert receiver_of("https://b.example:8443/done/x?y=/") == B


def test_a_receiver_gets_few_concurrent_calls_and_one_after_a_failure() -> None:
    receivers = Receivers(Clock(0.0))
    for _ in range(MAX_CALLS):
        assert receivers.pauses() == {}
        receivers.begin(A)
    assert receivers.pauses() == {A: math.inf}
    receivers.end(A, failed=True)
    assert receivers.pauses() == {A: math.inf}
    receivers.end(A, failed=False)
    assert receivers.pauses() == {}


def test_a_failing_receiver_is_paused_with_exponential_back_off() -> None:
    clock = Clock(0.0)
    receivers = Receivers(clock)
    for _ in range(MAX_FAILURES - 1):
        call(receivers, A, failed=True)
        assert receivers.pauses() == {}
    pauses = []
    # The exponent exceeds the range of floats; the pause must still be computed.
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


def test_the_number_of_remembered_failing_receivers_is_limited() -> None:
    receivers = Receivers(Clock(0.0))
    names = [f"https://{number}.example/" for number in range(MAX_FAILING + 1)]
    for name in names:
        for _ in range(MAX_FAILURES):
            call(receivers, name, failed=True)
    assert list(receivers.pauses()) == names[1:]
