"""The windows of a version's rows: when they end, how they differ, and which columns have drifted.

The rows of a window are binned in the bins of the baseline, and in those of the last window of the
version before. Without a baseline of a column, its first window with 50 values is the baseline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from tsx_archiver.monitor.baseline import ColumnSummary, MonitorBaseline, NumberSummary
from tsx_archiver.monitor.config import MonitorConfig
from tsx_runtime.features.monitor.report import ColumnDrift, ColumnHistogram, HistoryPoint
from tsx_runtime.features.monitor.statistics.columns import RowFacts
from tsx_runtime.features.monitor.statistics.drift import compare, window_alpha
from tsx_runtime.features.monitor.statistics.summaries import (
    Value,
    add_counts,
    bin_column,
    bin_shares,
    summarize,
)

MIN_ROWS = 50  # of a window that ends by time, and of a first window
CHUNK_ROWS = 1000  # rows that are binned together
MAX_FIRST_ROWS = 5000  # rows of a first window that become the baseline
MAX_HISTORY = 500

Summaries = dict[str, ColumnSummary]


class WindowsState(BaseModel):
    """What is kept of a version's windows; summaries and drifts are by column."""

    created: float = 0.0  # of the archive's baseline
    baseline: Summaries = {}
    baseline_rows: int = 0
    windows: int = 0  # complete ones
    rows: int = 0  # of the current window
    first: float | None = None  # seconds since 1970 of the first row
    latest: float = 0.0  # of the latest row
    start: float = 0.0  # of the current window
    previous: Summaries = {}  # the last window of the version before
    current: Summaries = {}  # in the bins of the baseline
    current_previous: Summaries = {}  # in the bins of the version before
    last: Summaries = {}  # the last complete window
    drifts: dict[str, ColumnDrift] = {}  # by the last window, without histograms
    drift: float | None = None  # largest index of the columns that differ significantly in it


class VersionWindows:
    """The windows of one version.

    A window ends with `window_samples` rows, or with the first row after its time if it has at
    least 50. Times are those of the rows, so recordings give the windows of their own days. An
    alarm of a column lasts from the end of the first window with a significant and large
    difference until a window without one (`drift.py` has the promise).

    Attributes:
        state: What is known; for readers only.
        previous: The `state.last` of the version before; it is used from the next window on.
    """

    def __init__(self, config: MonitorConfig, baseline: MonitorBaseline | None = None) -> None:
        self.state = WindowsState()
        self.previous: Mapping[str, ColumnSummary] = {}
        self._config = config
        self._rows: list[Mapping[str, Value]] = []  # rows that are not binned yet
        self._first_rows: list[Mapping[str, Value]] = []  # rows with columns without a baseline
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
        """Return the state as a JSON value; rows of an incomplete first window are not in it."""
        self._bin_rows()
        return self.state.model_dump(mode="json")

    def add(self, facts: RowFacts, at: float) -> bool:
        """Add a row that arrived at `at` (seconds since 1970); tell whether a window has ended."""
        if not facts.columns:
            return False
        has_ended, state = self.end_if_due(at), self.state
        if state.first is None:
            state.first = state.start = state.latest = at
        if not state.rows:
            state.previous = dict(self.previous)
        state.rows += 1
        state.latest = max(state.latest, at)
        self._rows.append(facts.columns)
        if state.rows >= self._config.window_samples:
            self._end()
            return True
        if len(self._rows) >= CHUNK_ROWS:
            self._bin_rows()
        return has_ended

    def end_if_due(self, now: float) -> bool:
        """End the current window if its time is over at `now`, and tell whether it has ended."""
        is_due = self.state.rows >= MIN_ROWS and now - self.state.start >= self._config.window
        if is_due:
            self._end()
        return is_due

    def drifts(self) -> list[ColumnDrift]:
        """Return the drift of each column by the last window, with histograms and history."""
        return [
            drift.model_copy(update={"histogram": self._histogram(name)})
            for name, drift in self.state.drifts.items()
        ]

    def _bin_rows(self) -> None:
        rows, self._rows = self._rows, []
        state = self.state
        if any(row.keys() - state.baseline.keys() for row in rows):
            self._first_rows += rows[: MAX_FIRST_ROWS - len(self._first_rows)]
        _add_rows(state.current, state.baseline, rows)
        _add_rows(state.current_previous, state.previous, rows)

    def _end(self) -> None:
        self._bin_rows()
        state, old_drifts = self.state, self.state.drifts
        alpha = window_alpha(self._config.alarm_rate, state.latest - state.start)
        state.drift = 0.0 if state.current else None
        state.drifts = {
            name: self._drift_of(name, alpha, old_drifts.get(name)) for name in state.current
        }
        summaries = summarize(self._first_rows)
        for name in summaries.keys() - state.baseline.keys():
            if summaries[name].count >= MIN_ROWS:
                state.baseline[name] = state.current[name] = summaries[name]
                state.baseline_rows = state.baseline_rows or len(self._first_rows)
        self._first_rows = []
        state.last, state.current, state.current_previous = state.current, {}, {}
        state.windows, state.rows, state.start = state.windows + 1, 0, state.latest

    def _drift_of(self, name: str, alpha: float, old: ColumnDrift | None) -> ColumnDrift:
        state, min_drift = self.state, self._config.min_drift
        baseline, live = state.baseline[name], state.current[name]
        result = compare(baseline, live)
        is_significant = result.p_value <= alpha / len(state.current)
        if is_significant:
            state.drift = max(state.drift or 0.0, result.psi)
        point = HistoryPoint(at=state.latest, value=round(result.psi, 4), count=state.rows)
        drift = ColumnDrift(
            column=name,
            kind=live.kind,
            **result._asdict(),
            alarm=is_significant and result.psi >= min_drift,
            missing=_missing_share(live),
            baseline_missing=_missing_share(baseline),
            history=[*(old.history if old else ()), point][-MAX_HISTORY:],
        )
        if drift.alarm:
            drift.alarm_since = (old.alarm_since if old else None) or state.latest
        if name in state.current_previous:
            result = compare(state.previous[name], state.current_previous[name])
            is_significant = result.p_value <= alpha / len(state.current_previous)
            drift.previous_psi = result.psi
            drift.previous_alarm = is_significant and result.psi >= min_drift
        return drift

    def _histogram(self, name: str) -> ColumnHistogram:
        baseline, live = self.state.baseline[name], self.state.last[name]
        previous = self.state.previous.get(name)
        # The live categories include those of the baseline.
        bins = baseline if isinstance(baseline, NumberSummary) else live
        return ColumnHistogram(
            edges=list(bins.edges) if isinstance(bins, NumberSummary) else None,
            categories=None if isinstance(bins, NumberSummary) else list(bins.counts),
            baseline=bin_shares(baseline, bins),
            live=bin_shares(live, bins),
            previous=None if previous is None else bin_shares(previous, bins),
        )


def _add_rows(
    summaries: Summaries,
    references: Mapping[str, ColumnSummary],
    rows: Sequence[Mapping[str, Value]],
) -> None:
    """Add rows to the summaries, in the bins of the references."""
    for name, reference in references.items() if rows else ():
        summary = bin_column([row.get(name) for row in rows], reference)
        summaries[name] = add_counts(summaries[name], summary) if name in summaries else summary


def _missing_share(summary: ColumnSummary) -> float:
    return summary.missing / max(1, summary.count + summary.missing)
