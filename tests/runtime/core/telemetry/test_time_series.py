"""Points of charts: rates from counters, a bounded ring, what takes the place of a version goes on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tsx_runtime.core.telemetry.time_series import KEPT, TimeSeries, between, read
from tsx_runtime.core.telemetry.version_stats import Stats
from tsx_runtime.errors import BadRequest, ClientLeft, QueueFull


class Server:
    """One model with one version, whose clock goes by seconds."""

    def __init__(self) -> None:
        self.now = 100.0
        self.model = SimpleNamespace(versions={})
        self.renew()
        self.series = TimeSeries(lambda: [self.model], lambda: self.now)

    def renew(self) -> None:
        self.version: Any = SimpleNamespace(name="m", version="1.0", stats=Stats(), pending=0)
        self.model.versions["1.0"] = self.version

    def second(self, seconds: float = 1.0) -> None:
        self.now += seconds
        self.series.sample()

    def points(self, since: int = 0) -> list[Any]:
        return self.series.since(since)[("m", "1.0")]


def test_a_rate_is_what_came_in_the_time_that_passed() -> None:
    server = Server()
    server.second()
    server.version.stats.answers.update({200: 30, 503: 6})
    job: Any = SimpleNamespace(request_id=b"id", arrived=0.0)
    for error in [QueueFull("full", status=429)] * 3 + [BadRequest("of its client's")] * 5 + [ClientLeft("gone")] * 100:
        server.version.stats.add_refusal(job, error, 1.0)
    server.version.pending = 7
    server.second(1.5)
    (point,) = server.points()
    assert (point.number, point.rate, point.failures, point.waiting) == (2, 24.0, 6.0, 7)
    assert server.version.stats.errors == 6 + 3


def test_latencies_are_those_of_that_second_alone() -> None:
    server = Server()
    server.version.stats.latency.add([5.0] * 1000)
    server.second()
    server.version.stats.answers[200] = 100
    server.version.stats.latency.add([0.01] * 98)
    server.version.stats.latency.add([0.2] * 2)
    server.second()
    (point,) = server.points()
    assert 0.008 < point.p50 < 0.012
    assert 0.15 < point.p99 < 0.25


def test_a_second_without_answers_has_no_latency() -> None:
    stats = Stats()
    reading = read(stats, 1.0)
    point = between(reading, read(stats, 2.0), 1, 0)
    assert (point.rate, point.p50, point.p99) == (0.0, None, None)


def test_only_what_is_newer_is_reported_and_ten_minutes_are_kept() -> None:
    server = Server()
    for _ in range(KEPT + 50):
        server.second()
    assert len(server.points()) == KEPT
    assert [point.number for point in server.points(KEPT + 47)] == [KEPT + 48, KEPT + 49, KEPT + 50]
    assert server.points(server.series.number) == []


def test_what_takes_the_place_of_a_version_goes_on_with_its_points_though_its_counters_start_again() -> None:
    server = Server()
    server.second()
    server.version.stats.answers[200] = 1000
    server.second()
    server.renew()
    server.second()
    server.version.stats.answers[200] = 5
    server.second()
    assert [point.rate for point in server.points()] == [1000.0, 5.0]


def test_of_a_version_that_is_gone_nothing_is_kept() -> None:
    server = Server()
    server.second()
    server.second()
    server.model.versions.clear()
    server.second()
    assert server.series.since(0) == {}
