"""The operations that the server calls: feedback, reports, contests and single requests."""

from __future__ import annotations

import base64
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import to_json
from sqlalchemy import text

from tsx_runtime.core.comparison.means import MetricCounts
from tsx_runtime.errors import BadRequest, Conflict, RequestNotFound, ResourceNotFound
from tsx_runtime.features.monitor.process.feedback import (
    FeedbackItem,
    FeedbackJoin,
    describe,
    parse_feedback,
)
from tsx_runtime.features.monitor.process.monitor import PAUSE_FACTOR, Monitor
from tsx_runtime.features.monitor.process.reports import build_report
from tsx_runtime.features.monitor.process.store import clean
from tsx_runtime.features.monitor.report import FeedbackResult
from tsx_runtime.recordings import NotARecording, Recorded, find_request

MAX_WORST = 100
MAX_RESPONSE_CHARS = 10_000
MIN_REPORT_S = 2.0  # A report is not made again within this time.
MAX_FILES = 2  # of a recording, in which a request is looked for
MAX_BODY_BYTES = 1 << 20  # of a recorded request or answer that is returned


_ANSWER = """
SELECT request_id, version, row, at, prediction, confidence, truth, error,
truth_at FROM tsx_monitor_answers WHERE model = :model
"""
ANSWERS = f"{_ANSWER} AND request_id = :request_id ORDER BY version, row"
WORST = f"""
{_ANSWER} AND version = :version AND truth IS NOT NULL AND error > 0
ORDER BY error DESC, COALESCE(confidence, -1) DESC, request_id LIMIT :count
"""
METRIC = """
SELECT CASE WHEN number IS NULL THEN 1 ELSE 2 END AS kind, COUNT(*) AS answers,
SUM(error) AS total, SUM(error * error) AS squares FROM tsx_monitor_answers
WHERE model = :model AND version = :version AND at >= :since AND truth IS NOT NULL GROUP BY 1
"""
CONTESTS = """
SELECT * FROM tsx_monitor_contests WHERE model = :model
AND (CAST(:state AS TEXT) IS NULL OR state = :state) ORDER BY at DESC LIMIT 1000
"""
CONTEST = "SELECT * FROM tsx_monitor_contests WHERE model = :model AND id = :id"
ANSWER_CONTEST = """
UPDATE tsx_monitor_contests SET state = :state, response = :response, answered_at = :answered_at
WHERE id = :id
"""


class ContestAnswer(BaseModel):
    """What a person answers to a contest."""

    model_config = ConfigDict(extra="forbid")

    state: Literal["upheld", "corrected"]
    response: str = Field("", max_length=MAX_RESPONSE_CHARS)
    truth: Any = None
    groups: dict[str, str] = {}


def answer_call(
    monitor: Monitor, operation: str, arguments: Mapping[str, Any], body: bytes
) -> bytes:
    """Return the JSON of an operation's result.

    Raises:
        TsxError: It cannot be done.
    """
    result = OPERATIONS[operation](monitor, body, **arguments)
    return result if isinstance(result, bytes) else to_json(result)


def _feedback(monitor: Monitor, body: bytes, *, model: str) -> FeedbackResult:
    items, errors = parse_feedback(body)
    rules = monitor.join_rules(model)
    with monitor.store.transaction() as connection:
        result = FeedbackJoin(monitor.store, connection, rules).apply(items, errors)
    monitor.note_truth(model)
    return result


def _report(monitor: Monitor, body: bytes, *, model: str, dropped: Mapping[str, int] = {}) -> bytes:
    """Return a `MonitorReport`; `dropped` are the samples that the server did not send."""
    until, content = monitor.reports.get(model, (0.0, b""))
    start = time.monotonic()
    if start >= until:
        report = build_report(monitor, model)
        report.dropped = dict(Counter(report.dropped) + Counter(dropped))
        content = to_json(report)
        pause = max(MIN_REPORT_S, PAUSE_FACTOR * (time.monotonic() - start))
        monitor.reports[model] = (start + pause, content)
    return content


def _contests(
    monitor: Monitor, body: bytes, *, model: str, state: str | None = None
) -> list[dict[str, Any]]:
    rows = monitor.store.read(CONTESTS, model=model, state=state)
    return [dict(row._mapping) for row in rows]


def _answer_contest(monitor: Monitor, body: bytes, *, model: str, id: str) -> dict[str, Any]:
    try:
        answer = ContestAnswer.model_validate_json(body)
    except ValidationError as error:
        raise BadRequest(f"The answer to a contest is wrong: {describe(error)}.") from error
    rules = monitor.join_rules(model)
    with monitor.store.transaction() as connection:
        row = connection.execute(text(CONTEST), {"model": model, "id": id}).first()
        if row is None:
            raise ResourceNotFound(f"Model {model} has no contest {id}.")
        contest = dict(row._mapping)
        if contest["state"] != "open":
            raise Conflict(f"The contest {id} is answered already: {contest['state']}.")
        if answer.truth is not None:
            names = {name: contest[name] for name in ("request_id", "version")}
            values = {**names, "truth": answer.truth, "groups": answer.groups, "replace": True}
            item = FeedbackItem.model_validate(values)
            errors = FeedbackJoin(monitor.store, connection, rules).apply({0: item}, []).errors
            if errors:
                raise BadRequest(f"The truth cannot be stored: {errors[0].message}.")
        contest |= {
            "state": answer.state,
            "response": clean(answer.response, MAX_RESPONSE_CHARS),
            "answered_at": time.time(),
        }
        connection.execute(text(ANSWER_CONTEST), contest)
    monitor.note_truth(model)
    return contest


def _quality(
    monitor: Monitor, body: bytes, *, model: str, version: str, since: float = 0.0
) -> dict[str, Any]:
    """Return a `VersionQuality` of the answers since a time."""
    monitor.flush()
    accuracy = error = MetricCounts()
    for row in monitor.store.read(METRIC, model=model, version=version, since=since):
        if row.kind == 1:
            hits = row.answers - row.total
            accuracy = MetricCounts(row.answers, hits, hits)
        else:
            error = MetricCounts(row.answers, row.total, row.squares)
    windows = None
    if (monitored := monitor.versions_of(model).get(version)) is not None:
        windows = monitored.windows.state
    return {
        "accuracy": asdict(accuracy),
        "error": asdict(error),
        "drift": None if windows is None else windows.drift,
        "windows": 0 if windows is None else windows.windows,
    }


def _worst(
    monitor: Monitor, body: bytes, *, model: str, version: str, count: int = 10
) -> list[dict[str, Any]]:
    rows = monitor.store.read(WORST, model=model, version=version, count=min(count, MAX_WORST))
    return [dict(row._mapping) for row in rows]


def _request(monitor: Monitor, body: bytes, *, model: str, request_id: str) -> dict[str, Any]:
    """Return the stored answer to each row, and the request where a recording has it."""
    advice = monitor.join_rules(model).advice
    rows = monitor.store.read(ANSWERS, model=model, request_id=clean(request_id))
    at = min((row.at for row in rows), default=None)
    recorded = None
    for version in monitor.versions_of(model).values():
        if version.recordings is not None and recorded is None:
            with suppress(OSError, NotARecording):
                recorded = find_request(Path(version.recordings), request_id, at, MAX_FILES)
    if not rows and recorded is None:
        raise RequestNotFound(f"No answer with the request id {request_id} is stored; {advice}.")
    return {
        "request_id": request_id,
        "answers": [dict(row._mapping) for row in rows],
        "recorded": None if recorded is None else _describe_recorded(recorded),
    }


def _describe_recorded(recorded: Recorded) -> dict[str, Any]:
    """Return a recorded request; bodies that are no text are base64, and large ones are left out."""
    bodies = {}
    for name, data in (("body", recorded.body), ("answer", recorded.answer)):
        if data is not None and len(data) <= MAX_BODY_BYTES:
            try:
                bodies[name] = data.decode()
            except UnicodeDecodeError:
                bodies[f"{name}_base64"] = base64.b64encode(data).decode()
    names = ("at", "version", "query", "headers", "status", "seconds", "answer_headers")
    return {name: getattr(recorded, name) for name in names} | bodies


OPERATIONS: dict[str, Callable[..., Any]] = {
    "feedback": _feedback,
    "report": _report,
    "contests": _contests,
    "answer_contest": _answer_contest,
    "quality": _quality,
    "worst": _worst,
    "request": _request,
}
