"""The checks that HTTP platforms share.

A container becomes ready, answers, stays healthy under load, and stops in order.
"""

from __future__ import annotations

import http.client
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from tsx_cli.archive.check import ModelSample
from tsx_cli.check.entry import EntryProcess, PlatformResponse, send_request, try_request
from tsx_cli.check.report import Report, time_of
from tsx_cli.deploy.preflight.diagnosis import diagnose

SPEED_ADVICE = "make the handler faster, or its batches smaller"
HEALTH_INTERVAL_S = 0.1  # shorter than the intervals of platforms
LOAD_CLIENTS, LOAD_S = 4, 2.0


@dataclass(frozen=True)
class HttpPlatform:
    """The paths and time limits of a platform, in seconds."""

    port: int
    health_path: str
    predict_path: str
    health_limit_s: float
    answer_limit_s: float
    start_limit_s: float
    stop_limit_s: float
    start_key: str  # the key of [deploy] that raises the start limit
    connect_limit_s: float | None = None


def check_ready(platform: HttpPlatform, entry: EntryProcess, report: Report) -> bool:
    """Poll the health check until it answers 200; return whether the container is ready.

    A refused connection is allowed, but each response must come in time.
    """
    slowest, count = 0.0, 0
    while entry.is_up and entry.uptime_s() < platform.start_limit_s:
        try:
            response = send_request(
                platform.port, "GET", platform.health_path, platform.health_limit_s
            )
        except ConnectionError:
            response = None
        except (OSError, http.client.HTTPException):
            # There was no response within the limit.
            slowest = max(slowest, platform.health_limit_s)
            response = None
        if response is not None:
            count, slowest = count + 1, max(slowest, response.total_s)
            if response.status == 200:
                report.within(
                    "ready", entry.uptime_s(), platform.start_limit_s, f"raise {platform.start_key}"
                )
                advice = (
                    "something blocks the server's process while the model loads: load the model in"
                    " the handler's initialize"
                )
                return report.within(
                    f"{platform.health_path} while it starts, the slowest of {count}",
                    slowest,
                    platform.health_limit_s,
                    advice,
                )
        with suppress(subprocess.TimeoutExpired):
            entry.process.wait(HEALTH_INTERVAL_S)
    report.log = entry.lines
    causes = diagnose("ping health check" if entry.is_up else "", entry.lines)
    advice = " ".join(map(str, causes)) or "see the last lines of its log"
    if entry.is_up:
        return report.add(
            "ready",
            False,
            f"not after {time_of(entry.uptime_s())}",
            f"within {time_of(platform.start_limit_s)}",
            f"{advice} ({platform.start_key})",
            timed=True,
        )
    return report.add(
        "ready",
        False,
        f"ended with {entry.process.returncode} after {time_of(entry.uptime_s())}",
        "stays up",
        advice,
    )


def check_samples(
    platform: HttpPlatform, samples: Sequence[ModelSample], max_bytes: int, report: Report
) -> ModelSample | None:
    """Send each sample; return the first sample that was answered with 200."""
    first_passed, slowest, largest, streamed_response = None, 0.0, 0, None
    for sample in samples:
        if len(sample.body) > max_bytes:
            advice = "the platform refuses it: send smaller inputs"
            report.add(
                f"sample {sample.name}",
                False,
                f"{len(sample.body)} bytes",
                f"at most {max_bytes}",
                advice,
            )
            continue
        response = _send(platform, sample)
        if isinstance(response, str):
            report.add(
                f"sample {sample.name}",
                False,
                response,
                f"within {time_of(platform.answer_limit_s)}",
                SPEED_ADVICE,
                timed=True,
            )
            continue
        if response.status != 200:
            body_text = " ".join(response.body[:300].decode(errors="replace").split())
            report.add(
                f"sample {sample.name}",
                False,
                f"status {response.status}",
                "200",
                f"it was answered: {body_text}",
            )
            continue
        first_passed, slowest, largest = (
            first_passed or sample,
            max(slowest, response.total_s),
            max(largest, len(response.body)),
        )
        streamed_response = streamed_response or (response if response.is_streamed else None)
    if first_passed is not None:
        label = f"{len(samples)} sample{'' if len(samples) == 1 else 's'}, the slowest"
        report.within(label, slowest, platform.answer_limit_s, SPEED_ADVICE)
        report.add(
            "answers, the largest",
            largest <= max_bytes,
            f"{largest} bytes",
            f"at most {max_bytes}",
            "return a smaller answer, or stream it",
        )
    if streamed_response is not None:
        measured = (
            f"first after {time_of(streamed_response.first_byte_s)},"
            f" last after {time_of(streamed_response.total_s)}"
        )
        report.add("streams, part by part", True, measured)
    if first_passed is None:
        report.not_checked("requests", samples)
    return first_passed


def _send(platform: HttpPlatform, sample: ModelSample) -> PlatformResponse | str:
    return try_request(
        platform.port,
        "POST",
        platform.predict_path,
        platform.answer_limit_s,
        sample.body,
        {"Content-Type": sample.content_type},
    )


def check_metrics(port: int, label: str, limit: float, advice: str, report: Report) -> None:
    response = try_request(port, "GET", "/metrics", limit)
    ok = not isinstance(response, str) and response.status == 200 and b"# TYPE" in response.body
    report.add(
        label,
        ok,
        response if isinstance(response, str) else f"status {response.status}",
        "200, for Prometheus",
        advice,
    )


def check_health_under_load(
    platform: HttpPlatform, sample: ModelSample | None, report: Report
) -> None:
    """Request the health check while clients send requests without a pause."""
    if sample is None:
        return
    end = time.monotonic() + LOAD_S
    connect_times: list[float] = []
    counts = [0] * LOAD_CLIENTS

    def client(number: int) -> None:
        while time.monotonic() < end:
            response = _send(platform, sample)
            if isinstance(response, str):
                return
            connect_times.append(response.connect_s)
            counts[number] += 1

    clients = [
        threading.Thread(target=client, args=(number,), daemon=True)
        for number in range(LOAD_CLIENTS)
    ]
    for thread in clients:
        thread.start()
    slowest, failure = 0.0, ""
    while time.monotonic() < end:
        health = try_request(platform.port, "GET", platform.health_path, platform.health_limit_s)
        if isinstance(health, str):
            failure = health
        else:
            slowest = max(slowest, health.total_s)
            failure = failure or ("" if health.status == 200 else f"status {health.status}")
        threading.Event().wait(HEALTH_INTERVAL_S)
    for thread in clients:
        thread.join()
    label = f"{platform.health_path} while {LOAD_CLIENTS} clients ask ({sum(counts)} answers)"
    advice = (
        "the server's process gets no CPU time: leave a core free (threads and minWorkers in"
        " model-config.yaml)"
    )
    if failure:
        report.add(
            label,
            False,
            failure,
            f"200 within {time_of(platform.health_limit_s)}",
            advice,
            timed=True,
        )
    else:
        report.within(label, slowest, platform.health_limit_s, advice)
    if platform.connect_limit_s is not None and connect_times:
        report.within(
            "connections accepted, the slowest",
            max(connect_times),
            platform.connect_limit_s,
            advice,
        )


def check_largest_body(platform: HttpPlatform, size: int, report: Report) -> None:
    """Send a body of zeros with the maximum size; the server must accept and answer it."""
    response = _send(platform, ModelSample("zeros", "application/octet-stream", bytes(size)))
    if isinstance(response, str):
        report.add(
            f"a body of {size} bytes",
            False,
            response,
            "an answer",
            "see its log; raise max_request_size",
            timed=True,
        )
        return
    advice = (
        "the server refuses what the platform accepts: raise max_request_size"
        " (TSX_MAX_REQUEST_SIZE)"
    )
    report.add(
        f"a body of {size} bytes",
        response.status != 413,
        f"status {response.status} in {time_of(response.total_s)}",
        "not 413",
        advice,
    )


def check_stop(
    platform: HttpPlatform, entry: EntryProcess, sample: ModelSample | None, report: Report
) -> None:
    """Send SIGTERM during a request; it must be answered, and the process must end in time."""
    results: list[PlatformResponse | str] = []
    client = threading.Thread(
        target=lambda: results.extend([_send(platform, sample)] if sample else ()), daemon=True
    )
    client.start()
    client.join(0.005)  # Give the request time to reach the server.
    code, seconds = entry.stop(platform.stop_limit_s)
    client.join(1)
    advice = (
        "something does not stop: threads of the handler that are not daemon threads, or requests"
        " longer than drain_timeout"
    )
    if code is None:
        report.log = entry.lines
        report.add(
            "ends on SIGTERM",
            False,
            f"still there after {time_of(seconds)}",
            f"within {time_of(platform.stop_limit_s)}",
            advice,
            timed=True,
        )
        return
    report.within("ends on SIGTERM", seconds, platform.stop_limit_s, advice)
    report.add(
        "its exit code",
        code == 0,
        str(code),
        "0",
        "it did not exit by itself; see the last lines of its log",
    )
    if sample is None:
        return
    response = results[0] if results else ""
    text = response if isinstance(response, str) else f"status {response.status}"
    # A refused connection is fine: the request came after the server had ended.
    ok = text is not response or "refused" in text
    report.add(
        "the request in flight at that time",
        ok,
        text,
        "an answer",
        "raise drain_timeout (TSX_DRAIN_TIMEOUT)",
    )
