"""A replay of a recording: it sends requests when they are due, and compares the responses."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from pydantic import ValidationError

from tsx_cli.common.client import Server, path
from tsx_cli.common.compare_option import comparison_text, read_compare
from tsx_cli.common.failure import CliError, UsageError
from tsx_runtime.core.comparison.comparison import compare, tolerance_of
from tsx_runtime.plugins import ComparedAnswer
from tsx_runtime.recordings import Recorded
from tsx_runtime.settings.traffic_policy import Compare
from tsx_runtime.shared.quantiles import nearest_rank

MAX_WAITING = 1000  # requests that may wait for a connection; then reading the recording pauses
MAX_SHOWN = 5  # shown requests with differing responses
PROGRESS_INTERVAL_S = 0.2


def read_comparison(comparison: str | None, ignore: list[str] | None) -> Compare:
    """Parse --compare and --ignore.

    Raises:
        UsageError: One of them is invalid.
    """
    fields = ({"kind": "numeric"} if comparison is None else read_compare(comparison)) | (
        {"ignore": ignore} if ignore else {}
    )
    if fields["kind"] == "plugin":
        raise UsageError(
            "--compare plugin: plugins compare in the server; use `tsx models shadow`, or numeric,"
            " exact or top-k here"
        )
    try:
        return Compare.model_validate(fields)
    except ValidationError as error:
        raise UsageError(
            f"--compare and --ignore: {error.errors()[0]['msg'].removeprefix('Value error, ')}"
        ) from None


def plan(entries: Iterable[Recorded], speed: float) -> Iterator[tuple[float, Recorded]]:
    """Yield each request with its due time, in seconds from the start."""
    first_time: float | None = None
    for entry in entries:
        first_time = entry.at if first_time is None else first_time
        yield (entry.at - first_time) / speed, entry


def target_of(entry: Recorded, model: str | None, version: str | None) -> str:
    """Return the path of a request; it must be one that passes a query to the handler."""
    name = model or entry.model
    segments = [name] if version is None else [name, version]
    if any(header.lower() == "explain" and value == "True" for header, value in entry.headers):
        return path("explanations", *segments)
    # Requests to OpenAI's paths have this header too.
    if url_path := next(
        (value for header, value in entry.headers if header.lower() == "url_path"), ""
    ):
        return f"{path('predictions', name, version or '')}/{url_path}"
    query = quote(entry.query, safe="%=&+;,/?:@!$'()*~[]", encoding="latin-1")
    return f"{path(*segments, 'predict')}?{query}" if query else path("predictions", *segments)


@dataclass
class Replay:
    """A replay and its figures.

    Latencies count from the due time of a request. Otherwise a slow server that delays the sending
    would look faster.
    """

    server: Server
    model: str | None
    version: str | None
    comparison: Compare
    sent: int = 0
    seconds: float = 0.0
    answers: Counter[int] = field(default_factory=Counter)  # responses by status
    failed: Counter[str] = field(default_factory=Counter)  # requests without a response, by reason
    latencies: list[float] = field(default_factory=list)  # seconds
    late: list[float] = field(default_factory=list)  # seconds between due time and sending
    compared: int = 0
    different: list[dict[str, Any]] = field(default_factory=list)  # the first differing responses
    equal: int = 0  # responses equal to the recorded ones
    largest: float = 0.0  # largest difference of two numbers
    precision: str | None = None  # precision of the recorded model
    same_status: int = 0  # responses with the recorded status
    first_error: str = ""  # the first error where the recording has a success

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._thread_local = threading.local()

    def send_all(
        self, entries: Iterable[Recorded], speed: float, concurrency: int, *, progress: bool
    ) -> None:
        """Send all requests when they are due.

        Raises:
            CliError: No server answers.
            NotARecording: The file is not a recording.
            OSError: The recording cannot be read.
        """
        copy(self.server).send("GET", "/ping")
        slots = threading.BoundedSemaphore(concurrency + MAX_WAITING)
        start = time.monotonic()
        with ThreadPoolExecutor(concurrency, initializer=self._connect) as pool:
            for due, entry in plan(entries, speed):
                while (remaining := start + due - time.monotonic()) > 0:
                    time.sleep(min(remaining, PROGRESS_INTERVAL_S))
                    if progress:
                        self._show_progress(start)
                slots.acquire()
                self.sent += 1
                pool.submit(self._send, entry, start + due, start).add_done_callback(
                    lambda _: slots.release()
                )
        self.seconds = time.monotonic() - start
        if progress:
            print("\r\033[K", end="", file=sys.stderr)

    def summary(self) -> dict[str, Any]:
        latencies, late = sorted(self.latencies), sorted(self.late)
        rtol, atol = tolerance_of(self.comparison, self.precision)
        tolerance = {"rtol": rtol, "atol": atol} if self.comparison.kind == "numeric" else None
        return {
            "sent": self.sent,
            "seconds": round(self.seconds, 3),
            "answers": {str(status): count for status, count in sorted(self.answers.items())},
            "failed": dict(self.failed),
            "p50_ms": _ms(latencies, 0.5),
            "p99_ms": _ms(latencies, 0.99),
            "max_ms": _ms(latencies, 1.0),
            "late_p99_ms": _ms(late, 0.99),
            "late_max_ms": _ms(late, 1.0),
            "compared": self.compared,
            "equal": self.equal,
            "compare": comparison_text(self.comparison.model_dump(mode="json"), tolerance),
            "largest_difference": self.largest if self.comparison.kind != "top-k" else None,
            "different": self.different,
        }

    def _connect(self) -> None:
        """Give this thread a connection of its own, because a shared pool is slower."""
        self._thread_local.server = copy(self.server)

    def _send(self, entry: Recorded, due: float, start: float) -> None:
        late = max(0.0, time.monotonic() - due)
        try:
            target = target_of(entry, self.model, self.version)
            response = self._thread_local.server.exchange(
                "POST", target, [*entry.headers, *self.server.authorization.items()], entry.body
            )
            status, body = response.status, response.body()
        except CliError as error:
            cause = error.__cause__
            with self._lock:
                self.late.append(late)
                self.failed[
                    "no connection" if isinstance(cause, OSError) else type(cause).__name__
                ] += 1
            return
        with self._lock:
            self.late.append(late)
            self.answers[status] += 1
            self.latencies.append(time.monotonic() - due)
            self.same_status += status == entry.status
            if status >= 300 > entry.status > 0 and not self.first_error:
                self.first_error = f"{status}: {self.server.refusal(status, body, target).message}"
        if entry.answer is not None:
            self._compare(
                entry, entry.answer, ComparedAnswer(status, response.headers, body), due - start
            )

    def _compare(self, entry: Recorded, recorded: bytes, actual: ComparedAnswer, at: float) -> None:
        expected = ComparedAnswer(
            entry.status, {name.lower(): value for name, value in entry.answer_headers}, recorded
        )
        result = compare(
            self.comparison, entry.body, expected, actual, precisions=[entry.precision]
        )
        with self._lock:
            self.compared += 1
            self.largest = max(self.largest, result.largest)
            self.precision = self.precision or entry.precision
            if result.difference is None:
                self.equal += 1
            elif len(self.different) < MAX_SHOWN:
                recorded_answer, new_answer = (
                    {"status": answer.status, "answer": _clip(answer.body)}
                    for answer in (expected, actual)
                )
                self.different.append(
                    {
                        "at": round(at, 3),
                        "recorded": recorded_answer,
                        "now": new_answer,
                        "why": result.difference.between("recorded", "now"),
                    }
                )

    def _show_progress(self, start: float) -> None:
        done = sum(self.answers.values()) + sum(self.failed.values())
        print(
            f"\r\033[Ksent {self.sent}, answered {done}, {time.monotonic() - start:.0f} s",
            end="",
            file=sys.stderr,
            flush=True,
        )


def _ms(sorted_values: list[float], fraction: float) -> float | None:
    return round(1000 * nearest_rank(sorted_values, fraction), 3) if sorted_values else None


def _clip(answer: bytes) -> str:
    text = answer.decode("utf-8", "replace")
    return text if len(text) <= 100 else f"{text[:100]}..."
