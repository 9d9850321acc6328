"""An open loop for these benchmarks, with the generator of `tsx bench`.

Every planned request ends as exactly one of: accepted (2xx), refused (429, 503), an error (its
status, or `closed`), unanswered (no response five seconds after the end), unsent (no connection was
free until the end). Latency counts from the planned time. A connection carries one request at a
time, so a server never has more requests than `connections`; to fill a queue, use more of them.
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
    """Figures of an open loop; latencies are in milliseconds, of accepted requests unless named."""

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
    # Accepted responses per second that came within `limit_ms` of their planned times.
    goodput: float
    p50: float
    p90: float
    p99: float
    p999: float
    most: float
    refused_p99: float
    waited: int  # requests that had to wait for a free connection
    late_p99: float  # the delay of the requests that did not have to wait
    generator_cpu: float  # fraction of one core
    generator_starved: float  # fraction of the time in which it had work but no core
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
    """Run an open loop in another process.

    Raises:
        CliError: The server accepts no connections.
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


def row(plan: LoadPlan, report: Round, limit_ms: float | None) -> Result:
    latency, generator = report.latency, report.generator
    timely_count = sum(
        count for end, count in report.histogram if limit_ms is not None and end <= limit_ms
    )
    goodput = (
        report.throughput
        if limit_ms is None
        else min(report.throughput, timely_count / report.seconds)
    )
    return Result(
        *(
            plan.rate or 0.0,
            plan.seconds,
            "Poisson" if plan.arrivals == "poisson" else "constant",
            plan.connections,
        ),
        *(
            report.sent + report.unsent,
            report.ok,
            report.refused,
            report.errors,
            report.unanswered,
            report.unsent,
        ),
        *(goodput, latency.p50_ms, latency.p90_ms, latency.p99_ms, latency.p999_ms, latency.max_ms),
        *(
            report.refused_p99_ms,
            generator.waited,
            generator.late_p99_ms,
            generator.cpu,
            generator.starved,
            generator.limited,
        ),
    )
