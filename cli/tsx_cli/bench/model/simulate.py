"""Simulates a model under load: the server's own batching function, with the measured times of batches and a number of workers."""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from tsx_runtime.core.scheduling.batching import assign
from tsx_runtime.core.scheduling.queue import NEVER, BatchLimits, RequestQueue
from tsx_runtime.core.slo.control import HeldBatches, SloControl
from tsx_runtime.shared.quantiles import nearest_rank

UNCOUNTED = 0.1  # of the requests, at the beginning: the queue starts empty, which it is not later
HALF = 0.002  # seconds of idleness after which a worker is half as slow to begin as it ever is: measured, caches and cores cool down alike
PHASE = 2.0  # seconds for which a machine is as quick as it is, where it is now quicker and now slower
NOISES = 4096  # drawn in advance, since drawing one costs as much as all else of a batch


class SimulationResult(NamedTuple):
    """The result of a simulation. Latencies are of answered requests; `utilisation` is the workers' share of the time at work."""

    throughput: float  # answers per second
    utilisation: float
    mean_ms: float
    p50_ms: float
    p90_ms: float
    p95_ms: float
    p99_ms: float
    p999_ms: float
    max_ms: float
    batch_sizes: dict[int, int]  # batches by their size
    answered: int
    refused: int  # found the queue full
    seconds: float
    batch_ms: float  # that the batch of a request took, in the mean


class _Request:
    """A job, as far as batching looks at one."""

    __slots__ = ("arrived",)
    body = meta = b""
    deadline = None
    priority = 0
    gone = False

    def __init__(self, arrived: float) -> None:
        self.arrived = arrived


class _Worker:
    __slots__ = ("batches", "began", "ended", "held", "late")
    prefetch = suspected = False

    def __init__(self) -> None:
        self.batches = 0
        self.began = 0.0  # when its first batch did
        self.ended = -1.0  # when its last batch did
        self.late = 0.0  # seconds that the batch it runs was later for, on its way to a worker that idled
        self.held: deque[list[Any]] = deque()


def constant(rate: float, count: int) -> list[float]:
    """Moments in seconds, evenly apart."""
    return [number / rate for number in range(count)]


def poisson(rate: float, count: int, seed: int = 0) -> list[float]:
    chance, now, moments = random.Random(seed), 0.0, []
    for _ in range(count):
        now += chance.expovariate(rate)
        moments.append(now)
    return moments


def recorded(moments: Iterable[float], rate: float | None = None) -> list[float]:
    """Those of a recording from 0 on; where a rate is given, so much closer or further apart that they come at it in the mean."""
    ordered = sorted(moments)
    if not ordered:
        return []
    span = ordered[-1] - ordered[0]
    factor = (len(ordered) - 1) / (rate * span) if rate and span > 1e-9 else 1.0
    return [(moment - ordered[0]) * factor for moment in ordered]


def simulate(
    times: Sequence[float],
    arrivals: Sequence[float],
    *,
    workers: int = 1,
    connections: int = 0,
    slow: Sequence[float] = (),
    spread: float = 0.0,
    extra_ms: Sequence[float] = (),
    drift: float = 0.0,
    cold_ms: float = 0.0,
    wake_ms: float = 0.0,
    overhead_ms: float = 0.0,
    limits: BatchLimits | None = None,
    queue_size: int | None = None,
    control: SloControl | None = None,
    uncounted: float = UNCOUNTED,
    seed: int = 0,
) -> SimulationResult:
    """`times[n - 1]` is how long a batch of n takes one worker, in milliseconds, and `slow[k]` how many times that beside k - 1 others.

    Requests come at `arrivals` (seconds); with `connections` the loop is closed instead: as many requests as there are arrivals, each sent
    by a connection `overhead_ms` after its last answer. A batch takes one of `extra_ms` more than its median, drawn by chance: what holds
    up a batch (another process, a page fault) takes no longer where the batch is large. Without any its time is lognormal, and `spread` its
    coefficient of variation. For seconds at a time all batches take longer or less: `drift` is
    the standard deviation of the logarithm of that. A worker that was idle for long takes `cold_ms` longer, and the way to it and back
    `wake_ms`. With a latency target its `control` decides on batches and admission. The share `uncounted` of the first answers is left out
    of the latencies.
    """
    noises = [1.0] if extra_ms else _noises(spread, seed)
    run = _Run(times, workers, slow, noises, (cold_ms, wake_ms), limits or BatchLimits(max_items=len(times)), queue_size)
    if extra_ms:
        run.extras = _drawn(seed, lambda chance: chance.choice(extra_ms) / 1000)
    run.control = control
    if drift > 0:
        run.phases = _drawn(seed, lambda chance: chance.lognormvariate(-drift * drift / 2, drift))
    if connections:
        run.closed(connections, len(arrivals), overhead_ms / 1000)
    else:
        run.open(arrivals)
    return run.result(overhead_ms, uncounted)


def _noises(spread: float, seed: int) -> list[float]:
    """Factors whose median is 1, as a curve's times are medians."""
    sigma = math.sqrt(math.log1p(spread * spread))
    return _drawn(seed, lambda chance: chance.lognormvariate(0.0, sigma)) if spread > 0 else [1.0]


def _drawn(seed: int, draw: Callable[[random.Random], float]) -> list[float]:
    chance = random.Random(seed)
    return [draw(chance) for _ in range(NOISES)]


class _Run:
    """One simulation: its clock, its queue, its workers, and what was answered."""

    def __init__(
        self,
        times: Sequence[float],
        workers: int,
        slow: Sequence[float],
        noises: list[float],
        idle_ms: tuple[float, float],
        limits: BatchLimits,
        queue_size: int | None,
    ) -> None:
        self.cold, self.wake_up = (each / 1000 for each in idle_ms)
        self.times = [time / 1000 for time in times]
        self.slow = list(slow) or [1.0] * (workers + 1)
        self.noises = noises
        self.extras = [0.0]
        self.phases = [1.0]
        self.limits = limits
        self.control: SloControl | None = None
        self.queue_size = math.inf if queue_size is None else queue_size
        self.queue = RequestQueue()
        self.workers = [_Worker() for _ in range(workers)]
        self.alone = workers == 1
        self.running: list[tuple[float, int, _Worker]] = []  # (its end, a number, whose) of each batch that runs
        self.started = 0  # batches
        self.work = 0.0  # seconds
        self.held = 0.0  # seconds, of each request in its batch
        self.late = 0.0  # of the requests that were answered last
        self.now = 0.0
        self.wake = NEVER
        self.refused = 0
        self.latencies: list[float] = []  # seconds, in the order of the answers
        self.sizes: Counter[int] = Counter()

    def open(self, arrivals: Sequence[float]) -> None:
        running, queue = self.running, self.queue
        for arrival in arrivals:
            while (running and running[0][0] <= arrival) or self.wake <= arrival:
                self.step()
            self.now = arrival
            if not self.admits():
                self.refused += 1
                continue
            request: Any = _Request(arrival)
            queue.put(request, 0)
            # Where every worker is at work, only a full batch may leave (see `assign`): nothing is to be asked.
            if self.control or len(running) < len(self.workers) or (self.alone and queue.fills(self.limits)):
                self.flush()
        while running or self.wake < NEVER:
            self.step()

    def admits(self) -> bool:
        if self.control is None:
            return len(self.queue.jobs) < self.queue_size
        self.control.offered()
        return self.control.admits([request.arrived for request in self.queue.jobs], self.held_batches(), self.now)

    def held_batches(self) -> Iterator[HeldBatches]:
        for worker in self.workers:
            yield HeldBatches(worker.began, [len(batch) for batch in worker.held])

    def closed(self, connections: int, count: int, think: float) -> None:
        due = [think * number / connections for number in range(min(connections, count))]  # a heap, as it is in order
        sent = len(due)
        while due or self.running or self.wake < NEVER:
            if due and due[0] <= min(self.running[0][0] if self.running else NEVER, self.wake):
                self.now = heapq.heappop(due)
                request: Any = _Request(self.now)
                self.queue.put(request, 0)
                self.flush()
                continue
            for _ in self.step():
                if sent < count:
                    heapq.heappush(due, self.now + think + self.late)
                    sent += 1

    def step(self) -> list[_Request]:
        """The next that happens by itself: a batch ends, or the wait to fill a batch is over. Returns the answered requests."""
        if not self.running or self.wake < self.running[0][0]:
            self.now, self.wake = self.wake, NEVER
            self.flush()
            return []
        self.now, _, worker = heapq.heappop(self.running)
        answered: list[_Request] = worker.held.popleft()
        worker.batches -= 1
        worker.ended = self.now
        self.late = worker.late
        over = self.now + self.late
        self.latencies += [over - request.arrived for request in answered]
        if self.control:
            missed = sum(self.now - request.arrived > self.control.target.seconds for request in answered)
            self.control.learn(len(answered), self.now - worker.began, self.now, len(self.workers), missed)
        if worker.held:
            self.begin(worker)
        if self.queue.jobs:
            self.flush()
        return answered

    def flush(self) -> None:
        limits = self.limits
        if self.control and self.queue.jobs:
            ends, waiting = [self.control.end(each, self.now) for each in self.held_batches()], [job.arrived for job in self.queue.jobs]
            limits = limits._replace(max_items=self.control.batch_size(waiting, min(ends), limits.max_items))
        todo = assign(self.queue, self.workers, self.now, limits)
        self.wake = todo.wake
        for worker, jobs in todo.batches:
            if self.control:
                self.control.sent(len(jobs), cut=False)
            worker.held.append(jobs)
            worker.batches += 1
            if worker.batches == 1:
                self.begin(worker)

    def begin(self, worker: _Worker) -> None:
        size, worker.began = len(worker.held[0]), self.now
        self.started += 1
        idle = self.now - worker.ended
        cooled = idle / (idle + HALF)
        worker.late = self.wake_up * cooled
        took = self.times[size - 1] + self.cold * cooled
        took *= self.slow[len(self.running) + 1] * self.noises[self.started % len(self.noises)]
        took *= self.phases[int(self.now / PHASE) % len(self.phases)]
        took = max(took / 2, took + self.extras[self.started % len(self.extras)])
        self.work += took
        self.held += took * size
        self.sizes[size] += 1
        heapq.heappush(self.running, (self.now + took, self.started, worker))

    def result(self, overhead_ms: float, uncounted: float = UNCOUNTED) -> SimulationResult:
        answered = len(self.latencies)
        counted = sorted(self.latencies[int(answered * uncounted) :])
        mean = sum(counted) / (len(counted) or 1)
        figures = (mean, *(nearest_rank(counted, share) if counted else 0.0 for share in (0.5, 0.9, 0.95, 0.99, 0.999, 1.0)))
        mean, p50, p90, p95, p99, p999, most = (1000 * figure + overhead_ms for figure in figures)
        seconds = self.now or 1e-9
        use = self.work / seconds / len(self.workers)
        sizes = dict(sorted(self.sizes.items()))
        held = 1000 * self.held / (answered or 1)
        return SimulationResult(answered / seconds, use, mean, p50, p90, p95, p99, p999, most, sizes, answered, self.refused, seconds, held)
