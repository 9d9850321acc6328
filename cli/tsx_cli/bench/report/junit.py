"""JUnit XML: a test case for each bound, or for each condition of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from tsx_archiver.metadata.slo import Bound
from tsx_archiver.storage.atomic_file import write_atomically
from tsx_cli.bench.load.results import Point, Results, parse_slo
from tsx_cli.bench.report import facts, shown
from tsx_cli.bench.report.compare import Compared
from tsx_cli.common.failure import CliError, UsageError
from tsx_cli.common.output import milliseconds, one_line, rounded


class JUnitCase(NamedTuple):
    """A test case. Its `failure` is a message with the figures, or None if it passed."""

    group: str
    name: str
    failure: str | None = None


def check_junit(file: str, criteria: object, option: str) -> None:
    """Check the options of `--junit`.

    Raises:
        UsageError: There is nothing to judge, or the file cannot be created.
    """
    if not criteria:
        raise UsageError(f"--junit reports what is judged: give {option} as well")
    if Path(file).is_dir() or not Path(file).absolute().parent.is_dir():
        raise UsageError(f"--junit: '{file}' cannot be a file; name one in a directory that exists")


def bound_cases(results: Results) -> list[JUnitCase]:
    """Return a case for each bound of the winner, or of the measured server.

    If no configuration keeps the bounds, the closest configuration is judged.
    """
    group = facts.title(results)
    slo = parse_slo(results.slo or "")
    trial_index = next(
        (index for index in shown.ordered(results) if results.trials[index].points), None
    )
    point = None if trial_index is None else shown.shown_point(results.trials[trial_index])
    cases = []
    if results.against is None:
        cases.append(
            JUnitCase(
                group,
                "a configuration is chosen",
                None if results.winner is not None else results.why or facts.best(results),
            )
        )
    bounds = [
        *slo.bounds,
        *(
            []
            if any(bound.figure == "errors" for bound in slo.bounds)
            else [Bound("errors", 0.0, "errors<=0%")]
        ),
    ]
    # Without answers all latencies are 0 and would pass, so these cases fail explicitly.
    if trial_index is None or point is None or point.throughput.value <= 0:
        failure = (
            "nothing was measured"
            if point is None
            else f"no request was answered ({point.offered})"
        )
        return [*cases, *(JUnitCase(group, bound.text, failure) for bound in bounds)]
    location = f"({shown.name(results.trials[trial_index], results)}, {point.offered})"
    broken = slo.broken(point.times, point.error_rate)
    cases += [
        JUnitCase(
            group, bound.text, f"{_exceeds(bound, point)} {location}" if bound in broken else None
        )
        for bound in bounds
    ]
    if point.offered.mode == "open":
        falls_behind = not point.holds and not broken
        throughput = f"{rounded(point.throughput.value)} answers/s {location}"
        cases.append(
            JUnitCase(
                group,
                "the throughput follows the rate",
                f"the server falls behind: {throughput}" if falls_behind else None,
            )
        )
    return cases


def _exceeds(bound: Bound, point: Point) -> str:
    if bound.figure == "errors":
        return (
            f"{shown.share(point.error_rate)} of the requests failed, the bound is"
            f" {shown.share(bound.limit)}"
        )
    if bound.figure not in point.times:
        return (
            f"{shown.figure_label(bound.figure)} is not known, as the answers were no event streams"
        )
    interval = f" {shown.margin(point.p99_ms)}".rstrip() if bound.figure == "p99_ms" else ""
    value = milliseconds(point.times[bound.figure])
    label = shown.figure_label(bound.figure)
    return f"{label} is {value}{interval}, the bound is {milliseconds(bound.limit)}"


def condition_cases(compared: Compared, results: Results) -> list[JUnitCase]:
    group = facts.title(results)
    return [
        JUnitCase(
            f"{group}: {judgement.name}, {judgement.load}",
            f"not {judgement.condition}",
            judgement.text if judgement.met else None,
        )
        for judgement in compared.judgements
    ]


def write_junit(file: str, cases: Sequence[JUnitCase], results: Results) -> None:
    """Write the test cases as JUnit XML.

    Raises:
        CliError: The file cannot be written.
    """
    failed = sum(case.failure is not None for case in cases)
    counts = {
        "tests": str(len(cases)),
        "failures": str(failed),
        "errors": "0",
        "time": f"{_seconds(results):.3f}",
    }
    root = ElementTree.Element("testsuites", {"name": "tsx bench", **counts})
    suite = ElementTree.SubElement(
        root,
        "testsuite",
        {"name": "tsx bench", "timestamp": results.started[:19], "skipped": "0", **counts},
    )
    for case in cases:
        element = ElementTree.SubElement(
            suite,
            "testcase",
            {"classname": one_line(case.group), "name": one_line(case.name), "time": "0"},
        )
        if case.failure is not None:
            message = one_line(case.failure)
            ElementTree.SubElement(
                element, "failure", {"message": message, "type": "bound"}
            ).text = message
    ElementTree.indent(root)
    try:
        with write_atomically(Path(file), durable=False) as out:
            out.write(ElementTree.tostring(root, encoding="utf-8", xml_declaration=True) + b"\n")
    except OSError as error:
        raise CliError(f"--junit: '{file}' cannot be written: {error.strerror or error}") from error


def _seconds(results: Results) -> float:
    """Return the seconds of the run, or 0 if its end is unknown."""
    try:
        start, end = (
            datetime.fromisoformat(text or "") for text in (results.started, results.ended)
        )
        return max(0.0, (end - start).total_seconds())
    except (ValueError, TypeError):
        return 0.0
