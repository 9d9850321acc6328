"""The output of `tsx deploy logs`, and of a failure: the platform's reason, the end of the log, the
likely causes.
"""

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
    """The log of containers on this machine, of pods or of replicas, from what runs them."""

    def __init__(self, place: Location) -> None:
        self._place, self.group = place, f"{place.target} {place.name}"

    def last(self, count: int, since: float | None = None) -> list[LogLine]:
        return list(self._lines(count, since, follow=False))

    def onwards(self, count: int, since: float | None = None) -> Iterator[LogLine]:
        return self._lines(count, since, follow=True)

    def _lines(self, count: int, since: float | None, *, follow: bool) -> Iterator[LogLine]:
        platform: Any = self._place.platform
        ago = None if since is None else f"{max(1, math.ceil(time.time() - since))}s"
        for text in platform.logs(
            self._place.cloud, self._place.name, lines=count, since=ago, follow=follow
        ):
            yield LogLine(None, "", text)


Log = CloudWatch | ProgramLog


def log_of(place: Location) -> Log:
    return CloudWatch(place.cloud, place.log_name) if place.log_name else ProgramLog(place)


def show_lines(log: Log, *, since: float | None, count: int, follow: bool, as_json: bool) -> None:
    """`since` in seconds before now."""
    start = None if since is None else time.time() - since
    lines: Iterable[LogLine] = log.onwards(count, start) if follow else log.last(count, start)
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
            print(json.dumps(report), flush=True)  # one a line
        else:
            print(
                f"{'' if when is None else f'{when.astimezone():%Y-%m-%d %H:%M:%S} '}{escaped(line.text)}",
                flush=True,
            )


def why(log: Log, reason: str, since: float | None = None) -> dict[str, Any]:
    """The end of the log and the likely causes; where the log cannot be read, the reason."""
    try:
        lines = [line.text for line in log.last(FAILURE_LINES, since)]
        unread = ""
    except CloudError as error:
        lines, unread = [], error.message
    causes = [str(each) for each in diagnose(reason, lines)]
    if not lines and not unread and isinstance(log, CloudWatch):
        causes.append(SILENT)
    return {"log": lines, "log_unread": unread, "diagnosis": causes}


def show_why(found: dict[str, Any], log: Log, *, to_stderr: bool) -> None:
    file = sys.stderr if to_stderr else sys.stdout
    if found["log"]:
        print(f"The last {len(found['log'])} lines of {log.group}:", file=file)
        for line in found["log"]:
            print(f"| {escaped(line)}", file=file)
    elif found["log_unread"]:
        print(f"The log could not be read: {escaped(found['log_unread'])}", file=file)
    for cause in found["diagnosis"]:
        print(f"Likely: {escaped(cause)}", file=file)


def explain(error: DeployFailed, log: Log, since: float) -> None:
    """To stderr, what the container itself said of a start that failed since that moment."""
    kind = error.change.resource.kind
    if error.change.action == "delete":
        return
    if kind in RUN_CODE:
        found = why(log, error.message, since)
        if kind.startswith("AWS::Lambda::"):  # no image need have been started by then
            found["diagnosis"] = [each for each in found["diagnosis"] if each != SILENT]
        show_why(found, log, to_stderr=True)
    elif kind.startswith(
        "Tsx::"
        # what docker and kubectl say is in the message, with the last words of a container that
        # made way
    ):
        for cause in diagnose("", error.message.splitlines()):
            print(f"Likely: {escaped(str(cause))}", file=sys.stderr)
