"""False alarms in months of stationary traffic, and windows until shifts of data are found.

    python -m benchmarks.drift

Three parts: months of stationary traffic, of which the counts of each window in the bins of the
baseline are drawn; rows of one shifted column among 20; and scikit-learn's digits with a classifier
that is trained on them, through the extractor of the monitor process. It takes about two and a half
minutes of processor time.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from scipy.ndimage import rotate
from scipy.special import chdtrc, kolmogorov, rel_entr
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

from benchmarks import machine
from tsx_archiver.monitor.baseline import OTHERS, ColumnSummary, MonitorBaseline, NumberSummary
from tsx_archiver.monitor.config import MonitorConfig
from tsx_runtime.features.monitor.messages import MonitorSample
from tsx_runtime.features.monitor.statistics.columns import Extractor, RowFacts
from tsx_runtime.features.monitor.statistics.drift import GROUPS, MONTH_S, compare, window_alpha
from tsx_runtime.features.monitor.statistics.summaries import bin_column, summarize
from tsx_runtime.features.monitor.statistics.windows import VersionWindows

CONFIG = MonitorConfig()
HOUR_S = 3600.0
COLUMNS = 20
MONTHS = 40  # per kind of traffic
RUNS = 20  # per shift
MAX_WINDOWS = 24  # A shift that is not found by then counts as not found.
DIGIT_ROWS = 200  # rows of a window of digits
DIGIT_RUNS = 5

Values = NDArray[np.float64]


class Traffic(NamedTuple):
    """A month of stationary traffic."""

    name: str
    windows: int
    rows: int  # size of a window
    baseline_rows: int
    columns: int


TRAFFIC = (
    Traffic("windows of 1 h with 1,000 rows", 720, 1000, 5000, 20),
    Traffic("windows of 1 h with 60 rows", 720, 60, 500, 20),
    Traffic("windows of 100 rows, 12 minutes", 3600, 100, 1000, 4),
    Traffic("windows of 50 rows, the first 300 as baseline", 3600, 50, 300, 4),
)


class Column(NamedTuple):
    distribution: Any  # a distribution of scipy
    is_category: bool = False
    missing: float = 0.0

    def draw(self, rows: int, random: np.random.Generator) -> list[float | str | None]:
        values = self.distribution.rvs(size=rows, random_state=random)
        is_missing = random.random(rows) < self.missing
        return [
            None if absent else f"class {value}" if self.is_category else float(value)
            for value, absent in zip(values, is_missing, strict=True)
        ]

    def shares(self, baseline: ColumnSummary) -> Values:
        """Return the probability of each bin or category of a baseline, and of no value."""
        if isinstance(baseline, NumberSummary):
            present = np.diff(self.distribution.cdf(baseline.edges), prepend=0, append=1)
        else:
            present = np.array(
                [
                    self.distribution.pmf(int(name.split()[1])) if name != OTHERS else 0.0
                    for name in baseline.counts
                ]
            )
            if OTHERS in baseline.counts:
                present[list(baseline.counts).index(OTHERS)] = 1 - present.sum()
            present /= present.sum()
        return np.append(present * (1 - self.missing), self.missing)


STATIONARY = (
    Column(stats.norm()),
    Column(stats.lognorm(1.0)),
    Column(stats.poisson(2)),
    Column(stats.geom(0.3), is_category=True),
    Column(stats.uniform(), missing=0.05),
)


def column_summary(values: Sequence[float | str | None]) -> ColumnSummary:
    return summarize([{"column": value} for value in values])["column"]


def with_counts(baseline: ColumnSummary, counts: Sequence[int]) -> ColumnSummary:
    """Return a summary with other counts in the bins of a baseline; the last is of no value."""
    *present, missing = counts
    totals = {"count": sum(present), "missing": missing}
    if isinstance(baseline, NumberSummary):
        return baseline.model_copy(update={**totals, "counts": tuple(present)})
    named = dict(zip(baseline.counts, present, strict=True))
    return baseline.model_copy(update={**totals, "counts": named})


class MonthResult(NamedTuple):
    alarms: int
    significant: int  # comparisons with a p-value below that of an alarm
    significant_at_100: int  # with an alarm rate of 100 %


def simulate_month(traffic: Traffic, random: np.random.Generator) -> MonthResult:
    alarms = significant = significant_at_100 = 0
    alpha = window_alpha(CONFIG.alarm_rate, MONTH_S / traffic.windows) / traffic.columns
    for index in range(traffic.columns):
        column = STATIONARY[index % len(STATIONARY)]
        baseline = column_summary(column.draw(traffic.baseline_rows, random))
        windows = random.multinomial(traffic.rows, column.shares(baseline), traffic.windows)
        for counts in windows[may_differ(baseline, windows, alpha / CONFIG.alarm_rate)]:
            result = compare(baseline, with_counts(baseline, counts.tolist()))
            alarms += result.is_drift(alpha, CONFIG.min_drift)
            significant += result.p_value <= alpha
            significant_at_100 += result.p_value <= alpha / CONFIG.alarm_rate
    return MonthResult(alarms, significant, significant_at_100)


def may_differ(
    baseline: ColumnSummary, windows: NDArray[np.int64], alpha: float
) -> NDArray[np.bool_]:
    """Return which windows can have a p-value of alpha, by bounds that are quick to compute.

    Pooling cells lowers the likelihood ratio, and one degree of freedom gives the smallest p-value.
    """
    is_number = isinstance(baseline, NumberSummary)
    counts: Any = baseline.counts if is_number else baseline.counts.values()
    first = np.array([*counts, 0], float)
    middles = (first.cumsum() - first / 2) / baseline.count
    groups = np.minimum(middles * GROUPS, GROUPS - 1).astype(int)
    groups[-1] = GROUPS
    groups = groups if is_number else np.arange(len(first))
    first[-1] = baseline.missing
    one_hot = np.eye(groups.max() + 1)[groups]
    cells, live = first @ one_hot, windows @ one_hot
    n, m = cells.sum(), live.sum(axis=1, keepdims=True)
    pooled = (cells + live) / (n + m)
    ratio = 2 * (rel_entr(cells, n * pooled) + rel_entr(live, m * pooled)).sum(axis=1)
    bins = windows[:, :-1].cumsum(axis=1)
    sizes = np.maximum(bins[:, -1:], 1)
    distances = np.abs(bins / sizes - first[:-1].cumsum() / baseline.count).max(axis=1)
    size = baseline.count * sizes[:, 0] / (baseline.count + sizes[:, 0])
    return np.minimum(chdtrc(1, ratio), kolmogorov(np.sqrt(size) * distances)) <= alpha


def print_false_alarms() -> None:
    print("| traffic | months | with a false alarm | with a significant column | at 100 % |")
    print("|---|---|---|---|---|")
    for seed, traffic in enumerate(TRAFFIC):
        random = np.random.default_rng(seed)
        months = [simulate_month(traffic, random) for _ in range(MONTHS)]
        per_month = statistics.mean(month.significant_at_100 for month in months)
        print(
            f"| {traffic.name}, {traffic.columns} columns | {MONTHS} "
            f"| {sum(month.alarms > 0 for month in months)} "
            f"| {sum(month.significant > 0 for month in months)} | {per_month:.2f} |",
            flush=True,
        )


SHIFTS: Mapping[str, tuple[Column, Column]] = {
    "mean + 0.25 sd": (Column(stats.norm()), Column(stats.norm(0.25))),
    "mean + 0.5 sd": (Column(stats.norm()), Column(stats.norm(0.5))),
    "mean + 1 sd": (Column(stats.norm()), Column(stats.norm(1))),
    "variance x 1.5": (Column(stats.norm()), Column(stats.norm(0, 1.5**0.5))),
    "variance x 3": (Column(stats.norm()), Column(stats.norm(0, 3**0.5))),
    "10 % missing": (Column(stats.norm()), Column(stats.norm(), missing=0.1)),
    "one of 10 classes vanishes": (
        Column(stats.randint(0, 10), is_category=True),
        Column(stats.randint(0, 9), is_category=True),
    ),
    "a class of 10 % becomes 25 %": (
        Column(stats.binom(1, 0.1), is_category=True),
        Column(stats.binom(1, 0.25), is_category=True),
    ),
    "a new class has 5 %": (
        Column(stats.binom(1, 0.0), is_category=True),
        Column(stats.binom(1, 0.05), is_category=True),
    ),
}


def windows_until_found(
    before: Column, after: Column, rows: int, min_drift: float, seed: int
) -> int | None:
    """Return the number of the first window of an hour with an alarm, among 20 columns."""
    random = np.random.default_rng(seed)
    baseline = column_summary(before.draw(5000, random))
    alpha = window_alpha(CONFIG.alarm_rate, HOUR_S) / COLUMNS
    for window in range(1, MAX_WINDOWS + 1):
        live = bin_column(after.draw(rows, random), baseline)
        if compare(baseline, live).is_drift(alpha, min_drift):
            return window
    return None


def delay(count_windows: Callable[[int], int | None], runs: int) -> str:
    """Return the median and the largest number of windows until a shift is found."""
    delays = [windows for seed in range(runs) if (windows := count_windows(seed)) is not None]
    if len(delays) < runs:
        return f"found in {len(delays)} of {runs}"
    return f"{statistics.median(delays):.0f} (at most {max(delays)})"


def print_delays() -> None:
    sizes, limits = (100, 300, 1000), (CONFIG.min_drift, 0.02)
    heads = [f"{rows} rows, min_drift {limit}" for limit in limits for rows in sizes]
    print("| shift | " + " | ".join(heads) + " |")
    print("|---|" + "---|" * len(heads))
    for name, (before, after) in SHIFTS.items():
        cells = [
            delay(partial(windows_until_found, before, after, rows, limit), RUNS)
            for limit in limits
            for rows in sizes
        ]
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


class Digits:
    """Scikit-learn's digits, and a classifier that is trained on a third of them."""

    def __init__(self) -> None:
        images, labels = load_digits(return_X_y=True)
        order = np.random.default_rng(0).permutation(len(images))
        self.images, self.labels = images[order].reshape(-1, 8, 8), labels[order]
        self.model = LogisticRegression(max_iter=2000)
        self.model.fit(self.images[:600].reshape(600, -1), self.labels[:600])
        extractor = Extractor(CONFIG)
        rows = [row for row in self.facts(extractor, self.images[600:1200]) if row.columns]
        columns = summarize([row.columns for row in rows])
        self.baseline = MonitorBaseline(
            rows=len(rows), created=0.0, fields=extractor.fields, columns=columns
        )

    def facts(self, extractor: Extractor, images: Values) -> list[RowFacts]:
        """Return the facts about a request with each image, and about its answer."""
        answers = self.model.predict_proba(images.reshape(len(images), -1))
        return [
            row
            for image, answer in zip(images, answers, strict=True)
            for row in extractor.rows(digit_sample(image, answer))
        ]

    def windows_until_found(
        self, change: Callable[[Values, Values], Values], seed: int
    ) -> int | None:
        """Return the number of the first window with an alarm after a change of the images."""
        random = np.random.default_rng(seed)
        extractor = Extractor(CONFIG, self.baseline.fields)
        config = CONFIG.model_copy(update={"window_samples": DIGIT_ROWS})
        windows = VersionWindows(config, self.baseline)
        images, labels = self.images[1200:], self.labels[1200:]
        at = 0.0
        for window in range(1, MAX_WINDOWS + 1):
            order = random.permutation(len(images))
            changed = change(images[order], labels[order])
            for row in self.facts(extractor, changed[:DIGIT_ROWS]):
                at += HOUR_S / DIGIT_ROWS / 2
                windows.add(row, at)
            if any(drift.alarm for drift in windows.drifts()):
                return window
        return None


def digit_sample(image: Values, answer: Values) -> MonitorSample:
    body = json.dumps({"image": image.tolist()}).encode()
    reply = json.dumps(answer.tolist()).encode()
    kind = "application/json"
    return MonitorSample("m", "1", "r", 0.0, 0.0, 200, {"content-type": kind}, kind, body, reply)


DIGIT_CHANGES: Mapping[str, Callable[[Values, Values], Values]] = {
    "none": lambda images, labels: images,
    "brightness x 0.9": lambda images, labels: images * 0.9,
    "brightness x 0.7": lambda images, labels: images * 0.7,
    "rotated by 30 degrees": lambda images, labels: np.clip(
        rotate(images, 30, axes=(1, 2), reshape=False, order=1), 0, 16
    ),
    "rotated by 90 degrees": lambda images, labels: np.rot90(images, axes=(1, 2)),
    "no more 3": lambda images, labels: images[labels != 3],
    "4 times as many 0": lambda images, labels: np.concatenate(
        [images[labels == 0], images[labels == 0], images[labels == 0], images]
    )[np.random.default_rng(len(images)).permutation(len(images) + 3 * sum(labels == 0))],
}


def print_digits() -> None:
    digits = Digits()
    print("| change of the digits | windows until it is found |")
    print("|---|---|")
    for name, change in DIGIT_CHANGES.items():
        result = delay(partial(digits.windows_until_found, change), DIGIT_RUNS)
        print(f"| {name} | {result} |", flush=True)


def main() -> None:
    print(machine.describe(), end="\n\n")
    print_false_alarms()
    print()
    print_delays()
    print()
    print_digits()


if __name__ == "__main__":
    main()
