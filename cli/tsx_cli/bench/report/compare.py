"""`tsx bench compare`: compares two results.json files, tests differences for significance, and
applies --fail-if.
"""

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
STREAM = {
    "tokens": "tokens_per_second",
    "goodput": "goodput",
}  # what event streams have besides, all rates
STREAM |= {
    f"{part}.{name}": f"{part}.{field}"
    for part in STREAM_TIMES
    for name, field in PERCENTILES.items()
}
SHOWN = ("throughput", "p50", "p99")
SHOWN_OF_STREAMS = ("tokens", "ttft.p99", "tpot.p99")
OWN = "one of tsx bench's own"
BEST = "best"  # the name of the pair of both runs' winners
LISTED = 300  # characters
_CONDITION = re.compile(
    r"\s*(throughput|tokens|goodput|(?:(?:ttft|tpot)\.)?(?:mean|p50|p90|p95|p99\.9|p99|max)|errors)\s*([<>])\s*([+-]?\d+(?:\.\d+)?)\s*%\s*"
)


class Condition(NamedTuple):
    """`throughput<-5%`: it is met where the throughput fell by more than 5 %.

    For `errors` it is percentage points of their rate.
    """

    figure: str
    above: bool
    limit: float  # a share: -0.05
    text: str

    def met(self, change: float) -> bool:
        return change > self.limit if self.above else change < self.limit


class FigureChange(NamedTuple):
    """The change of one figure.

    `change` is a share of the first, or for `errors` the difference of their rates.

    `low`, `high` and `sure` are None where one of the two has no interval.
    """

    figure: str
    first: float
    second: float
    change: float
    low: float | None
    high: float | None
    sure: bool | None


class Pair(NamedTuple):
    """The same configuration under the same load, in both runs."""

    name: str
    load: str
    changes: Sequence[FigureChange]


class Judgement(NamedTuple):
    """A condition, applied to one pair."""

    condition: str
    name: str
    load: str
    text: str  # the change, in words
    met: bool


class Compared(NamedTuple):
    pairs: Sequence[Pair]
    judgements: Sequence[Judgement]
    notes: Sequence[str]

    @property
    def met(self) -> list[str]:
        """The conditions that are met, in words."""
        return [
            f"{each.condition}: {each.text} ({each.name}, {each.load})"
            for each in self.judgements
            if each.met
        ]


def parse_condition(text: str) -> Condition:
    """Raises UsageError."""
    found = _CONDITION.fullmatch(text)
    if found is None:
        raise UsageError(
            f"--fail-if: '{text}' is not a condition. One is a figure and a change, such as"
            " 'throughput<-5%' (it fell by more than 5 %) or 'p99>10%'; there are"
            f" {', '.join(FIGURES)}, errors in percentage points, and of event streams tokens,"
            " goodput, ttft.p99 and tpot.p99"
        )
    limit = float(found[3]) / 100
    condition = Condition(found[1], found[2] == ">", limit, text.strip())
    if condition.met(0.0):
        raise UsageError(
            f"--fail-if: '{text}' is met where nothing has changed; 'throughput<-5%' is a fall,"
            " 'p99>10%' a rise"
        )
    return condition


def compare(
    first: Results, second: Results, conditions: Sequence[Condition] = (), *, every: bool = False
) -> Compared:
    """Conditions are for what each run found best; with `every`, or where one has no winner, for
    each configuration and load of both.

    A change meets a condition where it goes beyond its limit and is real. What was measured once
    has no interval, and then counts as it is. Raises UsageError where both have nothing in common.
    """
    best, pairs = _best(first, second), list(_pairs(first, second))
    if best is None and not pairs:
        measured = [
            "; ".join(
                f"{shown.name(trial, run)}, {point.offered}"
                for trial in run.trials
                for point in trial.points
            )
            for run in (first, second)
        ]
        raise UsageError(
            "not both runs have a winner, and no configuration and load is in both, so there is"
            f" nothing to compare. The first has measured [{shorten(measured[0], LISTED)}], the"
            f" second [{shorten(measured[1], LISTED)}]. Measure both with the same --batch-sizes,"
            " --workers and --connections"
        )
    judged = [best] if best is not None and not every else [*([best] if best else []), *pairs]
    named = {condition.figure for condition in conditions}
    if named & STREAM.keys() and not all(
        _figure_is_known(figure, point) for figure in named for each in judged for point in each[2:]
    ):
        raise UsageError(
            f"--fail-if: {', '.join(sorted(named & STREAM.keys()))} is of event streams, which not"
            " both runs have measured"
        )
    wanted = [figure for figure in FIGURES if figure in SHOWN or figure in named]
    if all(point.stream for each in [*judged, *pairs] for point in each[2:]):
        wanted += [figure for figure in STREAM if figure in SHOWN_OF_STREAMS or figure in named]
    if any(condition.figure == "errors" for condition in conditions) or any(
        _failed(each[2]) or _failed(each[3]) for each in judged
    ):
        wanted.append("errors")
    pairs_by_id = {
        id(each): Pair(each[0], each[1], [_change(figure, each[2], each[3]) for figure in wanted])
        for each in [*judged, *pairs]
    }
    judgements = [found for each in judged for found in _judged(pairs_by_id[id(each)], conditions)]
    return Compared(
        [pairs_by_id[id(each)] for each in ([best] if best else []) + pairs],
        judgements,
        _notes(first, second, judged),
    )


_Both = tuple[str, str, Point, Point]


def _best(first: Results, second: Results) -> _Both | None:
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


def _pairs(first: Results, second: Results) -> Iterable[_Both]:
    """In the order of the first."""
    others = {
        _key(trial.configuration, point): point for trial in second.trials for point in trial.points
    }
    for index in shown.ordered(first):
        trial = first.trials[index]
        for point in trial.points:
            other = others.get(_key(trial.configuration, point))
            if other is not None:
                yield _name(trial, first, second), str(point.offered), point, other


def _name(trial: Trial, first: Results, second: Results) -> str:
    """The configuration; of servers that ran already their addresses."""
    names = (shown.name(trial, each) for each in (first, second))
    return " -> ".join(dict.fromkeys(names))


def _key(configuration: dict[str, Any], point: Point) -> tuple[Any, ...]:
    offered = point.offered
    rate = None if offered.rate is None else round(offered.rate, 3)
    known = tuple(
        sorted((key, value) for key, value in configuration.items() if value is not None)
    )  # older results lack some keys
    return (
        known,
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
    one, other = _figure(figure, first), _figure(figure, second)
    difference = statistics.difference_of(one, other)
    known = one.low < one.high and other.low < other.high
    change = difference.ratio - 1
    return FigureChange(
        figure,
        one.value,
        other.value,
        change,
        difference.low - 1 if known else None,
        difference.high - 1 if known else None,
        difference.real if known else None,
    )


def _figure(figure: str, point: Point) -> Figure:
    if figure == "throughput":
        return point.throughput
    if figure == "p99":
        return point.p99_ms
    name = (FIGURES | STREAM)[figure]
    if point.rounds and "ms" in name:
        return statistics.percentile_figure(point.counted, name)
    if "ms" not in name and (
        rates := [float(getattr(each.stream, name)) for each in point.counted if each.stream]
    ):
        return statistics.interval(rates)
    value = point.times[name] if name in point.times else float(getattr(point.stream, name))
    return Figure(value=value, low=value, high=value)


def _figure_is_known(figure: str, point: Point) -> bool:
    return figure not in STREAM or (
        point.stream is not None and (figure != "goodput" or point.stream.goodput is not None)
    )


def _failed(point: Point) -> bool:
    return point.error_rate > 0


def _judged(pair: Pair, conditions: Sequence[Condition]) -> Iterable[Judgement]:
    for condition in conditions:
        change = next(each for each in pair.changes if each.figure == condition.figure)
        met = condition.met(change.change) and change.sure is not False
        yield Judgement(
            condition.text, pair.name, pair.load, f"{change.figure} {_percent(change)}", met
        )


def _notes(first: Results, second: Results, judged: Sequence[_Both]) -> list[str]:
    """What a reader must know before believing it."""
    notes = []
    if first.environment.fingerprint != second.environment.fingerprint:
        notes.append(
            "they were measured on different machines, so a difference may be due to the machine"
        )
    for name, one, other in (
        ("server", first.against or OWN, second.against or OWN),
        ("model", first.model.name, second.model.name),
        ("bound", first.slo or "none", second.slo or "none"),
        ("protocol", first.protocol, second.protocol),
        ("inputs", _inputs(first), _inputs(second)),
        ("version of torch", first.environment.torch, second.environment.torch),
    ):
        if one != other:
            notes.append(f"the {name} differs: {one}, {other}")
    names = [
        str(results.trials[results.winner].how())
        for results in (first, second)
        if results.winner is not None
    ]
    if len(set(names)) > 1:
        notes.append(f"what is best has changed from {names[0]} to {names[1]}")
    if any(point.throughput.low == point.throughput.high for each in judged for point in each[2:]):
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
    """A table, what is met, and what is to be known."""
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
            "configuration": p.name,
            "load": p.load,
            "changes": [_as_json(change) for change in p.changes],
        }
        for p in compared.pairs
    ]
    print_json({"pairs": pairs, "failed": compared.met, "notes": list(compared.notes)})


def _as_json(change: FigureChange) -> dict[str, Any]:
    """JSON has no infinity, which is how many times more than nothing something is."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in change._asdict().items()
    }


def _change_text(change: FigureChange) -> str:
    if change.figure == "errors":
        return f"{shown.share(change.first)} -> {shown.share(change.second)}"
    doubt = " (~)" if change.sure is False else ""
    shown_figure = number if change.figure in ("throughput", "tokens", "goodput") else milliseconds
    return (
        f"{shown_figure(change.first)} -> {shown_figure(change.second)}  {_percent(change)}{doubt}"
    )


def _percent(change: FigureChange) -> str:
    return (
        f"{100 * change.change:+.2f} points"
        if change.figure == "errors"
        else f"{change.change:+.1%}"
    )
