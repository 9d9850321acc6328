"""Lambda's contract: https://docs.aws.amazon.com/lambda/latest/dg/runtimes-api.html and
gettingstarted-limits.html.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tsx_cli.archive.check import ModelSample
from tsx_cli.check.container import unpack_model
from tsx_cli.check.entry import ENTRY, LAST, environment
from tsx_cli.check.lambda_events import balancer, function_url, messages, rest_api
from tsx_cli.check.lambda_host import (
    INIT,
    LARGEST_ANSWER,
    LARGEST_REQUEST,
    Host,
    HostedInvocation,
    RequestTooLarge,
)
from tsx_cli.check.report import Report, time_of
from tsx_cli.deploy.preflight.diagnosis import diagnose

SHORT = 2.0  # seconds of the invocation that is to be answered in time, whatever the model does
STOP = 2.0  # seconds from SIGTERM to SIGKILL
EMPTY = ModelSample("{}", "application/json", b"{}")  # sent where there is no sample
TEXT_TYPES = ("text/", "application/json")
ROOM = 2048  # bytes of an event around its body
PATH = "/invocations"
WAYS: Mapping[str, Callable[..., dict[str, Any]]] = {
    "a function URL, an HTTP API": function_url,
    "a REST API": rest_api,
    "a load balancer": balancer,
}


def check(
    report: Report,
    archive: Path,
    samples: Sequence[ModelSample],
    env: Mapping[str, str],
    place: Path,
    timeout: float,
) -> None:
    """The image's entry in front of a Runtime API, frozen between invocations; `timeout` is the
    function's.
    """
    unpack_model(archive, place)
    own = environment({"TSX_MODEL_DIR": str(place / "model"), "TSX_TARGET": "lambda", **env})
    host = Host(ENTRY, place, own, timeout=timeout)
    before = _files(place / "model")
    try:
        if not _starts(host, samples, report):
            return
        good = _answers(host, samples, report)
        if good is None:
            report.not_checked("requests", samples)
        else:
            _comes_by_each_way(host, good, report)
            _takes_messages(host, good, report)
            _answers_in_time(host, good, report)
        _takes_the_largest(host, report)
        written = sorted(_files(place / "model") - before)
        response = f"{len(written)} files, such as {written[0]}" if written else "none"
        report.add(
            "files written beside the model",
            not written,
            response,
            "none",
            "only /tmp is writable on Lambda: let the handler write there",
        )
        _ends(host, report)
    finally:
        host.close()


def _starts(host: Host, samples: Sequence[ModelSample], report: Report) -> bool:
    """Send the first invocation, which includes the start; return whether there is an
    environment.
    """
    first = samples[0] if samples else EMPTY
    begin = time.monotonic()
    invocation = _sent(host, function_url, first)
    took = time.monotonic() - begin
    ended = (
        not isinstance(invocation, str)
        and _status(invocation) == 503
        and host.ended(SHORT) is not None
    )
    if isinstance(invocation, str) or invocation.error is not None or ended:
        text = (
            invocation
            if isinstance(invocation, str)
            else invocation.answer[:300].decode(errors="replace")
        )
        report.log = host.log.splitlines()[-LAST:]
        ways = " ".join(map(str, diagnose(text, report.log))) or f"it was answered: {text}"
        report.add(
            "the first invocation", False, f"failed after {time_of(took)}", "an answer", ways
        )
        return False
    way = (
        "the handler's imports take too long; Lambda then repeats the start within the invocation's"
        " timeout: use provisioned concurrency"
    )
    report.within("start until it asks for invocations", host.init_seconds, INIT, way)
    report.within(
        "the first answer, start and model included",
        took,
        host.timeout,
        "raise lambda.timeout, or lambda.memory for more CPU",
    )
    return True


def _answers(host: Host, samples: Sequence[ModelSample], report: Report) -> ModelSample | None:
    """Send each sample; return the first that was answered with 200."""
    slowest, largest = 0.0, 0
    good: list[ModelSample] = []
    for sample in samples:
        begin = time.monotonic()
        invocation = _sent(host, function_url, sample)
        took = time.monotonic() - begin
        if isinstance(invocation, str):
            report.add(
                f"sample {sample.name}", False, f"{len(sample.body)} bytes", "taken", invocation
            )
        elif invocation.error is not None or _status(invocation) != 200:
            text = " ".join(invocation.answer[:300].decode(errors="replace").split())
            measured = "failed" if invocation.error is not None else f"status {_status(invocation)}"
            report.add(f"sample {sample.name}", False, measured, "200", f"it was answered: {text}")
        else:
            good.append(sample)
            slowest, largest = max(slowest, took), max(largest, len(invocation.answer))
    if good:
        what = f"{len(good)} sample{'' if len(good) == 1 else 's'}, the slowest"
        report.within(
            what, slowest, host.timeout, "raise lambda.timeout, or lambda.memory for more CPU"
        )
        report.add("answers, the largest", True, f"{largest} bytes", f"at most {LARGEST_ANSWER}")
    return good[0] if good else None


def _comes_by_each_way(host: Host, sample: ModelSample, report: Report) -> None:
    statuses = {}
    for name, event in WAYS.items():
        invocation = _sent(host, event, sample)
        failed = isinstance(invocation, str) or invocation.error is not None
        statuses[name] = (
            "failed" if failed or isinstance(invocation, str) else f"status {_status(invocation)}"
        )
    alike = set(statuses.values()) == {"status 200"}
    response = ", ".join(sorted(set(statuses.values())))
    report.add(
        f"by {', by '.join(statuses)}",
        alike,
        response,
        "alike",
        "; ".join(f"{name}: {status}" for name, status in statuses.items()),
    )


def _takes_messages(host: Host, sample: ModelSample, report: Report) -> None:
    """Two of a queue, which are one batch."""
    if not sample.content_type.startswith(TEXT_TYPES):
        way = (
            f"a message must be text, but {sample.name} is not: send S3 keys or base64 and let the"
            " handler decode them"
        )
        report.add("two messages of a queue", None, "not checked", "", way)
        return
    invocation = host.invoke(messages([sample.body.decode(errors="replace")] * 2))
    response = invocation.json() if invocation.error is None else {}
    failures = response.get("batchItemFailures") if isinstance(response, dict) else None
    measured = "failed" if failures is None else f"{len(failures)} of 2 failed"
    report.add(
        "two messages of a queue", failures == [], measured, "reported one by one", "see its log"
    )


def _takes_the_largest(host: Host, report: Report) -> None:
    """Whatever the handler makes of zeros: the function must answer, and be there afterwards."""
    body = bytes((LARGEST_REQUEST - ROOM) // 4 * 3)
    started = host.started
    invocation = host.invoke(
        function_url(PATH, body, headers={"content-type": "application/octet-stream"})
    )
    measured = "failed" if invocation.error is not None else f"status {_status(invocation)}"
    well = invocation.error is None and _status(invocation) != 413 and host.started == started
    report.add(
        f"an event of 6 MB ({len(body)} bytes in base64)",
        well,
        measured,
        "an answer",
        "see its log: it may need more memory",
    )


def _answers_in_time(host: Host, sample: ModelSample, report: Report) -> None:
    host.timeout, usual = min(SHORT, host.timeout), host.timeout
    begin = time.monotonic()
    invocation = _sent(host, function_url, sample)
    took = time.monotonic() - begin
    limit, host.timeout = host.timeout, usual
    well = not isinstance(invocation, str) and invocation.error is None
    way = (
        "its environment was stopped, and the next invocation includes a start: the handler holds"
        " the GIL for too long"
    )
    report.add(
        f"an answer within a timeout of {limit:g} s",
        well,
        time_of(took),
        f"within {time_of(limit)}",
        way,
        timed=True,
    )


def _ends(host: Host, report: Report) -> None:
    begin = time.monotonic()
    code = host.stop(STOP)
    took = time.monotonic() - begin
    way = "something does not stop: threads of the handler that are not daemon threads"
    report.add(
        "ends on SIGTERM",
        code is not None,
        "still there" if code is None else time_of(took),
        f"within {time_of(STOP)}",
        way,
        timed=True,
    )


def _sent(
    host: Host, event: Callable[..., dict[str, Any]], sample: ModelSample
) -> HostedInvocation | str:
    """In words, where Lambda itself does not take it."""
    body: str | bytes = sample.body
    if sample.content_type.startswith(TEXT_TYPES):
        body = sample.body.decode(errors="replace")
    try:
        return host.invoke(event(PATH, body, headers={"content-type": sample.content_type}))
    except RequestTooLarge as error:
        carried = (
            len(base64.b64encode(sample.body)) if isinstance(body, bytes) else len(json.dumps(body))
        )
        return f"{str(error).rstrip('.')}, and it has {carried}: send smaller inputs"


def _status(invocation: HostedInvocation) -> int | None:
    response = invocation.json()
    return response.get("statusCode") if isinstance(response, dict) else None


def _files(directory: Path) -> set[str]:
    return {
        str(path.relative_to(directory))
        for path in directory.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
