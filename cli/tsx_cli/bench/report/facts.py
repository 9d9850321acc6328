"""The text around the figures of a report: the winner, the environment, the inputs, how to reproduce it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tsx_cli.bench.model.parts import SizeClass
from tsx_cli.bench.model.results import Environment, Inputs, ModelInfo, Point, Results
from tsx_cli.bench.model.statistics import interval
from tsx_cli.bench.report import shown
from tsx_cli.common.output import milliseconds, number


class Tile(NamedTuple):
    name: str
    value: str
    beside: str


class ColdLine(NamedTuple):
    """A configuration's starts beside its answers afterwards."""

    name: str
    ready: str
    first: str
    warm: str


class SizeLine(NamedTuple):
    sizes: str
    answers: str
    p50: str
    p99: str


class PointLine(NamedTuple):
    text: Sequence[str]
    figures: Sequence[str]
    bounds: str


COLD = ("configuration", "start until ready", "first answer", "warm p50")
SIZES = ("input", "answers", "p50", "p99")
STREAMS = ("configuration, load", "TTFT p50, p99", "TPOT p50, p99", "tokens/s", "goodput")


def title(results: Results) -> str:
    version = f" {results.model.version}" if results.model.version else ""
    return f"{results.model.name or results.against}{version}"


def subtitle(results: Results) -> str:
    asked = f"bound {results.slo}" if results.slo else "no bound was given"
    where = f"at {results.against}" if results.against else f"on {machine(results.environment)}"
    return f"tsx bench, {shown.moment(results.started)}, {where}; {asked}"


def machine(here: Environment) -> str:
    gpus = f", {', '.join(here.gpus)}" if here.gpus else ""
    return f"{here.cores} core{'s' if here.cores != 1 else ''}, {here.cpu or 'an unknown CPU'}{gpus}"


def pinned(results: Results) -> str:
    if results.pinning is None:
        return ""
    sides = {"server": results.pinning.server, "generator": results.pinning.generator}
    return ", ".join(f"{side} {','.join(map(str, cores))}" for side, cores in sides.items() if cores)


def partial(results: Results) -> str:
    return "" if results.complete else "This run is incomplete: the report shows what was measured before it stopped."


def heading(results: Results) -> str:
    if results.against is not None and results.winner is None:
        return "Measured at"
    if results.winner is None:
        return "No configuration was chosen"
    if results.tied:
        return "Recommended, of several that differ within the noise"
    title = "Highest throughput" if results.winner_leads else "Recommended"
    return f"{title} within {results.slo}" if results.slo else title


def best(results: Results) -> str:
    if results.winner is not None:
        return shown.name(results.trials[results.winner], results)
    if results.against is not None:
        return results.against
    if results.faster_unmeasured:
        return "The time was too short to choose"
    return "No configuration met the bound" if results.slo and any(trial.points for trial in results.trials) else "Nothing was measured"


def summary_point(results: Results) -> Point | None:
    """The winner's; where none was sought, that of the server that was measured."""
    if results.winner is not None:
        return results.trials[results.winner].chosen
    if results.against is not None:
        return next((point for trial in results.trials if (point := shown.shown_point(trial)) is not None), None)
    return None


def tiles(results: Results) -> list[Tile]:
    point = summary_point(results)
    if point is None:
        return []
    shown_tiles = [
        Tile("Throughput", f"{number(point.throughput.value)}/s", shown.margin(point.throughput) or "accepted answers"),
        Tile("p99", milliseconds(point.p99_ms.value), shown.margin(point.p99_ms) or "of the answers' latencies"),
        Tile("p50", milliseconds(point.latency.p50_ms), f"mean {milliseconds(point.latency.mean_ms)}"),
        Tile("Errors", shown.share(point.error_rate), f"at {point.offered}"),
    ]
    if (stream := point.stream) is not None:
        shown_tiles[1:3] = [
            Tile(
                "Tokens",
                f"{number(stream.tokens_per_second)}/s",
                f"and {number(stream.prompt_tokens_per_second)}/s of prompts" if stream.prompt_tokens else "generated",
            ),
            Tile("TTFT p99", milliseconds(stream.ttft.p99_ms), f"time to first token, p50 {milliseconds(stream.ttft.p50_ms)}"),
            Tile("TPOT p99", milliseconds(stream.tpot.p99_ms), f"time per output token, p50 {milliseconds(stream.tpot.p50_ms)}"),
        ]
        if stream.goodput is not None:
            shown_tiles.insert(1, Tile("Goodput", f"{number(stream.goodput)}/s", "answers that keep each bound"))
    gain = shown.gain(results)
    if gain is not None:
        doubt = ", within the noise" if not gain.real and math.isfinite(gain.high) else ""
        shown_tiles.insert(1, Tile("Compared with the baseline", f"{gain.ratio:.2f} times", f"of one worker and batch 1{doubt}"))
    return shown_tiles


def cold(results: Results) -> list[ColdLine]:
    """Means over the starts of each configuration; warm is its least median."""
    rows = []
    for trial in (results.trials[index] for index in shown.ordered(results)):
        warm = [point.latency.p50_ms for point in trial.points if point.latency.p50_ms > 0]
        if not trial.starts or not warm:
            continue
        first = [start.first_answer_ms for start in trial.starts if start.first_answer_ms is not None]
        ready = shown.with_margin(interval([1000 * start.ready_seconds for start in trial.starts]))
        answered = shown.with_margin(interval(first)) if first else shown.NONE
        rows.append(ColdLine(shown.name(trial, results), ready, answered, milliseconds(min(warm))))
    return rows


def sizes(results: Results) -> list[SizeLine]:
    """Latencies by the size of the input, at the summary's load."""
    point = summary_point(results)
    classes: dict[tuple[int, int], list[SizeClass]] = {}
    for each in (each for one in (point.counted if point else []) for each in one.by_size if each.ok):
        classes.setdefault((each.smallest, each.largest), []).append(each)
    return [
        SizeLine(
            f"{smallest:,} bytes" if smallest == largest else f"{smallest:,} to {largest:,} bytes",
            f"{sum(each.ok for each in found):,}",
            shown.with_margin(interval([each.p50_ms for each in found])),
            shown.with_margin(interval([each.p99_ms for each in found])),
        )
        for (smallest, largest), found in sorted(classes.items())
    ]


def streams(results: Results) -> list[Sequence[str]]:
    """Of each measured load; goodput is the answers per second that kept each bound by themselves."""
    return [
        (
            f"{shown.name(trial, results)}, {point.offered}",
            f"{milliseconds(stream.ttft.p50_ms)}, {milliseconds(stream.ttft.p99_ms)}",
            f"{milliseconds(stream.tpot.p50_ms)}, {milliseconds(stream.tpot.p99_ms)}",
            number(stream.tokens_per_second),
            shown.NONE if stream.goodput is None else f"{number(stream.goodput)}/s",
        )
        for trial in (results.trials[index] for index in shown.ordered(results))
        for point in trial.points
        if (stream := point.stream) is not None
    ]


def keys(results: Results) -> str:
    """The winner as model-config.yaml has it."""
    if results.winner is None or not results.trials[results.winner].configuration:
        return ""
    settings: dict[str, Any] = {key: value for key, value in results.trials[results.winner].how().keys().items() if value is not None}
    return yaml.safe_dump(settings, sort_keys=False).rstrip()


def failures(results: Results) -> list[tuple[str, str]]:
    """(configuration, all that its log said) of those that the table tells in brief only."""
    failed = [trial for trial in results.trials if trial.state == "failed" and trial.reason]
    return [(shown.name(trial, results), trial.reason or "") for trial in failed if shown.brief(trial.reason or "") != trial.reason]


def points(results: Results) -> list[PointLine]:
    return [
        PointLine(
            (shown.name(trial, results), str(point.offered)),
            (
                f"{number(point.throughput.value)} {shown.margin(point.throughput)}".strip(),
                *(
                    milliseconds(getattr(point.latency, figure))
                    for figure in ("mean_ms", "p50_ms", "p90_ms", "p99_ms", "p999_ms", "max_ms")
                ),
                shown.share(point.error_rate),
                *([shown.cost(point, results)] if results.price_per_hour is not None else []),
                _rounds(point),
            ),
            "hold" if point.holds else "broken",
        )
        for trial in (results.trials[index] for index in shown.ordered(results))
        for point in trial.points
    ]


def _rounds(point: Point) -> str:
    bad = sum(bool(each.disturbed) for each in point.counted)
    return f"{len(point.counted)} ({bad} disturbed)" if bad else str(len(point.counted) or shown.NONE)


def facts(results: Results) -> list[tuple[str, str]]:
    """(name, value) of the environment and of what was sent; what is not known is left out."""
    rows = [
        ("protocol", results.protocol),
        ("price per hour", None if results.price_per_hour is None else number(results.price_per_hour)),
        ("pinned to cores", pinned(results)),
        *moments(results.started, results.ended),
    ]
    return common_facts(results.model, results.environment, results.inputs) + [(name, value) for name, value in rows if value]


def common_facts(model: ModelInfo, here: Environment, sent: Inputs) -> list[tuple[str, str]]:
    """The facts that reports of `tsx bench` and `tsx optimize` share."""
    kinds = ", ".join(f"{kind or 'no type'} ({count})" for kind, count in sent.content_types.items())
    sizes = (
        f"{sent.smallest:,} bytes"
        if sent.smallest == sent.largest
        else f"{sent.smallest:,} to {sent.largest:,} bytes, median {sent.median:,}"
    )
    versions = {"tsx": here.tsx, "torch": here.torch, "Python": here.python}
    rows = [
        ("model", model.archive or model.name),
        ("sha-256", model.sha256),
        ("size", None if model.size_mib is None else f"{model.size_mib:,.1f} MiB"),
        ("inputs", f"{sent.count} different from {sent.source}; {sizes}"),
        ("content types", kinds),
        ("processor", machine(here)),
        ("memory", f"{here.memory_mib:,} MiB" if here.memory_mib else None),
        ("system", here.system),
        ("versions", ", ".join(f"{name} {value}" for name, value in versions.items() if value)),
        ("noise", None if here.noise is None else f"a fixed computation varied by {here.noise:.1%}"),
    ]
    return [(name, value) for name, value in rows if value]


def moments(started: str, ended: str | None) -> list[tuple[str, str | None]]:
    return [("began", shown.moment(started)), ("ended", shown.moment(ended))]


def files(directory: Path) -> list[tuple[str, str]]:
    """The files of `--profile` beside the report, with a command for those that a browser does not show."""
    place = directory / "profile"
    found = sorted(file.relative_to(directory).as_posix() for file in place.rglob("*") if file.is_file()) if place.is_dir() else []
    return [(file, f"snakeviz {file}" if file.endswith(".prof") else "") for file in found]
