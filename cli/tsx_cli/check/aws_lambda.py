"""The checks of an image against the contract of Lambda.

https://docs.aws.amazon.com/lambda/latest/dg/runtimes-api.html and gettingstarted-limits.html.
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
from tsx_cli.check.entry import ENTRY, MAX_LOG_LINES, environment
from tsx_cli.check.lambda_events import balancer, function_url, messages, rest_api
from tsx_cli.check.lambda_host import (
    MAX_INIT_S,
    MAX_REQUEST_BYTES,
    MAX_RESPONSE_BYTES,
    Host,
    HostedInvocation,
    RequestTooLarge,
)
from tsx_cli.check.report import Report, time_of
from tsx_cli.deploy.preflight.diagnosis import diagnose

SHORT_TIMEOUT_S = 2.0  # a timeout within which the function must answer even while the model runs
STOP_TIMEOUT_S = 2.0  # time between SIGTERM and SIGKILL
EMPTY_SAMPLE = ModelSample("{}", "application/json", b"{}")
TEXT_TYPES = ("text/", "application/json")
ENVELOPE_BYTES = 2048  # size of an event without its body
PATH = "/invocations"
HTTP_EVENTS: Mapping[str, Callable[..., dict[str, Any]]] = {
    "a function URL, an HTTP API": function_url,
    "a REST API": rest_api,
    "a load balancer": balancer,
}


def check(
    report: Report,
    archive: Path,
    samples: Sequence[ModelSample],
    env: Mapping[str, str],
    directory: Path,
    timeout: float,
) -> None:
    """Check the image's entry point behind a Runtime API; it is frozen between invocations.

    The function has a timeout of `timeout` seconds.
    """
    unpack_model(archive, directory)
    variables = environment(
        {"TSX_MODEL_DIR": str(directory / "model"), "TSX_TARGET": "lambda", **env}
    )
    host = Host(ENTRY, directory, variables, timeout=timeout)
    files_before = _files(directory / "model")
    try:
        if not _check_start(host, samples, report):
            return
        sample = _check_samples(host, samples, report)
        if sample is None:
            report.not_checked("requests", samples)
        else:
            _check_http_events(host, sample, report)
            _check_messages(host, sample, report)
            _check_short_timeout(host, sample, report)
        _check_largest_event(host, report)
        written_files = sorted(_files(directory / "model") - files_before)
        measured = (
            f"{len(written_files)} files, such as {written_files[0]}" if written_files else "none"
        )
        report.add(
            "files written beside the model",
            not written_files,
            measured,
            "none",
            "only /tmp is writable on Lambda: let the handler write there",
        )
        _check_stop(host, report)
    finally:
        host.close()


def _check_start(host: Host, samples: Sequence[ModelSample], report: Report) -> bool:
    """Send the first invocation, which includes the start; return whether it succeeded."""
    first_sample = samples[0] if samples else EMPTY_SAMPLE
    start = time.monotonic()
    invocation = _send(host, function_url, first_sample)
    duration_s = time.monotonic() - start
    has_exited = (
        not isinstance(invocation, str)
        and _status_of(invocation) == 503
        and host.wait_for_exit(SHORT_TIMEOUT_S) is not None
    )
    if isinstance(invocation, str) or invocation.error is not None or has_exited:
        text = (
            invocation
            if isinstance(invocation, str)
            else invocation.answer[:300].decode(errors="replace")
        )
        report.log = host.log.splitlines()[-MAX_LOG_LINES:]
        advice = " ".join(map(str, diagnose(text, report.log))) or f"it was answered: {text}"
        report.add(
            "the first invocation",
            False,
            f"failed after {time_of(duration_s)}",
            "an answer",
            advice,
        )
        return False
    advice = (
        "the handler's imports take too long; Lambda then repeats the start within the invocation's"
        " timeout: use provisioned concurrency"
    )
    report.within("start until it asks for invocations", host.init_seconds, MAX_INIT_S, advice)
    report.within(
        "the first answer, start and model included",
        duration_s,
        host.timeout,
        "raise lambda.timeout, or lambda.memory for more CPU",
    )
    return True


def _check_samples(
    host: Host, samples: Sequence[ModelSample], report: Report
) -> ModelSample | None:
    """Send each sample; return the first sample that was answered with 200."""
    slowest, largest = 0.0, 0
    accepted_samples: list[ModelSample] = []
    for sample in samples:
        start = time.monotonic()
        invocation = _send(host, function_url, sample)
        duration_s = time.monotonic() - start
        if isinstance(invocation, str):
            report.add(
                f"sample {sample.name}", False, f"{len(sample.body)} bytes", "taken", invocation
            )
        elif invocation.error is not None or _status_of(invocation) != 200:
            text = " ".join(invocation.answer[:300].decode(errors="replace").split())
            measured = (
                "failed" if invocation.error is not None else f"status {_status_of(invocation)}"
            )
            report.add(f"sample {sample.name}", False, measured, "200", f"it was answered: {text}")
        else:
            accepted_samples.append(sample)
            slowest, largest = max(slowest, duration_s), max(largest, len(invocation.answer))
    if accepted_samples:
        count = len(accepted_samples)
        label = f"{count} sample{'' if count == 1 else 's'}, the slowest"
        report.within(
            label, slowest, host.timeout, "raise lambda.timeout, or lambda.memory for more CPU"
        )
        report.add(
            "answers, the largest", True, f"{largest} bytes", f"at most {MAX_RESPONSE_BYTES}"
        )
    return accepted_samples[0] if accepted_samples else None


def _check_http_events(host: Host, sample: ModelSample, report: Report) -> None:
    statuses = {}
    for name, event in HTTP_EVENTS.items():
        invocation = _send(host, event, sample)
        failed = isinstance(invocation, str) or invocation.error is not None
        statuses[name] = (
            "failed"
            if failed or isinstance(invocation, str)
            else f"status {_status_of(invocation)}"
        )
    are_all_200 = set(statuses.values()) == {"status 200"}
    response = ", ".join(sorted(set(statuses.values())))
    report.add(
        f"by {', by '.join(statuses)}",
        are_all_200,
        response,
        "alike",
        "; ".join(f"{name}: {status}" for name, status in statuses.items()),
    )


def _check_messages(host: Host, sample: ModelSample, report: Report) -> None:
    """Send two messages of a queue, which form one batch."""
    if not sample.content_type.startswith(TEXT_TYPES):
        advice = (
            f"a message must be text, but {sample.name} is not: send S3 keys or base64 and let the"
            " handler decode them"
        )
        report.add("two messages of a queue", None, "not checked", "", advice)
        return
    invocation = host.invoke(messages([sample.body.decode(errors="replace")] * 2))
    response = invocation.json() if invocation.error is None else {}
    failures = response.get("batchItemFailures") if isinstance(response, dict) else None
    measured = "failed" if failures is None else f"{len(failures)} of 2 failed"
    report.add(
        "two messages of a queue", failures == [], measured, "reported one by one", "see its log"
    )


def _check_largest_event(host: Host, report: Report) -> None:
    """Send an event of the maximum size; the function must answer it and keep running."""
    body = bytes((MAX_REQUEST_BYTES - ENVELOPE_BYTES) // 4 * 3)
    start_count = host.start_count
    invocation = host.invoke(
        function_url(PATH, body, headers={"content-type": "application/octet-stream"})
    )
    measured = "failed" if invocation.error is not None else f"status {_status_of(invocation)}"
    ok = (
        invocation.error is None
        and _status_of(invocation) != 413
        and host.start_count == start_count
    )
    report.add(
        f"an event of 6 MB ({len(body)} bytes in base64)",
        ok,
        measured,
        "an answer",
        "see its log: it may need more memory",
    )


def _check_short_timeout(host: Host, sample: ModelSample, report: Report) -> None:
    host.timeout, original = min(SHORT_TIMEOUT_S, host.timeout), host.timeout
    start = time.monotonic()
    invocation = _send(host, function_url, sample)
    duration_s = time.monotonic() - start
    limit, host.timeout = host.timeout, original
    ok = not isinstance(invocation, str) and invocation.error is None
    advice = (
        "its environment was stopped, and the next invocation includes a start: the handler holds"
        " the GIL for too long"
    )
    report.add(
        f"an answer within a timeout of {limit:g} s",
        ok,
        time_of(duration_s),
        f"within {time_of(limit)}",
        advice,
        timed=True,
    )


def _check_stop(host: Host, report: Report) -> None:
    start = time.monotonic()
    code = host.stop(STOP_TIMEOUT_S)
    duration_s = time.monotonic() - start
    advice = "something does not stop: threads of the handler that are not daemon threads"
    report.add(
        "ends on SIGTERM",
        code is not None,
        "still there" if code is None else time_of(duration_s),
        f"within {time_of(STOP_TIMEOUT_S)}",
        advice,
        timed=True,
    )


def _send(
    host: Host, event: Callable[..., dict[str, Any]], sample: ModelSample
) -> HostedInvocation | str:
    """Invoke the function with a sample; return the reason if Lambda would refuse the request."""
    body: str | bytes = sample.body
    if sample.content_type.startswith(TEXT_TYPES):
        body = sample.body.decode(errors="replace")
    try:
        return host.invoke(event(PATH, body, headers={"content-type": sample.content_type}))
    except RequestTooLarge as error:
        size = (
            len(base64.b64encode(sample.body)) if isinstance(body, bytes) else len(json.dumps(body))
        )
        return f"{str(error).rstrip('.')}, and it has {size}: send smaller inputs"


def _status_of(invocation: HostedInvocation) -> int | None:
    response = invocation.json()
    return response.get("statusCode") if isinstance(response, dict) else None


def _files(directory: Path) -> set[str]:
    return {
        str(path.relative_to(directory))
        for path in directory.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
