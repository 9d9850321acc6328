"""Decisions about a canary: a pure function of its state, its alarms and the time."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tsx_cli.deploy.engine.canary import Baking, CanaryAction, Shift, decide

START = datetime(2026, 11, 21, tzinfo=timezone.utc)
SHIFT = Shift(10, 600, ("errors",))
BAKING = Baking("2", 10, START)
BEGIN = CanaryAction("begin", percent=10)


@pytest.mark.parametrize(
    ("shift", "state", "alarms", "elapsed_s", "expected"),
    [
        # The specification no longer has a canary.
        (None, BAKING, {"errors": ""}, 0, CanaryAction("move")),
        (SHIFT, None, {}, 0, BEGIN),
        # The canary of another version is replaced.
        (SHIFT, BAKING._replace(version="1"), {}, 0, BEGIN),
        (SHIFT, BAKING._replace(percent=5), {}, 0, BEGIN),
        (SHIFT, BAKING, {}, 0, CanaryAction("wait", "10 % of the requests, 600 s to go, 1 alarm quiet")),
        (SHIFT, BAKING, {}, 599, CanaryAction("wait", "10 % of the requests, 1 s to go, 1 alarm quiet")),
        (SHIFT, BAKING, {}, 600, CanaryAction("move")),
        (SHIFT, BAKING, {"errors": "3 of them"}, 9000,
         CanaryAction("rollback", "the alarm errors went off (3 of them)")),
        (SHIFT, None, {"errors": ""}, 0, CanaryAction("rollback", "the alarm errors went off")),
    ],
)  # fmt: skip
def test_a_canary_begins_waits_moves_on_or_is_rolled_back(
    shift: Shift | None,
    state: Baking | None,
    alarms: dict[str, str],
    elapsed_s: int,
    expected: object,
) -> None:
    assert decide("2", shift, state, alarms, START + timedelta(seconds=elapsed_s)) == expected


@given(
    st.floats(1, 50),
    st.integers(0, 3600),
    st.lists(st.integers(1, 900), max_size=30),
    st.integers(0, 40),
)
def test_every_canary_ends_with_all_requests_at_one_version(
    percent: float, bake: int, pauses: list[int], alarm_at: int
) -> None:
    shift, state, now = Shift(percent, bake, ("errors",)), None, START
    for turn, pause in enumerate([*pauses, 1, 3600, 3600]):
        is_alarm = turn == alarm_at
        decision = decide("2", shift, state, {"errors": ""} if is_alarm else {}, now)
        if decision.action == "begin":
            state = Baking("2", decision.percent, now)
        elif decision.action in ("move", "rollback"):
            assert (decision.action == "rollback") == is_alarm
            if not is_alarm:
                assert state is not None
                assert now - state.since >= timedelta(seconds=bake)
            return
        now += timedelta(seconds=pause)
    raise AssertionError("it never ends")
