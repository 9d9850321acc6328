"""Batches that keep a latency target, and requests that are refused on arrival, as pure functions.

A request is accepted if its batch can start early enough: a batch of the planned size then ends
within the target. If requests wait less than they may, their batch is not made too small to be
worth its time. Sizes are numbers of requests, or sums of their weights (see `RequestWeights`).
Without `weights`, each request weighs 1.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from itertools import islice, repeat
from typing import NamedTuple

from tsx_runtime.core.models.latency_curve import LatencyCurve

UNKNOWN_FRACTION = 0.25  # part of the target that a batch is assumed to take at first


class Aim(NamedTuple):
    """The plan for one target at the current load."""

    size: int  # size of the batches that are planned
    wait: float  # longest seconds from an arrival to the start of its batch; at least 0
    duration: float  # expected seconds of such a batch


class QueueRoom(NamedTuple):
    """The number of requests that may wait in a queue."""

    waiting: float  # all requests that may wait, as far as is known
    opens_at: float  # time at which one more may wait, unless a batch leaves before


def factor(curve: LatencyCurve, target: float) -> float:
    """Return the ratio between the longest time that a batch is planned with and its typical time.

    It is the ratio of the quantile to the typical time. If even a single request would then miss
    the target, it is the ratio of the mean.
    """
    return curve.tail if curve.typical(1) * curve.tail <= target else curve.mean


def aim(curve: LatencyCurve, target: float, rate: float, workers: int) -> Aim:
    """Return the plan for the largest batch that can gather in time.

    It gathers until enough requests have arrived, or until a worker has finished a batch of this
    size, whichever is earlier.

    Args:
        curve: The latency curve.
        target: The target in seconds.
        rate: Requests per second that arrive, whether they are accepted or not.
        workers: The number of workers.
    """
    if not curve.known:
        return Aim(1, target - target * UNKNOWN_FRACTION, target * UNKNOWN_FRACTION)
    ratio, mean = factor(curve, target), curve.mean
    low, high = 1, curve.max_size
    while low < high:
        size = (low + high + 1) // 2
        typical = curve.typical(size)
        gathering = min(size / rate if rate > 0 else math.inf, typical * mean / max(1, workers))
        low, high = (size, high) if typical * ratio + gathering <= target else (low, size - 1)
    return Aim(low, max(0.0, target - curve.typical(low) * ratio), curve.typical(low) * mean)


def throughput(curve: LatencyCurve, target: float, rate: float, workers: int) -> tuple[float, int]:
    """Return how many requests per second are answered in time, and in which batch size."""
    size = aim(curve, target, rate, workers).size
    return workers * size / (curve.typical(size) * curve.mean), size


def batch_size(
    curve: LatencyCurve,
    target: float,
    arrivals: Iterable[float],
    start: float,
    planned: int,
    weights: Iterable[float] = repeat(1),
) -> float:
    """Return the size of the largest batch that keeps its oldest request's target, at least 1.

    The batch may take its quantile within the target. Up to the planned size, it is enough if its
    mean does, because smaller batches would delay the next ones even more. Requests that would be
    late even alone are not considered: the first other one decides. But if the late requests are
    more than that, the batch takes all of them.

    Args:
        curve: The latency curve.
        target: The target in seconds.
        arrivals: The arrival times of the waiting requests in the order of service.
        start: The start of the batch.
        planned: The planned size.
        weights: The weights of the waiting requests.
    """
    if not curve.known:
        return 1
    ratio, mean = factor(curve, target), curve.mean
    late_weight = 0.0
    for arrived, weight in zip(arrivals, weights, strict=False):
        slack = arrived + target - start
        size = max(curve.largest(slack / ratio), min(planned, curve.largest(slack / mean)))
        if size > late_weight:
            return size
        if size:
            break
        late_weight += weight
    return max(1, min(late_weight, curve.largest(target / ratio)))


def fill(size: float, weights: Sequence[float], first: int, waiting: int) -> tuple[int, float]:
    """Return the number and the weight of waiting requests for a batch; there is at least one."""
    if not weights:
        count = min(int(size), waiting - first)
        return count, count
    count, total = 1, weights[first]
    while first + count < waiting and total + weights[first + count] <= size:
        total += weights[first + count]
        count += 1
    return count, total


def admission(
    curve: LatencyCurve,
    target: float,
    planned: Aim,
    arrivals: Sequence[float],
    free: Sequence[float],
    now: float,
    weights: Sequence[float] = (),
    weight: float = 1,
    pause: float = 0.0,
) -> QueueRoom:
    """Return how many requests may wait.

    The waiting requests are divided into batches in the way in which they will be sent. A request
    has room in any case if no other one waits and a worker is idle, or if there is no worker.

    Args:
        curve: The latency curve.
        target: The target in seconds.
        planned: The plan for the target.
        arrivals: The arrival times of the waiting requests in the order of service.
        free: When each worker is free, not before `now`.
        now: The current time.
        weights: The weights of the waiting requests.
        weight: The weight of the new request.
        pause: Seconds between two batches in which other models use the device.
    """
    waiting = len(arrivals)
    if not free:
        return QueueRoom(1, now)
    ends = sorted(free)
    assigned, room = 0, 0.0
    while assigned < waiting:
        start = ends[0]
        remaining = islice(weights, assigned, None) if weights else repeat(1)
        size = batch_size(
            curve, target, islice(arrivals, assigned, None), start, planned.size, remaining
        )
        count, total = fill(size, weights, assigned, waiting)
        assigned, room = assigned + count, size - total
        heapq.heapreplace(
            ends,
            start
            + pause
            + (curve.typical(max(size, total)) * curve.mean if curve.known else planned.duration),
        )
    if room >= weight:  # The new request can join the last batch.
        return QueueRoom(waiting + room, now)
    latest_start = now + planned.wait
    return (
        QueueRoom(waiting + max(planned.size, weight), now)
        if ends[0] <= latest_start
        else QueueRoom(waiting, ends[0] - planned.wait)
    )


def expected_end(began: float, sizes: Sequence[float], curve: LatencyCurve, now: float) -> float:
    """Return when a worker is expected to finish batches of these sizes.

    If the first batch takes longer than expected, it is assumed to take the time of its quantile,
    and after that another typical time.

    Args:
        began: The start of the first batch.
        sizes: The sizes of the batches.
        curve: The latency curve.
        now: The current time.
    """
    if not sizes or not curve.known:
        return now
    typical = curve.typical(sizes[0])
    end = next(
        (end for ratio in (curve.mean, curve.tail) if (end := began + typical * ratio) > now),
        now + typical,
    )
    return end + sum(curve.typical(size) for size in sizes[1:]) * curve.mean
