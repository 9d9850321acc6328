"""The windows of a version's rows: when they end, how they differ, and which columns have drifted.

A window that has ended is compared with the baseline, and with the last window of the version
before in the bins of that one. A column without a baseline has its first window of 300 rows as the
baseline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from tsx_archiver.monitor.baseline import MAX_COLUMNS, ColumnSummary, MonitorBaseline
from tsx_archiver.monitor.config import MonitorConfig
from tsx_runtime.features.monitor.report import ColumnDrift, ColumnHistogram, HistoryPoint
from tsx_runtime.features.monitor.statistics.columns import RowFacts
from tsx_runtime.features.monitor.statistics.drift import compare, window_alpha
from tsx_runtime.features.monitor.statistics.summaries import (
    Row,
    bin_column,
    cells,
    summarize,
)

MIN_ROWS = 50  # rows of a window that ends by time
MIN_FIRST_ROWS = 300  # rows of a first window; fewer would raise false alarms
MAX_VALUES = 1_000_000  # A window with more values ends.
MAX_HISTORY = 500
MAX_POINTS = 20_000  # points in the histories of all columns together
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
    previous: dict[str, ColumnSummary] = {}  # the last window of the version before
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
        rows: The rows of the current window, which are not part of the state.
    """

    def __init__(
        self,
        config: MonitorConfig,
        baseline: MonitorBaseline | None = None,
        saved: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin, or continue with the saved JSON of a state that has the same baseline.

        Raises:
            pydantic.ValidationError: The JSON is not that of a state.
        """
        self.state = WindowsState()
        self.rows: list[Row] = []
        self._config = config
        if baseline is not None:
            self.state.created, self.state.baseline_rows = baseline.created, baseline.rows
            self.state.baseline = dict(baseline.columns)
        if saved and (state := WindowsState.model_validate(saved)).created == self.state.created:
            self.state = state

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
        return self.end_if_due(at) or has_ended

    def end_if_due(self, now: float) -> bool:
        """End the current window if it is full or over at `now`, and tell whether it has ended."""
        config, count = self._config, len(self.rows)
        is_due = count >= (MIN_ROWS if self.state.baseline else MIN_FIRST_ROWS) and (
            count >= config.window_samples
            or now - self.state.start >= config.window
            or count * len(self.rows[-1]) >= MAX_VALUES
        )
        if is_due:
            self._end()
        return is_due

    def drifts(self) -> list[ColumnDrift]:
        """Return the drift of each column by the last window, with histograms and history."""
        return [
            drift.model_copy(update={"histogram": self._histogram(name)})
            for name, drift in self.state.drifts.items()
        ]

    def _end(self) -> None:
        state, rows, self.rows = self.state, self.rows, []
        alpha = window_alpha(self._config.alarm_rate, state.latest - state.start)
        columns = {name: [row.get(name) for row in rows] for name in state.baseline}
        state.drift = 0.0 if columns else None
        state.last = {
            name: bin_column(values, state.baseline[name]) for name, values in columns.items()
        }
        state.drifts = {
            name: self._drift_of(name, values, alpha) for name, values in columns.items()
        }
        if len(rows) >= MIN_FIRST_ROWS:
            new = [
                {name: value for name, value in row.items() if name not in columns} for row in rows
            ]
            for name, summary in summarize(new).items():
                if summary.count >= MIN_ROWS and len(state.baseline) < MAX_COLUMNS:
                    state.baseline[name] = state.last[name] = summary
                    state.baseline_rows = state.baseline_rows or len(rows)
        state.windows, state.start = state.windows + 1, state.latest

    def _drift_of(self, name: str, values: Sequence[Any], alpha: float) -> ColumnDrift:
        state, min_drift = self.state, self._config.min_drift
        baseline, live, old = state.baseline[name], state.last[name], state.drifts.get(name)
        result = compare(baseline, live)
        column_alpha = alpha / len(state.last)
        if result.p_value <= column_alpha:
            state.drift = max(state.drift or 0.0, result.psi)
        alarm = result.is_drift(column_alpha, min_drift)
        limit = min(MAX_HISTORY, max(1, MAX_POINTS // len(state.baseline)))
        point = HistoryPoint(at=state.latest, value=round(result.psi, 4), count=len(values))
        drift = ColumnDrift(
            column=name,
            kind=live.kind,
            **result._asdict(),
            alarm=alarm,
            alarm_since=((old and old.alarm_since) or state.latest) if alarm else None,
            missing=live.missing / len(values),
            baseline_missing=baseline.missing / max(1, baseline.count + baseline.missing),
            history=[*(old.history if old else ()), point][-limit:],
        )
        if (previous := state.previous.get(name)) is not None:
            result = compare(previous, bin_column(values, previous))
            drift.previous_psi = result.psi
            drift.previous_alarm = result.is_drift(alpha / len(state.previous), min_drift)
        return drift

    def _histogram(self, name: str) -> ColumnHistogram:
        baseline, live = self.state.baseline[name], self.state.last[name]
        previous = self.state.previous.get(name)
        edges = getattr(baseline, "edges", None)
        bins = cells(live)  # The live categories include those of the baseline.

        def shares(summary: ColumnSummary) -> list[float]:
            counts, rows = cells(summary), max(1, summary.count + summary.missing)
            return [round(counts.get(bin, 0) / rows, 5) for bin in bins]

        has_bins = getattr(previous, "edges", None) == edges
        return ColumnHistogram(
            edges=edges,
            categories=list(bins) if edges is None else None,
            baseline=shares(baseline),
            live=shares(live),
            previous=shares(previous) if previous and has_bins else None,
        )
