"""Judges whether a measurement was disturbed by something else on the machine, and what it would
have been without that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean, median

from tsx_cli.bench.model.parts import Disturbed
from tsx_cli.bench.model.results import Curve, Noise, Point, Round, Trial, counted

OTHERS = 0.05  # of the cores: what other processes may use
STEAL = THROTTLED = 0.02  # of the time
MEMORY, IO = 0.05, 0.1  # of the time that some task may wait for them
PROBE = 1.25  # times as long as the fastest probe of the run
MOST = 3.0  # times: what other processes took is corrected by no more
FEW = 0.3  # of the rounds: those that may be measured again
LATEST = 6  # rounds by which the disturbance is called permanent


def judge(noise: Noise, cores: int) -> list[str]:
    """By what a measurement was disturbed, each with its figure and its limit; nothing where it was
    quiet.

    The pressure on the CPU is no reason: the measured server causes it by itself as soon as it has
    more workers than cores.
    """
    most, memory = (
        f", most by {noise.busiest}" if noise.busiest else "",
        noise.memory_pressure or 0.0,
    )
    found = [
        (
            noise.others > OTHERS * cores,
            f"other processes used {noise.others:.2g} cores (limit {OTHERS * cores:.2g}{most})",
        ),
        (
            noise.steal > STEAL,
            f"the hypervisor took {noise.steal:.0%} of the time (limit {STEAL:.0%})",
        ),
        (
            noise.throttled > THROTTLED,
            (
                f"the container's CPU quota was used up {noise.throttled:.0%} of the time (limit"
                f" {THROTTLED:.0%})"
            ),
        ),
        (memory > MEMORY, f"tasks waited for memory {memory:.0%} of the time (limit {MEMORY:.0%})"),
        (
            (noise.io_pressure or 0) > IO,
            f"tasks waited for a disk {noise.io_pressure or 0:.0%} of the time (limit {IO:.0%})",
        ),
        (
            noise.heat > 0,
            f"a core was slowed down for its temperature {noise.heat} times (limit 0)",
        ),
        (
            (noise.probe or 0) > PROBE,
            (
                f"a fixed computation took {noise.probe or 0:.2f} times as long as at best (limit"
                f" {PROBE})"
            ),
        ),
    ]
    return [text for is_so, text in found if is_so]


def again(disturbed: Sequence[bool], seconds_left: float, cost: float) -> bool:
    """Whether the last round is measured again at once: not where most rounds are disturbed, as
    another one would be as well.
    """
    latest = disturbed[-LATEST:]
    permanent = len(latest) > 2 and sum(latest) > len(latest) / 2
    return (
        bool(latest and latest[-1])
        and not permanent
        and sum(disturbed) <= max(2, FEW * len(disturbed))
        and seconds_left >= cost
    )


def correction(each: Round | Curve) -> float:
    """How many times as fast a disturbed measurement would have been, if the server had got all the
    cores that it was ready to use.

    So that configurations can be compared although some shared the machine with more than others.
    Other processes took no more than what they used, and no longer than a task waited for a core.
    """
    noise = each.noise
    if noise is None or not each.disturbed or noise.cores <= 0:
        return 1.0
    taken = noise.others if noise.cpu_pressure is None else min(noise.others, noise.cpu_pressure)
    return min(MOST, (noise.cores + taken) / noise.cores / max(0.1, 1 - noise.steal))


def worth(point: Point) -> float:
    """The throughput by which configurations are compared: as measured, but for what took cores
    from a disturbed round.
    """
    return (
        point.throughput.value * fmean(map(correction, point.counted))
        if point.rounds
        else point.throughput.value
    )


def summary(trials: Iterable[Trial]) -> Disturbed:
    """Of all rounds."""
    points = [point.rounds for trial in trials for point in trial.points]
    rounds = [each for point in points for each in point]
    bad = [each for each in rounds if each.disturbed]
    if not bad:
        return Disturbed(rounds=len(rounds))
    again = sum(len(point) - len(counted(point)) for point in points)
    others = median([each.noise.others for each in bad if each.noise is not None] or [0.0])
    were = "was" if len(bad) == 1 else "were"
    what = (
        f"by other processes (median {others:.1f} cores)"
        if others >= 0.05
        else f"({bad[0].disturbed[0]})"
    )
    dealt = f"{again} {'was' if again == 1 else 'were'} repeated"
    if len(bad) == len(rounds):
        dealt = (
            "so configurations were compared by their throughput for the processor time that"
            " they got"
        )
    elif not again:
        dealt = "none was repeated, and they are marked"
    says = f"{len(bad)} of {len(rounds)} rounds {were} disturbed {what}; {dealt}"
    return Disturbed(
        rounds=len(rounds), disturbed=len(bad), repeated=again, others=others, says=says
    )
