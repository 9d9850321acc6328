"""`tsx replay`: sends the requests of a recording again, with their original spacing."""

from __future__ import annotations

import http.client
import itertools
import math
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer
from pydantic import ValidationError

from tsx_cli.common.client import KeptConnection, Server, path
from tsx_cli.common.compare_option import Ignore, in_words, read_compare
from tsx_cli.common.failure import CliError, UsageError
from tsx_cli.common.options import AsJson, Config, Url, read_settings
from tsx_cli.common.output import one_line, print_result, print_table
from tsx_runtime.core.shadowing.comparison import compare, tolerance_of
from tsx_runtime.plugins import ComparedAnswer
from tsx_runtime.recordings import NotARecording, Recorded, read
from tsx_runtime.settings.traffic_policy import Compare
from tsx_runtime.shared.quantiles import nearest_rank

AHEAD = 1000  # requests that may wait for a connection; beyond it no more of the recording is read
SHOWN = 5  # requests whose answers differ
TICK = 0.2  # seconds between two looks at the progress

app = typer.Typer(add_completion=False)


@app.command()
def replay(
    recording: Annotated[Path, typer.Argument(metavar="FILE|DIRECTORY", help="A recording, or a directory of recordings.")],
    speed: Annotated[float, typer.Option(min=0.001, help="Speed factor relative to the recording.")] = 1.0,
    model: Annotated[str | None, typer.Option(help="Model to send the requests to; by default that of the recording.")] = None,
    version: Annotated[str | None, typer.Option(help="Version or label to send the requests to.")] = None,
    how: Annotated[
        str | None,
        typer.Option("--compare", metavar="HOW", help="numeric[:rtol=1e-3,atol=1e-6] (default), exact or top-k[:k=5]."),
    ] = None,
    ignore: Ignore = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum number of requests to send.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, max=1024, help="Connections; further concurrent requests wait for a free one.")] = 64,
    as_json: AsJson = False,
    url: Url = None,
    config: Config = None,
) -> None:
    """Replay the requests of a recording to a running server with their original spacing, and report how it answered."""
    if math.isnan(speed):
        raise UsageError("--speed takes a number, such as 2 for twice as fast as they came")
    settings, _ = read_settings(config)
    server = Server(url or settings.inference_address, settings.inference_token, certificate=settings.certificate_file)
    try:
        run = Run(server, model, version, _comparison(how, ignore))
        run.send_all(itertools.islice(read(recording), limit), speed, concurrency, progress=sys.stderr.isatty() and not as_json)
    except NotARecording as error:
        raise CliError(str(error)) from error
    except OSError as error:
        raise CliError(f"{recording} cannot be read: {error.strerror or error}") from error
    if not run.sent:
        raise CliError(f"{recording} contains no complete request")
    summary = run.summary()
    print_result(summary, as_json, _show)
    if run.failed:
        raise CliError(f"{sum(run.failed.values())} of {run.sent} requests got no answer")
    if set(run.answers) == {404} and not run.equal:
        raise CliError("no such model is served: `tsx models list` shows the models; --model and --version choose where the requests go")
    if run.refused and not run.alike and min(run.answers) >= 400:
        raise CliError(f"no request got the same answer as when it was recorded; the first got {run.refused}")


def _comparison(how: str | None, ignore: list[str] | None) -> Compare:
    """Raises UsageError."""
    fields = ({"kind": "numeric"} if how is None else read_compare(how)) | ({"ignore": ignore} if ignore else {})
    if fields["kind"] == "plugin":
        raise UsageError("--compare plugin: plugins compare in the server; use `tsx models shadow`, or numeric, exact or top-k here")
    try:
        return Compare.model_validate(fields)
    except ValidationError as error:
        raise UsageError(f"--compare and --ignore: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from None


def plan(entries: Iterable[Recorded], speed: float) -> Iterator[tuple[float, Recorded]]:
    """When each is due, in seconds from the start."""
    first: float | None = None
    for entry in entries:
        first = entry.at if first is None else first
        yield (entry.at - first) / speed, entry


def target_of(entry: Recorded, model: str | None, version: str | None) -> str:
    """One that hands the query on to the handler, where there is one."""
    name = model or entry.model
    named = [name] if version is None else [name, version]
    if any(header.lower() == "explain" and value == "True" for header, value in entry.headers):
        return path("explanations", *named)
    query = quote(entry.query, safe="%=&+;,/?:@!$'()*~[]", encoding="latin-1")
    return f"{path(*named, 'predict')}?{query}" if query else path("predictions", *named)


@dataclass
class Run:
    """Latencies count from the due time of a request, so a server that delays the generator does not look faster."""

    server: Server
    model: str | None
    version: str | None
    how: Compare
    sent: int = 0
    seconds: float = 0.0
    answers: Counter[int] = field(default_factory=Counter)  # by status
    failed: Counter[str] = field(default_factory=Counter)  # without an answer, by reason
    latencies: list[float] = field(default_factory=list)  # seconds
    late: list[float] = field(default_factory=list)  # seconds that requests left after they were due
    compared: int = 0
    different: list[dict[str, Any]] = field(default_factory=list)  # the first of them
    equal: int = 0  # those that agree
    largest: float = 0.0  # difference of two numbers
    precision: str | None = None  # of the recorded model
    alike: int = 0  # with the status that was recorded
    refused: str = ""  # the error of the first that fails, and did not then

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._here = threading.local()

    def send_all(self, entries: Iterable[Recorded], speed: float, concurrency: int, *, progress: bool) -> None:
        """Raises CliError where there is no server, NotARecording, OSError."""
        KeptConnection(self.server).open()
        room = threading.BoundedSemaphore(concurrency + AHEAD)
        start = time.monotonic()
        with ThreadPoolExecutor(concurrency) as pool:
            for due, entry in plan(entries, speed):
                while (left := start + due - time.monotonic()) > 0:
                    time.sleep(min(left, TICK))
                    if progress:
                        self._show_progress(start)
                room.acquire()
                self.sent += 1
                pool.submit(self._send, entry, start + due, start).add_done_callback(lambda _: room.release())
        self.seconds = time.monotonic() - start
        if progress:
            print("\r\033[K", end="", file=sys.stderr)

    def summary(self) -> dict[str, Any]:
        latencies, late = sorted(self.latencies), sorted(self.late)
        rtol, atol = tolerance_of(self.how, self.precision)
        tolerance = {"rtol": rtol, "atol": atol} if self.how.kind == "numeric" else None
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
            "compare": in_words(self.how.model_dump(mode="json"), tolerance),
            "largest_difference": self.largest if self.how.kind != "top-k" else None,
            "different": self.different,
        }

    def _send(self, entry: Recorded, due: float, start: float) -> None:
        """In a thread, which has a connection of its own."""
        connection: KeptConnection | None = getattr(self._here, "connection", None)
        if connection is None:
            connection = self._here.connection = KeptConnection(self.server)
        late = max(0.0, time.monotonic() - due)
        try:
            target = target_of(entry, self.model, self.version)
            status, headers, body = connection.call("POST", target, entry.headers, entry.body)
        except (OSError, ValueError, http.client.HTTPException, CliError) as error:  # ValueError: what no client may send
            with self._lock:
                self.late.append(late)
                self.failed[type(error).__name__ if not isinstance(error, CliError) else "no connection"] += 1
            return
        with self._lock:
            self.late.append(late)
            self.answers[status] += 1
            self.latencies.append(time.monotonic() - due)
            self.alike += status == entry.status
            if status >= 400 > entry.status > 0 and not self.refused:
                self.refused = f"{status}: {self.server.refusal(status, body, target).message}"
        if entry.answer is not None:
            self._compare(entry, entry.answer, ComparedAnswer(status, headers, body), due - start)

    def _compare(self, entry: Recorded, recorded: bytes, actual: ComparedAnswer, at: float) -> None:
        expected = ComparedAnswer(entry.status, {name.lower(): value for name, value in entry.answer_headers}, recorded)
        found = compare(self.how, entry.body, expected, actual, precisions=[entry.precision])
        with self._lock:
            self.compared += 1
            self.largest = max(self.largest, found.largest)
            self.precision = self.precision or entry.precision
            if found.difference is None:
                self.equal += 1
            elif len(self.different) < SHOWN:
                before, now = ({"status": answer.status, "answer": _clip(answer.body)} for answer in (expected, actual))
                self.different.append(
                    {"at": round(at, 3), "recorded": before, "now": now, "why": found.difference.between("recorded", "now")}
                )

    def _show_progress(self, start: float) -> None:
        done = sum(self.answers.values()) + sum(self.failed.values())
        print(f"\r\033[Ksent {self.sent}, answered {done}, {time.monotonic() - start:.0f} s", end="", file=sys.stderr, flush=True)


def _show(summary: dict[str, Any]) -> None:
    answers = [*summary["answers"].items(), *summary["failed"].items()]
    rows: list[tuple[str, object]] = [
        ("sent", f"{summary['sent']} in {summary['seconds']:.1f} s"),
        *((f"answered {status}" if status.isdigit() else f"not answered ({status})", count) for status, count in answers),
        ("latency p50", _shown(summary["p50_ms"])),
        ("latency p99", _shown(summary["p99_ms"])),
        ("the slowest", _shown(summary["max_ms"])),
        ("sent late p99", _shown(summary["late_p99_ms"])),
        ("the latest", _shown(summary["late_max_ms"])),
    ]
    if summary["compared"]:
        rows.append(("equal answers", f"{summary['equal']} of {summary['compared']}, compared by {summary['compare']}"))
        if summary["largest_difference"] is not None:
            rows.append(("largest difference", f"{summary['largest_difference']:.3g}"))
    print_table(["replay", ""], rows)
    for each in summary["different"]:
        was, now = each["recorded"], each["now"]
        print(
            f"differs at {each['at']} s: recorded {was['status']} {one_line(was['answer'])}, now {now['status']} {one_line(now['answer'])}"
        )
        print(f"  {one_line(each['why'])}")


def _ms(ordered: list[float], which: float) -> float | None:
    return round(1000 * nearest_rank(ordered, which), 3) if ordered else None


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} ms"


def _clip(answer: bytes) -> str:
    text = answer.decode("utf-8", "replace")
    return text if len(text) <= 100 else f"{text[:100]}..."
