"""The operations that the server calls: feedback, reports, contests and single requests."""

from __future__ import annotations

import base64
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError
from pydantic_core import to_json
from sqlalchemy import text

from tsx_archiver.monitor.config import MonitorConfig
from tsx_runtime.core.comparison.means import MetricCounts
from tsx_runtime.core.comparison.quality import Metric, VersionQuality
from tsx_runtime.errors import (
    BadRequest,
    Conflict,
    RequestNotFound,
    ResourceNotFound,
    StoreUnavailable,
)
from tsx_runtime.features.monitor.process.feedback import (
    FeedbackJoin,
    FeedbackPart,
    first_problem,
    parse_body,
)
from tsx_runtime.features.monitor.process.monitor import Monitor, MonitoredVersion
from tsx_runtime.features.monitor.process.store import clean
from tsx_runtime.features.monitor.report import (
    FeedbackResult,
    MonitorReport,
    VersionComparison,
    VersionReport,
)
from tsx_runtime.features.monitor.statistics.comparisons import compare_versions
from tsx_runtime.features.monitor.statistics.groups import GroupCount, groups_of
from tsx_runtime.features.monitor.statistics.quality import (
    ErrorSum,
    OutcomeCount,
    quality_of,
    sum_counts,
)
from tsx_runtime.recordings import NotARecording, find_request

MAX_FILES = 2  # files of a recording that a request reads
RECENT_S = 7 * 86400  # Older outcomes are read by day.

_ANSWER = """
SELECT request_id, version, row, at, prediction, confidence, truth, error,
truth_at FROM tsx_monitor_answers WHERE model = :model
"""
ANSWERS = f"{_ANSWER} AND request_id = :request_id ORDER BY version, row"
WORST = f"""
{_ANSWER} AND version = :version AND truth IS NOT NULL AND error > 0
ORDER BY error DESC, confidence DESC LIMIT :count
"""
METRICS = """
SELECT CASE WHEN number IS NULL THEN 'accuracy' ELSE 'error' END AS metric, COUNT(*) AS count,
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
OPEN_CONTESTS = """
SELECT COUNT(*) AS contests FROM tsx_monitor_contests WHERE model = :model AND state = 'open'
"""
_PERIOD = "CASE WHEN hour < :recent THEN hour - hour % 24 ELSE hour END * 3600 AS period"
_OF_ALL = "FROM tsx_monitor_counts WHERE model = :model AND attribute = ''"
_OF_GROUPS = "FROM tsx_monitor_counts WHERE model = :model AND attribute != ''"
SERVED = f"""
SELECT version, MIN(hour) * 3600 AS first, MAX(hour) * 3600 AS last, SUM(answers) AS samples
{_OF_ALL} GROUP BY version ORDER BY 2 DESC
"""
OUTCOMES = f"""
SELECT version, {_PERIOD}, prediction, truth, CAST(value AS INTEGER) AS bin,
  SUM(answers) AS answers, SUM(confidence) AS confidence
{_OF_ALL} AND kind = 1 GROUP BY 1, 2, 3, 4, 5 HAVING SUM(answers) > 0
"""
ERRORS = f"""
SELECT version, {_PERIOD}, SUM(answers) AS answers, SUM(total) AS total, SUM(squares) AS squares
{_OF_ALL} AND kind = 2 GROUP BY 1, 2 HAVING SUM(answers) > 0
"""
# If only feedback has the attribute, the number of answers without a truth is negative.
GROUPS = f"""
SELECT version, attribute, value AS "group", NULLIF(prediction, '') AS prediction,
  NULLIF(truth, '') AS truth, SUM(answers) AS answers, SUM(confidence) AS confidence
{_OF_GROUPS} GROUP BY 1, 2, 3, 4, 5 HAVING SUM(answers) > 0
"""
GROUP_ERRORS = f"""
SELECT version, attribute, value AS "group", SUM(answers) AS count, SUM(total) AS total,
  SUM(squares) AS squares
{_OF_GROUPS} AND kind = 2 GROUP BY 1, 2, 3 HAVING SUM(answers) > 0
"""
QUERIES: Mapping[str, tuple[str, Callable[..., Any]]] = {
    "served": (SERVED, dict),
    "outcomes": (OUTCOMES, OutcomeCount),
    "errors": (ERRORS, ErrorSum),
    "groups": (GROUPS, GroupCount),
    "group_errors": (
        GROUP_ERRORS,
        lambda attribute, group, **sums: ((attribute, group), MetricCounts(**sums)),
    ),
}


class ContestAnswer(FeedbackPart):
    """What a person answers to a contest."""

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
        if operation != "report":
            self._monitor.flush()  # The operation must find the last answers.
        return to_json(getattr(self, operation)(body, **arguments))

    def feedback(self, body: bytes, model: str) -> FeedbackResult:
        items = parse_body(body)
        with self._store.transaction() as connection:
            return FeedbackJoin(self._monitor, connection, model).apply(items)

    def report(self, body: bytes, model: str, dropped: Mapping[str, int] = {}) -> MonitorReport:
        """Return the report on a model; without the store, it has the drift only.

        Args:
            body: Empty.
            model: The model's name.
            dropped: The samples by reason that the server did not send.
        """
        versions, config = self._monitor.versions_of(model), self._monitor.config_of(model)
        stored = defaultdict[str, Any](partial(defaultdict, list))  # keys: version, query
        contests, problem = 0, self._monitor.store_problem
        recent = int((time.time() - RECENT_S) // 3600)
        try:
            self._monitor.flush()
            for query, (sql, kind) in QUERIES.items():
                for row in self._store.read(sql, model=model, recent=recent):
                    stored[row.pop("version")][query].append(kind(**row))
            contests = self._store.read(OPEN_CONTESTS, model=model)[0]["contests"]
        except StoreUnavailable as error:
            problem = error.message
        names = list(dict.fromkeys((*versions, *stored)))
        return MonitorReport(
            model=model,
            monitoring=bool(versions),
            config=config,
            samples=sum(version.samples for version in versions.values()),
            dropped=self._monitor.dropped_of(model) + Counter(dropped),
            problem=problem,
            versions=[_version(name, versions.get(name), stored[name], config) for name in names],
            comparisons=[
                comparison
                for new, old in pairwise(names)
                for comparison in _compare(old, new, stored)
            ],
            contests=contests,
        )

    def contests(self, body: bytes, model: str, state: str | None = None) -> list[Any]:
        return self._store.read(CONTESTS, model=model, state=state)

    def answer_contest(self, body: bytes, model: str, id: str) -> dict[str, Any]:
        try:
            answer = ContestAnswer.model_validate_json(body)
        except ValidationError as error:
            raise BadRequest(
                f"The answer to a contest is wrong: {first_problem(error)}."
            ) from error
        with self._store.transaction() as connection:
            row = connection.execute(text(CONTEST), {"model": model, "id": id}).first()
            if row is None:
                raise ResourceNotFound(f"Model {model} has no contest {id}.")
            contest = dict(row._mapping)
            if row.state != "open":
                raise Conflict(f"The contest {id} is answered already: {row.state}.")
            if answer.truth is not None:
                item = {name: contest[name] for name in ("request_id", "version")}
                item |= answer.model_dump(include={"truth", "groups"}) | {"replace": True}
                errors = FeedbackJoin(self._monitor, connection, model).apply([item]).errors
                if errors:
                    raise BadRequest(f"The truth cannot be stored: {errors[0].message}.")
            contest |= answer.model_dump(include={"state", "response"})
            contest["answered_at"] = time.time()
            connection.execute(text(ANSWER_CONTEST), contest)
        return contest

    def quality(self, body: bytes, model: str, version: str, since: float) -> dict[str, Any]:
        """Return a `VersionQuality` of the answers since a time."""
        rows = self._store.read(METRICS, model=model, version=version, since=since)
        facts: dict[str, Any] = {row.pop("metric"): MetricCounts(**row) for row in rows}
        if (monitored := self._monitor.versions_of(model).get(version)) is not None:
            state = monitored.windows.state
            facts |= {"drift": state.drift, "windows": state.windows}
        return VersionQuality(**facts)._asdict()

    def worst(self, body: bytes, model: str, version: str, count: int) -> list[Any]:
        return self._store.read(WORST, model=model, version=version, count=count)

    def request(self, body: bytes, model: str, request_id: str) -> dict[str, Any]:
        """Return the stored answer to each row, and the request where a recording has it."""
        answers = self._store.read(ANSWERS, model=model, request_id=request_id)
        at = min((answer["at"] for answer in answers), default=None)
        recorded = None
        for version in self._monitor.versions_of(model).values():
            if recorded is None and version.message.recordings is not None:
                with suppress(OSError, NotARecording):
                    recorded = find_request(version.message.recordings, request_id, at, MAX_FILES)
        if not answers and recorded is None:
            advice = self._monitor.advice(model)
            raise RequestNotFound(f"No answer with the id {request_id} is stored; {advice}.")
        result = None
        if recorded is not None:
            bodies = {"body": recorded.body, "answer": recorded.answer or b""}
            encoded = {name: base64.b64encode(data).decode() for name, data in bodies.items()}
            result = recorded._asdict() | encoded
        return {"request_id": request_id, "answers": answers, "recorded": result}


def _version(
    name: str,
    version: MonitoredVersion | None,
    rows: Mapping[str, list[Any]],
    config: MonitorConfig | None,
) -> VersionReport:
    report: dict[str, Any] = {
        "version": name,
        "quality": quality_of(rows["outcomes"], rows["errors"]),
        "groups": groups_of(
            rows["groups"], dict(rows["group_errors"]), config or MonitorConfig.model_validate({})
        ),
    }
    if version is not None:
        windows = version.windows.state
        kind = "archive" if windows.created else "first window"
        report |= {
            "first": windows.first,
            "last": windows.latest or None,
            "samples": version.samples,
            "baseline": kind if windows.baseline_rows else "none",
            "baseline_rows": windows.baseline_rows,
            "problem": version.problem,
            "windows": windows.windows,
            "window_samples": len(version.windows.rows),
            "drift": windows.drift,
            "alarm": any(drift.alarm for drift in windows.drifts.values()),
            "columns": version.windows.drifts(),
        }
    for served in rows["served"]:
        report |= {**served, "last": report.get("last") or served["last"]}
    return VersionReport.model_validate(report)


def _compare(
    old: str, new: str, stored: Mapping[str, Mapping[str, list[Any]]]
) -> Iterator[VersionComparison]:
    """Compare two versions by their answers since the new one has been answering."""
    metrics: dict[Metric, str] = {"accuracy": "outcomes", "mean_error": "errors"}
    for metric, query in metrics.items():
        new_counts = stored[new][query]
        start = min((count.period for count in new_counts), default=math.inf)
        old_counts = [count for count in stored[old][query] if count.period >= start]
        if old_counts:
            yield compare_versions(old, new, metric, sum_counts(old_counts), sum_counts(new_counts))
