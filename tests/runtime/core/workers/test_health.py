"""Decisions on a worker's health, look by look."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tsx_runtime.core.workers.health import JITTER, MEGA, Heartbeat, Recycling, Verdict


def look_at(
    heartbeat: Heartbeat,
    *,
    stopped: bool = False,
    busy: bool = False,
    answered: int = 0,
    pings: int = 0,
) -> Verdict:
    return heartbeat.check(stopped=stopped, busy=busy, answered=answered, pings=pings)


def test_an_idle_worker_is_asked_and_a_busy_or_lively_one_is_not():
    heartbeat = Heartbeat(2, 10)
    assert look_at(heartbeat) is Verdict.ASK
    assert look_at(heartbeat, busy=True) is Verdict.FINE
    assert look_at(heartbeat, answered=5) is Verdict.FINE
    assert look_at(heartbeat, answered=5) is Verdict.ASK


def test_a_worker_that_does_not_answer_is_silent_once_the_bound_is_over():
    heartbeat = Heartbeat(2, 6)
    assert [look_at(heartbeat, pings=1, busy=busy) for busy in (False, True, False)] == [
        Verdict.FINE,
        Verdict.FINE,
        Verdict.SILENT,
    ]


def test_an_answer_begins_the_wait_again():
    heartbeat = Heartbeat(2, 4)
    assert look_at(heartbeat, pings=1) is Verdict.FINE
    assert look_at(heartbeat) is Verdict.ASK
    assert look_at(heartbeat, pings=1) is Verdict.FINE


def test_a_bound_of_0_asks_nobody():
    assert look_at(Heartbeat(2, 0)) is Verdict.FINE


def test_a_stopped_process_is_reported_at_the_second_look_in_a_row_also_at_work():
    heartbeat = Heartbeat(2, 60)
    looks = [
        look_at(heartbeat, stopped=stopped, busy=True) for stopped in (True, False, True, True)
    ]
    assert looks == [Verdict.FINE, Verdict.FINE, Verdict.FINE, Verdict.STOPPED]


@given(
    limits=st.builds(Recycling, *[st.integers(0, 1000)] * 3),
    early=st.floats(0, 1),
    requests=st.integers(0, 2000),
    memory=st.integers(0, 2000),
    age=st.floats(0, 2000),
)
def test_a_limit_counts_from_its_jitter_on_and_0_is_no_limit(limits, early, requests, memory, age):
    reason = limits.reason(early, requests=requests, memory=memory * MEGA, age=age)
    values = {
        "requests": (limits.requests, requests),
        "memory": (limits.memory, memory),
        "age": (limits.age, age),
    }
    reached = {name for name, (limit, value) in values.items() if limit and value >= limit}
    near = {
        name
        for name, (limit, value) in values.items()
        if limit and value >= limit * (1 - JITTER) * 0.999
    }
    assert reason in near if reason else not reached


def test_workers_of_one_model_do_not_come_to_their_limit_together():
    limits = Recycling(requests=1000)
    assert limits.reason(1.0, requests=900, memory=0, age=0) == "requests"
    assert limits.reason(0.0, requests=999, memory=0, age=0) is None


@pytest.mark.parametrize("reason", ["requests", "memory", "age"])
def test_each_limit_has_its_name(reason):
    limits = Recycling(**{reason: 1})
    assert limits.reason(0.0, requests=1, memory=MEGA, age=1) == reason
