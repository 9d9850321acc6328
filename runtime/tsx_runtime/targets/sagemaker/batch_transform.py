"""Requests with many lines, which batch transform jobs send.

Each line is one job for the model, and its answer is one line. The answers have the order of the
lines. The content type selects one of three formats: JSON lines, CSV, and the rows of `tsx batch`
(`rows.py`). Answers are in the format that the client accepts, or else in that of the request.
"""

from __future__ import annotations

import asyncio
import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.scheduling.job import Route, WaitingJob
from tsx_runtime.errors import TsxError, Unavailable, read_error
from tsx_runtime.shared.content_types import best_type, looks_like
from tsx_runtime.targets.sagemaker import rows
from tsx_runtime.wire import content_type_of

MAX_QUOTED_CHARS = 1000  # most characters of an error answer in an error message


class LineFormat(NamedTuple):
    media_type: bytes  # content type of the whole body
    item: bytes  # content type of one line


JSON_LINES = LineFormat(b"application/jsonlines", b"application/json")
CSV = LineFormat(b"text/csv", b"text/csv")
ROWS = LineFormat(rows.TYPE.encode(), b"")  # Each row has its own content type.
FORMATS_BY_TYPE = {
    "application/jsonlines": JSON_LINES,
    "application/x-jsonlines": JSON_LINES,
    "application/jsonl": JSON_LINES,
    "application/x-ndjson": JSON_LINES,
    "text/csv": CSV,
    rows.TYPE: ROWS,
}
_NON_BLANK = re.compile(rb"\S")
ACCEPTED_FORMATS = {**FORMATS_BY_TYPE, "application/json": JSON_LINES}
del ACCEPTED_FORMATS[rows.TYPE]  # Answers are rows only if the request has rows.


def find_format(content_type: bytes) -> LineFormat | None:
    return FORMATS_BY_TYPE.get(content_type.partition(b";")[0].strip().lower().decode("latin-1"))


def choose_format(accept: bytes, request_format: LineFormat) -> LineFormat:
    """Return the format that the client prefers.

    The request's format is returned if the client accepts any type, or no known format.
    """
    best_match = best_type(
        accept.decode("latin-1"), [request_format.media_type.decode(), *ACCEPTED_FORMATS]
    )
    return ACCEPTED_FORMATS.get(best_match or "", request_format)


def split_lines(body: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank, with their numbers from 1.

    Lines are searched one by one, because a list of millions of lines would need much memory.
    """
    start, number = 0, 1
    while (match := _NON_BLANK.search(body, start)) is not None:
        number += body.count(b"\n", start, match.start())
        line_start = max(start, body.rfind(b"\n", start, match.start()) + 1)
        line_end = body.find(b"\n", line_start)
        line_end = len(body) if line_end < 0 else line_end
        yield number, body[line_start:line_end].rstrip(b"\r")
        start, number = line_end + 1, number + 1


def as_line(answer: bytes, line_format: LineFormat) -> bytes:
    """Return an answer as one line.

    Raises:
        ValueError: The answer is not text.
    """
    text = answer.decode("utf-8")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = text.rstrip("\r\n")
        if line_format is CSV and "\n" not in value:
            return value.encode()  # The answer is already CSV.
    if line_format is JSON_LINES:
        # JSON can contain a lone surrogate, which UTF-8 cannot encode.
        return _json(value).encode("utf-8", "backslashreplace")
    return _row(value if isinstance(value, list) else [value]).encode("utf-8", "backslashreplace")


def as_row(answer: LineAnswer, sent_fields: Mapping[str, Any]) -> bytes:
    """Return an answer as a row, with the other fields of the row in the request.

    Raises:
        LineFailed: The server is unavailable, so it could not answer other rows either.
    """
    if answer.server_error and answer.status == Unavailable.status:
        raise LineFailed(answer.number, answer.status, answer.server_error)
    kind = "" if answer.server_error else content_type_of(answer.headers) or looks_like(answer.body)
    return rows.as_line(
        answer.body,
        **sent_fields,
        status=answer.status,
        content_type=kind,
        error=answer.server_error or None,
    )


def join_lines(lines: Iterable[bytes]) -> bytes:
    return b"".join(line + b"\n" for line in lines)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(", ", ": "))


def _row(values: list[Any]) -> str:
    """Return a CSV line; values other than numbers and strings become JSON in one field."""
    file = io.StringIO()
    csv.writer(file, lineterminator="").writerow(
        [value if isinstance(value, str) else _json(value) for value in values]
    )
    # Line ends in quoted fields are replaced, because each line must be one record.
    return file.getvalue().replace("\r", " ").replace("\n", " ")


class LineAnswer(NamedTuple):
    number: int
    headers: bytes
    body: bytes
    status: int = 200
    server_error: str = ""  # the server's error message, if the model did not answer


class LineFailed(Exception):
    """The error of one line, which makes the whole request fail."""

    def __init__(self, number: int, status: int, reason: str) -> None:
        super().__init__(f"Line {number}: {reason}")
        self.number = number
        self.status = status


def max_queued_lines(version: ModelVersion) -> int:
    """Return the number of lines, of all requests together, that may be queued.

    It allows two full batches for each worker, or half of the queue if that is more.
    """
    plan = version.plan
    return max(
        1,
        min(
            plan.job_queue_size,
            max(2 * plan.batch_size * max(1, len(version.workers)), plan.job_queue_size // 2),
        ),
    )


async def answer_lines(
    lines: Iterable[tuple[int, bytes]],
    route: Route,
    semaphore: asyncio.Semaphore,
    make_job: Callable[[int, bytes], tuple[WaitingJob, Callable[[LineAnswer], bytes]]],
    max_bytes: int,
) -> list[LineAnswer]:
    """Submit a job for each line, and return the answers in the order of the lines.

    `make_job` returns a job and a function that converts its answer. Answers are converted as they
    arrive, because converting all answers at the end would block the event loop.

    Raises:
        LineFailed: At least one line failed; the error is that of the first such line. After a
            failure, no more lines are submitted.
    """
    answers: list[LineAnswer] = []
    failures: list[BaseException] = []
    tasks: set[asyncio.Task[LineAnswer]] = set()

    async def answer(number: int, line: bytes) -> LineAnswer:
        job, convert = make_job(number, line)
        result = await _answer(number, job, route, max_bytes)
        return result._replace(body=convert(result))

    def record_result(task: asyncio.Task[LineAnswer]) -> None:
        """Record a task's result; this also runs if the task was cancelled before its start."""
        tasks.discard(task)
        semaphore.release()
        if not task.cancelled():
            error = task.exception()
            answers.append(task.result()) if error is None else failures.append(error)

    try:
        for number, line in lines:
            await semaphore.acquire()
            if failures:
                semaphore.release()
                break
            task = asyncio.create_task(answer(number, line))
            tasks.add(task)
            task.add_done_callback(record_result)
        if tasks:
            await asyncio.wait(tasks)
    finally:
        for task in tasks:
            task.cancel()
    if failures:
        raise min(
            failures, key=lambda failure: failure.number if isinstance(failure, LineFailed) else 0
        )
    return sorted(answers)


async def _answer(number: int, job: WaitingJob, route: Route, max_bytes: int) -> LineAnswer:
    try:
        route.submit(job)
        answer = await job.done
        try:
            body = await answer.read_all(max_bytes)
        finally:
            answer.leave()
    except TsxError as error:
        return LineAnswer(number, b"", b"", error.status, error.message)
    except asyncio.CancelledError:
        job.gone = True
        route.leave(job)
        raise
    return LineAnswer(number, answer.headers, body, answer.status)


def check_answer(answer: LineAnswer) -> None:
    """Check that an answer is not an error.

    Raises:
        LineFailed: The status is 400 or higher.
    """
    if answer.status >= 400:
        raise LineFailed(answer.number, answer.status, answer.server_error or _reason(answer.body))


def _reason(body: bytes) -> str:
    """Return the text of an error answer; for the server's error JSON, only its message."""
    error = read_error(body.strip())
    text = error["message"] if error else body.decode("utf-8", "replace").strip()
    return text if len(text) <= MAX_QUOTED_CHARS else f"{text[:MAX_QUOTED_CHARS]}..."
