"""The texts of figures, loads and trials, for the page, the tables and the terminal."""

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
    """Return half the confidence interval relative to the figure, or an empty text."""
    # The lower end is cut off at 0, so the upper end shows the width.
    margin_value = figure.high - figure.value
    if margin_value <= 0 or figure.value <= 0:
        return ""
    # With few, different rounds the interval is wide, and its exact width means nothing.
    return f"± {margin_value / figure.value:.1%}" if margin_value < figure.value else "± over 100%"


def rate(point: Point) -> str:
    """Return the rate of an open loop."""
    return f"{number(point.offered.rate or 0.0)}/s"


def name(trial: Trial, results: Results) -> str:
    """Return the configuration, or the address of the running server."""
    return str(trial.as_configuration()) if trial.configuration else results.against or "as it is"


def moment(text: str | None) -> str:
    """Return a time of results.json in a readable form; an invalid text is returned unchanged."""
    if not text:
        return NONE
    try:
        return datetime.fromisoformat(text).strftime("%Y-%m-%d %H:%M %Z").strip()
    except ValueError:
        return text


def bounds(results: Results) -> Sequence[Bound]:
    """Return the bounds of times; bounds of errors are left out."""
    return (
        []
        if results.slo is None
        else [bound for bound in parse_slo(results.slo).bounds if bound.figure != "errors"]
    )


def figure_label(figure: str) -> str:
    """Return a label such as `p99` or `TTFT p99` for the name of a figure."""
    part, _, name = figure.rpartition(".")
    text = {"p999_ms": "p99.9", "mean_ms": "mean", "max_ms": "slowest"}.get(
        name, name.removesuffix("_ms")
    )
    return f"{part.upper()} {text}" if part else text


def shown_point(trial: Trial) -> Point | None:
    """Return the best point within the bounds, or else the point with the lowest p99."""
    if trial.chosen is not None:
        return trial.chosen
    return min(
        trial.points,
        key=lambda point: (point.throughput.value <= 0, point.p99_ms.value),
        default=None,
    )


def ordered(results: Results) -> list[int]:
    """Return the positions of the trials: the winner first, then by throughput within the bounds.

    Trials that failed or were not measured come last.
    """

    def key(index: int) -> tuple[bool, bool, bool, float, int]:
        trial = results.trials[index]
        chosen = trial.chosen
        predicted = 0.0 if trial.predicted is None else trial.predicted.throughput
        throughput = predicted if chosen is None else chosen.throughput.value
        return (
            index != results.winner,
            chosen is None,
            trial.state != "measured",
            -throughput,
            index,
        )

    return sorted(range(len(results.trials)), key=key)


def summary_point(results: Results) -> Point | None:
    """Return the point of the winner, or of the measured server."""
    if results.winner is not None:
        return results.trials[results.winner].chosen
    if results.against is not None:
        return next(
            (point for trial in results.trials if (point := shown_point(trial)) is not None), None
        )
    return None


def detailed_trial(results: Results) -> Trial | None:
    """Return the trial whose details are shown: the winner, or else the best trial."""
    if results.winner is not None:
        return results.trials[results.winner]
    return next(
        (results.trials[index] for index in ordered(results) if results.trials[index].points), None
    )


def mark(index: int, results: Results) -> str:
    """Return "winner", "recommended" (if there is a tie), "tie", "baseline" or an empty text."""
    if results.tied and index in (results.winner, *results.tied):
        return "recommended" if index == results.winner else "tie"
    return "winner" if index == results.winner else "baseline" if index == results.baseline else ""


def per_million(point: Point, results: Results) -> float | None:
    """Return the cost of a million requests, or None if there is no price or no answer."""
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
    """Return a figure in milliseconds with its margin."""
    return f"{milliseconds(figure.value)} {margin(figure)}".strip()


def brief(text: str) -> str:
    """Return the first and the last line of a log, which are the event and its consequence."""
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
        acceptance_text = (
            f", which is accepted by {trial.accuracy.accepted}" if trial.accuracy.accepted else ""
        )
        parts.append(
            f"answers differ in {trial.accuracy.different} of"
            f" {trial.accuracy.compared}{text}{acceptance_text}"
        )
    point = shown_point(trial)
    limit = (
        next(
            (round_.generator.limited for round_ in point.rounds if round_.generator.limited), None
        )
        if point
        else None
    )
    if limit:
        parts.append(f"the generator was the limit: {limit}")
    if point is not None:
        parts += filter(None, (stalls(point), disturbed(point)))
    return "; ".join(parts)


def disturbed(point: Point) -> str:
    """Describe how many of the counted rounds were disturbed, and by what."""
    reasons = [round_.disturbed[0] for round_ in point.counted if round_.disturbed]
    if not reasons:
        return ""
    count_text = (
        f"{len(reasons)} of {len(point.counted)} rounds were"
        if len(point.counted) > 1
        else "it was"
    )
    return f"{count_text} disturbed: {reasons[0]}"


def stalls(point: Point) -> str:
    """Describe the times without answers.

    In a closed loop only few requests wait during a stall, so percentiles hardly show it.
    """
    lengths = [length for round_ in point.rounds for _, length in round_.stalls]
    if not lengths:
        return ""
    seen_p99_ms = max(round_.corrected_p99_ms or 0.0 for round_ in point.rounds)
    p99_text = (
        f", and clients that come all the time would have seen a p99 of {milliseconds(seen_p99_ms)}"
        if seen_p99_ms
        else ""
    )
    return (
        f"{len(lengths)} stall{'s' if len(lengths) != 1 else ''},"
        f" {milliseconds(1000 * max(lengths))} at most{p99_text}"
    )


def gain(results: Results) -> RatioInterval | None:
    """Return the winner's throughput relative to the baseline's, or None if one has no figure.

    A comparison in turn takes precedence over separate measurements.
    """
    if results.winner is None or results.baseline is None or results.winner == results.baseline:
        return None
    for pair in results.paired:
        if (pair.first, pair.second) == (results.winner, results.baseline):
            return RatioInterval(pair.ratio, pair.low, pair.high, pair.real)
    winner = results.trials[results.winner].chosen
    baseline = results.trials[results.baseline].chosen
    if winner is None or baseline is None or baseline.throughput.value <= 0:
        return None
    return difference_of(baseline.throughput, winner.throughput)
