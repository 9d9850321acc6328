"""Elastic workers in a day: their savings and their misses.

    python benchmarks/elastic_day.py [--minutes 10] [--most 4] [--peak 0.75] [--bound-ms 200]

A day's requests come in some minutes: a quiet night, a morning, a plateau, a peak in the evening.
Three servers get the same arrivals at the same time: one worker, as many as the peak needs, and a
number in between that follows the load. The handler waits 20 ms for a device, so workers are scarce
and cores are not. A miss is a request that is refused, or answered later than the bound. Worker-
seconds are those of all processes of the model, which the management API lists twice a second.
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
# Time of the day, and share of the peak.
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


def peak_share(at: float) -> float:
    """Return the share of the peak at a share of the day."""
    (begin, low), (end, high) = next(pair for pair in itertools.pairwise(DAY) if at <= pair[1][0])
    return low + (high - low) * (at - begin) / (end - begin)


def arrivals(peak: float, seconds: float) -> list[float]:
    """Return random arrivals: those of the peak, thinned out."""
    chance, at, times = random.Random(24), 0.0, []
    while (at := at + chance.expovariate(peak)) < seconds:
        if chance.random() < peak_share(at / seconds):
            times.append(at)
    return times


def count_workers(server: servers.Server, over: threading.Event) -> WorkerCounts:
    total, highest, changes, before = 0.0, 0, 0, None
    while not over.wait(SAMPLE_INTERVAL_S):
        now = len(json.loads(server.call("/models/slow", management=True))[0]["workers"])
        total += SAMPLE_INTERVAL_S * now
        highest = max(highest, now)
        changes += before not in (None, now)
        before = now
    return WorkerCounts(total, highest, changes)


def measure_day(
    server: servers.Server, due: Sequence[float], seconds: float, bound_ms: float
) -> tuple[openloop.Result, WorkerCounts]:
    payloads = [Payload(b"{}", "application/octet-stream", (), at=at) for at in due]
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
    over = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        counting = pool.submit(count_workers, server, over)
        try:
            result = openloop.row(plan, measure(plan), bound_ms)
        finally:
            over.set()
        return result, counting.result()


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
    os.environ["BENCHMARK_BATCH_SECONDS"] = str(REQUEST_S)  # a setting of the handler
    seconds = 60 * options.minutes
    due = arrivals(options.peak * options.most / REQUEST_S, seconds)
    print(
        f"{machine.describe()}; {len(due):,} requests in {options.minutes:g} minutes,"
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
        for least, most in limits.values():
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            packed = servers.archive(
                directory,
                "slow",
                "--handler",
                HANDLER,
                config={"minWorkers": least, "maxWorkers": most},
            )
            running.append(stack.enter_context(servers.tsx(directory, packed)))
        for server in running:
            servers.first_answer(server, "/predictions/slow", b"{}")
        pool = stack.enter_context(ThreadPoolExecutor(len(running)))
        results = list(
            pool.map(lambda server: measure_day(server, due, seconds, options.bound_ms), running)
        )
    print(
        "| workers | worker-seconds | most | changes | misses | refused | p50 ms | p99 ms"
        f" |\n{'|---' * 8}|"
    )
    for name, (result, counted) in zip(limits, results, strict=True):
        good = result.goodput * result.seconds
        cells = (
            f"{name} | {counted.worker_seconds:,.0f} | {counted.most} | {counted.changes} |"
            f" {max(0.0, 1 - good / len(due)):.2%}"
        )
        print(
            f"| {cells} | {result.refused / len(due):.2%} | {result.p50:.1f} | {result.p99:.1f} |"
        )
        assert not result.errors, result.errors


if __name__ == "__main__":
    main()
