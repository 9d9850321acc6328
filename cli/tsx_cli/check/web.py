"""The checks that HTTP platforms share: a container becomes ready, answers, stays healthy under
load, and stops in order.
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

QUICKER = "make the handler faster, or its batches smaller"
AGAIN = 0.1  # seconds between two looks at whether it is well; platforms look less often
CLIENTS, LOAD = 4, 2.0  # at a time, and for how many seconds


@dataclass(frozen=True)
class Web:
    """The paths and time limits of a platform."""

    port: int
    health: str
    predict: str
    health_limit: float  # seconds
    answer_limit: float
    start_limit: float
    stop_limit: float
    start_key: str  # of [deploy] that gives more time to start
    connect_limit: float | None = None


def becomes_ready(web: Web, entry: EntryProcess, report: Report) -> bool:
    """Polled from the start: a refused connection is fine, but an answer must come in time, with
    200 only once ready.
    """
    slowest, asked = 0.0, 0
    while entry.is_up and entry.since() < web.start_limit:
        try:
            answered = send_request(web.port, "GET", web.health, web.health_limit)
        except ConnectionError:
            answered = None
        except (OSError, http.client.HTTPException):  # it took longer than it may
            slowest = max(slowest, web.health_limit)
            answered = None
        if answered is not None:
            asked, slowest = asked + 1, max(slowest, answered.took)
            if answered.status == 200:
                report.within("ready", entry.since(), web.start_limit, f"raise {web.start_key}")
                way = (
                    "something blocks the server's process while the model loads: load the model in"
                    " the handler's initialize"
                )
                return report.within(
                    f"{web.health} while it starts, the slowest of {asked}",
                    slowest,
                    web.health_limit,
                    way,
                )
        with suppress(subprocess.TimeoutExpired):
            entry.process.wait(AGAIN)
    report.log = entry.lines
    known = diagnose("ping health check" if entry.is_up else "", entry.lines)
    way = " ".join(map(str, known)) or "see the last lines of its log"
    if entry.is_up:
        return report.add(
            "ready",
            False,
            f"not after {time_of(entry.since())}",
            f"within {time_of(web.start_limit)}",
            f"{way} ({web.start_key})",
            timed=True,
        )
    return report.add(
        "ready",
        False,
        f"ended with {entry.process.returncode} after {time_of(entry.since())}",
        "stays up",
        way,
    )


def answers_samples(
    web: Web, samples: Sequence[ModelSample], most: int, report: Report
) -> ModelSample | None:
    """The first that was answered with 200, if any."""
    good, slowest, largest, streamed = None, 0.0, 0, None
    for sample in samples:
        if len(sample.body) > most:
            way = "the platform refuses it: send smaller inputs"
            report.add(
                f"sample {sample.name}", False, f"{len(sample.body)} bytes", f"at most {most}", way
            )
            continue
        answered = _send(web, sample)
        if isinstance(answered, str):
            report.add(
                f"sample {sample.name}",
                False,
                answered,
                f"within {time_of(web.answer_limit)}",
                QUICKER,
                timed=True,
            )
            continue
        if answered.status != 200:
            body_text = " ".join(answered.body[:300].decode(errors="replace").split())
            report.add(
                f"sample {sample.name}",
                False,
                f"status {answered.status}",
                "200",
                f"it was answered: {body_text}",
            )
            continue
        good, slowest, largest = (
            good or sample,
            max(slowest, answered.took),
            max(largest, len(answered.body)),
        )
        streamed = streamed or (answered if answered.streamed else None)
    if good is not None:
        what = f"{len(samples)} sample{'' if len(samples) == 1 else 's'}, the slowest"
        report.within(what, slowest, web.answer_limit, QUICKER)
        report.add(
            "answers, the largest",
            largest <= most,
            f"{largest} bytes",
            f"at most {most}",
            "return a smaller answer, or stream it",
        )
    if streamed is not None:
        measured = f"first after {time_of(streamed.began)}, last after {time_of(streamed.took)}"
        report.add("streams, part by part", True, measured)
    if good is None:
        report.not_checked("requests", samples)
    return good


def _send(web: Web, sample: ModelSample) -> PlatformResponse | str:
    return try_request(
        web.port,
        "POST",
        web.predict,
        web.answer_limit,
        sample.body,
        {"Content-Type": sample.content_type},
    )


def has_metrics(port: int, what: str, limit: float, way: str, report: Report) -> None:
    answered = try_request(port, "GET", "/metrics", limit)
    well = not isinstance(answered, str) and answered.status == 200 and b"# TYPE" in answered.body
    report.add(
        what,
        well,
        answered if isinstance(answered, str) else f"status {answered.status}",
        "200, for Prometheus",
        way,
    )


def stays_well_under_load(web: Web, sample: ModelSample | None, report: Report) -> None:
    """Clients that send one after the other, and between them the platform's question."""
    if sample is None:
        return
    over = time.monotonic() + LOAD
    connects: list[float] = []
    answered = [0] * CLIENTS

    def client(number: int) -> None:
        while time.monotonic() < over:
            one = _send(web, sample)
            if isinstance(one, str):
                return
            connects.append(one.connected)
            answered[number] += 1

    clients = [
        threading.Thread(target=client, args=(number,), daemon=True) for number in range(CLIENTS)
    ]
    for each in clients:
        each.start()
    slowest, bad = 0.0, ""
    while time.monotonic() < over:
        well = try_request(web.port, "GET", web.health, web.health_limit)
        if isinstance(well, str):
            bad = well
        else:
            slowest = max(slowest, well.took)
            bad = bad or ("" if well.status == 200 else f"status {well.status}")
        threading.Event().wait(AGAIN)
    for each in clients:
        each.join()
    what = f"{web.health} while {CLIENTS} clients ask ({sum(answered)} answers)"
    way = (
        "the server's process gets no CPU time: leave a core free (threads and minWorkers in"
        " model-config.yaml)"
    )
    if bad:
        report.add(what, False, bad, f"200 within {time_of(web.health_limit)}", way, timed=True)
    else:
        report.within(what, slowest, web.health_limit, way)
    if web.connect_limit is not None and connects:
        report.within("connections accepted, the slowest", max(connects), web.connect_limit, way)


def takes_the_largest(web: Web, size: int, report: Report) -> None:
    """Whatever the handler makes of zeros: the server must take them, and be well afterwards."""
    answered = _send(web, ModelSample("zeros", "application/octet-stream", bytes(size)))
    if isinstance(answered, str):
        report.add(
            f"a body of {size} bytes",
            False,
            answered,
            "an answer",
            "see its log; raise max_request_size",
            timed=True,
        )
        return
    way = (
        "the server refuses what the platform accepts: raise max_request_size"
        " (TSX_MAX_REQUEST_SIZE)"
    )
    report.add(
        f"a body of {size} bytes",
        answered.status != 413,
        f"status {answered.status} in {time_of(answered.took)}",
        "not 413",
        way,
    )


def ends_in_order(
    web: Web, entry: EntryProcess, sample: ModelSample | None, report: Report
) -> None:
    """SIGTERM while a request is on its way: that is answered, and the process is gone in time."""
    found: list[PlatformResponse | str] = []
    last = threading.Thread(
        target=lambda: found.extend([_send(web, sample)] if sample else ()), daemon=True
    )
    last.start()
    last.join(0.005)  # on its way, and for a quick model over already
    code, seconds = entry.stop(web.stop_limit)
    last.join(1)
    way = (
        "something does not stop: threads of the handler that are not daemon threads, or requests"
        " longer than drain_timeout"
    )
    if code is None:
        report.log = entry.lines
        report.add(
            "ends on SIGTERM",
            False,
            f"still there after {time_of(seconds)}",
            f"within {time_of(web.stop_limit)}",
            way,
            timed=True,
        )
        return
    report.within("ends on SIGTERM", seconds, web.stop_limit, way)
    report.add(
        "its exit code",
        code == 0,
        str(code),
        "0",
        "it did not exit by itself; see the last lines of its log",
    )
    if sample is None:
        return
    answered = found[0] if found else ""
    text = answered if isinstance(answered, str) else f"status {answered.status}"
    well = text is not answered or "refused" in text  # a refused request came after the end
    report.add(
        "the request in flight at that time",
        well,
        text,
        "an answer",
        "raise drain_timeout (TSX_DRAIN_TIMEOUT)",
    )
