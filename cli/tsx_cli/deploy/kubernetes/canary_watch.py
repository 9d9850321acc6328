"""What to do next with a canary that this command watches itself, from what is seen of it now and
what its metrics have been.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone

from tsx_cli.common.failure import CliError
from tsx_cli.deploy.aws.alarms import AlarmBound, read_bound
from tsx_cli.deploy.engine.canary import Shift
from tsx_cli.deploy.kubernetes.canary import (
    WINDOW,
    CanaryState,
    CanaryStep,
    Counters,
    Surroundings,
    next_step,
    went_off,
)

EVERY = 10.0  # seconds between two looks at the metrics
# seconds without metrics, or without a Gateway that takes its share, after which a canary goes back
STUCK = 300.0


class CanaryWatch:
    def __init__(self, clock: Callable[[], datetime] = lambda: datetime.now(timezone.utc)) -> None:
        self._clock = clock
        self._looks: list[tuple[datetime, Mapping[str, Counters]]] = []
        self._stuck: datetime | None = (
            None  # since when its metrics cannot be read, or no Gateway takes its share
        )

    def step(
        self,
        version: str | None,
        shift: Shift | None,
        seen: Surroundings,
        counters: Callable[[], Mapping[str, Counters]],
        broken: Callable[[], dict[str, str]] = dict,
    ) -> CanaryStep:
        """`counters` are those of its replicas by their names; they raise CliError where they
        cannot be read. `broken` ends it at once.
        """
        canary, off, unread = seen.canary, dict[str, str](), ""
        if (
            shift is not None
            and canary is not None
            and canary.since
            and not canary.ended
            and canary.version == version
        ):
            try:
                off = broken() or self._look(canary, shift, counters)
            except (
                CliError
            ) as error:  # it has its share, and stays where it is until it can be seen again
                unread = f"the canary's metrics cannot be read: {error.message}"
        now = self._clock()
        step = next_step(version, shift, seen, off, now)
        if unread and step.action != "end":
            step = CanaryStep("wait", unread)
        is_blocked = bool(unread) or (
            seen.route[0] != "ready" and version is not None and not seen.ends
        )
        self._stuck = (self._stuck or now) if step.action == "wait" and is_blocked else None
        if self._stuck is not None and (now - self._stuck).total_seconds() > STUCK:
            step = CanaryStep("end", step.text)
        if step.action == "start":
            self._looks = []
        return step

    def _look(
        self, canary: CanaryState, shift: Shift, counters: Callable[[], Mapping[str, Counters]]
    ) -> dict[str, str]:
        """What went off in the last minute, or since the canary began."""
        time, since = self._clock(), datetime.fromisoformat(canary.since)
        is_over = (time - since).total_seconds() >= shift.bake
        if self._looks and (time - self._looks[-1][0]).total_seconds() < EVERY and not is_over:
            return {}
        counted = counters()
        earlier = [look for look in self._looks if (time - look[0]).total_seconds() >= WINDOW]
        begin, before = earlier[-1] if earlier else (since, {})
        self._looks = [
            *earlier[-1:],
            *(look for look in self._looks if look not in earlier),
            (time, counted),
        ]
        return went_off(_bounds(shift.alarms), before, counted, (time - begin).total_seconds())


def _bounds(texts: Sequence[str]) -> list[AlarmBound]:
    return [bound for text in texts if (bound := read_bound(text)) is not None]
