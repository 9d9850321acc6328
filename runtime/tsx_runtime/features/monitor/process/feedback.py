"""Feedback: the truth of answers, and contests, joined with the stored answers."""

from __future__ import annotations

import json
import reprlib
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from datetime import datetime, timezone
from typing import Annotated, Any, NamedTuple

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import from_json
from sqlalchemy import Connection, text

from tsx_runtime.errors import BadRequest, PayloadTooLarge
from tsx_runtime.features.monitor.process.store import (
    ADD_CONTEST,
    HOUR_S,
    SET_TRUTH,
    CountChanges,
    CountKey,
    MonitoredAnswer,
    MonitorStore,
    clean,
)
from tsx_runtime.features.monitor.report import FeedbackError, FeedbackResult
from tsx_runtime.features.monitor.statistics.facts import category_of, number_of

MAX_ITEMS = 10_000
MAX_NAME_CHARS = 500  # PostgreSQL cannot index a key of more than 2,700 bytes.
MAX_SKEW_S = 300  # tolerance for a client's clock
MAX_NUMBER = 1e150  # The squares of errors are summed.


def _to_text(value: Any) -> Any:
    """Return a number as a text, and a text that a database can store."""
    return clean(str(value)) if type(value) in (int, str) else value


Name = Annotated[str, BeforeValidator(_to_text), Field(min_length=1, max_length=MAX_NAME_CHARS)]
Reason = Annotated[str, BeforeValidator(_to_text), Field(min_length=1, max_length=2000)]


class ContestReason(BaseModel):
    model_config = ConfigDict(extra="forbid")

    reason: Reason


class FeedbackItem(BaseModel):
    """The truth of an answer, or a contest, or both."""

    model_config = ConfigDict(extra="forbid")

    request_id: Name | None = None
    key: Name | None = None
    row: int | None = Field(default=None, ge=0, description="position of the row in the request")
    truth: Any = Field(
        default=None, description="a class or a number, or a list with one for each row"
    )
    contest: ContestReason | None = None
    groups: dict[Name, Name] = Field(default={}, max_length=20)
    at: datetime | None = Field(
        default=None, description="time of the truth: ISO 8601, or s since 1970"
    )
    version: Name | None = None
    replace: bool = Field(default=False, description="correct an earlier truth")

    @model_validator(mode="after")
    def _check(self) -> FeedbackItem:
        if (self.request_id is None) == (self.key is None):
            raise ValueError("give either request_id or key")
        if self.truth is None and self.contest is None:
            raise ValueError("give truth, contest or both")
        return self


class JoinRules(NamedTuple):
    """What the join knows of a model."""

    model: str
    versions: Collection[str]  # monitored ones
    attributes: Collection[str]  # names that feedback may use
    advice: str  # why an answer may be unknown
    group_of: Callable[[str, str], str]  # the counted group of an attribute and its value


class _Rejected(Exception):
    """An item that cannot be stored, with the code and message of its error."""


def parse_feedback(body: bytes) -> tuple[dict[int, FeedbackItem], list[FeedbackError]]:
    """Return the valid items by their index, and an error for each other item.

    Raises:
        BadRequest: The body is neither a JSON object nor a list.
        PayloadTooLarge: There are too many items.
    """
    try:
        entries = from_json(body)
    except ValueError as error:
        raise BadRequest(f"The feedback is no JSON: {error}.") from error
    if not isinstance(entries, list | dict):
        raise BadRequest("Feedback is a JSON object, or a list of them.")
    entries = entries if isinstance(entries, list) else [entries]
    if len(entries) > MAX_ITEMS:
        raise PayloadTooLarge(f"Feedback has {len(entries):,} items; send at most {MAX_ITEMS:,}.")
    items, errors = {}, []
    for index, entry in enumerate(entries):
        try:
            items[index] = FeedbackItem.model_validate(entry)
        except ValidationError as error:
            errors.append(FeedbackError(index=index, code="invalid", message=describe(error)))
    return items, errors


def describe(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    return ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))


class FeedbackJoin:
    """The join of items in one transaction.

    The result is the same however often and in which order items come, except that the first truth
    of an answer stays without `replace`.
    """

    def __init__(self, store: MonitorStore, connection: Connection, rules: JoinRules) -> None:
        self._store = store
        self._connection = connection
        self._rules = rules
        self._rows = defaultdict[str | None, dict[tuple[str, int], MonitoredAnswer]](dict)
        self._ids: dict[str, str] = {}  # request ids by key
        self._changed = dict[tuple[str, str, int], MonitoredAnswer]()
        self._changes = CountChanges()

    def apply(
        self, items: Mapping[int, FeedbackItem], errors: list[FeedbackError]
    ) -> FeedbackResult:
        """Store the items; add an error for each one that does not fit."""
        ids = {item.request_id for item in items.values() if item.request_id is not None}
        keys = {item.key for item in items.values() if item.key is not None}
        rows, self._ids = self._store.find_answers(self._connection, self._rules.model, ids, keys)
        for row in rows:
            self._rows[row.request_id][row.version, row.row] = row
        results = Counter[bool]()
        for index, item in items.items():
            try:
                results[self._apply(item)] += 1
            except _Rejected as error:
                code, message = error.args
                errors.append(FeedbackError(index=index, code=code, message=message))
        if self._changed:
            truths = [row._asdict() for _, row in sorted(self._changed.items())]
            self._connection.execute(text(SET_TRUTH), truths)
        self._store.write(self._connection, [], self._changes)
        errors.sort(key=lambda error: error.index)
        return FeedbackResult(accepted=results[True], duplicates=results[False], errors=errors)

    def _apply(self, item: FeedbackItem) -> bool:
        """Apply an item; tell whether it changed anything."""
        at = now = time.time()
        if item.at is not None:
            at = (item.at if item.at.tzinfo else item.at.replace(tzinfo=timezone.utc)).timestamp()
        if at > now + MAX_SKEW_S:
            raise _Rejected("future", f"at is {at - now:,.0f} s later than the server's time")
        if undeclared := item.groups.keys() - self._rules.attributes:
            message = f"the attribute {min(undeclared)} is not in `groups` of the monitoring"
            raise _Rejected("invalid", message)
        rows = self._find(item)
        truths = [] if item.truth is None else self._truths(item, rows)
        has_changed = [self._set_truth(new._replace(truth_at=at), item) for new in truths]
        if item.contest is not None:
            contest = {"id": uuid.uuid4().hex, "at": at, "reason": item.contest.reason}
            values = rows[0]._asdict() | contest | {"state": "open", "response": ""}
            result = self._connection.execute(text(ADD_CONTEST), values)
            has_changed.append(result.rowcount > 0)
        return any(has_changed)

    def _find(self, item: FeedbackItem) -> list[MonitoredAnswer]:
        """Return the rows that an item names, those of the first version first."""
        id = self._ids.get(item.key) if item.key is not None else item.request_id
        rows = [
            row
            for row in self._rows[id].values()
            if item.key in (None, row.key) and item.row in (None, row.row)
        ]
        chosen = [row for row in rows if item.version in (None, row.version)]
        if chosen:
            return sorted(chosen, key=lambda row: (row.at, row.version, row.row))
        names = {"key": item.key, "request_id": item.request_id, "version": item.version}
        name = ", ".join(f"{name} {value}" for name, value in names.items() if value is not None)
        is_gone = rows or item.version not in (None, *self._rules.versions)
        raise _Rejected(
            "version_gone" if is_gone else "unknown_request",
            f"no answer with the {name} is stored; {self._rules.advice}",
        )

    def _truths(self, item: FeedbackItem, rows: list[MonitoredAnswer]) -> list[MonitoredAnswer]:
        """Return the rows with their truths and errors, after all checks."""
        numbers = sorted({row.row for row in rows})
        truths = item.truth if isinstance(item.truth, list) else [item.truth]
        if len(truths) != len(numbers):
            message = f"the request has {len(numbers)} rows, and truth has {len(truths)} values"
            raise _Rejected("invalid", f"{message}; send a list with one for each, or `row`")
        by_row = dict(zip(numbers, truths, strict=True))
        judged = [_judge(row, by_row[row.row]) for row in rows]
        for old, new in zip(rows, judged, strict=True):
            if old.truth in (None, new.truth):
                continue
            if not item.replace:
                message = f"the truth is {old.truth} already; correct it with `replace: true`"
                raise _Rejected("conflict", message)
            if missing := _counted(old) - self._groups(old, item).keys():
                message = f"repeat the group of {min(missing)}, whose counts are to be corrected"
                raise _Rejected("invalid", message)
        return judged

    def _set_truth(self, new: MonitoredAnswer, item: FeedbackItem) -> bool:
        """Note a truth, and change the counts; tell whether anything changed."""
        rows, id = self._rows[new.request_id], (new.version, new.row)
        old, groups, counted = rows[id], self._groups(new, item), _counted(new)
        if old.truth == new.truth and counted >= groups.keys():
            return False
        for attribute, value in groups.items():
            if attribute in counted:
                self._count(old, attribute, value, -1)
            self._count(new, attribute, value, 1)
        rows[id] = new._replace(counted=json.dumps(sorted(counted | groups.keys())))
        self._changed[new[1:4]] = rows[id]
        return True

    def _groups(self, row: MonitoredAnswer, item: FeedbackItem) -> dict[str, str]:
        """Return the groups of an answer by attribute; '' has the decile of the confidence."""
        groups = item.groups | json.loads(row.attributes or "{}")
        decile = -1 if row.confidence is None else max(0, min(9, int(row.confidence * 10)))
        return {name: self._rules.group_of(name, value) for name, value in groups.items()} | {
            "": str(decile)
        }

    def _count(self, row: MonitoredAnswer, attribute: str, value: str, answers: int) -> None:
        classes = (1, row.prediction or "", row.truth or "") if row.number is None else (2,)
        hour = int(row.at // HOUR_S)
        key = CountKey(row.model, row.version, hour, attribute, value, *classes)
        self._changes.add(key, answers, row.confidence, row.error or 0.0)


def _judge(row: MonitoredAnswer, truth: Any) -> MonitoredAnswer:
    """Return a row with its truth and error.

    A text may be a class that the model has never predicted. A number is a class of a model whose
    classes are numbers, and `true` and `false` are classes of one whose classes they are.
    """
    is_number = isinstance(truth, int | float) and not isinstance(truth, bool)
    if row.number is not None:
        number = None if isinstance(truth, bool) else number_of(truth)  # CSV has texts of numbers.
        if number is None or not abs(number) < MAX_NUMBER:
            message = f"the answer is a number, and the truth is {reprlib.repr(truth)}"
            raise _Rejected("wrong_type", message)
        return row._replace(truth=repr(number), error=abs(number - row.number))
    if row.prediction is None:
        message = "the answer has no class or number; name its path as `prediction` of `monitor`"
        raise _Rejected("wrong_type", message)
    label = category_of(truth)
    is_same_type = (
        isinstance(truth, str)
        or (is_number and number_of(row.prediction) is not None)
        or (isinstance(truth, bool) and row.prediction in ("true", "false"))
    )
    if label is None or not is_same_type:
        message = f"the answer is a class, {row.prediction}, and the truth is {reprlib.repr(truth)}"
        raise _Rejected("wrong_type", message)
    label = clean(label)
    return row._replace(truth=label, error=float(label != row.prediction))


def _counted(row: MonitoredAnswer) -> set[str]:
    return set(json.loads(row.counted or "[]"))
