"""The plan of a load, and the due times of an open loop: constant, random or recorded."""

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
MAX_CONNECTIONS = 10_000
MAX_REQUESTS = 50_000_000  # limit for an open loop, whose due times stay in memory
MAX_AUTO_WARM_UP_S = 5.0  # longest warm-up if its end is detected


@dataclass(frozen=True)
class LoadPlan:
    """The plan of a load.

    `seconds` is the measured time, in steps of 0.1; a `warm_up` precedes it. With "auto" the end of
    the warm-up is detected (`statistics.warm_up_end`). It then takes at most `MAX_AUTO_WARM_UP_S`,
    and at most `seconds`. In an open loop at most `connections` requests run at a time. Further due
    requests wait, and their latency includes the wait. `timeout` limits each request, and `grace`
    limits the wait for answers after the end.

    Raises:
        UsageError: A value is invalid.
    """

    url: str
    model: str
    payloads: Sequence[Payload]
    protocol: str = "tsx"
    version: str | None = None
    mode: Mode = "closed"
    connections: int = 1
    # Requests per second of an open loop, unless the arrivals are recorded.
    rate: float | None = None
    arrivals: Arrivals = "poisson"  # used by open loops only
    speed: float = 1.0  # speed of recorded arrivals relative to the recording
    seconds: float = 10.0
    warm_up: float | Literal["auto"] = "auto"
    timeout: float = 30.0
    grace: float = 5.0
    token: str | None = None
    certificate: str | None = None  # file of a certificate to trust in addition to this machine's
    seed: int = 0
    cores: tuple[
        int, ...
    ] = ()  # cores of the generator's process; empty: all cores of this process
    slo: Slo | None = None  # Event streams within these bounds count for the goodput.

    def __post_init__(self) -> None:
        for is_wrong, message in _faults(self):
            if is_wrong:
                raise UsageError(message)
        read_target(self.url)

    @property
    def lead(self) -> float:
        """The seconds before the measured time."""
        return min(MAX_AUTO_WARM_UP_S, self.seconds) if self.warm_up == "auto" else self.warm_up

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
    """Return the mean rate of recorded requests, or 0 if all of them have the same time."""
    span = (payloads[-1].at or 0.0) - (payloads[0].at or 0.0)
    return (len(payloads) - 1) / span if span > 0 else 0.0


def _faults(plan: LoadPlan) -> list[tuple[bool, str]]:
    """Return each possible fault as a condition and a message."""
    is_open, is_recorded = plan.mode == "open", plan.arrivals == "recorded"
    has_rate = plan.rate is not None
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
            not 1 <= plan.connections <= MAX_CONNECTIONS,
            f"--connections: {plan.connections} is not from 1 to {MAX_CONNECTIONS}",
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
        (not is_open and has_rate, "--rate is for an open loop: leave it out, or give --mode open"),
        (
            is_open and is_recorded and has_rate,
            (
                "--rate and recorded arrivals cannot be combined: give --speed to change a"
                " recording's rate"
            ),
        ),
        (
            is_open and not is_recorded and not rate > 0,
            "an open loop needs a rate: give --rate, in requests per second, above 0",
        ),
        (
            is_open and not is_recorded and rate * plan.seconds > MAX_REQUESTS,
            f"--rate {rate:g} for {plan.seconds:g} seconds is too much",
        ),
        (
            is_open and is_recorded and any(payload.at is None for payload in plan.payloads),
            "recorded arrivals need a recording as --input",
        ),
        (
            is_open
            and is_recorded
            and not recorded_rate(plan.payloads) * plan.speed * plan.seconds < MAX_REQUESTS,
            f"--speed {plan.speed:g} for {plan.seconds:g} seconds is too much",
        ),
        (
            not plan.speed > 0,
            f"--speed: {plan.speed:g} is not a valid speed; give a number above 0",
        ),
    ]


def due_times(plan: LoadPlan, seconds: float) -> array[float]:
    """Return when the requests of an open loop are due, in seconds from the start.

    Request n sends payload n modulo the number of payloads.
    """
    if plan.arrivals == "recorded":
        return recorded([payload.at or 0.0 for payload in plan.payloads], plan.speed, seconds)
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


def recorded(arrival_times: Sequence[float], speed: float, seconds: float) -> array[float]:
    """Return the due times of a recording.

    A recording that is too short is repeated after its mean interval. If all requests have the same
    time, it is sent once.
    """
    first, span = arrival_times[0], arrival_times[-1] - arrival_times[0]
    cycle_s = (span + span / max(1, len(arrival_times) - 1)) / speed
    due, cycle_start = array("d"), 0.0
    while cycle_start < seconds:
        due.extend(
            due_time
            for arrival in arrival_times
            if (due_time := cycle_start + (arrival - first) / speed) < seconds
        )
        if cycle_s <= 0:
            break
        cycle_start += cycle_s
    return due
