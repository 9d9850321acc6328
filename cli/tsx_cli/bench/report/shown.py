"""Formats figures, loads and trials for the page, the tables and the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from tsx_archiver.metadata.slo import Bound
from tsx_cli.bench.load.results import OUT_OF_TIME, Figure, Point, Results, Trial, parse_slo
from tsx_cli.bench.load.statistics import RatioInterval, difference_of
from tsx_cli.bench.search.points import cost_per_million
from tsx_cli.common.output import milliseconds, number

NONE = "-"
ENDED_BEFORE = f"not measured: {OUT_OF_TIME}"


def share(value: float) -> str:
    return "0" if value == 0 else f"{value:.2%}" if value < 0.1 else f"{value:.0%}"


def margin(figure: Figure) -> str:
    """Half the confidence interval, as a share of the figure; empty where there is none."""
    width = figure.high - figure.value  # and not of both ends, as the lower one is never below 0
    if width <= 0 or figure.value <= 0:
        return ""
    return (
        f"± {width / figure.value:.1%}" if width < figure.value else "± over 100%"
    )  # of few rounds that differ: it says no more


def rate(point: Point) -> str:
    """The rate of an open loop."""
    return f"{number(point.offered.rate or 0.0)}/s"


def name(trial: Trial, results: Results) -> str:
    """The configuration; of a server that ran already nothing is known but its address."""
    return str(trial.how()) if trial.configuration else results.against or "as it is"


def moment(text: str | None) -> str:
    """A time of results.json as people write it; as it is where it is none."""
    if not text:
        return NONE
    try:
        return datetime.fromisoformat(text).strftime("%Y-%m-%d %H:%M %Z").strip()
    except ValueError:
        return text


def bounds(results: Results) -> Sequence[Bound]:
    """Of time, among those that were asked for."""
    return (
        []
        if results.slo is None
        else [bound for bound in parse_slo(results.slo).bounds if bound.figure != "errors"]
    )


def word(figure: str) -> str:
    """`p99_ms` as people write it, and `ttft.p99_ms`."""
    part, _, name = figure.rpartition(".")
    text = {"p999_ms": "p99.9", "mean_ms": "mean", "max_ms": "slowest"}.get(
        name, name.removesuffix("_ms")
    )
    return f"{part.upper()} {text}" if part else text


def shown_point(trial: Trial) -> Point | None:
    """Its best within the bounds; where there is none, the one of the lowest p99 that has
    answers.
    """
    if trial.chosen is not None:
        return trial.chosen
    return min(
        trial.points,
        key=lambda point: (point.throughput.value <= 0, point.p99_ms.value),
        default=None,
    )


def ordered(results: Results) -> list[int]:
    """Numbers of the trials: the winner, then by throughput within the bounds, and at the end what
    failed or was not measured.
    """

    def key(index: int) -> tuple[bool, bool, bool, float, int]:
        trial = results.trials[index]
        chosen, predicted = (
            trial.chosen,
            0.0 if trial.predicted is None else trial.predicted.throughput,
        )
        reached = predicted if chosen is None else chosen.throughput.value
        return (index != results.winner, chosen is None, trial.state != "measured", -reached, index)

    return sorted(range(len(results.trials)), key=key)


def summary_point(results: Results) -> Point | None:
    """The winner's; where none was sought, that of the server that was measured."""
    if results.winner is not None:
        return results.trials[results.winner].chosen
    if results.against is not None:
        return next(
            (point for trial in results.trials if (point := shown_point(trial)) is not None), None
        )
    return None


def told_trial(results: Results) -> Trial | None:
    """The one whose details are shown: the winner, or what is best where nothing won."""
    if results.winner is not None:
        return results.trials[results.winner]
    return next(
        (results.trials[index] for index in ordered(results) if results.trials[index].points), None
    )


def mark(index: int, results: Results) -> str:
    """Return winner, recommended (of a tie), tie, baseline or nothing."""
    if results.tied and index in (results.winner, *results.tied):
        return "recommended" if index == results.winner else "tie"
    return "winner" if index == results.winner else "baseline" if index == results.baseline else ""


def per_million(point: Point, results: Results) -> float | None:
    """The cost of a million requests; None where no price is given, or nothing was answered."""
    rate = point.throughput.value
    return (
        None
        if results.price_per_hour is None or rate <= 0
        else cost_per_million(results.price_per_hour, rate)
    )


def cost(point: Point, results: Results) -> str:
    value = per_million(point, results)
    return NONE if value is None else number(value)


def with_margin(figure: Figure) -> str:
    """Of milliseconds."""
    return f"{milliseconds(figure.value)} {margin(figure)}".strip()


def brief(text: str) -> str:
    """The first line and the last of what a log says: what happened, and what of it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"{lines[0]} ... {lines[-1]}" if len(lines) > 2 else " ".join(lines)


def note(trial: Trial, results: Results) -> str:
    parts = []
    if trial.state == "failed":
        parts.append(f"failed: {brief(trial.reason or 'no reason is known')}")
    elif trial.state == "predicted":
        parts.append(f"not measured: {trial.reason or 'it could not win'}")
    elif trial.chosen is None:
        parts.append(
            f"never within {results.slo}"
            if results.slo
            else brief(trial.reason or "no answer was accepted")
        )
    if trial.accuracy is not None and not trial.accuracy.same:
        text = f" ({trial.accuracy.worst})" if trial.accuracy.worst else ""
        accepted = (
            f", which is accepted by {trial.accuracy.accepted}" if trial.accuracy.accepted else ""
        )
        parts.append(
            f"answers differ in {trial.accuracy.different} of"
            f" {trial.accuracy.compared}{text}{accepted}"
        )
    point = shown_point(trial)
    limited = (
        next((each.generator.limited for each in point.rounds if each.generator.limited), None)
        if point
        else None
    )
    if limited:
        parts.append(f"the generator was the limit: {limited}")
    if point is not None:
        parts += filter(None, (stalls(point), disturbed(point)))
    return "; ".join(parts)


def disturbed(point: Point) -> str:
    """How many of its rounds something else on the machine disturbed, and by what; rounds that were
    repeated do not count.
    """
    reasons = [each.disturbed[0] for each in point.counted if each.disturbed]
    if not reasons:
        return ""
    how_many = (
        f"{len(reasons)} of {len(point.counted)} rounds were"
        if len(point.counted) > 1
        else "it was"
    )
    return f"{how_many} disturbed: {reasons[0]}"


def stalls(point: Point) -> str:
    """Times without any answer.

    In a closed loop few requests wait for their end, so that percentiles hardly tell of them.
    """
    lengths = [length for each in point.rounds for _, length in each.stalls]
    if not lengths:
        return ""
    seen = max(each.corrected_p99_ms or 0.0 for each in point.rounds)
    others = (
        f", and clients that come all the time would have seen a p99 of {milliseconds(seen)}"
        if seen
        else ""
    )
    return (
        f"{len(lengths)} stall{'s' if len(lengths) != 1 else ''},"
        f" {milliseconds(1000 * max(lengths))} at most{others}"
    )


def gain(results: Results) -> RatioInterval | None:
    """The winner beside the baseline: as they were measured in turn, or else apart; None where one
    of them has no figure.
    """
    if results.winner is None or results.baseline is None or results.winner == results.baseline:
        return None
    for pair in results.paired:
        if (pair.first, pair.second) == (results.winner, results.baseline):
            return RatioInterval(pair.ratio, pair.low, pair.high, pair.real)
    winner, baseline = (
        results.trials[results.winner].chosen,
        results.trials[results.baseline].chosen,
    )
    if winner is None or baseline is None or baseline.throughput.value <= 0:
        return None
    return difference_of(baseline.throughput, winner.throughput)
