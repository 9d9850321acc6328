"""What workers that follow the load save in a day, and what they miss: beside one worker and beside
as many as the peak needs.

    python benchmarks/elastic_day.py [--minutes 10] [--most 4] [--peak 0.75] [--bound-ms 200]

A day's requests in some minutes: a quiet night, a morning, a plateau, a peak in the evening. Three
servers get the same arrivals at the same time; they differ in `minWorkers` and `maxWorkers`. The
handler waits 20 ms for a device, so that workers are what a request may lack, and not cores. A
request that is refused, or answered later than the bound, is a miss. Worker-seconds are those of
all processes of the model, as the management API lists them twice a second.
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
SECONDS = 0.020  # that a request takes
DAY = (
    (0.0, 0.10),
    (0.25, 0.10),
    (0.40, 0.70),
    (0.60, 0.60),
    (0.72, 1.00),
    (0.80, 0.95),
    (0.90, 0.20),
    (1.0, 0.10),
)  # time, share of the peak
LOOK = 0.5  # seconds between two counts of workers


class Counted(NamedTuple):
    worker_seconds: float
    most: int
    changes: int


def share(at: float) -> float:
    """Of the peak, at a share of the day."""
    (begin, low), (end, high) = next(pair for pair in itertools.pairwise(DAY) if at <= pair[1][0])
    return low + (high - low) * (at - begin) / (end - begin)


def arrivals(peak: float, seconds: float) -> list[float]:
    """By chance: those of the peak, thinned out."""
    chance, at, found = random.Random(24), 0.0, []
    while (at := at + chance.expovariate(peak)) < seconds:
        if chance.random() < share(at / seconds):
            found.append(at)
    return found


def workers(server: servers.Server, over: threading.Event) -> Counted:
    total, most, changes, before = 0.0, 0, 0, None
    while not over.wait(LOOK):
        now = len(json.loads(server.call("/models/slow", management=True))[0]["workers"])
        total, most, changes = (
            total + LOOK * now,
            max(most, now),
            changes + (before not in (None, now)),
        )
        before = now
    return Counted(total, most, changes)


def measured(
    server: servers.Server, due: Sequence[float], seconds: float, bound_ms: float
) -> tuple[openloop.Result, Counted]:
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
        counting = pool.submit(workers, server, over)
        try:
            found = openloop.row(plan, measure(plan), bound_ms)
        finally:
            over.set()
        return found, counting.result()


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
    os.environ["BENCHMARK_BATCH_SECONDS"] = str(SECONDS)  # for the handler
    seconds = 60 * options.minutes
    due = arrivals(options.peak * options.most / SECONDS, seconds)
    print(
        f"{machine.describe()}; {len(due):,} requests in {options.minutes:g} minutes,"
        f" {SECONDS * 1000:.0f} ms each\n",
        flush=True,
    )
    limits = {
        "fixed 1": (1, 1),
        f"1 to {options.most}": (1, options.most),
        f"fixed {options.most}": (options.most, options.most),
    }
    with ExitStack() as held:
        running = []
        for least, most in limits.values():
            directory = Path(held.enter_context(tempfile.TemporaryDirectory()))
            packed = servers.archive(
                directory,
                "slow",
                "--handler",
                HANDLER,
                config={"minWorkers": least, "maxWorkers": most},
            )
            running.append(held.enter_context(servers.tsx(directory, packed)))
        for server in running:
            servers.first_answer(server, "/predictions/slow", b"{}")
        pool = held.enter_context(ThreadPoolExecutor(len(running)))
        results = list(
            pool.map(lambda server: measured(server, due, seconds, options.bound_ms), running)
        )
    print(
        "| workers | worker-seconds | most | changes | misses | refused | p50 ms | p99 ms"
        f" |\n{'|---' * 8}|"
    )
    for name, (found, counted) in zip(limits, results, strict=True):
        kept = found.goodput * found.seconds
        cells = (
            f"{name} | {counted.worker_seconds:,.0f} | {counted.most} | {counted.changes} |"
            f" {max(0.0, 1 - kept / len(due)):.2%}"
        )
        print(f"| {cells} | {found.refused / len(due):.2%} | {found.p50:.1f} | {found.p99:.1f} |")
        assert not found.errors, found.errors


if __name__ == "__main__":
    main()
