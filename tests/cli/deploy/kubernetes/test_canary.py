"""Canaries on Kubernetes: pure functions that choose the next step and read the pods' metrics."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tsx_cli.deploy.aws.alarms import AlarmBound, parse_bound
from tsx_cli.deploy.engine.canary import Shift
from tsx_cli.deploy.engine.resources import State
from tsx_cli.deploy.kubernetes.canary import (
    CanaryObservation,
    CanaryState,
    Counters,
    find_exceeded_bounds,
    next_step,
    percentile,
    read_counters,
)
from tsx_runtime.core.telemetry.histogram import Durations
from tsx_runtime.metrics.exposition import Families

START = datetime(2026, 11, 21, tzinfo=timezone.utc)
SHIFT = Shift(10, 600, ("5xx>0",))
READY: tuple[State, str] = ("ready", "")
BUSY: tuple[State, str] = ("changing", "0 of 1 pods are ready")
BAKING = CanaryState("new", 10, START.isoformat())


NEW = CanaryState("new", 10)
OLD = CanaryState("old", 10, START.isoformat())
TWENTY = CanaryState("new", 20)
SLOW, BROKEN = replace(BAKING, ended="slow"), ("failed", "ImagePullBackOff")
MORE = replace(SHIFT, percent=20)


@pytest.mark.parametrize(
    ("action", "version", "shift", "state", "elapsed_s"),
    [
        ("start", "new", SHIFT, (None, BUSY, 0, READY), 0),
        ("start", "new", SHIFT, (OLD, READY, 10, READY), 0),
        ("wait", "new", SHIFT, (NEW, BUSY, 0, READY), 0),
        ("end", "new", SHIFT, (NEW, BROKEN, 0, READY), 0),
        ("route", "new", SHIFT, (NEW, READY, 0, READY), 0),
        ("wait", "new", SHIFT, (NEW, READY, 10, BUSY), 0),
        ("bake", "new", SHIFT, (NEW, READY, 10, READY), 0),
        ("wait", "new", SHIFT, (BAKING, READY, 10, READY), 599),
        ("move", "new", SHIFT, (BAKING, READY, 10, READY), 600),
        # The Gateway does not accept the canary's route.
        ("end", "new", SHIFT, (BAKING, BUSY, 10, READY), 0),
        ("start", "new", MORE, (BAKING, READY, 10, READY), 600),
        ("route", "new", MORE, (TWENTY, READY, 10, READY), 600),
        # The specification no longer has a canary.
        ("move", "new", None, (BAKING, READY, 10, READY), 0),
        # The stable Deployment already runs the new version.
        ("unroute", None, SHIFT, (BAKING, READY, 10, READY), 0),
        ("wait", None, SHIFT, (BAKING, READY, 0, BUSY), 0),
        ("remove", None, SHIFT, (BAKING, READY, 0, READY), 0),
        ("unroute", "new", SHIFT, (SLOW, READY, 10, READY), 600),
        ("remove", "new", SHIFT, (SLOW, READY, 0, READY), 600),
    ],
)  # fmt: skip
def test_each_step_of_a_canary_follows_from_the_state_of_the_cluster(
    action: str, version: str | None, shift: Shift | None, state: Any, elapsed_s: int
) -> None:
    now = START + timedelta(seconds=elapsed_s)
    assert next_step(version, shift, CanaryObservation(*state), {}, now).action == action


def test_an_alarm_ends_a_canary() -> None:
    state = CanaryObservation(BAKING, READY, 10, READY)
    assert next_step("new", SHIFT, state, {"5xx>0": "3"}, START).action == "end"


@given(
    st.integers(0, 600),
    st.lists(st.tuples(st.integers(0, 120), st.booleans(), st.booleans()), max_size=60),
    st.integers(0, 80),
)
def test_requests_never_reach_a_version_that_does_not_run(
    bake: int, rounds: list[tuple[int, bool, bool]], alarm_at: int
) -> None:
    """Pass time in rounds in which pods may be ready and the Gateway may accept the route."""
    shift, now, stable = Shift(10, bake, ("5xx>0",)), START, "old"
    canary: CanaryState | None = None
    exists, percent, accepted_percent, is_withdrawn = False, 0.0, 0.0, False
    for number, (pause, pods, gateway) in enumerate([*rounds, *[(700, True, True)] * 12]):
        now += timedelta(seconds=pause)
        accepted_percent = percent if gateway else accepted_percent
        route = READY if accepted_percent == percent else BUSY
        state = CanaryObservation(canary, READY if pods else BUSY, percent, route)
        alarms = {"5xx>0": "1"} if number == alarm_at and exists else {}
        version = None if stable == "new" else "new"
        step = next_step(version, shift, state, alarms, now)
        if step.action == "start":
            canary, exists = CanaryState("new", 10), True
        elif step.action == "route":
            assert exists
            percent = 10
        elif step.action == "bake":
            assert canary is not None
            canary = replace(canary, since=now.isoformat())
        elif step.action == "end":
            assert canary is not None
            canary, is_withdrawn = replace(canary, ended=step.text), True
        elif step.action == "move":
            assert canary is not None
            assert now - datetime.fromisoformat(canary.since) >= timedelta(seconds=bake)
            stable = "new"
        elif step.action == "unroute":
            assert is_withdrawn or stable == "new"
            percent = 0
        elif step.action == "remove":
            assert accepted_percent == percent == 0
            assert (stable == "old") == is_withdrawn
            return
    raise AssertionError("it never ends")


def metrics(*models: str) -> str:
    """Write the server's metrics of models that have answered twenty requests and failed once."""
    families, durations = Families(), Durations()
    durations.add([0.2] * 18 + [0.4, 200.0])
    for model in models:
        families.add(
            "tsx_errors_total", "counter", "requests that failed", [({"model_name": model}, 1)]
        )
        families.add("tsx_requests_total", "counter", "requests", [({"model_name": model}, 20)])
        families.add_durations("tsx_request_seconds", "seconds", {"model_name": model}, durations)
        families.add_durations("tsx_queue_seconds", "seconds", {"model_name": model}, durations)
    return b"".join(families.text()).decode()


def bounds(*texts: str) -> list[AlarmBound]:
    return [bound for text in texts if (bound := parse_bound(text)) is not None]


def test_the_servers_metrics_are_parsed_and_summed_over_models() -> None:
    errors, bucket_counts = read_counters(metrics("digits", "letters"))
    assert (
        errors,
        bucket_counts[0.1],
        bucket_counts[0.25],
        bucket_counts[0.5],
        bucket_counts[float("inf")],
    ) == (2, 0, 36, 38, 40)
    assert percentile(0.9, bucket_counts) == 0.25
    assert percentile(0.95, bucket_counts) == 0.5
    # Beyond the last bucket, its limit is returned.
    assert percentile(0.99, bucket_counts) == 100
    assert percentile(0.95, {}) == percentile(0.95, {0.25: 0.0, float("inf"): 0.0}) == 0


def test_alarms_compare_the_requests_of_the_last_minute() -> None:
    inf = float("inf")
    slow = Counters(0, {0.25: 0, 0.5: 100, inf: 100})
    fast = Counters(0, {0.25: 100, 0.5: 100, inf: 100})
    for texts, before, after, seconds, alarm in (
        (["5xx>2"], {}, {"a": Counters(1), "b": Counters(2)}, 20, {"5xx>2": "3 in a minute"}),
        (["5xx>2"], {}, {"a": Counters(3)}, 120, {}),
        (["5xx>0"], {"a": Counters(5)}, {"a": Counters(5)}, 60, {}),
        (["5xx>0"], {"gone": Counters(5)}, {"a": Counters(1)}, 60, {"5xx>0": "1 in a minute"}),
        (["p95>300ms", "p50>1s"], {}, {"a": slow, "b": fast}, 60, {"p95>300ms": "475 ms"}),
        (["p95>300ms"], {"a": slow}, {"a": slow}, 60, {}),
    ):
        assert find_exceeded_bounds(bounds(*texts), before, after, seconds) == alarm
