"""Feedback: the truth of answers, and contests, joined with the stored answers."""

from __future__ import annotations

import json
import reprlib
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from datetime import datetime, timezone
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import from_json
from sqlalchemy import Connection, String, bindparam, text

from tsx_runtime.errors import BadRequest, PayloadTooLarge
from tsx_runtime.features.monitor.process.monitor import Monitor
from tsx_runtime.features.monitor.process.store import (
    MAX_NAME_CHARS,
    CountChanges,
    MonitoredAnswer,
    clean,
)
from tsx_runtime.features.monitor.report import FeedbackError, FeedbackResult
from tsx_runtime.features.monitor.statistics.facts import category_of, number_of

MAX_ITEMS = 10_000
MAX_SKEW_S = 300  # tolerance for a client's clock
SET_TRUTH = """
UPDATE tsx_monitor_answers
SET truth = :truth, error = :error, truth_at = :truth_at, attributes = :attributes
WHERE model = :model AND request_id = :request_id AND version = :version AND row = :row
"""
ADD_CONTEST = """
INSERT INTO tsx_monitor_contests VALUES (:id, :model, :version, :request_id, :at, NULL, :reason,
  :prediction, 'open', '') ON CONFLICT DO NOTHING
"""
# A key names the newest request that had it.
FIND_KEYS = """
SELECT key, request_id FROM tsx_monitor_answers AS a WHERE model = :model AND key IN :names
AND at = (SELECT max(at) FROM tsx_monitor_answers WHERE model = :model AND key = a.key)
ORDER BY request_id
"""
# The order is the same in all servers, so that none waits for another in a circle.
FIND_ANSWERS = """
SELECT model, request_id, version, row, at, prediction, number, confidence, key, attributes, truth,
  error, truth_at
FROM tsx_monitor_answers WHERE model = :model AND request_id IN :names
ORDER BY request_id, at, version, row
"""
Name = Annotated[str, AfterValidator(clean), Field(min_length=1, max_length=MAX_NAME_CHARS)]


class FeedbackPart(BaseModel):
    model_config = ConfigDict(extra="forbid", coerce_numbers_to_str=True)


class ContestReason(FeedbackPart):
    reason: Annotated[str, AfterValidator(clean), Field(min_length=1, max_length=2000)]


class FeedbackItem(FeedbackPart):
    """The truth of an answer, or a contest, or both."""

    request_id: Name | None = None
    key: Name | None = None
    row: int | None = None  # the position of the row in the request
    truth: Any = None  # a class or a number, or a list with one for each row
    contest: ContestReason | None = None
    groups: dict[Name, Name] = Field(default={}, max_length=20)
    at: datetime | None = None  # the time of the truth: ISO 8601, or seconds since 1970
    version: Name | None = None
    replace: bool = False  # correct an earlier truth

    @model_validator(mode="after")
    def _check(self) -> FeedbackItem:
        if (self.request_id is None) == (self.key is None) or self.truth is self.contest is None:
            raise ValueError("give request_id or key, and truth, contest or both")
        return self


class _Rejected(Exception):
    """An item that cannot be stored, with the code and message of its error."""


def parse_body(body: bytes) -> list[Any]:
    """Return the items of a request.

    Raises:
        BadRequest: The body is neither a JSON object nor a list.
        PayloadTooLarge: There are too many items.
    """
    try:
        items = from_json(body)
    except ValueError as error:
        raise BadRequest(f"The feedback is no JSON: {error}.") from error
    if isinstance(items, dict):
        return [items]
    if not isinstance(items, list):
        raise BadRequest("Feedback is a JSON object, or a list of them.")
    if len(items) > MAX_ITEMS:
        raise PayloadTooLarge(f"Feedback has {len(items):,} items; send at most {MAX_ITEMS:,}.")
    return items


def first_problem(error: ValidationError) -> str:
    """Return the path and the message of the first problem."""
    problem = error.errors(include_url=False)[0]
    path, message = ".".join(map(str, problem["loc"])), problem["msg"]
    return f"{path}: {message}".removeprefix(": ").replace("Value error, ", "", 1)


class FeedbackJoin:
    """The join of items with the answers of a model, in one transaction.

    The result is the same however often and in which order items come, except that the first truth
    of an answer stays without `replace`.
    """

    def __init__(self, monitor: Monitor, connection: Connection, model: str) -> None:
        self._monitor = monitor
        self._connection = connection
        self._model = model
        self._rows = defaultdict[str, dict[tuple[str, int], MonitoredAnswer]](dict)
        self._ids: dict[str, str] = {}  # request ids by key
        self._changes: CountChanges = {}

    def apply(self, entries: Sequence[Any]) -> FeedbackResult:
        """Store the items; the result has an error for each one that does not fit."""
        items, errors, results = dict[int, FeedbackItem](), dict[int, Any](), Counter[bool]()
        for index, entry in enumerate(entries):
            try:
                items[index] = FeedbackItem.model_validate(entry)
            except ValidationError as error:
                errors[index] = "invalid", first_problem(error)
        rows = self._read(items.values())
        for row in rows:
            self._rows[row.request_id][row[2:4]] = row
        for index, item in items.items():
            try:
                results[self._apply(item)] += 1
            except _Rejected as error:
                errors[index] = error.args
        changed = {row for rows in self._rows.values() for row in rows.values()}.difference(rows)
        if changed:
            self._connection.execute(text(SET_TRUTH), [row._asdict() for row in changed])
        self._monitor.store.write(self._connection, [], self._changes)
        return FeedbackResult(
            accepted=results[True],
            duplicates=results[False],
            errors=[
                FeedbackError(index=index, code=code, message=message)
                for index, (code, message) in sorted(errors.items())
            ],
        )

    def _read(self, items: Collection[FeedbackItem]) -> list[MonitoredAnswer]:
        """Return the answers that items name, and lock them until the end of the transaction."""
        names = bindparam("names", type_=String, expanding=True)
        values = {"model": self._model, "names": [item.key for item in items if item.key]}
        keys = self._connection.execute(text(FIND_KEYS).bindparams(names), values)
        self._ids = dict(map(tuple, keys))
        ids = {self._id_of(item) for item in items}
        lock = "" if self._connection.dialect.name == "sqlite" else " FOR UPDATE"
        rows = self._connection.execute(
            text(FIND_ANSWERS + lock).bindparams(names),
            {"model": self._model, "names": list(ids)},
        )
        return [MonitoredAnswer(*row) for row in rows]

    def _id_of(self, item: FeedbackItem) -> str:
        return item.request_id or self._ids.get(item.key or "", "")

    def _apply(self, item: FeedbackItem) -> bool:
        """Apply an item; tell whether it changed anything."""
        at = now = time.time()
        if item.at is not None:
            at = (item.at if item.at.tzinfo else item.at.replace(tzinfo=timezone.utc)).timestamp()
        if at > now + MAX_SKEW_S:
            raise _Rejected("future", f"at is {at - now:,.0f} s later than the server's time")
        config = self._monitor.config_of(self._model)
        if undeclared := item.groups.keys() - (config.groups if config else ()):
            message = f"the attribute {min(undeclared)} is not in `groups` of the monitoring"
            raise _Rejected("invalid", message)
        rows = self._find(item)
        has_changed = item.truth is not None and self._set_truths(item, rows, at)
        if item.contest is not None:
            contest = {"id": uuid.uuid4().hex, "at": at, "reason": item.contest.reason}
            result = self._connection.execute(text(ADD_CONTEST), rows[0]._asdict() | contest)
            has_changed |= result.rowcount > 0
        return has_changed

    def _find(self, item: FeedbackItem) -> list[MonitoredAnswer]:
        """Return the rows that an item names, the earliest first."""
        rows = [
            row
            for row in self._rows[self._id_of(item)].values()
            if item.key in (None, row.key) and item.row in (None, row.row)
        ]
        if chosen := [row for row in rows if item.version in (None, row.version)]:
            return chosen
        is_gone = rows or item.version not in (None, *self._monitor.versions_of(self._model))
        name = f"request_id {item.request_id}" if item.key is None else f"key {item.key}"
        raise _Rejected(
            "version_gone" if is_gone else "unknown_request",
            f"no answer with the {name} is stored; {self._monitor.advice(self._model)}",
        )

    def _set_truths(self, item: FeedbackItem, rows: list[MonitoredAnswer], at: float) -> bool:
        """Note the truths of rows and change the counts; tell whether anything changed."""
        numbers = sorted({row.row for row in rows})
        truths = item.truth if isinstance(item.truth, list) else [item.truth]
        if len(truths) != len(numbers):
            message = f"the request has {len(numbers)} rows, and truth has {len(truths)} values"
            raise _Rejected("invalid", f"{message}; send a list with one for each, or `row`")
        by_row = dict(zip(numbers, truths, strict=True))
        corrected, counts = [], list[Any]()
        for old in rows:
            new = _judge(old, by_row[old.row])
            stored = json.loads(old.attributes)
            # The attribute '' stands for all answers.
            counted = set() if old.truth is None else {"", *stored}
            known = {name: group for name, group in stored.items() if group is not None}
            groups = {"": ""} | item.groups | known
            if old.truth == new.truth and counted >= groups.keys():
                continue
            if old.truth not in (None, new.truth):
                if not item.replace:
                    message = f"the truth is {old.truth} already; correct it with `replace: true`"
                    raise _Rejected("conflict", message)
                if missing := counted - groups.keys():
                    message = f"repeat the group of {min(missing)}, whose counts are corrected"
                    raise _Rejected("invalid", message)
            for name, group in groups.items():
                before = old if name in counted else old._replace(truth=None)
                counts += (before, name, group, -1), (new, name, group, 1)
            attributes = json.dumps(dict.fromkeys(item.groups) | stored)
            corrected.append(new._replace(truth_at=at, attributes=attributes))
        for count in counts:
            self._monitor.count(self._changes, *count)
        for row in corrected:
            self._rows[row.request_id][row[2:4]] = row
        return bool(corrected)


def _judge(row: MonitoredAnswer, truth: Any) -> MonitoredAnswer:
    """Return a row with its truth and error.

    A text may be a class that the model has never predicted. A number is a class of a model whose
    classes are numbers, and `true` and `false` are classes of one whose classes they are.
    """
    # CSV has texts of numbers.
    types = (int, float) if row.number is None else (int, float, str)
    number = number_of(truth) if type(truth) in types else None
    if row.number is not None and number is not None:
        return row._replace(truth=repr(number), error=abs(number - row.number))
    label = clean(category_of(truth))
    is_class = row.number is None and (
        isinstance(truth, str)
        or (number is not None and number_of(row.prediction) is not None)
        or (isinstance(truth, bool) and row.prediction in ("true", "false"))
    )
    if row.prediction is None or label is None or not is_class:
        message = (
            f"the truth {reprlib.repr(truth)} does not fit the answer {row.prediction}; if its"
            " class or number is elsewhere, name the path as `prediction` of `monitor`"
        )
        raise _Rejected("wrong_type", message)
    return row._replace(truth=label, error=float(label != row.prediction))
