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
from tsx_cli.deploy.engine.engine import DeployFailed
from tsx_cli.deploy.engine.kind import CloudError
from tsx_cli.deploy.preflight.diagnosis import SILENT, diagnose
from tsx_cli.deploy.spec_values import span
from tsx_cli.deploy.target import Location
from tsx_runtime.shared.log_format import escaped

CODE_RUNNING_KINDS = {
    "AWS::SageMaker::Endpoint",
    "AWS::SageMaker::InferenceComponent",
    "AWS::Lambda::Function",
    "AWS::Lambda::Version",
    "AWS::Lambda::Alias",
    "Kubernetes::Deployment",
    "Kubernetes::InferenceService",
    "Tsx::Ray::Application",
}


class ProgramLog:
    """The log of containers, pods or replicas, read through the program that manages them."""

    def __init__(self, location: Location) -> None:
        self._location, self.group = location, f"{location.target.name} {location.name}"

    def last_lines(self, count: int, since: float | None = None) -> list[LogLine]:
        return list(self._lines(count, since, follow=False))

    def follow_from_last(self, count: int, since: float | None = None) -> Iterator[LogLine]:
        return self._lines(count, since, follow=True)

    def _lines(self, count: int, since: float | None, *, follow: bool) -> Iterator[LogLine]:
        platform: Any = self._location.platform
        max_age = None if since is None else f"{max(1, math.ceil(time.time() - since))}s"
        for text in platform.logs(
            self._location.cloud, self._location.name, lines=count, since=max_age, follow=follow
        ):
            yield LogLine(None, "", text)


Log = CloudWatch | ProgramLog


def log_of(location: Location) -> Log:
    return (
        CloudWatch(location.cloud, location.log_name) if location.log_name else ProgramLog(location)
    )


def show_lines(log: Log, *, since: str | None, count: int, follow: bool, as_json: bool) -> None:
    """Print lines of a log.

    Args:
        log: The log.
        since: How far back to start, such as 10m.
        count: The largest number of lines.
        follow: Whether to print new lines as well.
        as_json: Whether to print a JSON object for each line.

    Raises:
        CliError: There are no lines.
    """
    start = None if since is None else time.time() - span(since, "--since")
    lines: Iterable[LogLine] = (
        log.follow_from_last(count, start) if follow else log.last_lines(count, start)
    )
    if not lines:
        raise CliError(
            f"{log.group} has no lines{'' if since is None else ' of that time'}; an invocation or"
            " a start writes some"
        )
    for line in lines:
        time_of_line = line.time
        if as_json:
            report = {
                "time": None if time_of_line is None else time_of_line.isoformat(),
                "stream": line.stream,
                "message": line.text,
            }
            print(json.dumps(report), flush=True)  # JSON lines
        else:
            time_text = (
                "" if time_of_line is None else f"{time_of_line.astimezone():%Y-%m-%d %H:%M:%S} "
            )
            print(f"{time_text}{escaped(line.text)}", flush=True)


def explain_log(log: Log, reason: str, since: float | None = None) -> dict[str, Any]:
    """Return the end of the log and the likely causes, or the reason why the log cannot be read."""
    try:
        lines = [line.text for line in log.last_lines(FAILURE_LINES, since)]
        read_error = ""
    except CloudError as error:
        lines, read_error = [], error.message
    causes = [str(diagnosis) for diagnosis in diagnose(reason, lines)]
    if not lines and not read_error and isinstance(log, CloudWatch):
        causes.append(SILENT)
    return {"log": lines, "log_unread": read_error, "diagnosis": causes}


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
    """Print to stderr the log and the likely causes of a failed start.

    `since` is the time when the start began.
    """
    kind = error.change.resource.kind
    if error.change.action == "delete":
        return
    if kind in CODE_RUNNING_KINDS:
        findings = explain_log(log, error.message, since)
        # A silent log is normal if Lambda has not started the image.
        if kind.startswith("AWS::Lambda::"):
            findings["diagnosis"] = [cause for cause in findings["diagnosis"] if cause != SILENT]
        show_explanation(findings, log, to_stderr=True)
    elif kind.startswith("Tsx::"):  # The message contains the output of the program.
        for cause in diagnose("", error.message.splitlines()):
            print(f"Likely: {escaped(str(cause))}", file=sys.stderr)
