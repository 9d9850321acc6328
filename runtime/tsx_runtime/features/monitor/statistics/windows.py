"""The windows of a version's rows: when they end, how they differ, and which columns have drifted.

A window that has ended is compared with the baseline, and with the last window of the version
before in the bins of that one. A column without a baseline has its first window of 300 rows as the
baseline.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from tsx_archiver.monitor.baseline import MAX_COLUMNS, ColumnSummary, MonitorBaseline, NumberSummary
from tsx_archiver.monitor.config import MonitorConfig
from tsx_runtime.features.monitor.report import ColumnDrift, ColumnHistogram, HistoryPoint
from tsx_runtime.features.monitor.statistics.columns import RowFacts
from tsx_runtime.features.monitor.statistics.drift import compare, window_alpha
from tsx_runtime.features.monitor.statistics.summaries import (
    Row,
    bin_rows,
    bin_shares,
    missing_share,
    summarize,
)

MIN_ROWS = 50  # rows of a window that ends by time
MIN_FIRST_ROWS = 300  # rows of a first window; fewer would raise false alarms
MAX_VALUES = 1_000_000  # A window with more values ends.
MAX_HISTORY = 500
MAX_POINTS = 20_000  # of the histories of all columns
MAX_DISORDER_S = 86400.0  # Rows of recordings may be mixed up; by more, a clock was set back.


class WindowsState(BaseModel):
    """What is kept of a version's windows; summaries and drifts are by column."""

    created: float = 0.0  # the time of the archive's baseline
    baseline: dict[str, ColumnSummary] = {}
    baseline_rows: int = 0
    windows: int = 0  # complete ones
    first: float | None = None  # seconds since 1970 of the first row
    latest: float = 0.0  # the time of the latest row
    start: float = 0.0  # the time at which the current window began
    last: dict[str, ColumnSummary] = {}  # the last complete window
    previous: dict[str, ColumnSummary] = {}  # the window of the version before that was compared
    drifts: dict[str, ColumnDrift] = {}  # results of the last window, without histograms
    drift: float | None = None  # largest index of the columns that differ significantly in it


class VersionWindows:
    """The windows of one version.

    A window ends with `window_samples` rows, or with the first row after its time if it has at
    least 50; without a baseline, the first one has at least 300. Times are those of the rows, so
    recordings give the windows of their own days. An alarm of a column lasts from the end of the
    first window with a significant and large difference until a window without one (`drift.py` has
    the promise).

    Attributes:
        state: The results, for readers.
        rows: The rows of the current window.
        previous: The `state.last` of the version before.
    """

    def __init__(self, config: MonitorConfig, baseline: MonitorBaseline | None = None) -> None:
        self.state = WindowsState()
        self.rows: list[Row] = []
        self.previous: Mapping[str, ColumnSummary] = {}
        self._config = config
        if baseline is not None:
            self.state.created, self.state.baseline_rows = baseline.created, baseline.rows
            self.state.baseline = dict(baseline.columns)

    @classmethod
    def load(
        cls, config: MonitorConfig, baseline: MonitorBaseline | None, data: Mapping[str, Any]
    ) -> VersionWindows:
        """Continue with what `dump` returned; with another baseline, begin anew.

        Raises:
            pydantic.ValidationError: The data is not of a dump.
        """
        windows, state = cls(config, baseline), WindowsState.model_validate(data)
        if state.created == windows.state.created:
            windows.state, windows.previous = state, state.previous
        return windows

    def dump(self) -> dict[str, Any]:
        """Return the state as a JSON value; the rows of the current window are not in it."""
        return self.state.model_dump(mode="json")

    def add(self, facts: RowFacts, at: float) -> bool:
        """Add a row that arrived at `at` (seconds since 1970); tell whether a window has ended."""
        if not facts.columns:
            return False
        has_ended, state = self.end_if_due(at), self.state
        if state.first is None or at < state.start - MAX_DISORDER_S:
            state.first = min(at, state.first or at)
            state.start = state.latest = at
        state.latest = max(state.latest, at)
        self.rows.append(facts.columns)
        count = len(self.rows)
        is_full = count >= max(self._config.window_samples, self._min_rows)
        if is_full or count * len(facts.columns) >= MAX_VALUES:
            self._end()
            return True
        return has_ended

    def end_if_due(self, now: float) -> bool:
        """End the current window if its time is over at `now`, and tell whether it has ended."""
        is_over = now - self.state.start >= self._config.window
        is_due = is_over and len(self.rows) >= self._min_rows
        if is_due:
            self._end()
        return is_due

    @property
    def _min_rows(self) -> int:
        return MIN_ROWS if self.state.baseline else MIN_FIRST_ROWS

    def drifts(self) -> list[ColumnDrift]:
        """Return the drift of each column by the last window, with histograms and history."""
        return [
            drift.model_copy(update={"histogram": self._histogram(name)})
            for name, drift in self.state.drifts.items()
        ]

    def _end(self) -> None:
        state, rows, self.rows = self.state, self.rows, []
        config = self._config
        alpha = window_alpha(config.alarm_rate, state.latest - state.start)
        state.last, state.previous = bin_rows(rows, state.baseline), dict(self.previous)
        state.drift = 0.0 if state.last else None
        column_alpha = alpha / max(1, len(state.last))
        state.drifts = {name: self._drift_of(name, column_alpha, len(rows)) for name in state.last}
        for name, live in bin_rows(rows, state.previous).items():
            if name in state.drifts:
                result, drift = compare(state.previous[name], live), state.drifts[name]
                drift.previous_psi = result.psi
                drift.previous_alarm = result.is_drift(alpha / len(self.previous), config.min_drift)
        if len(rows) >= MIN_FIRST_ROWS and any(row.keys() - state.baseline.keys() for row in rows):
            for name, summary in summarize(rows).items():
                is_new = name not in state.baseline and len(state.baseline) < MAX_COLUMNS
                if is_new and summary.count >= MIN_ROWS:
                    state.baseline[name] = state.last[name] = summary
                    state.baseline_rows = state.baseline_rows or len(rows)
        state.windows, state.start = state.windows + 1, state.latest

    def _drift_of(self, name: str, alpha: float, rows: int) -> ColumnDrift:
        state = self.state
        baseline, live, old = state.baseline[name], state.last[name], state.drifts.get(name)
        result = compare(baseline, live)
        if result.p_value <= alpha:
            state.drift = max(state.drift or 0.0, result.psi)
        alarm = result.is_drift(alpha, self._config.min_drift)
        limit = min(MAX_HISTORY, max(1, MAX_POINTS // len(state.last)))
        point = HistoryPoint(at=state.latest, value=round(result.psi, 4), count=rows)
        return ColumnDrift(
            column=name,
            kind=live.kind,
            **result._asdict(),
            alarm=alarm,
            alarm_since=((old and old.alarm_since) or state.latest) if alarm else None,
            missing=missing_share(live),
            baseline_missing=missing_share(baseline),
            history=[*(old.history if old else ()), point][-limit:],
        )

    def _histogram(self, name: str) -> ColumnHistogram:
        baseline, live = self.state.baseline[name], self.state.last[name]
        previous = self.state.previous.get(name)
        # The live categories include those of the baseline.
        bins = baseline if isinstance(baseline, NumberSummary) else live
        return ColumnHistogram(
            edges=list(bins.edges) if isinstance(bins, NumberSummary) else None,
            categories=None if isinstance(bins, NumberSummary) else list(bins.counts),
            baseline=bin_shares(baseline, bins) or [],
            live=bin_shares(live, bins) or [],
            previous=None if previous is None else bin_shares(previous, bins),
        )
