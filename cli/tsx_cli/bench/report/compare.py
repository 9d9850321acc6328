"""`tsx bench compare`: the significant differences of two results.json files, and --fail-if."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from textwrap import shorten
from typing import Any, NamedTuple

from tsx_archiver.metadata.slo import PERCENTILES, STREAM_TIMES
from tsx_cli.bench.load import statistics
from tsx_cli.bench.load.results import Figure, Point, Results, Trial
from tsx_cli.bench.report import shown
from tsx_cli.common.failure import UsageError
from tsx_cli.common.output import milliseconds, number, one_line, print_json, print_table

FIGURES = {"throughput": "throughput", "mean": "mean_ms", **PERCENTILES}
# Figures of event streams only; these two are rates.
STREAM_FIGURES = {"tokens": "tokens_per_second", "goodput": "goodput"}
STREAM_FIGURES |= {
    f"{part}.{name}": f"{part}.{field}"
    for part in STREAM_TIMES
    for name, field in PERCENTILES.items()
}
SHOWN_FIGURES = ("throughput", "p50", "p99")
SHOWN_STREAM_FIGURES = ("tokens", "ttft.p99", "tpot.p99")
OWN_SERVER = "one of tsx bench's own"
BEST = "best"  # name of the pair of the two winners
MAX_LISTED_CHARS = 300  # length of a list of loads in an error message
_CONDITION = re.compile(
    r"\s*(throughput|tokens|goodput|(?:(?:ttft|tpot)\.)?(?:mean|p50|p90|p95|p99\.9|p99|max)|errors)\s*([<>])\s*([+-]?\d+(?:\.\d+)?)\s*%\s*"
)


class Condition(NamedTuple):
    """A condition such as `throughput<-5%`, met if the throughput fell by more than 5 %.

    For `errors` the limit is in percentage points of the error rate.
    """

    figure: str
    above: bool
    limit: float  # a fraction, such as -0.05
    text: str

    def met(self, change: float) -> bool:
        return change > self.limit if self.above else change < self.limit


class FigureChange(NamedTuple):
    """The change of one figure.

    `change` is relative to the first value; for `errors` it is the difference of the rates. `low`,
    `high` and `sure` are None if one of the two figures has no interval.
    """

    figure: str
    first: float
    second: float
    change: float
    low: float | None
    high: float | None
    sure: bool | None


class Pair(NamedTuple):
    """A configuration and a load that both runs have measured."""

    name: str
    load: str
    changes: Sequence[FigureChange]


class Judgement(NamedTuple):
    """The result of a condition for one pair."""

    condition: str
    name: str
    load: str
    text: str  # description of the change
    met: bool


class Compared(NamedTuple):
    pairs: Sequence[Pair]
    judgements: Sequence[Judgement]
    notes: Sequence[str]

    @property
    def met(self) -> list[str]:
        """Descriptions of the conditions that are met."""
        return [
            f"{judgement.condition}: {judgement.text} ({judgement.name}, {judgement.load})"
            for judgement in self.judgements
            if judgement.met
        ]


def parse_condition(text: str) -> Condition:
    """Parse the text of `--fail-if`.

    Raises:
        UsageError: The text is not a condition, or the condition is met without any change.
    """
    match = _CONDITION.fullmatch(text)
    if match is None:
        raise UsageError(
            f"--fail-if: '{text}' is not a condition. One is a figure and a change, such as"
            " 'throughput<-5%' (it fell by more than 5 %) or 'p99>10%'; there are"
            f" {', '.join(FIGURES)}, errors in percentage points, and of event streams tokens,"
            " goodput, ttft.p99 and tpot.p99"
        )
    limit = float(match[3]) / 100
    condition = Condition(match[1], match[2] == ">", limit, text.strip())
    if condition.met(0.0):
        raise UsageError(
            f"--fail-if: '{text}' is met where nothing has changed; 'throughput<-5%' is a fall,"
            " 'p99>10%' a rise"
        )
    return condition


def compare(
    first: Results,
    second: Results,
    conditions: Sequence[Condition] = (),
    *,
    all_pairs: bool = False,
) -> Compared:
    """Compare two runs and evaluate the conditions.

    Conditions apply to the best of each run. With `all_pairs`, or if a run has no winner, they
    apply to each common configuration and load. A change meets a condition if it exceeds the limit
    and is real. A figure that was measured once has no interval; its change counts as real.

    Raises:
        UsageError: The runs have nothing in common, or a condition's figure was not measured.
    """
    best, pairs = _best(first, second), list(_pairs(first, second))
    if best is None and not pairs:
        measured_loads = [
            shorten(
                "; ".join(
                    f"{shown.name(trial, run)}, {point.offered}"
                    for trial in run.trials
                    for point in trial.points
                ),
                MAX_LISTED_CHARS,
            )
            for run in (first, second)
        ]
        raise UsageError(
            "not both runs have a winner, and no configuration and load is in both, so there is"
            f" nothing to compare. The first has measured [{measured_loads[0]}], the second"
            f" [{measured_loads[1]}]. Measure both with the same --batch-sizes, --workers and"
            " --connections"
        )
    judged_pairs = (
        [best] if best is not None and not all_pairs else [*([best] if best else []), *pairs]
    )
    condition_figures = {condition.figure for condition in conditions}
    if condition_figures & STREAM_FIGURES.keys() and not all(
        _figure_is_known(figure, point)
        for figure in condition_figures
        for pair in judged_pairs
        for point in pair[2:]
    ):
        raise UsageError(
            f"--fail-if: {', '.join(sorted(condition_figures & STREAM_FIGURES.keys()))} is of event"
            " streams, which not both runs have measured"
        )
    figures = [
        figure for figure in FIGURES if figure in SHOWN_FIGURES or figure in condition_figures
    ]
    if all(point.stream for pair in [*judged_pairs, *pairs] for point in pair[2:]):
        figures += [
            figure
            for figure in STREAM_FIGURES
            if figure in SHOWN_STREAM_FIGURES or figure in condition_figures
        ]
    if any(condition.figure == "errors" for condition in conditions) or any(
        _has_errors(pair[2]) or _has_errors(pair[3]) for pair in judged_pairs
    ):
        figures.append("errors")
    pairs_by_id = {
        id(pair): Pair(pair[0], pair[1], [_change(figure, pair[2], pair[3]) for figure in figures])
        for pair in [*judged_pairs, *pairs]
    }
    judgements = [
        judgement
        for pair in judged_pairs
        for judgement in _judgements(pairs_by_id[id(pair)], conditions)
    ]
    return Compared(
        [pairs_by_id[id(pair)] for pair in ([best] if best else []) + pairs],
        judgements,
        _notes(first, second, judged_pairs),
    )


_PointPair = tuple[str, str, Point, Point]


def _best(first: Results, second: Results) -> _PointPair | None:
    if first.winner is None or second.winner is None:
        return None
    trials = first.trials[first.winner], second.trials[second.winner]
    points = trials[0].chosen, trials[1].chosen
    if points[0] is None or points[1] is None:
        return None
    return (
        BEST,
        " / ".join(dict.fromkeys(str(point.offered) for point in points if point)),
        points[0],
        points[1],
    )


def _pairs(first: Results, second: Results) -> Iterable[_PointPair]:
    """Yield the common loads, in the order of the first run."""
    second_points = {
        _key(trial.configuration, point): point for trial in second.trials for point in trial.points
    }
    for index in shown.ordered(first):
        trial = first.trials[index]
        for point in trial.points:
            second_point = second_points.get(_key(trial.configuration, point))
            if second_point is not None:
                yield _name(trial, first, second), str(point.offered), point, second_point


def _name(trial: Trial, first: Results, second: Results) -> str:
    """Return the name of a configuration, or the addresses of running servers."""
    names = (shown.name(trial, run) for run in (first, second))
    return " -> ".join(dict.fromkeys(names))


def _key(configuration: dict[str, Any], point: Point) -> tuple[Any, ...]:
    offered = point.offered
    rate = None if offered.rate is None else round(offered.rate, 3)
    # Older results lack some keys, so keys without a value are ignored.
    keys = tuple(sorted((key, value) for key, value in configuration.items() if value is not None))
    return (
        keys,
        offered.mode,
        offered.connections if offered.mode == "closed" else rate,
        offered.arrivals,
    )


def _change(figure: str, first: Point, second: Point) -> FigureChange:
    if figure == "errors":
        return FigureChange(
            figure,
            first.error_rate,
            second.error_rate,
            second.error_rate - first.error_rate,
            None,
            None,
            None,
        )
    first_figure, second_figure = _figure(figure, first), _figure(figure, second)
    difference = statistics.difference_of(first_figure, second_figure)
    has_intervals = first_figure.low < first_figure.high and second_figure.low < second_figure.high
    change = difference.ratio - 1
    return FigureChange(
        figure,
        first_figure.value,
        second_figure.value,
        change,
        difference.low - 1 if has_intervals else None,
        difference.high - 1 if has_intervals else None,
        difference.real if has_intervals else None,
    )


def _figure(figure: str, point: Point) -> Figure:
    if figure == "throughput":
        return point.throughput
    if figure == "p99":
        return point.p99_ms
    name = (FIGURES | STREAM_FIGURES)[figure]
    if point.rounds and "ms" in name:
        return statistics.percentile_figure(point.counted, name)
    if "ms" not in name and (
        rates := [float(getattr(round_.stream, name)) for round_ in point.counted if round_.stream]
    ):
        return statistics.interval(rates)
    value = point.times[name] if name in point.times else float(getattr(point.stream, name))
    return Figure(value=value, low=value, high=value)


def _figure_is_known(figure: str, point: Point) -> bool:
    return figure not in STREAM_FIGURES or (
        point.stream is not None and (figure != "goodput" or point.stream.goodput is not None)
    )


def _has_errors(point: Point) -> bool:
    return point.error_rate > 0


def _judgements(pair: Pair, conditions: Sequence[Condition]) -> Iterable[Judgement]:
    for condition in conditions:
        change = next(
            figure_change
            for figure_change in pair.changes
            if figure_change.figure == condition.figure
        )
        met = condition.met(change.change) and change.sure is not False
        yield Judgement(
            condition.text, pair.name, pair.load, f"{change.figure} {_percent(change)}", met
        )


def _notes(first: Results, second: Results, judged_pairs: Sequence[_PointPair]) -> list[str]:
    """Return warnings about the comparison."""
    notes = []
    if first.environment.fingerprint != second.environment.fingerprint:
        notes.append(
            "they were measured on different machines, so a difference may be due to the machine"
        )
    for name, first_value, second_value in (
        ("server", first.against or OWN_SERVER, second.against or OWN_SERVER),
        ("model", first.model.name, second.model.name),
        ("bound", first.slo or "none", second.slo or "none"),
        ("protocol", first.protocol, second.protocol),
        ("inputs", _inputs(first), _inputs(second)),
        ("version of torch", first.environment.torch, second.environment.torch),
    ):
        if first_value != second_value:
            notes.append(f"the {name} differs: {first_value}, {second_value}")
    names = [
        str(results.trials[results.winner].as_configuration())
        for results in (first, second)
        if results.winner is not None
    ]
    if len(set(names)) > 1:
        notes.append(f"what is best has changed from {names[0]} to {names[1]}")
    if any(
        point.throughput.low == point.throughput.high for pair in judged_pairs for point in pair[2:]
    ):
        notes.append(
            "what was measured in one round has no confidence interval, so differences may be due"
            " to noise"
        )
    notes += [
        f"the {name} is incomplete"
        for name, results in (("first", first), ("second", second))
        if not results.complete
    ]
    return notes


def _inputs(results: Results) -> str:
    inputs = results.inputs
    return f"{inputs.count} of {inputs.smallest} to {inputs.largest} bytes"


def show_compared(compared: Compared) -> None:
    """Print the comparison as a table, the notes, and the conditions that are met."""
    figures = [change.figure for change in compared.pairs[0].changes]
    rows = [
        [pair.name, pair.load, *(_change_text(change) for change in pair.changes)]
        for pair in compared.pairs
    ]
    print_table(("configuration", "load", *figures), rows)
    if any(change.sure is False for pair in compared.pairs for change in pair.changes):
        print("\n(~) is within the noise of the measurements: no real difference.")
    for note in compared.notes:
        print(f"Note: {one_line(note)}")
    for message in compared.met:
        print(f"Failed: {one_line(message)}")


def print_compared(compared: Compared) -> None:
    pairs = [
        {
            "configuration": pair.name,
            "load": pair.load,
            "changes": [_as_json(change) for change in pair.changes],
        }
        for pair in compared.pairs
    ]
    print_json({"pairs": pairs, "failed": compared.met, "notes": list(compared.notes)})


def _as_json(change: FigureChange) -> dict[str, Any]:
    """Return a change for JSON, which has no infinity (the ratio of a figure to 0)."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in change._asdict().items()
    }


def _change_text(change: FigureChange) -> str:
    if change.figure == "errors":
        return f"{shown.share(change.first)} -> {shown.share(change.second)}"
    noise_mark = " (~)" if change.sure is False else ""
    shown_figure = number if change.figure in ("throughput", "tokens", "goodput") else milliseconds
    return (
        f"{shown_figure(change.first)} -> {shown_figure(change.second)}"
        f"  {_percent(change)}{noise_mark}"
    )


def _percent(change: FigureChange) -> str:
    return (
        f"{100 * change.change:+.2f} points"
        if change.figure == "errors"
        else f"{change.change:+.1%}"
    )
