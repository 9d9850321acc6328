"""The next step of a canary, for platforms that do not watch canaries (Lambda, Kubernetes).

The decision is a pure function of the state that the platform shows: percentages, times and alarms.
Therefore any run can continue a canary of an interrupted one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal, NamedTuple


@dataclass(frozen=True)
class Shift:
    """The wanted course of a canary: its first percentage, its duration, and its alarms."""

    percent: float
    bake: int  # duration in seconds
    alarms: tuple[str, ...]


class Baking(NamedTuple):
    """A running canary, as the platform shows it."""

    version: str
    percent: float
    since: datetime


class CanaryAction(NamedTuple):
    """A step of a canary.

    `move` gives the new version all requests, and `rollback` gives them to the earlier version.
    """

    action: Literal["begin", "wait", "move", "rollback"]
    text: str = ""  # the progress, or the reason of a rollback
    percent: float = 0.0  # percentage of the requests at the beginning


def decide(
    new_version: str,
    shift: Shift | None,
    baking: Baking | None,
    triggered_alarms: Mapping[str, str],
    now: datetime,
) -> CanaryAction:
    """Decide the next step of a canary.

    1. Without a canary, the new version gets all requests at once.
    2. If an alarm was triggered, the requests go back.
    3. If the new version does not have the wanted percentage, the canary begins.
    4. After the bake time the new version gets all requests. Until then the canary waits.

    Args:
        new_version: The new version.
        shift: The wanted canary, if any.
        baking: The running canary, if any.
        triggered_alarms: The reasons of the alarms since the canary began, by their names.
        now: The time.
    """
    if shift is None:
        return CanaryAction("move")
    if triggered_alarms:
        reasons = (
            f"the alarm {name} went off{f' ({reason})' if reason else ''}"
            for name, reason in triggered_alarms.items()
        )
        return CanaryAction("rollback", "; ".join(reasons))
    if (
        baking is None
        or baking.version != new_version
        or abs(baking.percent - shift.percent) > 0.01
    ):
        return CanaryAction("begin", percent=shift.percent)
    remaining = baking.since + timedelta(seconds=shift.bake) - now
    if remaining <= timedelta():
        return CanaryAction("move")
    alarms = (
        f"{len(shift.alarms)} alarm{'s' * (len(shift.alarms) != 1)} quiet"
        if shift.alarms
        else "no alarm is watched"
    )
    return CanaryAction(
        "wait",
        f"{shift.percent:g} % of the requests, {remaining.total_seconds():.0f} s to go, {alarms}",
    )
