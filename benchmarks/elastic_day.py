"""Savings and misses of elastic workers in a simulated day.

    python benchmarks/elastic_day.py [--minutes 10] [--most 4] [--peak 0.75] [--bound-ms 200]

A day's requests come within some minutes: a quiet night, a morning, a plateau, a peak in the
evening. Three servers get the same requests at the same time. They have one worker, as many as the
peak needs, and a number in between that follows the load. The handler waits 20 ms for a device, so
the limit is the number of workers, not of cores. A miss is a request that is refused, or answered
after the limit (`--bound-ms`). Worker-seconds are those of all processes of the model, which the
management API lists twice a second.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import machine
import openloop
import servers

from tsx_cli.bench.load.generator import measure
from tsx_cli.bench.load.payloads import Payload
from tsx_cli.bench.load.plan import LoadPlan

HANDLER = Path(__file__).parent / "models" / "slow.py"
REQUEST_S = 0.020
# Points of the day's load: the fraction of the day, and the fraction of the peak.
DAY = (
    (0.0, 0.10),
    (0.25, 0.10),
    (0.40, 0.70),
    (0.60, 0.60),
    (0.72, 1.00),
    (0.80, 0.95),
    (0.90, 0.20),
    (1.0, 0.10),
)
SAMPLE_INTERVAL_S = 0.5


class WorkerCounts(NamedTuple):
    worker_seconds: float
    most: int
    changes: int


def peak_share(day_fraction: float) -> float:
    """Return the load, as a fraction of the peak, at a fraction of the day."""
    (begin, begin_load), (end, end_load) = next(
        pair for pair in itertools.pairwise(DAY) if day_fraction <= pair[1][0]
    )
    return begin_load + (end_load - begin_load) * (day_fraction - begin) / (end - begin)


def arrivals(peak: float, seconds: float) -> list[float]:
    """Return random arrival times: those of the peak rate, of which some are dropped."""
    random_source, time_s, arrival_times = random.Random(24), 0.0, []
    while (time_s := time_s + random_source.expovariate(peak)) < seconds:
        if random_source.random() < peak_share(time_s / seconds):
            arrival_times.append(time_s)
    return arrival_times


def count_workers(server: servers.Server, stop_event: threading.Event) -> WorkerCounts:
    total, highest, changes, previous_count = 0.0, 0, 0, None
    while not stop_event.wait(SAMPLE_INTERVAL_S):
        worker_count = len(json.loads(server.call("/models/slow", management=True))[0]["workers"])
        total += SAMPLE_INTERVAL_S * worker_count
        highest = max(highest, worker_count)
        changes += previous_count not in (None, worker_count)
        previous_count = worker_count
    return WorkerCounts(total, highest, changes)


def measure_day(
    server: servers.Server, arrival_times: Sequence[float], seconds: float, bound_ms: float
) -> tuple[openloop.Result, WorkerCounts]:
    payloads = [
        Payload(b"{}", "application/octet-stream", (), at=time_s) for time_s in arrival_times
    ]
    url = f"{server.inference}/predictions/slow"
    plan = LoadPlan(
        url,
        "",
        payloads,
        "post",
        mode="open",
        connections=256,
        arrivals="recorded",
        seconds=seconds,
        warm_up=0.0,
    )
    stop_event = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        counter = pool.submit(count_workers, server, stop_event)
        try:
            result = openloop.row(plan, measure(plan), bound_ms)
        finally:
            stop_event.set()
        return result, counter.result()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10, help="that the day lasts")
    parser.add_argument("--most", type=int, default=4, help="workers")
    parser.add_argument(
        "--peak", type=float, default=0.75, help="share of what the most workers can do"
    )
    parser.add_argument(
        "--bound-ms", type=float, default=200, help="beyond which an answer is a miss"
    )
    options = parser.parse_args()
    os.environ["BENCHMARK_BATCH_SECONDS"] = str(REQUEST_S)  # The handler reads this setting.
    seconds = 60 * options.minutes
    arrival_times = arrivals(options.peak * options.most / REQUEST_S, seconds)
    print(
        f"{machine.describe()}; {len(arrival_times):,} requests in {options.minutes:g} minutes,"
        f" {REQUEST_S * 1000:.0f} ms each\n",
        flush=True,
    )
    limits = {
        "fixed 1": (1, 1),
        f"1 to {options.most}": (1, options.most),
        f"fixed {options.most}": (options.most, options.most),
    }
    with ExitStack() as stack:
        running = []
        for min_workers, max_workers in limits.values():
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            packed = servers.archive(
                directory,
                "slow",
                "--handler",
                HANDLER,
                config={"minWorkers": min_workers, "maxWorkers": max_workers},
            )
            running.append(stack.enter_context(servers.tsx(directory, packed)))
        for server in running:
            servers.first_answer(server, "/predictions/slow", b"{}")
        pool = stack.enter_context(ThreadPoolExecutor(len(running)))
        results = list(
            pool.map(
                lambda server: measure_day(server, arrival_times, seconds, options.bound_ms),
                running,
            )
        )
    print(
        "| workers | worker-seconds | most | changes | misses | refused | p50 ms | p99 ms"
        f" |\n{'|---' * 8}|"
    )
    for name, (result, counts) in zip(limits, results, strict=True):
        good_count = result.goodput * result.seconds
        cells = (
            f"{name} | {counts.worker_seconds:,.0f} | {counts.most} | {counts.changes} |"
            f" {max(0.0, 1 - good_count / len(arrival_times)):.2%}"
        )
        print(
            f"| {cells} | {result.refused / len(arrival_times):.2%} | {result.p50:.1f} | {result.p99:.1f} |"
        )
        assert not result.errors, result.errors


if __name__ == "__main__":
    main()
