"""The windows of a version: when they end, and which columns have an alarm."""

from __future__ import annotations

import json

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.ndimage import rotate
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

from tsx_archiver.monitor.baseline import MonitorBaseline
from tsx_archiver.monitor.config import MonitorConfig
from tsx_runtime.features.monitor.messages import MonitorSample
from tsx_runtime.features.monitor.statistics.columns import Extractor, RowFacts
from tsx_runtime.features.monitor.statistics.summaries import summarize
from tsx_runtime.features.monitor.statistics.windows import VersionWindows

CONFIG = MonitorConfig(window_samples=100, window=3600)
Columns = dict[str, float | str | None]


def facts(columns: Columns) -> RowFacts:
    return RowFacts(columns, None, None, None, {}, {})


def draw(random: np.random.Generator, mean: float = 0.0, classes: str = "abc") -> Columns:
    return {"input.x": random.normal(mean), "answer.class": str(random.choice([*classes]))}


def baseline_of(rows: list[Columns]) -> MonitorBaseline:
    return MonitorBaseline(rows=len(rows), created=1.0, columns=summarize(rows))


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def windows(random: np.random.Generator) -> VersionWindows:
    return VersionWindows(CONFIG, baseline_of([draw(random) for _ in range(1000)]))


def feed(
    windows: VersionWindows,
    random: np.random.Generator,
    rows: int = 100,
    step: float = 20.0,
    **options: object,
) -> int:
    """Add rows every `step` seconds; return the number of windows that have ended."""
    at = windows.state.latest
    ended = 0
    for index in range(rows):
        ended += windows.add(facts(draw(random, **options)), at + step * (index + 1))  # type: ignore[arg-type]  # mean and classes
    return ended


def test_a_window_ends_by_the_number_of_rows(
    windows: VersionWindows, random: np.random.Generator
) -> None:
    assert feed(windows, random, 250) == 2
    assert windows.state.windows == 2
    assert len(windows.rows) == 50
    assert (windows.state.first, windows.state.latest) == (20.0, 5000.0)


def test_a_window_ends_by_time_if_it_has_50_rows(
    windows: VersionWindows, random: np.random.Generator
) -> None:
    assert feed(windows, random, 49, step=100.0) == 0
    assert not windows.end_if_due(1e6)
    assert feed(windows, random, 2, step=1.0) == 1
    (drift, _) = windows.drifts()
    assert drift.history[0].count == 50
    assert drift.history[0].at == 4901.0
    feed(windows, random, 60, step=1.0)
    assert windows.end_if_due(4901.0 + 3600)


def test_rows_of_a_guess_are_not_counted(windows: VersionWindows) -> None:
    assert not windows.add(facts({}), 1.0)
    assert windows.state.first is None


def test_a_stationary_stream_has_no_alarm(
    windows: VersionWindows, random: np.random.Generator
) -> None:
    for _ in range(40):
        assert feed(windows, random) == 1
        assert not any(drift.alarm for drift in windows.drifts())
        assert windows.state.drift == 0


@pytest.mark.parametrize(
    ("options", "column", "most"),
    [
        ({"mean": 1.0}, "input.x", 1),
        ({"mean": -0.6}, "input.x", 5),
        ({"classes": "ab"}, "answer.class", 1),
        ({"classes": "abcaa"}, "answer.class", 10),
        ({"classes": "abcd"}, "answer.class", 1),
    ],
    ids=str,
)
def test_a_shift_is_found(
    windows: VersionWindows,
    random: np.random.Generator,
    options: dict[str, object],
    column: str,
    most: int,
) -> None:
    feed(windows, random, 300)
    alarms: list[str] = []
    for _ in range(most):
        feed(windows, random, **options)
        alarms = alarms or [drift.column for drift in windows.drifts() if drift.alarm]
    assert alarms == [column]


def test_an_alarm_lasts_until_a_window_without_drift(
    windows: VersionWindows, random: np.random.Generator
) -> None:
    feed(windows, random)
    feed(windows, random, mean=2.0)
    since = windows.state.latest
    feed(windows, random, mean=2.0)
    (drift, other) = windows.drifts()
    assert (drift.alarm, drift.alarm_since) == (True, since)
    assert not other.alarm
    assert windows.state.drift == drift.psi
    assert [point.value > 0.5 for point in drift.history] == [False, True, True]
    feed(windows, random)
    assert windows.drifts()[0].alarm_since is None


def test_a_column_that_is_absent_counts_as_missing(
    windows: VersionWindows, random: np.random.Generator
) -> None:
    for index in range(100):
        windows.add(facts({"input.x": random.normal()}), 20.0 * index)
    drift = windows.drifts()[1]
    assert (drift.alarm, drift.missing, drift.baseline_missing) == (True, 1.0, 0.0)


def test_the_first_window_is_the_baseline_of_columns_without_one(
    random: np.random.Generator,
) -> None:
    windows = VersionWindows(CONFIG)
    assert feed(windows, random, 299) == 0
    assert feed(windows, random, 1) == 1
    assert (windows.state.baseline_rows, windows.state.drift) == (300, None)
    assert windows.drifts() == []
    feed(windows, random)
    assert windows.state.drift == 0.0
    feed(windows, random, mean=3.0)
    assert [drift.alarm for drift in windows.drifts()] == [True, False]


def test_a_column_that_the_baseline_lacks_has_its_first_window_as_baseline(
    windows: VersionWindows, random: np.random.Generator
) -> None:
    large = VersionWindows(MonitorConfig(window_samples=300))
    large.state.baseline = windows.state.baseline
    for index in range(600):
        large.add(facts({**draw(random), "answer.new": random.random()}), 10.0 * index)
    assert [drift.column for drift in large.drifts()] == ["input.x", "answer.class", "answer.new"]
    assert not any(drift.alarm for drift in large.drifts())


def test_the_version_before_is_compared_in_its_own_bins(
    windows: VersionWindows, random: np.random.Generator
) -> None:
    feed(windows, random, mean=3.0)
    new = VersionWindows(CONFIG)
    new.state.previous = windows.state.last
    feed(new, random, 400)
    (drift, other) = new.drifts()
    assert (drift.alarm, drift.previous_alarm) == (False, True)
    assert (other.alarm, other.previous_alarm) == (False, False)
    assert drift.previous_psi is not None
    assert drift.previous_psi > 1
    assert drift.histogram is not None
    assert drift.histogram.previous is None  # Its bins are others.
    assert other.histogram is not None
    assert other.histogram.previous is not None


def test_histograms_have_the_bins_of_the_baseline(
    windows: VersionWindows, random: np.random.Generator
) -> None:
    feed(windows, random, classes="abcd")
    numbers, categories = (drift.histogram for drift in windows.drifts())
    assert numbers is not None
    assert numbers.edges is not None
    assert len(numbers.baseline) == len(numbers.live) == len(numbers.edges) + 1
    assert categories is not None
    assert categories.categories is not None
    assert {*categories.categories} == {"a", "b", "c", "(others)"}
    assert sum(categories.live) == pytest.approx(1)


def test_a_dump_continues(windows: VersionWindows, random: np.random.Generator) -> None:
    feed(windows, random, 150, mean=2.0)
    baseline = MonitorBaseline(rows=1000, created=1.0, columns=windows.state.baseline)
    data = windows.state.model_dump(mode="json")
    loaded = VersionWindows(CONFIG, baseline, data)
    assert loaded.state == windows.state
    assert loaded.drifts() == windows.drifts()
    since = loaded.drifts()[0].alarm_since
    feed(loaded, random, mean=2.0)
    assert loaded.drifts()[0].alarm_since == since
    assert len(loaded.drifts()[0].history) == 2
    other = baseline.model_copy(update={"created": 2.0})
    assert VersionWindows(CONFIG, other, data).state.windows == 0


def test_the_history_is_bounded(random: np.random.Generator) -> None:
    config = MonitorConfig(window_samples=50)
    windows = VersionWindows(config)
    for index in range(300 + 50 * 501):
        windows.add(facts({"x": float(index % 7)}), float(index))
    assert windows.state.windows == 502
    assert len(windows.drifts()[0].history) == 500


def test_the_histories_of_many_columns_are_shorter(
    windows: VersionWindows, random: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tsx_runtime.features.monitor.statistics.windows.MAX_POINTS", 6)
    feed(windows, random, 500)
    assert [len(drift.history) for drift in windows.drifts()] == [3, 3]


def test_answers_with_ever_new_keys_have_a_bounded_number_of_columns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tsx_runtime.features.monitor.statistics.windows.MAX_COLUMNS", 5)
    windows = VersionWindows(MonitorConfig(window_samples=300))
    for row in range(3000):
        windows.add(facts({f"answer.{row // 300}": 1.0}), float(row))
    assert windows.state.windows == 10
    assert len(windows.drifts()) == 5


def test_a_clock_that_is_set_back_hides_no_drift(
    windows: VersionWindows, random: np.random.Generator
) -> None:
    windows.add(facts(draw(random)), 1e9)
    feed(windows, random, 99)
    windows.add(facts(draw(random, mean=2.0)), 1e6)
    feed(windows, random, 199, mean=2.0)
    assert windows.state.latest < 2e6
    assert [drift.alarm for drift in windows.drifts() if drift.column == "input.x"] == [True]


Images = NDArray[np.float64]


@pytest.fixture(scope="module")
def digits() -> tuple[Images, Images, LogisticRegression]:
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = images[order], labels[order]
    model = LogisticRegression(max_iter=300).fit(images[:600] / 16, labels[:600])
    return images[600:].reshape(-1, 8, 8), labels[600:], model


@pytest.mark.parametrize(
    ("change", "columns"),
    [
        ("none", set()),
        ("brightness", {"input.image.mean"}),
        ("rotation", {"answer.confidence"}),
        ("vanished class", {"answer.class"}),
    ],
)
def test_changes_of_real_images_are_found(
    digits: tuple[Images, Images, LogisticRegression], change: str, columns: set[str]
) -> None:
    images, labels, model = digits
    extractor = Extractor(CONFIG, {"image": "image"})

    def rows_of(part: Images) -> list[RowFacts]:
        answers = model.predict_proba(part.reshape(len(part), -1) / 16)
        kind = "application/json"
        return [
            row
            for image, answer in zip(part, answers, strict=True)
            for row in extractor.rows(
                MonitorSample(
                    *("m", "1", "r", 0.0, 0.0, 200, {"content-type": kind}, kind),
                    json.dumps({"image": image.tolist()}).encode(),
                    json.dumps(answer.tolist()).encode(),
                )
            )
        ]

    windows = VersionWindows(
        MonitorConfig(window_samples=500),
        baseline_of([row.columns for row in rows_of(images[:600])]),
    )
    live = images[600:]
    if change == "brightness":
        live = live * 0.8
    elif change == "rotation":
        live = rotate(live, 40, axes=(1, 2), reshape=False, order=1)
    elif change == "vanished class":
        live = live[labels[600:] != 3]
    for index, row in enumerate(rows_of(live[:500])):
        windows.add(row, 7.0 * index)
    assert windows.state.windows == 1
    alarms = {drift.column for drift in windows.drifts() if drift.alarm}
    assert columns <= alarms
    assert bool(columns) == bool(alarms)
