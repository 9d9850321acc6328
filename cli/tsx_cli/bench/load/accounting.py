"""Computes the figures of a round from a load's records; no clock and no socket here."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from copy import deepcopy
from itertools import pairwise

from tsx_cli.bench.load.histogram import Histogram
from tsx_cli.bench.load.loops import SLOT, Load, SlotCounts
from tsx_cli.bench.load.plan import LoadPlan
from tsx_cli.bench.load.results import GeneratorSide, Round, SizeClass
from tsx_cli.bench.load.statistics import warm_up_end
from tsx_cli.bench.load.streams import stream_figures
from tsx_cli.common.output import milliseconds

BUSY = 0.9  # of the time: beyond it the generator is the limit
LATE_MS = 1.0
STALL = 0.05  # seconds without an answer; less is no stall
MOST_INTERVALS, FEWEST_INTERVALS = 40, 6  # of a round, that its course is told in
OF_INTERVAL = 20  # answers, where there are enough
MOST_CLASSES = 4  # of sizes of inputs
TIMES_MEDIAN, TIMES_SPACING = (
    3.0,
    10.0,
)  # a stall is so many times longer than an answer takes, and than answers are apart


def account(plan: LoadPlan, noted: Load, cpu: float, starved: float) -> Round:
    """Of a load that is over; its last mark is that of the end of waiting."""
    marks = [SlotCounts(noted.start, 0, 0, 0, Counter()), *noted.marks]
    slots = [after.answers - before.answers for before, after in pairwise(marks[:-1])]
    skipped = _warm_up(plan, slots)
    begin, end = marks[skipped], marks[-2]
    accepted, refused = Histogram(), Histogram()
    accepted.add(noted.accepted[begin.accepted :])
    refused.add(noted.refused[begin.refused :])
    errors = sum((mark.errors for mark in marks[skipped + 1 :]), Counter[str]())
    seconds = end.at - begin.at
    in_time = end.accepted - begin.accepted
    stalls = find_stalls(noted.gaps, begin.at, seconds, in_time, accepted.quantile(0.5))
    latency = accepted.latency()
    late = Histogram()
    late.add(noted.late)
    late_p99 = 1000 * late.quantile(0.99)
    side = GeneratorSide(
        cpu=cpu,
        starved=starved,
        late_p99_ms=late_p99,
        waited=noted.waited,
        limited=limit(cpu, starved, late_p99, latency.p99_ms),
    )
    return Round(
        seconds=seconds,
        sent=len(accepted) + len(refused) + errors.total() + noted.unanswered,
        ok=len(accepted),
        refused=len(refused),
        refused_p99_ms=1000 * refused.quantile(0.99),
        errors=dict(errors),
        unanswered=noted.unanswered,
        unsent=noted.unsent,
        throughput=in_time / seconds,
        latency=latency,
        histogram=accepted.coarse(),
        warm_up_seconds=begin.at - noted.start,
        stalls=stalls,
        corrected_p99_ms=(
            corrected_p99(accepted, stalls, in_time / seconds)
            if plan.mode == "closed" and stalls
            else None
        ),
        over_time=over_time(marks[:-1], skipped, noted.accepted),
        by_size=by_size(
            [len(payload.body) for payload in plan.payloads],
            noted.numbers[begin.accepted :],
            noted.accepted[begin.accepted :],
        ),
        stream=stream_figures(
            noted.streams, noted.accepted, begin.accepted, end.accepted, seconds, plan.slo
        ),
        generator=side,
    )


def over_time(
    marks: Sequence[SlotCounts], skipped: int, accepted: Sequence[float]
) -> list[tuple[float, int, float, float]]:
    """`Round.over_time`, of the marks up to the end of sending; the first of them is the start, and
    `skipped` slots are warm-up.
    """
    slots, answers = len(marks) - 1, max(1, marks[-1].accepted)
    enough = min(
        -(-OF_INTERVAL * slots // answers), slots // FEWEST_INTERVALS
    )  # or percentiles are those of a few answers
    length = max(1, -(-slots // MOST_INTERVALS), enough)
    ends = range(skipped % length + length, len(marks), length)
    found = []
    for before, after in ((marks[end - length], marks[end]) for end in ends):
        p50, p99 = _percentiles(accepted[before.accepted : after.accepted])
        found.append(
            (round(after.at - marks[skipped].at, 3), after.accepted - before.accepted, p50, p99)
        )
    return found


def by_size(
    sizes: Sequence[int], numbers: Sequence[int], accepted: Sequence[float]
) -> list[SizeClass]:
    """A class for each size where there are few, else for each quarter of the inputs; `numbers` are
    those of the answers' inputs.
    """
    ordered = sorted(sizes)
    if ordered[0] == ordered[-1]:
        return []
    few = sorted(set(sizes))
    ends = (
        few
        if len(few) <= MOST_CLASSES
        else sorted({ordered[-(-len(ordered) * part // MOST_CLASSES) - 1] for part in (1, 2, 3, 4)})
    )
    import numpy as np  # what only a run needs

    classes = np.asarray([bisect_left(ends, size) for size in sizes])
    of_answers, seconds, found = (
        classes[np.asarray(numbers, dtype=np.int64)],
        np.asarray(accepted),
        [],
    )
    for place, end in enumerate(ends):
        mine = seconds[of_answers == place]
        p50, p99 = _percentiles(mine)
        smallest = min(size for size in sizes if bisect_left(ends, size) == place)
        found.append(
            SizeClass(smallest=smallest, largest=end, ok=len(mine), p50_ms=p50, p99_ms=p99)
        )
    return found


def _percentiles(seconds: Sequence[float]) -> tuple[float, float]:
    """p50 and p99 in milliseconds; 0 of nothing."""
    if not len(seconds):
        return 0.0, 0.0
    import numpy as np  # what only a run needs

    p50, p99 = np.quantile(seconds, (0.5, 0.99), method="inverted_cdf")
    return round(1000 * float(p50), 4), round(1000 * float(p99), 4)


def find_stalls(
    gaps: Iterable[tuple[float, float]], begin: float, seconds: float, answers: int, median: float
) -> list[tuple[float, float]]:
    """(start, length) in seconds from `begin`, of the gaps in which some request waited and that
    are too long to be the server's way.

    Once nothing more is sent, only the slowest requests are left, and between their answers nothing
    stalls.
    """
    longest = max(STALL, TIMES_MEDIAN * median, TIMES_SPACING * seconds / max(1, answers))
    return [
        (start - begin, end - start)
        for start, end in gaps
        if end > begin > start - seconds and end - start > longest
    ]


def corrected_p99(accepted: Histogram, stalls: Sequence[tuple[float, float]], rate: float) -> float:
    """Milliseconds: what clients that arrive at the mean rate would have seen.

    In a closed loop no more than its connections wait for the
    end of a stall; those clients arrive all through it, and each waits for what is left of it and
    then as long as others do.
    """
    usual = accepted.quantile(0.5)
    seen = deepcopy(accepted)
    for _, length in stalls:
        count = round(rate * length)
        seen.add([length * (number + 0.5) / count + usual for number in range(count)])
    return 1000 * seen.quantile(0.99)


def limit(cpu: float, starved: float, late_p99: float, p99: float) -> str | None:
    """Why the figures tell of the generator and not of the server; times in milliseconds."""
    if cpu + starved > BUSY:
        return (
            f"the generator used {cpu:.0%} of a core and waited for one {starved:.0%} of the time"
        )
    if late_p99 > LATE_MS and late_p99 > 0.2 * p99:
        return f"the generator itself was {milliseconds(late_p99)} late (p99)"
    return None


def _warm_up(plan: LoadPlan, slots: Sequence[int]) -> int:
    """Slots that do not count."""
    most = round(plan.lead / SLOT)
    if plan.warm_up != "auto":
        return most
    return min(most, warm_up_end(slots))
