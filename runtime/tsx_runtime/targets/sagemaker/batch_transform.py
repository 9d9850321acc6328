"""A request of many lines, as a batch transform job sends it: each line is a job, and the answers
are lines in the same order.

Three formats, by content type: JSON lines, CSV, and the rows of `tsx batch` (`rows.py`). An answer
is one line, in the format that the client accepts, or else that of the request.
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

QUOTED = 1000  # characters of an error answer that are quoted as the reason of a failure


class LineFormat(NamedTuple):
    media_type: bytes  # of the whole
    item: bytes  # the type of one line


JSON_LINES = LineFormat(b"application/jsonlines", b"application/json")
CSV = LineFormat(b"text/csv", b"text/csv")
ROWS = LineFormat(rows.TYPE.encode(), b"")  # each has a type of its own
FORMS = {
    "application/jsonlines": JSON_LINES,
    "application/x-jsonlines": JSON_LINES,
    "application/jsonl": JSON_LINES,
    "application/x-ndjson": JSON_LINES,
    "text/csv": CSV,
    rows.TYPE: ROWS,
}
_SOMETHING = re.compile(rb"\S")
ACCEPTED = {**FORMS, "application/json": JSON_LINES}
del ACCEPTED[rows.TYPE]  # which answers rows alone


def form_of(content_type: bytes) -> LineFormat | None:
    return FORMS.get(content_type.partition(b";")[0].strip().lower().decode("latin-1"))


def accepted_form(accept: bytes, own: LineFormat) -> LineFormat:
    """Return the format that the client accepts best.

    It is the request's own if the client accepts anything, or no known format.
    """
    best = best_type(accept.decode("latin-1"), [own.media_type.decode(), *ACCEPTED])
    return ACCEPTED.get(best or "", own)


def lines_of(body: bytes) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, with their numbers from 1.

    They are found one by one: a body may have millions.
    """
    start, number = 0, 1
    while (found := _SOMETHING.search(body, start)) is not None:
        number += body.count(b"\n", start, found.start())
        begin = max(start, body.rfind(b"\n", start, found.start()) + 1)
        end = body.find(b"\n", begin)
        end = len(body) if end < 0 else end
        yield number, body[begin:end].rstrip(b"\r")
        start, number = end + 1, number + 1


def as_line(answer: bytes, form: LineFormat) -> bytes:
    """An answer as one line. Raises ValueError where it is not text."""
    text = answer.decode("utf-8")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = text.rstrip("\r\n")
        if form is CSV and "\n" not in value:
            return value.encode()  # taken as CSV
    if form is JSON_LINES:
        return _json(value).encode(
            "utf-8", "backslashreplace"
        )  # a lone surrogate, which JSON can hold and UTF-8 cannot
    return _row(value if isinstance(value, list) else [value]).encode("utf-8", "backslashreplace")


def as_row(answer: LineAnswer, sent: Mapping[str, Any]) -> bytes:
    """With what came with the row, by which its sender knows it.

    Raises LineFailed where no row can be answered any more.
    """
    if answer.refused and answer.status == Unavailable.status:
        raise LineFailed(answer.number, answer.status, answer.refused)
    kind = "" if answer.refused else content_type_of(answer.headers) or looks_like(answer.body)
    return rows.as_line(
        answer.body, **sent, status=answer.status, content_type=kind, error=answer.refused or None
    )


def joined(lines: Iterable[bytes]) -> bytes:
    return b"".join(line + b"\n" for line in lines)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(", ", ": "))


def _row(values: list[Any]) -> str:
    """Numbers and strings as they are, anything else as JSON in one field."""
    file = io.StringIO()
    csv.writer(file, lineterminator="").writerow(
        [value if isinstance(value, str) else _json(value) for value in values]
    )
    # Of a quoted field: a line is a record.
    return file.getvalue().replace("\r", " ").replace("\n", " ")


class LineAnswer(NamedTuple):
    number: int
    headers: bytes
    body: bytes
    status: int = 200
    refused: str = ""  # tsx's own reason, in place of the model's answer


class LineFailed(Exception):
    """One line could not be answered, so the request fails."""

    def __init__(self, number: int, status: int, why: str) -> None:
        super().__init__(f"Line {number}: {why}")
        self.number = number
        self.status = status


def room(version: ModelVersion) -> int:
    """How many lines of all requests may be queued: two full batches for each worker, with room for
    other requests.
    """
    plan = version.plan
    return max(
        1,
        min(
            plan.job_queue_size,
            max(2 * plan.batch_size * max(1, len(version.workers)), plan.job_queue_size // 2),
        ),
    )


async def answer_each(
    lines: Iterable[tuple[int, bytes]],
    route: Route,
    gate: asyncio.Semaphore,
    job_of: Callable[[int, bytes], tuple[WaitingJob, Callable[[LineAnswer], bytes]]],
    most: int,
) -> list[LineAnswer]:
    """The answers in the lines' order.

    `job_of` makes of a line a job and what converts its answer, as it arrives, since converting all
    at once would block the loop.

    Raises LineFailed for the first line that failed; no line is submitted after a failure.
    """
    answers: list[LineAnswer] = []
    failures: list[BaseException] = []
    tasks: set[asyncio.Task[LineAnswer]] = set()

    async def answer(number: int, line: bytes) -> LineAnswer:
        job, line_of = job_of(number, line)
        answered = await _answer(number, job, route, most)
        return answered._replace(body=line_of(answered))

    def ended(task: asyncio.Task[LineAnswer]) -> None:
        """Runs also for a task that was cancelled before it started."""
        tasks.discard(task)
        gate.release()
        if not task.cancelled():
            error = task.exception()
            answers.append(task.result()) if error is None else failures.append(error)

    try:
        for number, line in lines:
            await gate.acquire()
            if failures:
                gate.release()
                break
            task = asyncio.create_task(answer(number, line))
            tasks.add(task)
            task.add_done_callback(ended)
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


async def _answer(number: int, job: WaitingJob, route: Route, most: int) -> LineAnswer:
    try:
        route.submit(job)
        answer = await job.done
        try:
            body = await answer.read_all(most)
        finally:
            answer.leave()
    except TsxError as error:
        return LineAnswer(number, b"", b"", error.status, error.message)
    except asyncio.CancelledError:
        job.gone = True
        route.leave(job)
        raise
    return LineAnswer(number, answer.headers, body, answer.status)


def check(answer: LineAnswer) -> None:
    """Raises LineFailed where it is an error."""
    if answer.status >= 400:
        raise LineFailed(answer.number, answer.status, answer.refused or _reason(answer.body))


def _reason(body: bytes) -> str:
    """The reason in an error answer; of the server's own error form only the message is quoted."""
    error = read_error(body.strip())
    text = error["message"] if error else body.decode("utf-8", "replace").strip()
    return text if len(text) <= QUOTED else f"{text[:QUOTED]}..."
