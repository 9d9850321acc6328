"""Chooses how many threads torch uses for a batch, by measuring: as few as are nearly as fast, of
the cores that are this worker's.

Small models are fastest with one thread, large ones with all, and beside other busy processes the
best number is lower. So batches of each size are tried with half and with twice as many threads, in
turns with the present number, from time to time; a trial may cost a twentieth of the time. Models
that torch.compile has compiled keep their number: another one would compile them again.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from typing import Any, TypeAlias

WARM_UP = 3  # batches of a size that are not compared
# batches in a row with one number; the first of them, which may have to start threads, is not
# compared
RUN = 4
LEAST, MOST = 2, 4  # turns of both numbers in a trial: the least where the difference is clear
CLEAR = 1.5
# the part of the time that twice the threads may take at most; else the cores are of more use to
# others
GAIN = 0.9
FIRST_PAUSE, LONGEST_PAUSE = (
    1.0,
    4.0,
)  # seconds between trials, doubled after those that changed nothing
COST = 20  # a pause is at least so many times as long as what the trials before it cost

Search: TypeAlias = Generator[
    None, tuple[float, float], Any
]  # gets time.monotonic() and the seconds of each batch


class ThreadTuning:
    """Sets torch's threads for each batch, in the thread that runs it."""

    def __init__(self, share: int, *, tunes: bool) -> None:
        """`share`: cores. `tunes`: whether each batch is between `begin` and `end`."""
        self._share = share
        self._tunes = tunes
        self._torch: Any = sys.modules["torch"]
        self._threads = share  # that are set
        self._sizes: dict[int, _Size] = {}
        self._batch = _Size(share)

    def reshare(self, share: int) -> None:
        """Where this tunes, for the next batch, and from any thread; else at once."""
        self._share = share
        if not self._tunes:
            self._set(share)

    def begin(self, requests: int) -> None:
        size = requests.bit_length()
        batch = self._sizes.get(size)
        if batch is None:
            batch = self._sizes[size] = _Size(self._share)
        elif batch.share != self._share:
            batch.reshare(self._share)
        self._batch = batch
        if batch.threads != self._threads:
            self._set(batch.threads)

    def end(self, now: float, seconds: float) -> None:
        """`now`: time.monotonic()."""
        self._batch.search.send((now, seconds))

    def _set(self, threads: int) -> None:
        if not _has_compiled():
            self._torch.set_num_threads(threads)
            self._threads = threads


class _Size:
    """The search for the number of threads for batches of about one size."""

    def __init__(self, share: int) -> None:
        self.threads = self.share = share  # for the next batch
        self.reshare(share)

    def reshare(self, share: int) -> None:
        """Start from what was best; from all of the new share where that was all of the old one."""
        best = share if self.threads == self.share else self.threads
        levels = [share]
        while levels[-1] > 1:
            levels.append(levels[-1] // 2)
        self.share = share
        self.search = self._search(
            levels, next(at for at, threads in enumerate(levels) if threads <= best)
        )
        next(self.search)

    def _search(self, levels: list[int], at: int) -> Search:
        pause = FIRST_PAUSE
        self.threads = levels[at]
        for _ in range(WARM_UP):
            yield
        while True:
            start, cost = at, 0.0
            for step in (1, -1):  # fewer, then more
                if at != start:
                    break
                while 0 <= at + step < len(levels):
                    is_better, seconds = yield from self._trial(levels[at], levels[at + step])
                    cost += seconds
                    if not is_better:
                        break
                    at += step
            self.threads = levels[at]
            now, _ = yield
            pause = FIRST_PAUSE if at != start else min(LONGEST_PAUSE, 2 * pause)
            due = now + max(pause, COST * cost)
            while now < due:
                now, _ = yield

    def _trial(
        self, mine: int, rival: int
    ) -> Generator[None, tuple[float, float], tuple[bool, float]]:
        """Whether the rival is better, and how many seconds longer its batches took."""
        times: tuple[list[float], list[float]] = ([], [])
        for turn in range(MOST):
            for threads, each in zip((mine, rival), times, strict=True):
                self.threads = threads
                for batch in range(RUN):
                    _, seconds = yield
                    if batch:
                        each.append(seconds)
            own, other = map(_mean, times)
            if turn + 1 >= LEAST and max(own, other) > CLEAR * min(own, other):
                break
        is_better = other <= GAIN * own if rival > mine else own > GAIN * other
        return is_better, max(0.0, sum(times[1]) - sum(times[0]))


def _mean(times: list[float]) -> float:
    """Without the longest, which may be anything's; but no median, since what a busy machine does
    to some of the batches counts.
    """
    return (sum(times) - max(times)) / (len(times) - 1)


def _has_compiled() -> bool:
    """Whether torch.compile has compiled anything in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters.get("frames"))


def tuning_of(share: int, *, tunes: bool) -> ThreadTuning | None:
    """None where the worker has no torch, or where its handler has chosen a number of its own."""
    torch = sys.modules.get("torch")
    return (
        ThreadTuning(share, tunes=tunes)
        if torch is not None and torch.get_num_threads() == share
        else None
    )
