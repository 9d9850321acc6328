"""The output of `tsx deploy logs`, and the explanation of a failure from the log."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

from tsx_cli.common.failure import CliError
from tsx_cli.deploy.aws.logs import FAILURE_LINES, CloudWatch, LogLine
from tsx_cli.deploy.commands.locations import Location
from tsx_cli.deploy.engine.engine import DeployFailed
from tsx_cli.deploy.engine.kind import CloudError
from tsx_cli.deploy.preflight.diagnosis import SILENT, diagnose
from tsx_runtime.shared.log_format import escaped

RUN_CODE = frozenset(
    {
        "AWS::SageMaker::Endpoint",
        "AWS::SageMaker::InferenceComponent",
        "AWS::Lambda::Function",
        "AWS::Lambda::Version",
        "AWS::Lambda::Alias",
    }
    | {"Kubernetes::Deployment", "Kubernetes::InferenceService", "Tsx::Ray::Application"}
)


class ProgramLog:
    """The log of containers, pods or replicas, read from the program that runs them."""

    def __init__(self, location: Location) -> None:
        self._place, self.group = location, f"{location.target} {location.name}"

    def last_lines(self, count: int, since: float | None = None) -> list[LogLine]:
        return list(self._lines(count, since, follow=False))

    def follow_from_last(self, count: int, since: float | None = None) -> Iterator[LogLine]:
        return self._lines(count, since, follow=True)

    def _lines(self, count: int, since: float | None, *, follow: bool) -> Iterator[LogLine]:
        platform: Any = self._place.platform
        ago = None if since is None else f"{max(1, math.ceil(time.time() - since))}s"
        for text in platform.logs(
            self._place.cloud, self._place.name, lines=count, since=ago, follow=follow
        ):
            yield LogLine(None, "", text)


Log = CloudWatch | ProgramLog


def log_of(location: Location) -> Log:
    return (
        CloudWatch(location.cloud, location.log_name) if location.log_name else ProgramLog(location)
    )


def show_lines(log: Log, *, since: float | None, count: int, follow: bool, as_json: bool) -> None:
    """Print lines of a log.

    Args:
        log: The log.
        since: How far back to start, in seconds.
        count: The largest number of lines.
        follow: Whether to print new lines as well.
        as_json: Whether to print a JSON object for each line.

    Raises:
        CliError: There are no lines.
    """
    start = None if since is None else time.time() - since
    lines: Iterable[LogLine] = (
        log.follow_from_last(count, start) if follow else log.last_lines(count, start)
    )
    if not lines:
        raise CliError(
            f"{log.group} has no lines{'' if since is None else ' of that time'}; an invocation or"
            " a start writes some"
        )
    for line in lines:
        when = line.when
        if as_json:
            report = {
                "time": None if when is None else when.isoformat(),
                "stream": line.stream,
                "message": line.text,
            }
            print(json.dumps(report), flush=True)  # JSON lines
        else:
            time_text = "" if when is None else f"{when.astimezone():%Y-%m-%d %H:%M:%S} "
            print(f"{time_text}{escaped(line.text)}", flush=True)


def explain_log(log: Log, reason: str, since: float | None = None) -> dict[str, Any]:
    """Return the end of the log and the likely causes, or why the log cannot be read."""
    try:
        lines = [line.text for line in log.last_lines(FAILURE_LINES, since)]
        unread = ""
    except CloudError as error:
        lines, unread = [], error.message
    causes = [str(diagnosis) for diagnosis in diagnose(reason, lines)]
    if not lines and not unread and isinstance(log, CloudWatch):
        causes.append(SILENT)
    return {"log": lines, "log_unread": unread, "diagnosis": causes}


def show_explanation(findings: dict[str, Any], log: Log, *, to_stderr: bool) -> None:
    file = sys.stderr if to_stderr else sys.stdout
    if findings["log"]:
        print(f"The last {len(findings['log'])} lines of {log.group}:", file=file)
        for line in findings["log"]:
            print(f"| {escaped(line)}", file=file)
    elif findings["log_unread"]:
        print(f"The log could not be read: {escaped(findings['log_unread'])}", file=file)
    for cause in findings["diagnosis"]:
        print(f"Likely: {escaped(cause)}", file=file)


def explain(error: DeployFailed, log: Log, since: float) -> None:
    """Print to stderr the log and the likely causes of a start that failed since a time."""
    kind = error.change.resource.kind
    if error.change.action == "delete":
        return
    if kind in RUN_CODE:
        findings = explain_log(log, error.message, since)
        if kind.startswith("AWS::Lambda::"):  # perhaps no image was started
            findings["diagnosis"] = [cause for cause in findings["diagnosis"] if cause != SILENT]
        show_explanation(findings, log, to_stderr=True)
    elif kind.startswith("Tsx::"):  # the message has the output of the program
        for cause in diagnose("", error.message.splitlines()):
            print(f"Likely: {escaped(str(cause))}", file=sys.stderr)
