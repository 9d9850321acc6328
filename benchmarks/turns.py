"""Load that is held still when it is not its turn, so that two servers can be compared in turns of a fraction of a second.

What else a machine does, and its host, changes from second to second: of two rounds that follow each other the second one may be a fifth
slower for that alone. So both loads (`wrk`) run all the while, each against a server of its own, and one of them is always stopped
(SIGSTOP). A block is four turns, one-other-other-one and then the other way round, so that what grows or shrinks meanwhile is the same for
both. How many requests were answered in a turn is told by the bytes that the load has read: all answers are as long as each other.
Linux only: it reads /proc.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
from numpy.typing import NDArray

from benchmarks import wrk

QUIET = 0.01  # seconds after a turn until what was under way is answered
WARM_UP = 1.0  # seconds for each side
RESAMPLES = 2000


class Turn(NamedTuple):
    seconds: float
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
    """How much more one takes than the other, in percent: the median, and between what it is with 95 % confidence."""

    middle: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.middle:+.1f} % ({self.low:+.1f} to {self.high:+.1f})"

    def verdict(self, most: float) -> str:
        """Whether it is at most so many percent."""
        if self.high <= most:
            return f"under {most:g} %"
        return f"over {most:g} %" if self.low > most else f"not decided: {most:g} % is within the interval"


def effect(pairs: Sequence[Sequence[float]]) -> Effect:
    """Of the ratio in each block of each pair of servers: the median.

    Servers of the same code differ by some percent, each from start to end, as their memory happens to lie. So the interval is that of a
    bootstrap in two steps: as many pairs are drawn, then as many blocks of each, and this again and again.
    """
    random = np.random.default_rng(0)
    medians = [
        np.median(np.concatenate([random.choice(pairs[each], len(pairs[each])) for each in drawn])) for drawn in _draws(random, len(pairs))
    ]
    low, high = np.percentile(medians, (2.5, 97.5))
    middle = float(np.median(np.concatenate(pairs)))
    return Effect(*(100 * (float(each) - 1) for each in (middle, low, high)))


def _draws(random: np.random.Generator, count: int) -> NDArray[np.int64]:
    return random.integers(0, count, (RESAMPLES, count))


class Load:
    """`wrk` with one thread against one server, stopped but for its turns."""

    def __init__(self, url: str, connections: int, body: Path, server: int) -> None:
        command = ["wrk", "-t1", f"-c{connections}", "-d1h", "--timeout=60s", "--latency", "-s", str(wrk.SCRIPT), url]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"BODY": str(body)})
        self._pid = self._process.pid
        self._server = server
        self._others = [child.pid for child in psutil.Process(server).children(recursive=True)]  # a worker, and two processes that idle
        self._stop()

    def turn(self, seconds: float) -> Turn:
        before, spent, start = self._read(), self._spent(), time.perf_counter()
        self._process.send_signal(signal.SIGCONT)
        time.sleep(seconds)
        self._stop()
        took = time.perf_counter() - start
        read = self._read() - before
        time.sleep(QUIET)
        front, worker = (now - then for now, then in zip(self._spent(), spent, strict=True))
        return Turn(took, read, front, worker)

    def end(self) -> float:
        """The bytes of an answer. Raises `wrk.NotAnswered`."""
        self._process.send_signal(signal.SIGCONT)
        while os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:  # what it has read can still be seen then
            self._process.send_signal(signal.SIGINT)  # again, where it went to the thread that does not wait for it
            time.sleep(QUIET)
        read = self._read()
        output, _ = self._process.communicate()
        return read / wrk.parse(output).requests

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)
        os.waitpid(self._pid, os.WUNTRACED)

    def _read(self) -> int:
        return int(Path(f"/proc/{self._pid}/io").read_text().split()[1])

    def _spent(self) -> tuple[float, float]:
        return _processor(self._server), sum(map(_processor, self._others))


def _processor(pid: int) -> float:
    """Seconds that all threads of a process have run, to the nanosecond: `cpu_times` counts hundredths of a second."""
    return 1e-9 * sum(int(thread.read_text().split()[0]) for thread in Path(f"/proc/{pid}/task").glob("*/schedstat"))


def run(one: Load, other: Load, blocks: int, seconds: float) -> tuple[list[Cost], list[Cost]]:
    """What a request cost on each side, block by block; each turn takes so many seconds. Raises `wrk.NotAnswered`."""
    both = (one, other)
    for load in both:
        load.turn(WARM_UP)
    turns: tuple[list[list[Turn]], list[list[Turn]]] = ([], [])
    for number in range(blocks):
        for kept in turns:
            kept.append([])
        for which in (0, 1, 1, 0) if number % 2 == 0 else (1, 0, 0, 1):
            turns[which][-1].append(both[which].turn(seconds))
    lengths = [load.end() for load in both]
    found = [[_cost(block, length) for block in kept] for kept, length in zip(turns, lengths, strict=True)]
    return found[0], found[1]


def _cost(turns: Sequence[Turn], length: float) -> Cost:
    seconds, read, front, worker = (sum(each) for each in zip(*turns, strict=True))
    requests = read / length
    return Cost(seconds / requests, front / requests, worker / requests)


@contextmanager
def loads(urls: Sequence[str], connections: int, body: Path, servers: Sequence[int]) -> Iterator[list[Load]]:
    made: list[Load] = []
    try:
        for url, server in zip(urls, servers, strict=True):
            made.append(Load(url, connections, body, server))
        yield made
    finally:
        for load in made:
            load.kill()
