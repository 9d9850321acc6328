"""The health decisions about a worker, check by check."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tsx_runtime.core.workers.health import JITTER, MEGA, Heartbeat, Recycling, Verdict


def check(
    heartbeat: Heartbeat,
    *,
    is_stopped: bool = False,
    is_busy: bool = False,
    answered_count: int = 0,
    pings: int = 0,
) -> Verdict:
    return heartbeat.check(stopped=is_stopped, busy=is_busy, answered=answered_count, pings=pings)


def test_only_an_idle_worker_without_recent_answers_is_pinged():
    heartbeat = Heartbeat(2, 10)
    assert check(heartbeat) is Verdict.ASK
    assert check(heartbeat, is_busy=True) is Verdict.FINE
    assert check(heartbeat, answered_count=5) is Verdict.FINE
    assert check(heartbeat, answered_count=5) is Verdict.ASK


def test_a_worker_that_does_not_answer_is_reported_after_the_timeout():
    heartbeat = Heartbeat(2, 6)
    assert [check(heartbeat, pings=1, is_busy=is_busy) for is_busy in (False, True, False)] == [
        Verdict.FINE,
        Verdict.FINE,
        Verdict.SILENT,
    ]


def test_an_answer_restarts_the_timeout():
    heartbeat = Heartbeat(2, 4)
    assert check(heartbeat, pings=1) is Verdict.FINE
    assert check(heartbeat) is Verdict.ASK
    assert check(heartbeat, pings=1) is Verdict.FINE


def test_a_timeout_of_0_disables_pings():
    assert check(Heartbeat(2, 0)) is Verdict.FINE


def test_two_consecutive_checks_report_a_stopped_process_even_if_busy():
    heartbeat = Heartbeat(2, 60)
    verdicts = [
        check(heartbeat, is_stopped=is_stopped, is_busy=True)
        for is_stopped in (True, False, True, True)
    ]
    assert verdicts == [Verdict.FINE, Verdict.FINE, Verdict.FINE, Verdict.STOPPED]


@given(
    limits=st.builds(Recycling, *[st.integers(0, 1000)] * 3),
    jitter_fraction=st.floats(0, 1),
    requests=st.integers(0, 2000),
    memory=st.integers(0, 2000),
    age=st.floats(0, 2000),
)
def test_a_limit_applies_from_its_jittered_value_and_0_disables_it(
    limits, jitter_fraction, requests, memory, age
):
    reason = limits.reason(jitter_fraction, requests=requests, memory=memory * MEGA, age=age)
    values = {
        "requests": (limits.requests, requests),
        "memory": (limits.memory, memory),
        "age": (limits.age, age),
    }
    passed_limits = {name for name, (limit, value) in values.items() if limit and value >= limit}
    passed_jittered_limits = {
        name
        for name, (limit, value) in values.items()
        if limit and value >= limit * (1 - JITTER) * 0.999
    }
    assert reason in passed_jittered_limits if reason else not passed_limits


def test_workers_of_one_model_reach_their_limits_at_different_times():
    limits = Recycling(requests=1000)
    assert limits.reason(1.0, requests=900, memory=0, age=0) == "requests"
    assert limits.reason(0.0, requests=999, memory=0, age=0) is None


@pytest.mark.parametrize("reason", ["requests", "memory", "age"])
def test_the_reason_names_the_limit(reason):
    limits = Recycling(**{reason: 1})
    assert limits.reason(0.0, requests=1, memory=MEGA, age=1) == reason
