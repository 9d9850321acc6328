"""The points of charts: rates from counters, in a bounded ring."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any

import pytest

from tsx_runtime.core.telemetry.version_stats import Stats
from tsx_runtime.errors import BadRequest, ClientLeft, QueueFull
from tsx_runtime.features.ui.time_series import MAX_POINTS, TimeSeries, between, read
from tsx_runtime.wire import TIMES


class Server:
    """A server with one version and a clock that advances by whole seconds."""

    def __init__(self) -> None:
        self.now = 100.0
        self.model = SimpleNamespace(versions={})
        self.renew()
        self.series = TimeSeries(lambda: [self.model], lambda: self.now)

    def renew(self) -> None:
        self.version: Any = SimpleNamespace(
            name="m", version="1.0", stats=Stats(), pending=0, batch_places=8
        )
        self.model.versions["1.0"] = self.version

    def second(self, seconds: float = 1.0) -> None:
        self.now += seconds
        self.series.sample()

    def points(self, since: int = 0) -> list[Any]:
        return self.series.since(since)[("m", "1.0")]


def test_a_rate_is_computed_over_the_elapsed_time() -> None:
    server = Server()
    server.second()
    server.version.stats.answers.update({200: 30, 503: 6})
    job: Any = SimpleNamespace(request_id=b"id", arrived=0.0)
    for error in (
        [QueueFull("full", status=429)] * 3
        + [BadRequest("of its client's")] * 5
        + [ClientLeft("gone")] * 100
    ):
        server.version.stats.add_refusal(job, error, 1.0)
    server.version.pending = 7
    server.second(1.5)
    *_, point = server.points()
    assert (point.number, point.rate, point.failures, point.waiting, point.refused) == (
        2,
        24.0,
        6.0,
        7,
        2.0,
    )
    assert server.version.stats.errors == 6 + 3


def test_latencies_cover_only_their_own_second() -> None:
    server = Server()
    server.version.stats.latency.add([5.0] * 1000)
    server.second()
    server.version.stats.answers[200] = 100
    server.version.stats.latency.add([0.01] * 98)
    server.version.stats.latency.add([0.2] * 2)
    server.second()
    *_, point = server.points()
    assert 0.008 < point.p50 < 0.012
    assert 0.15 < point.p99 < 0.25


def test_a_second_without_answers_has_no_latency() -> None:
    stats = Stats()
    reading = read(stats, 1.0)
    point = between(reading, read(stats, 2.0), 1, 0)
    assert (point.rate, point.p50, point.p99, point.places, point.stages) == (
        0.0,
        None,
        None,
        0.0,
        None,
    )


def test_a_point_divides_the_time_by_stage_and_counts_batch_slots() -> None:
    server = Server()
    add_batches(server.version.stats, 2)
    server.second()
    add_batches(server.version.stats, 5)
    server.second(0.5)
    *_, point = server.points()
    # Each batch fills four of eight slots.
    assert (point.rate, point.places) == (40.0, 80.0)
    queue, batch, preprocess, inference, postprocess, rest_s = point.stages
    assert (queue, batch) == pytest.approx((0.01, 0.02), abs=1e-6)
    assert (preprocess, inference, postprocess) == pytest.approx((0.001, 0.005, 0.002), abs=1e-6)
    assert queue + batch + preprocess + inference + postprocess + rest_s == pytest.approx(
        0.042, abs=1e-5
    )


def add_batches(stats: Stats, count: int) -> None:
    """Add batches of four requests that take 42 ms.

    A worker becomes free after 10 ms, starts 20 ms later, and takes 12 ms.
    """
    jobs: list[Any] = [
        SimpleNamespace(request_id=b"id", arrived=1.0, deadline=None, priority=0)
    ] * 4
    for _ in range(count):
        times = TIMES.pack(1.03, 0.012, 0.001, 0.005, 0.002)
        stats.add_batch((1.01, 1.02, 1.042, 4, times, struct.pack("4d", *[1.0] * 4), None), jobs)


def test_only_newer_points_are_reported_and_ten_minutes_kept() -> None:
    server = Server()
    for _ in range(MAX_POINTS + 50):
        server.second()
    assert len(server.points()) == MAX_POINTS
    assert [point.number for point in server.points(MAX_POINTS + 47)] == [
        MAX_POINTS + 48,
        MAX_POINTS + 49,
        MAX_POINTS + 50,
    ]
    assert server.points(server.series.number) == []


def test_a_replacement_continues_the_series_despite_reset_counters() -> None:
    server = Server()
    server.second()
    server.version.stats.answers[200] = 1000
    server.second()
    server.renew()
    server.second()
    server.version.stats.answers[200] = 5
    server.second()
    assert [point.rate for point in server.points()] == [0.0, 1000.0, 0.0, 5.0]


def test_requests_in_the_first_second_of_a_version_are_counted() -> None:
    server = Server()
    server.version.stats.answers.update({200: 2, 503: 1})
    server.second()
    (point,) = server.points()
    assert (point.rate, point.failures) == (3.0, 1.0)


def test_points_of_a_removed_version_are_dropped() -> None:
    server = Server()
    server.second()
    server.second()
    server.model.versions.clear()
    server.second()
    assert server.series.since(0) == {}
