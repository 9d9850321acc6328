"""From rounds to a point: one load on one configuration, with what is known of it and whether it holds the bounds."""

from __future__ import annotations

from collections.abc import Sequence

from tsx_cli.bench import statistics
from tsx_cli.bench.results import Offered, Point, Round
from tsx_cli.bench.search import best_point
from tsx_cli.bench.slo import Slo

KEPT_UP = 0.95  # of the requests of an open loop; a server that answers fewer of them in the time is behind for good


def point_of(offered: Offered, rounds: Sequence[Round], slo: Slo | None) -> Point:
    throughput, latency = statistics.throughput(rounds), statistics.latency(rounds)
    sent = sum(each.sent for each in rounds)
    error_rate = (sent - sum(each.ok for each in rounds)) / sent if sent else 1.0
    broken = (slo or Slo(())).broken(latency.model_dump(), error_rate)
    in_time = sum(each.throughput * each.seconds for each in rounds)
    behind = offered.mode == "open" and in_time < KEPT_UP * sent
    return Point(
        offered=offered,
        throughput=throughput,
        latency=latency,
        p99_ms=statistics.percentile_figure(rounds, "p99_ms"),
        error_rate=error_rate,
        holds=not broken and not behind and throughput.value > 0,
        rounds=list(rounds),
    )


def with_round(points: list[Point], offered: Offered, fresh: Round, slo: Slo | None) -> int:
    """Add a round to the point of that load, or a point; returns its position."""
    at = next((position for position, point in enumerate(points) if point.offered == offered), None)
    if at is None:
        points.append(point_of(offered, [fresh], slo))
        return len(points) - 1
    points[at] = point_of(offered, [*points[at].rounds, fresh], slo)
    return at


def confirmed_best(points: Sequence[Point]) -> int | None:
    """The best of those that were measured again, where one of them holds: of many figures the highest single one is partly luck."""
    again = [each if len(each.rounds) > 1 else each.model_copy(update={"holds": False}) for each in points]
    best = best_point(again)
    return best_point(points) if best is None else best
