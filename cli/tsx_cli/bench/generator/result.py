"""Computes the figures of a round from a load's records; no clock and no socket here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from copy import deepcopy
from itertools import pairwise

from tsx_cli.bench.generator.load import SLOT, Load, SlotCounts
from tsx_cli.bench.generator.plan import LoadPlan
from tsx_cli.bench.model.histogram import Histogram
from tsx_cli.bench.model.results import GeneratorSide, Round
from tsx_cli.bench.model.statistics import warm_up_end
from tsx_cli.common.output import milliseconds

BUSY = 0.9  # of the time: beyond it the generator is the limit
LATE_MS = 1.0
STALL = 0.05  # seconds without an answer; less is no stall
TIMES_MEDIAN, TIMES_SPACING = 3.0, 10.0  # a stall is so many times longer than an answer takes, and than answers are apart


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
        corrected_p99_ms=corrected_p99(accepted, stalls, in_time / seconds) if plan.mode == "closed" and stalls else None,
        generator=side,
    )


def find_stalls(
    gaps: Iterable[tuple[float, float]], begin: float, seconds: float, answers: int, median: float
) -> list[tuple[float, float]]:
    """(start, length) in seconds from `begin`, of the gaps in which some request waited and that are too long to be the server's way.

    Once nothing more is sent, only the slowest requests are left, and between their answers nothing stalls.
    """
    longest = max(STALL, TIMES_MEDIAN * median, TIMES_SPACING * seconds / max(1, answers))
    return [(start - begin, end - start) for start, end in gaps if end > begin > start - seconds and end - start > longest]


def corrected_p99(accepted: Histogram, stalls: Sequence[tuple[float, float]], rate: float) -> float:
    """Milliseconds: what clients that arrive at the mean rate would have seen. In a closed loop no more than its connections wait for the
    end of a stall; those clients arrive all through it, and each waits for what is left of it and then as long as others do."""
    usual = accepted.quantile(0.5)
    seen = deepcopy(accepted)
    for _, length in stalls:
        count = round(rate * length)
        seen.add([length * (number + 0.5) / count + usual for number in range(count)])
    return 1000 * seen.quantile(0.99)


def limit(cpu: float, starved: float, late_p99: float, p99: float) -> str | None:
    """Why the figures tell of the generator and not of the server; times in milliseconds."""
    if cpu + starved > BUSY:
        return f"the generator used {cpu:.0%} of a core and waited for one {starved:.0%} of the time"
    if late_p99 > LATE_MS and late_p99 > 0.2 * p99:
        return f"the generator itself was {milliseconds(late_p99)} late (p99)"
    return None


def _warm_up(plan: LoadPlan, slots: Sequence[int]) -> int:
    """Slots that do not count."""
    most = round(plan.lead / SLOT)
    if plan.warm_up != "auto":
        return most
    return min(most, warm_up_end(slots))
