"""The number of torch's threads for a batch, chosen by measuring.

The module looks for the lowest number that is nearly as fast as the best one, up to the cores of
this worker. Small models are fastest with one thread, and large ones with all cores. The best
number is lower while other processes are busy. Therefore batches of each size are tried from time
to time with half and with twice as many threads, in turns with the current number. Trials may cost
a twentieth of the time. For models that torch.compile has compiled, the number is not changed,
since they would be compiled again.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from typing import Any, TypeAlias

WARM_UP_BATCHES = 3  # the first batches of a size, which are not compared
# Batches per turn with one number. The first one is not compared, since it may start threads.
BATCHES_PER_TURN = 4
MIN_TURNS, MAX_TURNS = 2, 4  # turns per number in a trial
CLEAR_RATIO = 1.5  # the ratio of times at which a trial ends early
# Twice the threads are used only if they reduce the time to this ratio. Otherwise other workers
# make better use of the cores.
GAIN_RATIO = 0.9
# The pause between trials doubles after each trial that changed nothing.
FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 4.0
PAUSE_FACTOR = 20  # the smallest ratio of a pause to the cost of the preceding trials

# A generator that is sent time.monotonic() and the seconds of each batch.
SearchSteps: TypeAlias = Generator[None, tuple[float, float], Any]


class ThreadTuning:
    """The tuning of torch's number of threads, which is set for each batch in its thread."""

    def __init__(self, cores: int, *, is_tuning: bool) -> None:
        """Begin with all cores.

        Args:
            cores: The number of cores.
            is_tuning: Whether `begin` and `end` are called for each batch.
        """
        self._cores = cores
        self._is_tuning = is_tuning
        self._torch: Any = sys.modules["torch"]
        self._threads = cores  # the number that torch uses
        self._size_classes: dict[int, _SizeClass] = {}
        self._size_class = _SizeClass(cores)

    def set_cores(self, cores: int) -> None:
        """Change the number of cores, from any thread.

        With tuning, the change applies from the next batch on; without it, at once.
        """
        self._cores = cores
        if not self._is_tuning:
            self._set(cores)

    def begin(self, requests: int) -> None:
        size_bits = requests.bit_length()
        size_class = self._size_classes.get(size_bits)
        if size_class is None:
            size_class = self._size_classes[size_bits] = _SizeClass(self._cores)
        elif size_class.cores != self._cores:
            size_class.set_cores(self._cores)
        self._size_class = size_class
        if size_class.threads != self._threads:
            self._set(size_class.threads)

    def end(self, now: float, seconds: float) -> None:
        """Record the seconds of the batch; `now` is time.monotonic()."""
        self._size_class.search.send((now, seconds))

    def _set(self, threads: int) -> None:
        if not _has_compiled_model():
            self._torch.set_num_threads(threads)
            self._threads = threads


class _SizeClass:
    """The search for the best number of threads for batches of similar sizes."""

    def __init__(self, cores: int) -> None:
        self.threads = self.cores = cores  # the number for the next batch
        self.set_cores(cores)

    def set_cores(self, cores: int) -> None:
        """Search again, from the best number, or from all cores if that was the best."""
        best = cores if self.threads == self.cores else self.threads
        levels = [cores]
        while levels[-1] > 1:
            levels.append(levels[-1] // 2)
        self.cores = cores
        self.search = self._search(
            levels, next(level for level, threads in enumerate(levels) if threads <= best)
        )
        next(self.search)

    def _search(self, levels: list[int], level: int) -> SearchSteps:
        pause = FIRST_PAUSE_S
        self.threads = levels[level]
        for _ in range(WARM_UP_BATCHES):
            yield
        while True:
            start, trial_cost = level, 0.0
            for direction in (1, -1):  # fewer threads, then more
                if level != start:
                    break
                while 0 <= level + direction < len(levels):
                    is_better, seconds = yield from self._trial(
                        levels[level], levels[level + direction]
                    )
                    trial_cost += seconds
                    if not is_better:
                        break
                    level += direction
            self.threads = levels[level]
            now, _ = yield
            pause = FIRST_PAUSE_S if level != start else min(MAX_PAUSE_S, 2 * pause)
            next_trial_at = now + max(pause, PAUSE_FACTOR * trial_cost)
            while now < next_trial_at:
                now, _ = yield

    def _trial(
        self, current: int, candidate: int
    ) -> Generator[None, tuple[float, float], tuple[bool, float]]:
        """Return whether the candidate is better, and how many seconds longer its batches took."""
        times: tuple[list[float], list[float]] = ([], [])
        for turn in range(MAX_TURNS):
            for threads, seconds_list in zip((current, candidate), times, strict=True):
                self.threads = threads
                for batch in range(BATCHES_PER_TURN):
                    _, seconds = yield
                    if batch:
                        seconds_list.append(seconds)
            current_mean, candidate_mean = map(_mean_without_longest, times)
            if turn + 1 >= MIN_TURNS and max(current_mean, candidate_mean) > CLEAR_RATIO * min(
                current_mean, candidate_mean
            ):
                break
        is_better = (
            candidate_mean <= GAIN_RATIO * current_mean
            if candidate > current
            else current_mean > GAIN_RATIO * candidate_mean
        )
        return is_better, max(0.0, sum(times[1]) - sum(times[0]))


def _mean_without_longest(times: list[float]) -> float:
    """Return the mean without the longest time, which may be an outlier.

    A median would also ignore delays by other processes, which must count.
    """
    return (sum(times) - max(times)) / (len(times) - 1)


def _has_compiled_model() -> bool:
    """Tell whether torch.compile has compiled anything in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters.get("frames"))


def make_tuning(cores: int, *, is_tuning: bool) -> ThreadTuning | None:
    """Return the tuning; None without torch, or if the handler has set a number itself."""
    torch = sys.modules.get("torch")
    return (
        ThreadTuning(cores, is_tuning=is_tuning)
        if torch is not None and torch.get_num_threads() == cores
        else None
    )
