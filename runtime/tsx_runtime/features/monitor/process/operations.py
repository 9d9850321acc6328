"""The operations that the server calls: feedback, reports, contests and single requests."""

from __future__ import annotations

import base64
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import to_json
from sqlalchemy import text

from tsx_runtime.core.comparison.means import MetricCounts
from tsx_runtime.core.comparison.quality import VersionQuality
from tsx_runtime.errors import BadRequest, Conflict, RequestNotFound, ResourceNotFound
from tsx_runtime.features.monitor.process.feedback import (
    FeedbackItem,
    FeedbackJoin,
    describe,
    parse_feedback,
)
from tsx_runtime.features.monitor.process.monitor import Monitor
from tsx_runtime.features.monitor.process.reports import build_report
from tsx_runtime.features.monitor.process.store import clean
from tsx_runtime.features.monitor.report import FeedbackResult, MonitorReport
from tsx_runtime.recordings import NotARecording, find_request

MAX_FILES = 2  # files of a recording that a request reads


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
SELECT CASE WHEN number IS NULL THEN 'accuracy' ELSE 'error' END AS metric, COUNT(*) AS answers,
  SUM(CASE WHEN number IS NULL THEN 1 - error ELSE error END) AS total,
  SUM(CASE WHEN number IS NULL THEN 1 - error ELSE error * error END) AS squares
FROM tsx_monitor_answers
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
    response: Annotated[str, AfterValidator(clean), Field(max_length=10_000)] = ""
    truth: Any = None
    groups: dict[str, str] = {}


class Operations:
    """The operations; each takes the body of the request and its arguments."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        self._store = monitor.store

    def call(self, operation: str, body: bytes, arguments: Mapping[str, Any]) -> bytes:
        """Return the JSON of an operation's result.

        Raises:
            TsxError: It cannot be done.
            AttributeError, TypeError: There is no such operation, or it has other arguments.
        """
        return to_json(getattr(self, operation)(body, **arguments))

    def feedback(self, body: bytes, model: str) -> FeedbackResult:
        items, errors = parse_feedback(body)
        self._monitor.flush()  # so that it finds the last answers
        with self._store.transaction() as connection:
            return FeedbackJoin(self._monitor, connection, model).apply(items, errors)

    def report(self, body: bytes, model: str, dropped: Mapping[str, int] = {}) -> MonitorReport:
        """Return the report; `dropped` are the samples that the server did not send."""
        report = build_report(self._monitor, model)
        report.dropped = dict(Counter(report.dropped) + Counter(dropped))
        return report

    def contests(self, body: bytes, model: str, state: str | None = None) -> list[Any]:
        return self._read(CONTESTS, model=model, state=state)

    def answer_contest(self, body: bytes, model: str, id: str) -> dict[str, Any]:
        try:
            answer = ContestAnswer.model_validate_json(body)
        except ValidationError as error:
            raise BadRequest(f"The answer to a contest is wrong: {describe(error)}.") from error
        self._monitor.flush()
        with self._store.transaction() as connection:
            row = connection.execute(text(CONTEST), {"model": model, "id": id}).first()
            if row is None:
                raise ResourceNotFound(f"Model {model} has no contest {id}.")
            contest = dict(row._mapping)
            if row.state != "open":
                raise Conflict(f"The contest {id} is answered already: {row.state}.")
            if answer.truth is not None:
                item = FeedbackItem(
                    request_id=row.request_id,
                    version=row.version,
                    truth=answer.truth,
                    groups=answer.groups,
                    replace=True,
                )
                errors = FeedbackJoin(self._monitor, connection, model).apply({0: item}, []).errors
                if errors:
                    raise BadRequest(f"The truth cannot be stored: {errors[0].message}.")
            answered = {"state": answer.state, "response": answer.response}
            contest |= answered | {"answered_at": time.time()}
            connection.execute(text(ANSWER_CONTEST), contest)
        return contest

    def quality(self, body: bytes, model: str, version: str, since: float) -> dict[str, Any]:
        """Return a `VersionQuality` of the answers since a time."""
        self._monitor.flush()
        quality = VersionQuality()
        for row in self._store.read(METRIC, model=model, version=version, since=since):
            metric: dict[str, Any] = {row.metric: MetricCounts(row.answers, row.total, row.squares)}
            quality = quality._replace(**metric)
        if (monitored := self._monitor.versions_of(model).get(version)) is not None:
            state = monitored.windows.state
            quality = quality._replace(drift=state.drift, windows=state.windows)
        return quality._asdict()

    def worst(self, body: bytes, model: str, version: str, count: int) -> list[Any]:
        return self._read(WORST, model=model, version=version, count=count)

    def request(self, body: bytes, model: str, request_id: str) -> dict[str, Any]:
        """Return the stored answer to each row, and the request where a recording has it."""
        self._monitor.flush()
        answers = self._read(ANSWERS, model=model, request_id=request_id)
        at = min((answer["at"] for answer in answers), default=None)
        recorded = None
        for version in self._monitor.versions_of(model).values():
            if recorded is None and (directory := version.message.recordings) is not None:
                with suppress(OSError, NotARecording):
                    recorded = find_request(directory, request_id, at, MAX_FILES)
        if not answers and recorded is None:
            advice = self._monitor.advice(model)
            raise RequestNotFound(f"No answer with the id {request_id} is stored; {advice}.")
        result = None
        if recorded is not None:
            bodies = {"body": recorded.body, "answer": recorded.answer or b""}
            encoded = {name: base64.b64encode(data).decode() for name, data in bodies.items()}
            result = recorded._asdict() | encoded
        return {"request_id": request_id, "answers": answers, "recorded": result}

    def _read(self, sql: str, **values: Any) -> list[Any]:
        return [dict(row._mapping) for row in self._store.read(sql, **values)]
