"""The state of the monitor process: the versions, their windows, and what is not stored yet."""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from sqlalchemy import text

from tsx_archiver.errors import CannotPack
from tsx_archiver.monitor.baseline import OTHERS, parse_baseline
from tsx_archiver.monitor.config import FieldKind, MonitorConfig
from tsx_runtime.errors import StoreUnavailable
from tsx_runtime.features.monitor.messages import MonitorSample, VersionState
from tsx_runtime.features.monitor.process.feedback import MAX_NAME_CHARS, JoinRules
from tsx_runtime.features.monitor.process.store import (
    HOUR_S,
    SAVE_STATE,
    CountChanges,
    CountKey,
    MonitoredAnswer,
    MonitorStore,
    clean,
)
from tsx_runtime.features.monitor.statistics.columns import Extractor, RowFacts
from tsx_runtime.features.monitor.statistics.windows import VersionWindows

COMMIT_S = 0.5  # the longest time for which an answer waits
RETRY_S = 5.0  # pause after an error of the store
MAX_WAITING = 10_000  # rows that wait for the store
STATE_S = 1.0  # pause between two reports of the state
REFRESH_S = 60.0  # pause between two reads of what other servers have stored
SAVE_S = 30.0  # pause between two saved states of windows
EXPIRE_S = 3600.0
DAY_S = 86400
PAUSE_FACTOR = 20  # A read is followed by a pause of this many times its duration.
MAX_GROUPS = 200  # groups of an attribute, or classes, that are counted

TOTALS = """
SELECT model, version, SUM(answers) AS answers,
  1 - SUM(CASE kind WHEN 1 THEN total END) / SUM(CASE kind WHEN 1 THEN answers END) AS accuracy,
  SUM(CASE kind WHEN 2 THEN total END) / SUM(CASE kind WHEN 2 THEN answers END) AS mean_error
FROM tsx_monitor_counts WHERE attribute = '' AND kind > 0 GROUP BY model, version
"""
LOAD_STATE = """
SELECT state FROM tsx_monitor_states
WHERE model = :model AND version = :version AND instance = :instance
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

    def __init__(self, head: Mapping[str, Any], body: bytes) -> None:
        """Read a `version` message.

        Raises:
            ValidationError: The message has no configuration.
        """
        self.message = VersionMessage.model_validate(head)
        self.id = (self.message.model, self.message.version)
        self.samples = 0
        self.is_saved = True
        self.totals: tuple[int, float | None, float | None] = (0, None, None)
        self.baseline = self.problem = None
        if body:
            try:
                self.baseline = parse_baseline(body, "the baseline of the archive")
            except CannotPack as error:
                self.problem = str(error)
        self._set_fields(self.message.fields or (self.baseline.fields if self.baseline else {}))
        self.windows = VersionWindows(self.message.config, self.baseline)

    def dump(self) -> dict[str, Any]:
        """Return what a later process needs to continue the windows, as a JSON value.

        It has no rows, so those of the current window are not in it.
        """
        # The fields are not final as long as they are guessed.
        fields = self.extractor.fields if self.windows.state.first is not None else {}
        return {"columns": self._columns, "fields": fields, "windows": self.windows.dump()}

    def load(self, data: Mapping[str, Any]) -> bool:
        """Continue with what `dump` returned, and return True if it has the same columns.

        Raises:
            ValueError, KeyError: It is the dump of another release.
        """
        if data["columns"] != self._columns:
            return False
        self.windows = VersionWindows.load(self.message.config, self.baseline, data["windows"])
        if data["fields"]:
            self._set_fields(data["fields"])
        return True

    def state(self, store_problem: str | None) -> VersionState:
        windows, drifts = self.windows.state, self.windows.state.drifts.items()
        return VersionState(
            *(*self.id, self.samples, windows.windows, windows.drift),
            [name for name, drift in drifts if drift.alarm],
            {name: drift.psi for name, drift in drifts if drift.psi is not None},
            *self.totals,
            self.problem or store_problem,
        )

    @property
    def _columns(self) -> str:
        """What the columns of the windows depend on."""
        message = self.message
        values = (message.config.fields, message.config.prediction, message.fields)
        return json.dumps([*values, message.signature])

    def _set_fields(self, fields: Mapping[str, FieldKind]) -> None:
        centres = self.baseline.centres if self.baseline is not None else {}
        message = self.message
        self.extractor = Extractor(message.config, fields, message.signature, centres)


class Monitor:
    """All monitored versions, and the answers and counts that wait for the store."""

    def __init__(self, store: MonitorStore, instance: str) -> None:
        """Use a store; `instance` names the server in it."""
        self.store = store
        self.store_problem: str | None = None
        self.dropped = Counter[tuple[str, str]]()  # samples by model and reason
        self._instance = instance
        self._versions: dict[tuple[str, str], MonitoredVersion] = {}
        self._rows: list[MonitoredAnswer] = []
        self._changes = CountChanges()
        self._groups = defaultdict[tuple[str, str], set[str]](set)  # names by model and attribute
        self._has_news = False  # whether the state has changed since it was reported
        self._due = defaultdict[str, float](float)  # the time of the next work by its name

    def versions_of(self, model: str) -> dict[str, MonitoredVersion]:
        """Return the versions of a model by their numbers, the newest first."""
        versions = [version for version in self._versions.values() if version.id[0] == model]
        versions.sort(key=lambda version: -version.message.registered)
        return {version.id[1]: version for version in versions}

    # Messages

    def set_version(self, head: Mapping[str, Any], body: bytes) -> None:
        version = MonitoredVersion(head, body)
        if (older := self._versions.get(version.id)) is not None:
            version.samples, version.is_saved = older.samples, older.is_saved
            if version.load(older.dump()):
                version.windows.rows = older.windows.rows
        else:
            self._load_state(version)
        self._versions[version.id] = version
        self._link(version.id[0])
        self.note_truth()

    def end(self, model: str, version: str | None) -> None:
        for number, ended in self.versions_of(model).items():
            if version in (None, number):
                del self._versions[ended.id]
                self._has_news = True
                with suppress(StoreUnavailable):
                    self._save_state(ended)

    def add_sample(self, sample: MonitorSample) -> None:
        version = self._versions.get((sample.model, sample.version))
        if version is None:
            self.dropped[sample.model, "stopped"] += 1
            return
        rows = version.extractor.rows(sample)
        has_ended = [version.windows.add(row, sample.at) for row in rows]
        if any(has_ended):
            self._link(sample.model)
        version.samples += 1
        version.is_saved = False
        self._has_news = True
        if len(self._rows) >= MAX_WAITING:
            self.dropped.update((row.model, "store") for row in self._rows if row.row == 0)
            self._rows, self._changes = [], CountChanges()
        for index, row in enumerate(rows if self.store.is_configured else ()):
            self._add_row(version, sample, index, row)

    def dropped_of(self, model: str) -> Counter[str]:
        """Return the samples of a model that were not examined or stored, by reason."""
        dropped = Counter(
            {reason: count for (of, reason), count in self.dropped.items() if of == model}
        )
        for version in self.versions_of(model).values():
            dropped["unreadable"] += version.extractor.unreadable
        return dropped

    def group_of(self, model: str, attribute: str, value: str) -> str:
        """Return the name of a group, or `(others)` for a new one after too many."""
        names = self._groups[model, attribute]
        if len(names) < MAX_GROUPS:
            names.add(value)
        return value if value in names else OTHERS

    def _add_row(
        self, version: MonitoredVersion, sample: MonitorSample, index: int, facts: RowFacts
    ) -> None:
        prediction, is_recorded = facts.prediction, version.message.recording
        facts_key = facts.key or ""
        groups = {name: clean(value) for name, value in facts.groups.items()}
        row = MonitoredAnswer(
            model=sample.model,
            request_id=clean(sample.request_id),
            version=sample.version,
            row=index,
            at=sample.at,
            prediction=None if prediction is None else clean(str(prediction)),
            number=prediction if isinstance(prediction, float) else None,
            confidence=facts.confidence,
            key=clean(facts_key) if 0 < len(facts_key) <= MAX_NAME_CHARS else None,
            attributes=json.dumps(groups) if groups and is_recorded else None,
        )
        self._rows.append(row)
        is_class = row.prediction is not None and row.number is None
        label = self.group_of(sample.model, "", row.prediction or "") if is_class else ""
        hour = int(sample.at // HOUR_S)
        for attribute, value in groups.items() | {("", "")}:
            group = self.group_of(sample.model, attribute, value) if attribute else ""
            key = CountKey(sample.model, sample.version, hour, attribute, group, 0, label)
            self._changes.add(key, 1, facts.confidence)

    def _link(self, model: str) -> None:
        """Let each version compare its next window with the last one of the version before."""
        for newer, older in pairwise(self.versions_of(model).values()):
            if older.windows.state.last:
                newer.windows.previous = older.windows.state.last

    # Feedback

    def join_rules(self, model: str) -> JoinRules:
        """Store what waits, so that feedback finds the last answers, and return the rules.

        Raises:
            StoreUnavailable: It cannot be stored.
        """
        self.flush()
        versions = self.versions_of(model)
        config = next((version.message.config for version in versions.values()), None)
        share = f"{config.share:g} % of the requests are" if config else "the model is not"
        advice = (
            f"{share} monitored, and answers are stored for {self.store.retention_s / DAY_S:g} days"
        )
        groups = config.groups if config else ()
        return JoinRules(model, versions, groups, advice, partial(self.group_of, model))

    def note_truth(self) -> None:
        """Note that the truth of answers has changed."""
        self._due["totals"] = min(self._due["totals"], self._due["next totals"])
        self._has_news = True

    # Periodic work

    def work(self, now: float) -> float:
        """Do what is due; return the seconds until there may be more to do.

        After an error of the store, its work is done later, and `store_problem` has the reason.
        """
        for version in self._versions.values():
            if version.windows.end_if_due(now):
                self._link(version.id[0])
                version.is_saved, self._has_news = False, True
        if self.store.is_configured and now >= self._due["store"]:
            try:
                self._work_on_store(now)
                self.store_problem = None
            except StoreUnavailable as error:
                self._due["store"] = now + RETRY_S
                self.store_problem, self._has_news = error.message, True
        return COMMIT_S if self._rows or self._has_news else SAVE_S

    def take_states(self, now: float) -> list[VersionState]:
        """Return the states of all versions if they have changed and are to be reported now."""
        if not self._has_news or not self._is_due("state", now, STATE_S):
            return []
        self._has_news = False
        return [version.state(self.store_problem) for version in self._versions.values()]

    def flush(self) -> None:
        """Store what waits.

        Raises:
            StoreUnavailable: It cannot be stored, and waits again.
        """
        with self.store.transaction() as connection:
            self.store.write(connection, self._rows, self._changes)
        self._rows, self._changes = [], CountChanges()

    def close(self) -> None:
        """Store everything."""
        if self.store.is_configured:
            self.flush()
            for version in self._versions.values():
                self._save_state(version)
        self.store.close()

    def _work_on_store(self, now: float) -> None:
        if self._rows and self._is_due("commit", now, COMMIT_S):
            self.flush()
        if self._is_due("totals", now, REFRESH_S):
            for model, version, *totals in self.store.read(TOTALS):
                if (monitored := self._versions.get((model, version))) is not None:
                    monitored.totals = (int(totals[0]), totals[1], totals[2])
                    self._has_news = True
            pause = PAUSE_FACTOR * (time.time() - now)
            self._due["next totals"] = now + max(STATE_S, pause)
        if self._is_due("save", now, SAVE_S):
            for monitored in self._versions.values():
                self._save_state(monitored)
        if self._is_due("expire", now, EXPIRE_S) and self.store.expire():
            self._due["expire"] = now  # There is more to delete.

    def _is_due(self, work: str, now: float, pause_s: float) -> bool:
        if now < self._due[work]:
            return False
        self._due[work] = now + pause_s
        return True

    def _save_state(self, version: MonitoredVersion) -> None:
        if not version.is_saved and self.store.is_configured:
            values = {"updated": time.time(), "state": json.dumps(version.dump())}
            with self.store.transaction() as connection:
                connection.execute(text(SAVE_STATE), values | self._state_key(version))
            version.is_saved = True

    def _load_state(self, version: MonitoredVersion) -> None:
        """Continue the windows of an earlier process, of this release."""
        with suppress(StoreUnavailable, ValueError, KeyError):
            for row in self.store.read(LOAD_STATE, **self._state_key(version)):
                version.load(json.loads(row.state))

    def _state_key(self, version: MonitoredVersion) -> dict[str, str]:
        model, number = version.id
        return {"model": model, "version": number, "instance": self._instance}
