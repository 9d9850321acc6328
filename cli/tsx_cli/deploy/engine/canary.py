"""The next step of a canary: a pure function, for targets that do not watch canaries themselves
(Lambda, Kubernetes).

What is known is what the platform shows: which version has which share and since when, and what the
alarms did meanwhile. So a run that was left is picked up by any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal, NamedTuple


@dataclass(frozen=True)
class Shift:
    """The plan of moving requests to a new version."""

    percent: float
    bake: int  # seconds
    alarms: tuple[str, ...]


class Baking(NamedTuple):
    """A running canary."""

    version: str
    percent: float
    since: datetime


class CanaryAction(NamedTuple):
    """Moves give the new version all requests, and a rollback the former one."""

    action: Literal["begin", "wait", "move", "rollback"]
    text: str = ""  # how far it is, or why it goes back
    percent: float = 0.0  # that it begins with


def decide(
    wanted: str,
    shift: Shift | None,
    baking: Baking | None,
    went_off: Mapping[str, str],
    now: datetime,
) -> CanaryAction:
    """`went_off` has, by name, why each alarm is off, or went off since the canary began.

    1. No canary is asked for: all at once.
    2. An alarm is off: back, or not even begun.
    3. The share that is wanted is not there: it begins.
    4. It has baked: all. Until then it waits.
    """
    if shift is None:
        return CanaryAction("move")
    if went_off:
        reasons = (
            f"the alarm {name} went off{f' ({reason})' if reason else ''}"
            for name, reason in went_off.items()
        )
        return CanaryAction("rollback", "; ".join(reasons))
    if baking is None or baking.version != wanted or abs(baking.percent - shift.percent) > 0.01:
        return CanaryAction("begin", percent=shift.percent)
    left = baking.since + timedelta(seconds=shift.bake) - now
    if left <= timedelta():
        return CanaryAction("move")
    watched = (
        f"{len(shift.alarms)} alarm{'s' * (len(shift.alarms) != 1)} quiet"
        if shift.alarms
        else "no alarm is watched"
    )
    return CanaryAction(
        "wait",
        f"{shift.percent:g} % of the requests, {left.total_seconds():.0f} s to go, {watched}",
    )
