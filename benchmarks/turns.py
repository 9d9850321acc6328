"""Load on a server that switches between two modes in turns of a few milliseconds.

The speed of a machine changes from moment to moment: the second of two equal rounds may be a fifth
slower. Two servers with the same code differ by some percent, because of their memory layout.
Therefore one server runs under one load (`wrk`), and a signal switches the mode of its processes.
Short turns share most of the noise: eight turns of 15 ms are as precise as eight of 100 ms. A block
has many turns, in which each mode is equally often first and last, so that growth affects both. The
ratio of a block is a ratio of sums, which includes rare work with its full cost. All responses have
the same length, so the bytes that `wrk` has read give the number of requests. The module needs
Linux, because it reads /proc.
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

ORDER = (0, 1, 1, 0, 1, 0, 0, 1) * 4  # the modes of a block's turns
SETTLE_S = 0.004  # time after a switch until running requests have ended
WARM_UP_S = 1.0
RESAMPLES = 2000


class Point(NamedTuple):
    """The counters at one moment."""

    at: float  # time.perf_counter()
    read: int  # bytes of responses read so far
    front: float  # processor seconds
    worker: float


class Cost(NamedTuple):
    """The seconds of one request, in one block."""

    time: float  # 1 / throughput
    front: float  # processor seconds
    worker: float

    @property
    def processor(self) -> float:
        return self.front + self.worker


class Effect(NamedTuple):
    """The extra cost of a mode in percent: the median and its 95 % interval."""

    middle: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.middle:+.1f} % ({self.low:+.1f} to {self.high:+.1f})"

    def verdict(self, max_percent: float) -> str:
        """Return, in words, whether the effect is at most `max_percent`."""
        if self.high <= max_percent:
            return f"under {max_percent:g} %"
        return (
            f"over {max_percent:g} %"
            if self.low > max_percent
            else f"not decided: {max_percent:g} % is within the interval"
        )


def effect(servers: Sequence[Sequence[float]]) -> Effect:
    """Return the effect from the ratio in each block of each server.

    The interval comes from a bootstrap in two steps: servers are drawn with replacement, then
    blocks of each server.
    """
    generator = np.random.default_rng(0)
    medians = [
        np.median(
            np.concatenate(
                [generator.choice(servers[index], len(servers[index])) for index in drawn_indexes]
            )
        )
        for drawn_indexes in _draws(generator, len(servers))
    ]
    low, high = np.percentile(medians, (2.5, 97.5))
    middle = float(np.median(np.concatenate(servers)))
    return Effect(*(100 * (float(ratio) - 1) for ratio in (middle, low, high)))


def _draws(generator: np.random.Generator, count: int) -> NDArray[np.int64]:
    return generator.integers(0, count, (RESAMPLES, count))


class Switch:
    """The processes of a server that handle both signals: front end, fork server and workers."""

    def __init__(self, server: int) -> None:
        pids = [
            server,
            *(child.pid for child in psutil.Process(server).children(recursive=True)),
        ]
        self._pids = [pid for pid in pids if is_listening(pid)]

    def to(self, number: signal.Signals) -> None:
        for pid in self._pids:
            os.kill(pid, number)


def is_listening(pid: int) -> bool:
    """Tell whether a process handles SIGUSR1 and SIGUSR2, which would otherwise end it."""
    line = next(
        line
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("SigCgt:")
    )
    handled_signals = int(line.split()[1], 16)
    return all(handled_signals >> number - 1 & 1 for number in (signal.SIGUSR1, signal.SIGUSR2))


class Load:
    """A `wrk` process with one thread."""

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
        # the worker, and two idle processes
        self._others = [child.pid for child in psutil.Process(server).children(recursive=True)]

    def point(self) -> Point:
        return Point(
            time.perf_counter(),
            self._read(),
            _processor(self._server),
            sum(map(_processor, self._others)),
        )

    def end(self) -> float:
        """End the load, and return the bytes of a response.

        Raises:
            wrk.NotAnswered: A request failed.
        """
        # /proc still shows the bytes that an ended process has read, until it is waited for.
        while os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
            # The signal is repeated, since it may reach a thread that ignores it.
            os.kill(self._pid, signal.SIGINT)
            time.sleep(SETTLE_S)
        read = self._read()
        output, _ = self._process.communicate()
        return read / wrk.parse(output).requests

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _read(self) -> int:
        return int(Path(f"/proc/{self._pid}/io").read_text().split()[1])


def _processor(pid: int) -> float:
    """Return the processor seconds of all threads of a process, to the nanosecond.

    `cpu_times` counts hundredths of a second.
    """
    return 1e-9 * sum(
        int(thread.read_text().split()[0])
        for thread in Path(f"/proc/{pid}/task").glob("*/schedstat")
    )


def run(load: Load, switch: Switch, blocks: int, seconds: float) -> tuple[list[Cost], list[Cost]]:
    """Return the costs of a request after SIGUSR1 and after SIGUSR2, block by block.

    Each turn takes `seconds`.

    Raises:
        wrk.NotAnswered: A request failed.
    """
    time.sleep(WARM_UP_S)
    signals = (signal.SIGUSR1, signal.SIGUSR2)
    turns: tuple[list[list[tuple[Point, Point]]], list[list[tuple[Point, Point]]]] = ([], [])
    for _ in range(blocks):
        for blocks_of_mode in turns:
            blocks_of_mode.append([])
        for mode in ORDER:
            switch.to(signals[mode])
            time.sleep(SETTLE_S)
            start_point = load.point()
            time.sleep(seconds)
            turns[mode][-1].append((start_point, load.point()))
    length = load.end()
    costs = [[_cost(block, length) for block in blocks_of_mode] for blocks_of_mode in turns]
    return costs[0], costs[1]


def _cost(turns: Sequence[tuple[Point, Point]], length: float) -> Cost:
    seconds, read, front, worker = (
        sum(end_point[index] - start_point[index] for start_point, end_point in turns)
        for index in range(4)
    )
    requests = read / length
    return Cost(seconds / requests, front / requests, worker / requests)
