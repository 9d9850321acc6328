"""Load on a server that is switched between two ways of working, in turns of a few milliseconds.

What else a machine does, and its host, changes from one moment to the next: of two rounds that
follow each other the second one may be a fifth slower for that alone; and two servers of the same
code differ by some percent from start to end, as their memory happens to lie. So it is one server,
under one load (`wrk`), and its processes are told by a signal which way to work. The shorter the
turns, the more of the noise is the same for both: eight turns of 15 ms tell as much as eight of 100
ms. A block is many of them, each way as often first as last, so that what grows or shrinks
meanwhile is the same for both; its ratio is that of sums, so that what is done only now and then
counts as much as it costs. How many requests were answered in a turn is told by the bytes that the
load has read: all answers are as long as each other. Linux only: it reads /proc.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
from numpy.typing import NDArray

from benchmarks import wrk

ORDER = (0, 1, 1, 0, 1, 0, 0, 1) * 4  # of a block's turns
SETTLE = 0.004  # seconds after a switch until what was under way is answered
WARM_UP = 1.0  # seconds
RESAMPLES = 2000


class Point(NamedTuple):
    """What was done so far."""

    at: float  # time.perf_counter()
    read: int  # bytes of answers
    front: float  # seconds of the processor
    worker: float


class Cost(NamedTuple):
    """Of one request, in one block; seconds."""

    time: float  # 1 / throughput
    front: float  # of the processor
    worker: float

    @property
    def processor(self) -> float:
        return self.front + self.worker


class Effect(NamedTuple):
    """How much more one takes than the other, in percent: the median, and between what it is with
    95 % confidence.
    """

    middle: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.middle:+.1f} % ({self.low:+.1f} to {self.high:+.1f})"

    def verdict(self, most: float) -> str:
        """Whether it is at most so many percent."""
        if self.high <= most:
            return f"under {most:g} %"
        return (
            f"over {most:g} %"
            if self.low > most
            else f"not decided: {most:g} % is within the interval"
        )


def effect(servers: Sequence[Sequence[float]]) -> Effect:
    """Of the ratio in each block of each server: the median.

    The interval is that of a bootstrap in two steps: as many servers are drawn, then as many blocks
    of each, and this again and again.
    """
    random = np.random.default_rng(0)
    medians = [
        np.median(
            np.concatenate([random.choice(servers[each], len(servers[each])) for each in drawn])
        )
        for drawn in _draws(random, len(servers))
    ]
    low, high = np.percentile(medians, (2.5, 97.5))
    middle = float(np.median(np.concatenate(servers)))
    return Effect(*(100 * (float(each) - 1) for each in (middle, low, high)))


def _draws(random: np.random.Generator, count: int) -> NDArray[np.int64]:
    return random.integers(0, count, (RESAMPLES, count))


class Switch:
    """The processes of a server that listen to both signals: the front end, its fork server and its
    workers.
    """

    def __init__(self, server: int) -> None:
        everyone = [
            server,
            *(child.pid for child in psutil.Process(server).children(recursive=True)),
        ]
        self._pids = [pid for pid in everyone if listens(pid)]

    def to(self, number: signal.Signals) -> None:
        for pid in self._pids:
            os.kill(pid, number)


def listens(pid: int) -> bool:
    """To SIGUSR1 and SIGUSR2, which would end it otherwise."""
    line = next(
        line
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("SigCgt:")
    )
    caught = int(line.split()[1], 16)
    return all(caught >> number - 1 & 1 for number in (signal.SIGUSR1, signal.SIGUSR2))


class Load:
    """`wrk` with one thread."""

    def __init__(self, url: str, connections: int, body: Path, server: int) -> None:
        command = [
            "wrk",
            "-t1",
            f"-c{connections}",
            "-d1h",
            "--timeout=60s",
            "--latency",
            "-s",
            str(wrk.SCRIPT),
            url,
        ]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=os.environ | {"BODY": str(body)}
        )
        self._pid = self._process.pid
        self._server = server
        self._others = [
            child.pid for child in psutil.Process(server).children(recursive=True)
        ]  # a worker, and two processes that idle

    def point(self) -> Point:
        return Point(
            time.perf_counter(),
            self._read(),
            _processor(self._server),
            sum(map(_processor, self._others)),
        )

    def end(self) -> float:
        """The bytes of an answer. Raises `wrk.NotAnswered`."""
        while (
            os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None
        ):  # what it has read can still be seen then
            os.kill(
                self._pid, signal.SIGINT
            )  # again, where it went to the thread that does not wait for it
            time.sleep(SETTLE)
        read = self._read()
        output, _ = self._process.communicate()
        return read / wrk.parse(output).requests

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _read(self) -> int:
        return int(Path(f"/proc/{self._pid}/io").read_text().split()[1])


def _processor(pid: int) -> float:
    """Seconds that all threads of a process have run, to the nanosecond: `cpu_times` counts
    hundredths of a second.
    """
    return 1e-9 * sum(
        int(thread.read_text().split()[0])
        for thread in Path(f"/proc/{pid}/task").glob("*/schedstat")
    )


def run(load: Load, switch: Switch, blocks: int, seconds: float) -> tuple[list[Cost], list[Cost]]:
    """What a request cost after SIGUSR1 and after SIGUSR2, block by block; each turn takes so many
    seconds. Raises `wrk.NotAnswered`.
    """
    time.sleep(WARM_UP)
    signals = (signal.SIGUSR1, signal.SIGUSR2)
    turns: tuple[list[list[tuple[Point, Point]]], list[list[tuple[Point, Point]]]] = ([], [])
    for _ in range(blocks):
        for kept in turns:
            kept.append([])
        for which in ORDER:
            switch.to(signals[which])
            time.sleep(SETTLE)
            before = load.point()
            time.sleep(seconds)
            turns[which][-1].append((before, load.point()))
    length = load.end()
    found = [[_cost(block, length) for block in kept] for kept in turns]
    return found[0], found[1]


def _cost(turns: Sequence[tuple[Point, Point]], length: float) -> Cost:
    seconds, read, front, worker = (
        sum(after[each] - before[each] for before, after in turns) for each in range(4)
    )
    requests = read / length
    return Cost(seconds / requests, front / requests, worker / requests)
