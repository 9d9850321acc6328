"""The state of the monitor process: the versions, their windows, and what is not stored yet."""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from typing import Any

from sqlalchemy import text

from tsx_archiver.errors import CannotPack
from tsx_archiver.monitor.baseline import OTHERS, parse_baseline
from tsx_archiver.monitor.config import FieldKind, MonitorConfig
from tsx_runtime.errors import StoreUnavailable
from tsx_runtime.features.monitor.messages import MonitorSample, VersionState
from tsx_runtime.features.monitor.process.feedback import JoinRules
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
PAUSE_FACTOR = 20  # A long read is followed by a pause of this many times its duration.
MAX_GROUPS = 200  # groups of an attribute, or classes, that are counted

TOTALS = """
SELECT version, COALESCE(SUM(answers), 0) AS answers,
  1 - SUM(CASE kind WHEN 1 THEN total END) / SUM(CASE kind WHEN 1 THEN answers END) AS accuracy,
  SUM(CASE kind WHEN 2 THEN total END) / SUM(CASE kind WHEN 2 THEN answers END) AS mean_error
FROM tsx_monitor_counts WHERE model = :model AND attribute = '' AND kind > 0 GROUP BY version
"""
LOAD_STATE = """
SELECT state FROM tsx_monitor_states
WHERE model = :model AND version = :version AND instance = :instance
"""


class MonitoredVersion:
    """A version of a model whose answers are examined."""

    def __init__(self, head: Mapping[str, Any], body: bytes) -> None:
        """Read a `version` message.

        Raises:
            ValueError: The message has no configuration.
        """
        self.model, self.version = clean(head["model"]), clean(head["version"])
        self.config = MonitorConfig.model_validate(head["config"])
        self.registered = float(head.get("registered") or 0)
        self.recording = bool(head.get("recording"))
        self.recordings: str | None = head.get("recordings")
        self.samples = 0
        self.is_saved = True
        self.totals: tuple[int, float | None, float | None] = (0, None, None)
        self.baseline = self.problem = None
        if body:
            try:
                self.baseline = parse_baseline(body, "the baseline of the archive")
            except CannotPack as error:
                self.problem = str(error)
        self._signature = head.get("signature")
        fields = head.get("fields") or (self.baseline.fields if self.baseline else {})
        self.extractor = self._make_extractor(fields)
        self.windows = VersionWindows(self.config, self.baseline)
        # Windows of other columns cannot be continued.
        columns = self.config.model_dump(mode="json", include={"fields", "prediction"})
        self._columns = json.dumps([columns, fields, self._signature])

    def dump(self) -> dict[str, Any]:
        """Return what a later process needs to continue the windows, as a JSON value."""
        # The fields are not final as long as they are guessed.
        fields = self.extractor.fields if self.windows.state.first is not None else {}
        return {"columns": self._columns, "fields": fields, "windows": self.windows.dump()}

    def load(self, data: Mapping[str, Any]) -> None:
        """Continue with what `dump` returned, if it has the same columns and baseline."""
        if data["columns"] == self._columns:
            self.windows = VersionWindows.load(self.config, self.baseline, data["windows"])
            if data["fields"]:
                self.extractor = self._make_extractor(data["fields"])

    def state(self, store_problem: str | None) -> VersionState:
        windows, drifts = self.windows.state, self.windows.state.drifts.items()
        return VersionState(
            model=self.model,
            version=self.version,
            samples=self.samples,
            windows=windows.windows,
            drift=windows.drift,
            drifted=[name for name, drift in drifts if drift.alarm],
            fields={name: drift.psi for name, drift in drifts if drift.psi is not None},
            feedback=self.totals[0],
            accuracy=self.totals[1],
            mean_error=self.totals[2],
            problem=self.problem or store_problem,
        )

    def _make_extractor(self, fields: Mapping[str, FieldKind]) -> Extractor:
        centres = self.baseline.centres if self.baseline is not None else {}
        return Extractor(self.config, fields, self._signature, centres)


class Monitor:
    """All monitored versions, and the answers and counts that wait for the store."""

    def __init__(self, store: MonitorStore, instance: str) -> None:
        """Use a store; `instance` names the server in it."""
        self.store = store
        self.store_problem: str | None = None
        self.reports: dict[str, tuple[float, bytes]] = {}  # until when, and the JSON, by model
        self.dropped = Counter[tuple[str, str]]()  # samples by model and reason
        self._instance = instance
        self._versions: dict[tuple[str, str], MonitoredVersion] = {}
        self._rows: list[MonitoredAnswer] = []
        self._changes = CountChanges()
        self._groups = defaultdict[tuple[str, str], set[str]](set)  # by model and attribute
        self._changed_models = set[str]()  # whose totals are read again
        self._has_news = False  # whether the state has changed since it was reported
        self._due = defaultdict[str, float](float)  # the time of the next work by its name

    def versions_of(self, model: str) -> dict[str, MonitoredVersion]:
        """Return the versions of a model by their numbers, the newest last."""
        versions = [version for id, version in self._versions.items() if id[0] == model]
        versions.sort(key=lambda version: version.registered)
        return {version.version: version for version in versions}

    # Messages

    def set_version(self, head: Mapping[str, Any], body: bytes) -> None:
        version = MonitoredVersion(head, body)
        id = (version.model, version.version)
        older = self._versions.get(id)
        if older is not None:
            version.load(older.dump())
            version.samples, version.is_saved = older.samples, older.is_saved
        else:
            self._load_state(version)
        self._versions[id] = version
        self._link(version.model)
        self._changed_models.add(version.model)

    def end(self, model: str, version: str | None) -> None:
        for id in [id for id in self._versions if id[0] == model and version in (None, id[1])]:
            self._has_news = True
            self._save_state(self._versions.pop(id))

    def add_sample(self, sample: MonitorSample) -> None:
        version = self._versions.get((sample.model, sample.version))
        if version is None:
            self.dropped[sample.model, "stopped"] += 1
            return
        rows = version.extractor.rows(sample)
        windows = version.windows.state.windows
        for row in rows:
            version.windows.add(row, sample.at)
        if version.windows.state.windows != windows:
            self._link(version.model)
        version.samples += 1
        version.is_saved = False
        self._has_news = True
        if len(self._rows) >= MAX_WAITING:
            self.dropped[sample.model, "store"] += 1
        elif self.store.is_configured:
            for index, row in enumerate(rows):
                self._add_row(version, sample, index, row)

    def dropped_of(self, model: str) -> Counter[str]:
        """Return the samples of a model that were not examined or stored, by reason."""
        dropped = Counter(
            {name: count for (of, name), count in self.dropped.items() if of == model}
        )
        for version in self.versions_of(model).values():
            dropped["unreadable"] += version.extractor.unreadable
        return +dropped

    def group_of(self, model: str, attribute: str, value: str) -> str:
        """Return the name of a group, or `(others)` for a new one after too many."""
        names, value = self._groups[model, attribute], clean(value)
        if len(names) < MAX_GROUPS:
            names.add(value)
        return value if value in names else OTHERS

    def _add_row(
        self, version: MonitoredVersion, sample: MonitorSample, index: int, facts: RowFacts
    ) -> None:
        model, prediction = version.model, facts.prediction
        groups = {name: clean(value) for name, value in facts.groups.items()}
        self._rows.append(
            MonitoredAnswer(
                *(model, clean(sample.request_id), version.version, index, sample.at),
                None if prediction is None else clean(str(prediction)),
                prediction if isinstance(prediction, float) else None,
                facts.confidence,
                None if facts.key is None else clean(facts.key),
                json.dumps(groups) if groups and version.recording else None,
            )
        )
        label = self.group_of(model, "", prediction) if isinstance(prediction, str) else ""
        hour = int(sample.at // HOUR_S)
        for attribute, value in [("", ""), *groups.items()]:
            group = self.group_of(model, attribute, value) if attribute else ""
            key = CountKey(model, version.version, hour, attribute, group, 0, label)
            self._changes.add(key, 1, facts.confidence)

    def _link(self, model: str) -> None:
        """Let each version compare its next window with the last one of the version before."""
        for older, newer in pairwise(self.versions_of(model).values()):
            if older.windows.state.last:
                newer.windows.previous = older.windows.state.last

    # Feedback

    def join_rules(self, model: str) -> JoinRules:
        """Store what waits, so that feedback finds the last answers, and return the rules.

        Raises:
            StoreUnavailable: It cannot be stored.
        """
        self.flush()
        newest = next(reversed(self.versions_of(model).values()), None)
        share = "the model is not monitored now"
        if newest is not None:
            share = f"{newest.config.share:g} % of the requests are monitored"
        days = self.store.retention_s / DAY_S
        return JoinRules(
            model,
            newest.config.groups if newest is not None else (),
            f"{share}, and answers are stored for {days:g} days",
            partial(self.group_of, model),
        )

    def note_truth(self, model: str) -> None:
        """Note that the truth of a model's answers has changed."""
        self._changed_models.add(model)
        self.reports.pop(model, None)

    # Periodic work

    def work(self, now: float) -> float:
        """Do what is due; return the seconds until there may be more to do.

        After an error of the store, its work is done later, and `store_problem` has the reason.
        """
        for version in self._versions.values():
            if version.windows.end_if_due(now):
                self._link(version.model)
                version.is_saved, self._has_news = False, True
        if self.store.is_configured and now >= self._due["store"]:
            try:
                self._work_on_store(now)
                self.store_problem = None
            except StoreUnavailable as error:
                self._due["store"] = now + RETRY_S
                self.store_problem, self._has_news = error.message, True
        return COMMIT_S if self._rows or self._has_news or self._changed_models else REFRESH_S / 2

    def take_states(self, now: float) -> list[VersionState] | None:
        """Return the states of all versions if they have changed and are to be reported now."""
        if not self._has_news or not self._is_due("state", now, STATE_S):
            return None
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
        if self._is_due("refresh", now, REFRESH_S):
            self._changed_models.update(model for model, _ in self._versions)
        if self._changed_models and self._is_due("totals", now, STATE_S):
            start = time.monotonic()
            for model in self._changed_models:
                versions = self.versions_of(model)
                for number, *totals in self.store.read(TOTALS, model=model):
                    if number in versions:
                        versions[number].totals = (int(totals[0]), totals[1], totals[2])
            self._changed_models.clear()
            self._has_news = True
            pause = PAUSE_FACTOR * (time.monotonic() - start)
            self._due["totals"] = max(self._due["totals"], now + pause)
        if self._is_due("save", now, SAVE_S):
            for version in self._versions.values():
                self._save_state(version)
        if self._is_due("expire", now, EXPIRE_S) and self.store.expire():
            self._due["expire"] = now  # There is more to delete.

    def _is_due(self, work: str, now: float, pause_s: float) -> bool:
        if now < self._due[work]:
            return False
        self._due[work] = now + pause_s
        return True

    def _save_state(self, version: MonitoredVersion) -> None:
        if not version.is_saved and self.store.is_configured:
            values = self._state_key(version) | {
                "updated": time.time(),
                "state": json.dumps(version.dump()),
            }
            with self.store.transaction() as connection:
                connection.execute(text(SAVE_STATE), values)
            version.is_saved = True

    def _load_state(self, version: MonitoredVersion) -> None:
        """Continue the windows of an earlier process."""
        try:
            for row in self.store.read(LOAD_STATE, **self._state_key(version)):
                version.load(json.loads(row.state))
        except StoreUnavailable as error:
            self.store_problem = error.message
        except (ValueError, KeyError):
            pass  # It is of another release.

    def _state_key(self, version: MonitoredVersion) -> dict[str, str]:
        return {
            "model": version.model,
            "version": version.version,
            "instance": self._instance,
        }
