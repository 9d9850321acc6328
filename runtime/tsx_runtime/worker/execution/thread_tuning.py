"""The number of torch's threads for a batch, chosen by measuring.

It is the lowest number that is nearly as fast as any, up to the cores of this worker. Small models
are fastest with one thread, large ones with all, and beside other busy processes the best number is
lower. From time to time, batches of each size are therefore tried with half and with twice as many
threads, in turns with the present number. A trial may cost a twentieth of the time. Models that
torch.compile has compiled keep their number: another one would compile them again.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from typing import Any, TypeAlias

WARM_UP_BATCHES = 3  # batches of a size that are not compared
# Batches in a row with one number. The first one is not compared, since it may start threads.
RUN_BATCHES = 4
MIN_TURNS, MAX_TURNS = 2, 4  # turns of both numbers in a trial; the least if the ratio is clear
CLEAR_RATIO = 1.5
# The largest time, as a ratio, for twice the threads. Without such a gain, others have more use for
# the cores.
GAIN_RATIO = 0.9
# Pauses between trials double after those that changed nothing.
FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 4.0
PAUSE_FACTOR = 20  # the least ratio of a pause to the cost of the trials before it

# It gets time.monotonic() and the seconds of each batch.
Search: TypeAlias = Generator[None, tuple[float, float], Any]


class ThreadTuning:
    """The setter of torch's threads for each batch, in the thread that runs it."""

    def __init__(self, share: int, *, tunes: bool) -> None:
        """Begin with all cores.

        Args:
            share: The number of cores.
            tunes: Whether each batch is between `begin` and `end`.
        """
        self._share = share
        self._tunes = tunes
        self._torch: Any = sys.modules["torch"]
        self._threads = share  # the number that is set
        self._sizes: dict[int, _Size] = {}
        self._batch = _Size(share)

    def reshare(self, share: int) -> None:
        """Change the number of cores, from any thread.

        With tuning it holds from the next batch on, and without it at once.
        """
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
        """Note the seconds of the batch; `now` is time.monotonic()."""
        self._batch.search.send((now, seconds))

    def _set(self, threads: int) -> None:
        if not _has_compiled():
            self._torch.set_num_threads(threads)
            self._threads = threads


class _Size:
    """The search for the number of threads for batches of about one size."""

    def __init__(self, share: int) -> None:
        self.threads = self.share = share  # the number for the next batch
        self.reshare(share)

    def reshare(self, share: int) -> None:
        """Start from the best number, or from the new share if the old one was the best."""
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
        pause = FIRST_PAUSE_S
        self.threads = levels[at]
        for _ in range(WARM_UP_BATCHES):
            yield
        while True:
            start, cost = at, 0.0
            for step in (1, -1):  # fewer threads, then more
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
            pause = FIRST_PAUSE_S if at != start else min(MAX_PAUSE_S, 2 * pause)
            due = now + max(pause, PAUSE_FACTOR * cost)
            while now < due:
                now, _ = yield

    def _trial(
        self, present: int, rival: int
    ) -> Generator[None, tuple[float, float], tuple[bool, float]]:
        """Tell whether the rival is better, and how many seconds longer its batches took."""
        times: tuple[list[float], list[float]] = ([], [])
        for turn in range(MAX_TURNS):
            for threads, seconds_list in zip((present, rival), times, strict=True):
                self.threads = threads
                for batch in range(RUN_BATCHES):
                    _, seconds = yield
                    if batch:
                        seconds_list.append(seconds)
            present_mean, rival_mean = map(_mean, times)
            if turn + 1 >= MIN_TURNS and max(present_mean, rival_mean) > CLEAR_RATIO * min(
                present_mean, rival_mean
            ):
                break
        is_better = (
            rival_mean <= GAIN_RATIO * present_mean
            if rival > present
            else present_mean > GAIN_RATIO * rival_mean
        )
        return is_better, max(0.0, sum(times[1]) - sum(times[0]))


def _mean(times: list[float]) -> float:
    """Return the mean without the longest time, which may have any cause.

    It is no median, since what a busy machine does to some of the batches counts.
    """
    return (sum(times) - max(times)) / (len(times) - 1)


def _has_compiled() -> bool:
    """Tell whether torch.compile has compiled anything in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters.get("frames"))


def tuning_of(share: int, *, tunes: bool) -> ThreadTuning | None:
    """Return the tuning; None without torch, or if the handler has chosen its own number."""
    torch = sys.modules.get("torch")
    return (
        ThreadTuning(share, tunes=tunes)
        if torch is not None and torch.get_num_threads() == share
        else None
    )
