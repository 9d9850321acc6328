"""What monitoring finds in real data, with a real server, models and clients.

The data are scikit-learn's digits, and its table of tumors. `docs/guides/monitoring.md` states
within how many windows a change is found.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.ndimage import rotate
from sklearn.datasets import load_breast_cancer, load_digits
from sklearn.linear_model import LogisticRegression

from tests.runtime.conftest import RunningServer, make_settings, running_server
from tests.support.models import make_model
from tsx_archiver.monitor.baseline import MEMBER, MonitorBaseline
from tsx_archiver.monitor.config import MonitorConfig
from tsx_archiver.rewriting import rewrite_archive
from tsx_runtime.features.monitor.messages import MonitorSample
from tsx_runtime.features.monitor.statistics.columns import Extractor
from tsx_runtime.features.monitor.statistics.summaries import summarize

pytestmark = [pytest.mark.usefixtures("processes"), pytest.mark.nightly]

# A linear model as a handler: a request is a list of numbers, an answer has a score by class.
LINEAR = """
import json, numpy
MODEL = json.loads({model!r})
def handle(data, context):
    if data is None:
        return None
    rows = numpy.array([row["body"]["x"] for row in data], float)
    scores = rows @ numpy.array(MODEL["weights"]).T + numpy.array(MODEL["bias"])
    scores = numpy.exp(scores - scores.max(1, keepdims=True))
    scores /= scores.sum(1, keepdims=True)
    return [dict(zip(MODEL["classes"], row)) for row in scores.tolist()]
"""
WINDOW = 200


class Served:
    """A served linear model, and rows to send to it."""

    def __init__(self, server: RunningServer, name: str) -> None:
        self.server = server
        self.name = name

    def ask(self, rows: np.ndarray[Any, Any], **fields: Sequence[str]) -> list[str]:
        """Send each row as a request; return their ids."""
        ids = []
        for index, row in enumerate(rows):
            body = {"x": row.tolist()} | {name: values[index] for name, values in fields.items()}
            answer = self.server.inference.post(f"/predictions/{self.name}", json=body)
            assert answer.status_code == 200, answer.text
            ids.append(answer.headers["x-request-id"])
        return ids

    def report(self, **feedback: Any) -> dict[str, Any]:
        """Report the truth of answers, if it is given, and return the report."""
        if feedback:
            items = [
                {"request_id": id, "truth": truth}
                for id, truth in zip(feedback["ids"], feedback["truths"], strict=True)
            ]
            result = self.server.inference.post(f"/feedback/{self.name}", json=items).json()
            assert (result["accepted"], result["errors"]) == (len(items), [])
        else:  # A call that follows the samples is answered after them.
            self.server.inference.post(f"/feedback/{self.name}", json=[])
        response = self.server.management.get(f"/models/{self.name}/monitor")
        return dict(response.json())

    def alarms(self) -> set[str]:
        (version,) = self.report()["versions"]
        return {column["column"] for column in version["columns"] if column["alarm"]}


def pack(
    path: Path,
    model: LogisticRegression,
    past: np.ndarray[Any, Any],
    config: str,
    version: str = "1.0",
) -> None:
    """Write an archive of a model with a baseline of past rows."""
    weights, bias = np.atleast_2d(model.coef_), np.atleast_1d(model.intercept_)
    if len(weights) == 1:
        weights, bias = np.concatenate([-weights, weights]) / 2, np.concatenate([-bias, bias]) / 2
    classes = list(map(str, model.classes_))
    text = json.dumps({"weights": weights.tolist(), "bias": bias.tolist(), "classes": classes})
    name = path.stem.partition("-")[0]
    handler = LINEAR.format(model=text)
    make_model(path, handler, name=name, version=version, config=config)
    extractor = Extractor(MonitorConfig())
    answers = model.predict_proba(past)
    samples = [
        MonitorSample(
            *("m", "1", "", 0.0, 0.0, 200),
            headers={"content-type": "application/json"},
            answer_type="application/json",
            body=json.dumps({"x": row.tolist()}).encode(),
            answer=json.dumps(dict(zip(classes, scores.tolist(), strict=True))).encode(),
        )
        for row, scores in zip(past, answers, strict=True)
    ]
    for sample in samples:
        extractor.rows(sample)
    extractor.freeze()
    rows = [facts.columns for sample in samples for facts in extractor.rows(sample)]
    baseline = MonitorBaseline(
        rows=len(rows), created=1.0, fields=extractor.fields, columns=summarize(rows)
    )
    rewrite_archive(path, {MEMBER: baseline.model_dump_json().encode()})


@pytest.fixture
def digits(tmp_path: Path) -> Iterator[Served]:
    images, labels = load_digits(return_X_y=True)
    model = LogisticRegression(max_iter=300).fit(images[::3] / 16, labels[::3])
    config = f"monitor: {{share: 100, windowSamples: {WINDOW}}}\n"
    past = np.delete(images, np.s_[::3], axis=0)
    pack(tmp_path / "digits.mar", model, past / 16, config)
    with running_server(make_settings(tmp_path)) as server:
        server.register("digits.mar", initial_workers=1)
        yield Served(server, "digits")


def draw(keep: Callable[[Any], Any], count: int, seed: int) -> np.ndarray[Any, Any]:
    """Draw images whose labels `keep` accepts."""
    images, labels = load_digits(return_X_y=True)
    chosen = np.flatnonzero(keep(labels) & (np.arange(len(labels)) % 3 != 0))
    return images[np.random.default_rng(seed).choice(chosen, count)] / 16


def all_digits(labels: Any) -> Any:
    return labels >= 0


def test_a_brightness_and_a_rotation_are_found_in_the_first_window(digits: Served) -> None:
    digits.ask(draw(all_digits, WINDOW, 0))
    assert digits.alarms() == set()
    digits.ask(draw(all_digits, WINDOW, 1) * 0.7)
    assert digits.alarms() != set()
    digits.ask(draw(all_digits, WINDOW, 2))
    assert digits.alarms() == set()
    images = draw(all_digits, WINDOW, 3).reshape(-1, 8, 8)
    turned = rotate(images, 30, axes=(1, 2), reshape=False, order=1).reshape(-1, 64)
    digits.ask(turned.clip(0, 1))
    assert digits.alarms() & {"answer.confidence", "answer.entropy", "answer.class"}


def test_a_vanished_digit_is_found_in_the_first_window_of_1000(digits: Served) -> None:
    config = {"share": 100, "window_samples": 1000}
    digits.server.management.put("/models/digits/monitor", json=config)
    digits.ask(draw(lambda labels: labels != 3, 1000, 0))
    assert "answer.class" in digits.alarms()


@pytest.fixture
def tumors(tmp_path: Path) -> Iterator[tuple[Served, np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """Versions of a model of a table: 1.0 sees two columns, 2.0 ten; 3.0 was made for others."""
    rows, labels = load_breast_cancer(return_X_y=True)
    rows = (rows - rows.mean(0)) / rows.std(0)
    config = "monitor: {share: 100, windowSamples: 1000, groups: [clinic], positive: '1'}\n"
    for version, columns, scale in (("1.0", 2, 1), ("2.0", 10, 1), ("3.0", 10, 2)):
        seen = rows * (np.arange(rows.shape[1]) < columns)
        model = LogisticRegression(max_iter=500).fit(seen, labels)
        model.coef_ *= np.arange(rows.shape[1]) < columns
        path = tmp_path / f"tumors-{version}.mar"
        pack(path, model, rows * scale, config, version)
    with running_server(make_settings(tmp_path)) as server:
        server.register("tumors-1.0.mar", initial_workers=1)
        yield Served(server, "tumors"), rows, labels


def test_label_noise_lowers_the_accuracy_and_a_group_has_twice_the_error(tumors: Any) -> None:
    served, rows, labels = tumors
    numbers = np.random.default_rng(0).choice(len(rows), 1500)
    clinics = np.array(["north", "south"])[np.random.default_rng(1).integers(0, 2, 1500)]
    ids = served.ask(rows[numbers], clinic=clinics.tolist())
    truths, noise = labels[numbers], np.random.default_rng(2)
    # One label of eight is wrong in the south.
    is_noisy = (clinics == "south") & (noise.random(1500) < 0.125)
    truths = np.where(is_noisy, 1 - truths, truths)
    items = [
        {"request_id": id, "truth": str(truth), "groups": {"clinic": clinic}}
        for id, truth, clinic in zip(ids, truths.tolist(), clinics.tolist(), strict=True)
    ]
    for start in range(0, len(items), 500):  # The servers of tests take at most 100 kB.
        part = items[start : start + 500]
        result = served.server.inference.post("/feedback/tumors", json=part).json()
        assert (result["accepted"], result["errors"]) == (len(part), [])
    (version,) = served.report()["versions"]
    (attribute,) = version["groups"]
    errors = {group["group"]: group["error"]["value"] for group in attribute["groups"]}
    assert errors["south"] > 1.5 * errors["north"]
    (difference,) = [item for item in attribute["differences"] if item["name"] == "error"]
    assert difference["groups"] == ["south", "north"]
    assert difference["difference"]["low"] > 0
    accuracy = version["quality"]["accuracy"]
    assert accuracy["value"] == pytest.approx(
        np.mean([1 - value for value in errors.values()]), abs=0.01
    )


def test_an_ab_test_ends_with_the_better_version(tumors: Any) -> None:
    served, rows, labels = tumors
    server = served.server
    server.register("tumors-2.0.mar", initial_workers=1)
    server.management.put("/models/tumors/traffic", json={"weights": {"1.0": 1, "2.0": 1}})
    sentence = ""
    for seed in range(12):
        numbers = np.random.default_rng(seed).choice(len(rows), 500)
        truths = list(map(str, labels[numbers].tolist()))
        report = served.report(ids=served.ask(rows[numbers]), truths=truths)
        (comparison,) = report["comparisons"]
        sentence = comparison["sentence"]
        if comparison.get("better"):
            break
    assert comparison["better"] == "2.0", sentence
    assert sentence.startswith("Version 2.0 is better: its accuracy is")


def test_drift_ends_a_rollout(tumors: Any) -> None:
    served, rows, _ = tumors
    server = served.server
    server.register("tumors-3.0.mar", initial_workers=1)
    plan = {"version": "3.0", "steps": [50], "bake": 600, "guards": ["drift<0.2"]}
    config = {"share": 100, "window_samples": 200}
    server.management.put("/models/tumors/monitor", json=config).raise_for_status()
    server.management.post("/models/tumors/rollout", json=plan).raise_for_status()
    for _ in range(100):
        served.ask(rows[:100])
        rollout = server.management.get("/models/tumors/rollout").json()
        if rollout["status"] != "running":
            break
    assert rollout["status"] == "went back"
    assert "drift" in rollout["reason"]
