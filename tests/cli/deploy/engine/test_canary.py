"""What becomes of a canary: a pure function of what is there, what is wanted and what time it
is.
"""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tsx_cli.deploy.engine.canary import Baking, CanaryAction, Shift, decide

START = datetime(2026, 11, 21, tzinfo=timezone.utc)
SHIFT = Shift(10, 600, ("errors",))


def baking(version: str = "2", percent: float = 10) -> Baking:
    return Baking(version, percent, START)


@pytest.mark.parametrize(
    ("shift", "there", "off", "after", "expected"),
    [
        (None, baking(), {"errors": ""}, 0, CanaryAction("move")),  # nobody asks for one
        (SHIFT, None, {}, 0, CanaryAction("begin", percent=10)),
        (
            SHIFT,
            baking("1"),
            {},
            0,
            CanaryAction("begin", percent=10),
        ),  # that of another version is replaced
        (SHIFT, baking(percent=5), {}, 0, CanaryAction("begin", percent=10)),
        (
            SHIFT,
            baking(),
            {},
            0,
            CanaryAction("wait", "10 % of the requests, 600 s to go, 1 alarm quiet"),
        ),
        (
            SHIFT,
            baking(),
            {},
            599,
            CanaryAction("wait", "10 % of the requests, 1 s to go, 1 alarm quiet"),
        ),
        (SHIFT, baking(), {}, 600, CanaryAction("move")),
        (
            SHIFT,
            baking(),
            {"errors": "3 of them"},
            9000,
            CanaryAction("rollback", "the alarm errors went off (3 of them)"),
        ),
        (SHIFT, None, {"errors": ""}, 0, CanaryAction("rollback", "the alarm errors went off")),
    ],
)
def test_a_canary_begins_waits_moves_on_or_goes_back(
    shift: Shift | None, there: Baking | None, off: dict[str, str], after: int, expected: object
) -> None:
    assert decide("2", shift, there, off, START + timedelta(seconds=after)) == expected


@given(
    st.floats(1, 50),
    st.integers(0, 3600),
    st.lists(st.integers(1, 900), max_size=30),
    st.integers(0, 40),
)
def test_whoever_looks_and_when_all_requests_come_to_one_version_in_the_end(
    percent: float, bake: int, pauses: list[int], alarm_at: int
) -> None:
    shift, there, now = Shift(percent, bake, ("errors",)), None, START
    for turn, pause in enumerate([*pauses, 1, 3600, 3600]):
        did = decide("2", shift, there, {"errors": ""} if turn == alarm_at else {}, now)
        if did.action == "begin":
            there = Baking("2", did.percent, now)
        elif did.action in ("move", "rollback"):
            assert (did.action == "rollback") == (turn == alarm_at)
            assert did.action == "rollback" or (
                there is not None and now - there.since >= timedelta(seconds=bake)
            )
            return
        now += timedelta(seconds=pause)
    raise AssertionError("it never ends")
