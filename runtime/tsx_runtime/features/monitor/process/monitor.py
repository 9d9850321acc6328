"""The state of the monitor process: the versions, their windows, and what is not stored yet."""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from sqlalchemy import text

from tsx_archiver.errors import CannotPack
from tsx_archiver.monitor.baseline import OTHERS, MonitorBaseline, parse_baseline
from tsx_archiver.monitor.config import FieldKind, MonitorConfig
from tsx_runtime.errors import StoreUnavailable
from tsx_runtime.features.monitor.messages import (
    MonitorSample,
    VersionState,
    decode_samples,
    header_pattern,
)
from tsx_runtime.features.monitor.process.events import EventSender
from tsx_runtime.features.monitor.process.store import (
    MAX_NAME_CHARS,
    CountChanges,
    CountKey,
    MonitoredAnswer,
    MonitorStore,
    clean,
)
from tsx_runtime.features.monitor.statistics.columns import Extractor, RowFacts
from tsx_runtime.features.monitor.statistics.windows import VersionWindows

COMMIT_S = 0.5  # the longest time for which an answer waits
MAX_WAITING = 10_000  # rows that wait for the store
STATE_S, MAX_STATE_S = 2.0, 60.0  # limits of the pause between two reports of the state
PAUSE_FACTOR = 20  # Work on a large store is followed by a pause of this many times its duration.
MAX_GROUPS = 200  # groups of an attribute, or classes, that are counted
EVENTS_TIMEOUT_S = 3.0  # limit of the time for waiting events at the end

TOTALS = """
SELECT model, version, SUM(answers) AS feedback,
  1 - SUM(CASE kind WHEN 1 THEN total END) / SUM(CASE kind WHEN 1 THEN answers END) AS accuracy,
  SUM(CASE kind WHEN 2 THEN total END) / SUM(CASE kind WHEN 2 THEN answers END) AS mean_error
FROM tsx_monitor_counts WHERE attribute = '' AND kind > 0 GROUP BY model, version
"""
LOAD_STATE = """
SELECT state FROM tsx_monitor_states
WHERE model = :model AND version = :version AND instance = :instance
"""
SAVE_STATE = """
INSERT INTO tsx_monitor_states VALUES (:model, :version, :instance, :updated, :state)
ON CONFLICT (model, version, instance) DO UPDATE SET updated = excluded.updated,
  state = excluded.state
"""


class VersionMessage(BaseModel):
    """The head of a `version` message."""

    model: str
    version: str
    config: MonitorConfig
    fields: dict[str, FieldKind] = {}
    signature: dict[str, Any] | None = None
    registered: float = 0.0
    recording: bool = False
    recordings: Path | None = None


class MonitoredVersion:
    """A version of a model whose answers are examined."""

    def __init__(self, message: VersionMessage, baseline: bytes) -> None:
        """Begin with the file of a baseline, which may be empty."""
        self.message = message
        self.samples = 0
        self.is_saved = True
        self.totals: dict[str, Any] = {"feedback": 0, "accuracy": None, "mean_error": None}
        self.problem: str | None = None
        self.baseline = MonitorBaseline.model_validate({"rows": 0, "created": 0})
        if baseline:
            try:
                self.baseline = parse_baseline(baseline, "the baseline of the archive")
            except CannotPack as error:
                self.problem = str(error)
        self._set_fields(message.fields or self.baseline.fields)
        self.windows = VersionWindows(message.config, self.baseline)

    def dump(self) -> str:
        """Return what a later process needs to continue the windows.

        It has no rows, so those of the current window are not in it.
        """
        # The fields are not final as long as they are guessed.
        fields = self.extractor.fields if self.windows.state.first is not None else {}
        return json.dumps(
            {
                self.columns: {
                    "fields": fields,
                    "windows": self.windows.state.model_dump(mode="json"),
                }
            }
        )

    def load(self, dump: str) -> None:
        """Continue with what `dump` returned if it has the same columns.

        Raises:
            ValueError, KeyError: It is the dump of another release.
        """
        if data := json.loads(dump).get(self.columns):
            self.windows = VersionWindows(self.message.config, self.baseline, data["windows"])
            if data["fields"]:
                self._set_fields(data["fields"])

    @property
    def columns(self) -> str:
        """What the columns of the windows depend on."""
        parts: Any = {"fields": True, "signature": True, "config": {"fields", "prediction"}}
        return self.message.model_dump_json(include=parts)

    def state(self) -> VersionState:
        windows, drifts = self.windows.state, self.windows.state.drifts.items()
        return VersionState(
            model=self.message.model,
            version=self.message.version,
            samples=self.samples,
            windows=windows.windows,
            drift=windows.drift,
            drifted=[name for name, drift in drifts if drift.alarm],
            fields={name: drift.psi for name, drift in drifts if drift.psi is not None},
            **self.totals,
        )

    def _set_fields(self, fields: Mapping[str, FieldKind]) -> None:
        message, centres = self.message, self.baseline.centres
        config = message.config
        self.extractor = Extractor(config, fields, message.signature, centres)
        self.headers = header_pattern([*self.extractor.fields, *config.groups, config.key or ""])


class Monitor:
    """All monitored versions, and the answers and counts that wait for the store.

    Attributes:
        store_problem: Why the last work on the store failed.
        dropped: The samples that were not examined or stored, by model and reason.
    """

    def __init__(
        self, store: MonitorStore, instance: str, events: EventSender | None = None
    ) -> None:
        """Use a store, in which `instance` names the server, and send samples to `events` too."""
        self.store = store
        self.store_problem: str | None = None
        self.dropped = defaultdict[str, Counter[str]](Counter)
        self._instance = instance
        self._events = events
        self._versions: dict[tuple[str, str], MonitoredVersion] = {}
        self._rows: list[MonitoredAnswer] = []
        self._changes: CountChanges = {}
        self._groups = defaultdict[tuple[str, str | None], set[str]](set)  # names by attribute
        self._commit_at = self._state_at = 0.0

    def versions_of(self, model: str) -> dict[str, MonitoredVersion]:
        """Return the versions of a model by their numbers, the newest first."""
        versions = sorted(self._versions.values(), key=lambda version: -version.message.registered)
        return {
            version.message.version: version
            for version in versions
            if version.message.model == model
        }

    def config_of(self, model: str) -> MonitorConfig | None:
        return next((version.message.config for version in self.versions_of(model).values()), None)

    def advice(self, model: str) -> str:
        """Return why an answer of a model may be unknown."""
        config, days = self.config_of(model), self.store.retention_s / 86400
        share = f"{config.share:g} % of the requests are" if config else "the model is not"
        return f"{share} monitored, and answers are stored for {days:g} days"

    def set_version(self, head: Mapping[str, Any], body: bytes) -> None:
        """Begin or go on to examine a version.

        Raises:
            ValidationError: The message has no configuration.
        """
        message = VersionMessage.model_validate(head)
        id = message.model, message.version
        if (older := self._versions.get(id)) is not None:
            news = {"recording": message.recording, "recordings": message.recordings}
            if older.message.model_copy(update=news) == message:
                older.message = message
                return
            self.end(*id)
        version = self._versions[id] = MonitoredVersion(message, body)
        # A state of another release is not continued.
        with suppress(StoreUnavailable, ValueError, KeyError):
            for row in self.store.read(LOAD_STATE, **vars(message), instance=self._instance):
                version.load(row["state"])

    def end(self, model: str, version: str) -> None:
        if (ended := self._versions.pop((model, version), None)) is not None:
            with suppress(StoreUnavailable):
                self._save_state(ended)

    def decode(self, model: str, number: str, data: bytes) -> Iterator[MonitorSample]:
        """Yield the samples of a `samples` message."""
        version = self._versions.get((model, number))
        headers = header_pattern(()) if version is None else version.headers
        return decode_samples(model, number, data, headers)

    def add_sample(self, sample: MonitorSample) -> None:
        if self._events is not None:
            self._events.send(sample)
        version = self._versions.get((sample.model, sample.version))
        if version is None:
            self.dropped[sample.model]["stopped"] += 1
            return
        unreadable = version.extractor.unreadable
        rows = version.extractor.rows(sample)
        self.dropped[sample.model]["unreadable"] += version.extractor.unreadable - unreadable
        for row in rows:
            # The rows of a window that has not ended are not in its state.
            version.is_saved &= not version.windows.add(row, sample.at)
        version.samples += 1
        if len(self._rows) >= MAX_WAITING:
            for waiting in self._rows:
                self.dropped[waiting.model]["store"] += waiting.row == 0
            self._rows, self._changes = [], {}
        if self.store.is_configured:
            for index, row in enumerate(rows):
                self._add_row(version, sample, index, row)

    def dropped_of(self, model: str) -> Counter[str]:
        """Return the samples of a model that were not examined, stored or sent, by reason."""
        dropped = self.dropped[model].copy()
        if self._events is not None:
            dropped["events"] = self._events.dropped[model] + self._events.failed[model]
        return dropped

    def count(
        self, changes: CountChanges, row: MonitoredAnswer, attribute: str, group: str, answers: int
    ) -> None:
        """Change the counts of a group by answers like `row`; the attribute '' is for all."""
        kind = 0 if row.truth is None else 1 if row.number is None else 2
        truth = row.truth or "" if kind == 1 else ""
        prediction = row.prediction or "" if row.number is None else ""
        if not kind:
            prediction = self._group_name(row.model, None, prediction)
        if attribute:
            group = self._group_name(row.model, attribute, group)
        elif row.confidence is None:
            group = "-1"
        else:
            group = str(max(0, min(9, int(row.confidence * 10))))
        hour = int(row.at // 3600)
        key = CountKey(row.model, row.version, hour, attribute, group, kind, prediction, truth)
        error = row.error or 0.0 if kind else 0.0
        changes.setdefault(key, Counter()).update(
            answers=answers,
            confidence=answers * (row.confidence or 0.0),
            total=answers * error,
            squares=answers * error * error,
        )

    def work(self, now: float) -> list[VersionState]:
        """Do what is due; return the states of the versions if they are to be reported now.

        After an error of the store, its work is done later, and `store_problem` has the reason.
        """
        if now < self._commit_at:
            return []
        self._commit_at = now + COMMIT_S
        for version in self._versions.values():
            version.is_saved &= not version.windows.end_if_due(now)
        for model in {model for model, _ in self._versions}:
            for newer, older in pairwise(self.versions_of(model).values()):
                # The next window is compared with the last one of the version before.
                newer.windows.state.previous = (
                    older.windows.state.last or newer.windows.state.previous
                )
        is_due = now >= self._state_at
        try:
            self.flush()
            if is_due:
                self._work_on_store()
            self.store_problem = None
        except StoreUnavailable as error:
            self.store_problem = error.message
        if not is_due:
            return []
        pause = max(STATE_S, PAUSE_FACTOR * (time.time() - now))
        self._state_at = now + min(MAX_STATE_S, pause)
        return [version.state() for version in self._versions.values()]

    def flush(self) -> None:
        """Store what waits.

        Raises:
            StoreUnavailable: It cannot be stored, and waits again.
        """
        with self.store.transaction() as connection:
            self.store.write(connection, self._rows, self._changes)
        self._rows, self._changes = [], {}

    def close(self) -> None:
        """Store everything, and send the events that wait.

        Raises:
            StoreUnavailable: It cannot be stored.
        """
        try:
            if self.store.is_configured:
                self.flush()
                for version in self._versions.values():
                    self._save_state(version)
        finally:
            self.store.close()
            if self._events is not None:
                self._events.close(EVENTS_TIMEOUT_S)

    def _work_on_store(self) -> None:
        for row in self.store.read(TOTALS):
            id = row.pop("model"), row.pop("version")
            if (counted := self._versions.get(id)) is not None:
                counted.totals = row
        for version in self._versions.values():
            self._save_state(version)
        self.store.expire()

    def _add_row(
        self, version: MonitoredVersion, sample: MonitorSample, index: int, facts: RowFacts
    ) -> None:
        groups = {name: clean(group) for name, group in facts.groups.items()}
        row = MonitoredAnswer(
            model=sample.model,
            request_id=str(clean(sample.request_id)),
            version=sample.version,
            row=index,
            at=sample.at,
            prediction=clean(facts.prediction),
            number=facts.prediction if isinstance(facts.prediction, float) else None,
            confidence=facts.confidence,
            key=clean(facts.key) if 0 < len(facts.key or "") <= MAX_NAME_CHARS else None,
            attributes=json.dumps(groups if version.message.recording else {}),
        )
        self._rows.append(row)
        for attribute, group in (groups | {"": ""}).items():
            self.count(self._changes, row, attribute, str(group), 1)

    def _group_name(self, model: str, attribute: str | None, group: str) -> str:
        """Return the name of a group or class, or `(others)` for a new one after too many."""
        names = self._groups[model, attribute]
        if len(names) < MAX_GROUPS:
            names.add(group)
        return group if group in names else OTHERS

    def _save_state(self, version: MonitoredVersion) -> None:
        if not version.is_saved:
            values = {"instance": self._instance, "updated": time.time(), "state": version.dump()}
            with self.store.transaction() as connection:
                connection.execute(text(SAVE_STATE), vars(version.message) | values)
            version.is_saved = True
