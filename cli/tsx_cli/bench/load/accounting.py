"""The figures of a round, calculated from a load's records without a clock or a socket."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from copy import deepcopy
from itertools import pairwise

from tsx_cli.bench.load.histogram import Histogram
from tsx_cli.bench.load.loops import SLOT_S, Load, SlotCounts
from tsx_cli.bench.load.plan import LoadPlan
from tsx_cli.bench.load.results import GeneratorSide, Round, SizeClass
from tsx_cli.bench.load.statistics import warm_up_end
from tsx_cli.bench.load.streams import stream_figures
from tsx_cli.common.output import milliseconds

MAX_BUSY_SHARE = 0.9  # A generator that is busy for a larger fraction of the time is the limit.
MAX_LATE_MS = 1.0
MIN_STALL_S = 0.05  # shortest stall, a time without answers
MAX_INTERVALS, MIN_INTERVALS = 40, 6  # number of intervals in `Round.over_time`
ANSWERS_PER_INTERVAL = 20  # minimum, unless a round has too few answers
MAX_SIZE_CLASSES = 4
# A stall is this many times longer than the median latency, and than the mean time between answers.
STALL_MEDIANS, STALL_SPACINGS = 3.0, 10.0


def account(plan: LoadPlan, load: Load, cpu: float, starved: float) -> Round:
    """Return the figures of a finished load; its last mark is the end of the wait for answers."""
    marks = [SlotCounts(load.start, 0, 0, 0, Counter()), *load.marks]
    slots = [after.answers - before.answers for before, after in pairwise(marks[:-1])]
    skipped = _warm_up(plan, slots)
    begin, end = marks[skipped], marks[-2]
    accepted, refused = Histogram(), Histogram()
    accepted.add(load.accepted[begin.accepted :])
    refused.add(load.refused[begin.refused :])
    errors = sum((mark.errors for mark in marks[skipped + 1 :]), Counter[str]())
    seconds = end.time - begin.time
    accepted_in_time = end.accepted - begin.accepted
    stalls = find_stalls(load.gaps, begin.time, seconds, accepted_in_time, accepted.quantile(0.5))
    latency = accepted.latency()
    send_delays = Histogram()
    send_delays.add(load.send_delays)
    late_p99 = 1000 * send_delays.quantile(0.99)
    generator = GeneratorSide(
        cpu=cpu,
        starved=starved,
        late_p99_ms=late_p99,
        waited=load.waited,
        limited=limit(cpu, starved, late_p99, latency.p99_ms),
    )
    return Round(
        seconds=seconds,
        sent=len(accepted) + len(refused) + errors.total() + load.unanswered,
        ok=len(accepted),
        refused=len(refused),
        refused_p99_ms=1000 * refused.quantile(0.99),
        errors=dict(errors),
        unanswered=load.unanswered,
        unsent=load.unsent,
        throughput=accepted_in_time / seconds,
        latency=latency,
        histogram=accepted.coarse(),
        warm_up_seconds=begin.time - load.start,
        stalls=stalls,
        corrected_p99_ms=(
            corrected_p99(accepted, stalls, accepted_in_time / seconds)
            if plan.mode == "closed" and stalls
            else None
        ),
        over_time=over_time(marks[:-1], skipped, load.accepted),
        by_size=by_size(
            [len(payload.body) for payload in plan.payloads],
            load.payload_indexes[begin.accepted :],
            load.accepted[begin.accepted :],
        ),
        stream=stream_figures(
            load.streams, load.accepted, begin.accepted, end.accepted, seconds, plan.slo
        ),
        generator=generator,
    )


def over_time(
    marks: Sequence[SlotCounts], skipped: int, accepted: Sequence[float]
) -> list[tuple[float, int, float, float]]:
    """Return the intervals of `Round.over_time`.

    The marks cover the time from the start to the end of sending; the first `skipped` slots are
    warm-up.
    """
    slots, answers = len(marks) - 1, max(1, marks[-1].accepted)
    # Percentiles of a few answers are not meaningful, so an interval has enough answers.
    min_length = min(-(-ANSWERS_PER_INTERVAL * slots // answers), slots // MIN_INTERVALS)
    length = max(1, -(-slots // MAX_INTERVALS), min_length)
    ends = range(skipped % length + length, len(marks), length)
    intervals = []
    for before, after in ((marks[end - length], marks[end]) for end in ends):
        p50, p99 = _percentiles(accepted[before.accepted : after.accepted])
        intervals.append(
            (round(after.time - marks[skipped].time, 3), after.accepted - before.accepted, p50, p99)
        )
    return intervals


def by_size(
    sizes: Sequence[int], numbers: Sequence[int], accepted: Sequence[float]
) -> list[SizeClass]:
    """Return a class for each input size; if there are many sizes, for each quarter of the inputs.

    `numbers` are the positions of the inputs that the answers belong to.
    """
    sorted_sizes = sorted(sizes)
    if sorted_sizes[0] == sorted_sizes[-1]:
        return []
    distinct_sizes = sorted(set(sizes))
    ends = (
        distinct_sizes
        if len(distinct_sizes) <= MAX_SIZE_CLASSES
        else sorted(
            {
                sorted_sizes[-(-len(sorted_sizes) * part // MAX_SIZE_CLASSES) - 1]
                for part in (1, 2, 3, 4)
            }
        )
    )
    import numpy as np  # a slow import

    classes = np.asarray([bisect_left(ends, size) for size in sizes])
    answer_classes = classes[np.asarray(numbers, dtype=np.int64)]
    seconds = np.asarray(accepted)
    size_classes = []
    for index, end in enumerate(ends):
        class_seconds = seconds[answer_classes == index]
        p50, p99 = _percentiles(class_seconds)
        smallest = min(size for size in sizes if bisect_left(ends, size) == index)
        size_classes.append(
            SizeClass(smallest=smallest, largest=end, ok=len(class_seconds), p50_ms=p50, p99_ms=p99)
        )
    return size_classes


def _percentiles(seconds: Sequence[float]) -> tuple[float, float]:
    """Return the p50 and the p99 in milliseconds, or zeros if there are no values."""
    if not len(seconds):
        return 0.0, 0.0
    import numpy as np  # a slow import

    p50, p99 = np.quantile(seconds, (0.5, 0.99), method="inverted_cdf")
    return round(1000 * float(p50), 4), round(1000 * float(p99), 4)


def find_stalls(
    gaps: Iterable[tuple[float, float]], begin: float, seconds: float, answers: int, median: float
) -> list[tuple[float, float]]:
    """Return the start and the length of each stall, in seconds from `begin`.

    A stall is a gap between answers during which a request waited. It is too long to be the
    server's usual time. Gaps after the end of sending are ignored, because only the slowest
    requests are left then.
    """
    min_stall_s = max(
        MIN_STALL_S, STALL_MEDIANS * median, STALL_SPACINGS * seconds / max(1, answers)
    )
    return [
        (start - begin, end - start)
        for start, end in gaps
        if end > begin > start - seconds and end - start > min_stall_s
    ]


def corrected_p99(accepted: Histogram, stalls: Sequence[tuple[float, float]], rate: float) -> float:
    """Return the p99 in milliseconds that independent clients would have seen at the mean rate.

    In a closed loop, only as many requests as there are connections wait for the end of a stall.
    Independent clients keep arriving during a stall. Each of them waits for the rest of the stall,
    and then for the usual time.
    """
    median_s = accepted.quantile(0.5)
    corrected = deepcopy(accepted)
    for _, length in stalls:
        count = round(rate * length)
        corrected.add([length * (number + 0.5) / count + median_s for number in range(count)])
    return 1000 * corrected.quantile(0.99)


def limit(cpu: float, starved: float, late_p99: float, p99: float) -> str | None:
    """Return why the generator limits the figures, or None; times are in milliseconds."""
    if cpu + starved > MAX_BUSY_SHARE:
        return (
            f"the generator used {cpu:.0%} of a core and waited for one {starved:.0%} of the time"
        )
    if late_p99 > MAX_LATE_MS and late_p99 > 0.2 * p99:
        return f"the generator itself was {milliseconds(late_p99)} late (p99)"
    return None


def _warm_up(plan: LoadPlan, slots: Sequence[int]) -> int:
    """Return the number of slots at the beginning that are not counted."""
    max_slots = round(plan.lead / SLOT_S)
    if plan.warm_up != "auto":
        return max_slots
    return min(max_slots, warm_up_end(slots))
