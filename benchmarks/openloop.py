"""An open loop for these benchmarks: the generator of `tsx bench`, with figures in one row.

Every planned request ends as exactly one of: accepted (2xx), refused (429, 503), an error (its
status, or `closed`), unanswered (no response five seconds after the end), unsent (no connection was
free until the end). Latency counts from the planned time. A connection carries one request at a
time, so a server never has more than `connections` at once; a full queue needs more of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tsx_cli.bench.load.generator import measure
from tsx_cli.bench.load.payloads import Payload
from tsx_cli.bench.load.plan import LoadPlan
from tsx_cli.bench.load.results import Round


class Result(NamedTuple):
    """Figures of an open loop; latencies are milliseconds, of accepted requests by default."""

    rate: float
    seconds: float
    arrivals: str
    connections: int
    planned: int
    accepted: int
    refused: int
    errors: dict[str, int]
    unanswered: int
    unsent: int
    # Accepted responses per second in time, and within `limit_ms` of their planned times.
    goodput: float
    p50: float
    p90: float
    p99: float
    p999: float
    most: float
    refused_p99: float
    waited: int  # requests that found no free connection when due
    late_p99: float  # delay of the requests that found one
    generator_cpu: float  # share of one core
    generator_starved: float  # share of the time in which it had work and got no core
    limited: str | None


def run(
    url: str,
    rate: float,
    seconds: float,
    connections: int,
    body: Path,
    *,
    poisson: bool = False,
    headers: Sequence[str] = (),
    limit_ms: float | None = None,
) -> Result:
    """Run an open loop in a process of its own.

    Raises:
        CliError: The server takes no connections.
    """
    plan = planned(url, rate, seconds, connections, body, poisson=poisson, headers=headers)
    return row(plan, measure(plan), limit_ms)


def planned(
    url: str,
    rate: float,
    seconds: float,
    connections: int,
    body: Path,
    *,
    poisson: bool = False,
    headers: Sequence[str] = (),
) -> LoadPlan:
    header_pairs = [
        (name, value.strip()) for name, _, value in (header.partition(":") for header in headers)
    ]
    content_type = next(
        (value for name, value in header_pairs if name.lower() == "content-type"), None
    )
    payload = Payload(body.read_bytes(), content_type, tuple(header_pairs))
    return LoadPlan(
        *(url, "", (payload,), "post"),
        mode="open",
        connections=connections,
        rate=rate,
        arrivals="poisson" if poisson else "constant",
        seconds=seconds,
        warm_up=0.0,
    )


def row(plan: LoadPlan, reported: Round, limit_ms: float | None) -> Result:
    latency, side = reported.latency, reported.generator
    within = sum(
        count for end, count in reported.histogram if limit_ms is not None and end <= limit_ms
    )
    in_time = (
        reported.throughput
        if limit_ms is None
        else min(reported.throughput, within / reported.seconds)
    )
    return Result(
        *(
            plan.rate or 0.0,
            plan.seconds,
            "Poisson" if plan.arrivals == "poisson" else "constant",
            plan.connections,
        ),
        *(
            reported.sent + reported.unsent,
            reported.ok,
            reported.refused,
            reported.errors,
            reported.unanswered,
            reported.unsent,
        ),
        *(in_time, latency.p50_ms, latency.p90_ms, latency.p99_ms, latency.p999_ms, latency.max_ms),
        *(
            reported.refused_p99_ms,
            side.waited,
            side.late_p99_ms,
            side.cpu,
            side.starved,
            side.limited,
        ),
    )
