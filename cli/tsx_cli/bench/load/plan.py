"""What a load is to be, and when the requests of an open loop are due: at an even rate, at random,
or as they once came.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tsx_archiver.metadata.slo import Slo
from tsx_cli.bench.load.payloads import Payload
from tsx_cli.bench.load.protocols import PROTOCOLS, read_target
from tsx_cli.bench.load.results import OfferedLoad
from tsx_cli.common.failure import UsageError

Mode = Literal["closed", "open"]
Arrivals = Literal["constant", "poisson", "recorded"]
MOST_CONNECTIONS = 10_000
MOST_REQUESTS = 50_000_000  # of an open loop: each has its time, kept in memory
AUTO_SECONDS = 5.0  # that a warm-up may last at most where it is found


@dataclass(frozen=True)
class LoadPlan:
    """Raises UsageError where it makes no sense.

    `seconds` are those that count, in steps of 0.1; a `warm_up` goes before them. "auto" finds its
    end (`statistics.warm_up_end`) and puts up to `AUTO_SECONDS` before them, no more than
    `seconds`. In an open loop no more than `connections` requests are under way at a time: what is
    due beyond that waits, and its latency tells. `timeout` ends a request, `grace` the wait for
    answers after the end.
    """

    url: str
    model: str
    payloads: Sequence[Payload]
    protocol: str = "tsx"
    version: str | None = None
    mode: Mode = "closed"
    connections: int = 1
    rate: float | None = (
        None  # requests per second, of open loops with other arrivals than recorded ones
    )
    arrivals: Arrivals = "poisson"  # of open loops
    speed: float = 1.0  # of recorded arrivals: how many times as fast as they came
    seconds: float = 10.0
    warm_up: float | Literal["auto"] = "auto"
    timeout: float = 30.0
    grace: float = 5.0
    token: str | None = None
    certificate: str | None = None  # a file to trust, beside what this machine trusts
    seed: int = 0
    cores: tuple[int, ...] = ()  # of the generator's process; empty: those of this one
    slo: Slo | None = None  # what an event stream has to keep to count for the goodput

    def __post_init__(self) -> None:
        for wrong, message in _faults(self):
            if wrong:
                raise UsageError(message)
        read_target(self.url)

    @property
    def lead(self) -> float:
        """Seconds before those that count."""
        return min(AUTO_SECONDS, self.seconds) if self.warm_up == "auto" else self.warm_up

    @property
    def offered(self) -> OfferedLoad:
        if self.mode == "closed":
            return OfferedLoad(mode="closed", connections=self.connections)
        rate = (
            recorded_rate(self.payloads) * self.speed if self.arrivals == "recorded" else self.rate
        )
        return OfferedLoad(
            mode="open", connections=self.connections, rate=rate, arrivals=self.arrivals
        )


def recorded_rate(payloads: Sequence[Payload]) -> float:
    """The mean rate of recorded requests; 0 where they all came at once."""
    span = (payloads[-1].at or 0.0) - (payloads[0].at or 0.0)
    return (len(payloads) - 1) / span if span > 0 else 0.0


def _faults(plan: LoadPlan) -> list[tuple[bool, str]]:
    """Each with whether it is one."""
    open_loop, recorded = plan.mode == "open", plan.arrivals == "recorded"
    given = plan.rate is not None
    rate = plan.rate or 0.0
    return [
        (not plan.payloads, "there is nothing to send: give --input a file"),
        (
            plan.protocol not in PROTOCOLS,
            f"--protocol: '{plan.protocol}' is unknown; choose one of {', '.join(PROTOCOLS)}",
        ),
        (
            plan.mode not in ("closed", "open"),
            f"--mode: '{plan.mode}' is unknown; choose closed or open",
        ),
        (
            plan.arrivals not in ("constant", "poisson", "recorded"),
            f"--arrivals: '{plan.arrivals}' is unknown; choose constant, poisson or recorded",
        ),
        (
            not 1 <= plan.connections <= MOST_CONNECTIONS,
            f"--connections: {plan.connections} is not from 1 to {MOST_CONNECTIONS}",
        ),
        (
            not plan.seconds >= 0.1,
            f"--duration: {plan.seconds:g} seconds are too few; give 0.1 or more",
        ),
        (
            plan.warm_up != "auto" and not plan.warm_up >= 0,
            f"--warm-up: {plan.warm_up} is not a time; give seconds, or auto",
        ),
        (not plan.timeout > 0, f"--timeout: {plan.timeout:g} seconds leave no time for an answer"),
        (not plan.grace >= 0, f"the time for late answers is negative: {plan.grace:g} seconds"),
        (not open_loop and given, "--rate is for an open loop: leave it out, or give --mode open"),
        (
            open_loop and recorded and given,
            (
                "--rate and recorded arrivals cannot be combined: give --speed to change a"
                " recording's rate"
            ),
        ),
        (
            open_loop and not recorded and not rate > 0,
            "an open loop needs a rate: give --rate, in requests per second, above 0",
        ),
        (
            open_loop and not recorded and rate * plan.seconds > MOST_REQUESTS,
            f"--rate {rate:g} for {plan.seconds:g} seconds is too much",
        ),
        (
            open_loop and recorded and any(each.at is None for each in plan.payloads),
            "recorded arrivals need a recording as --input",
        ),
        (
            open_loop
            and recorded
            and not recorded_rate(plan.payloads) * plan.speed * plan.seconds < MOST_REQUESTS,
            f"--speed {plan.speed:g} for {plan.seconds:g} seconds is too much",
        ),
        (
            not plan.speed > 0,
            f"--speed: {plan.speed:g} is not a valid speed; give a number above 0",
        ),
    ]


def due_times(plan: LoadPlan, seconds: float) -> array[float]:
    """When the requests of an open loop are due, in seconds from the start; the n-th is that of
    payload n modulo their number.
    """
    if plan.arrivals == "recorded":
        return recorded([each.at or 0.0 for each in plan.payloads], plan.speed, seconds)
    assert plan.rate is not None
    return (
        constant(plan.rate, seconds)
        if plan.arrivals == "constant"
        else poisson(plan.rate, seconds, plan.seed)
    )


def constant(rate: float, seconds: float) -> array[float]:
    return array("d", (number / rate for number in range(max(1, int(rate * seconds)))))


def poisson(rate: float, seconds: float, seed: int) -> array[float]:
    chance = random.Random(seed)
    due, now = array("d"), chance.expovariate(rate)
    while now < seconds:
        due.append(now)
        now += chance.expovariate(rate)
    return due


def recorded(times: Sequence[float], speed: float, seconds: float) -> array[float]:
    """A recording that is shorter begins again, after its mean pause; one that has no length is
    sent once.
    """
    first, span = times[0], times[-1] - times[0]
    again = (span + span / max(1, len(times) - 1)) / speed
    due, start = array("d"), 0.0
    while start < seconds:
        due.extend(moment for at in times if (moment := start + (at - first) / speed) < seconds)
        if again <= 0:
            break
        start += again
    return due
