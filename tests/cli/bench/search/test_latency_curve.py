"""Measurements of a single worker: its times, responses and failures."""

from __future__ import annotations

import json
import math
import os
import re
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.support.models import make_model
from tsx_archiver import open_archive
from tsx_cli.bench.load.configuration import Configuration
from tsx_cli.bench.load.payloads import Payload
from tsx_cli.bench.load.results import Curve, CurvePoint
from tsx_cli.bench.search import latency_curve
from tsx_cli.bench.search import worker as standalone_worker
from tsx_cli.bench.search.latency_curve import (
    BatchTiming,
    implausible,
    is_precise,
    is_settled,
    measure_curve,
    point_of,
    quartiles,
    spread_of,
)
from tsx_cli.bench.search.worker import batch_of, items_of

pytestmark = pytest.mark.skipif(
    os.name == "nt", reason="workers that are programs need Linux or macOS"
)

HERE = Configuration()
PAYLOADS = [
    Payload(b"a", "text/plain"),
    Payload(b"b", "text/plain", (("X-Mark", "!"),)),
    Payload(b"c", "text/plain"),
]
TELLING = """
    import time

    class Telling:
        device = "cpu"

        def initialize(self, context):
            pass

        def preprocess(self, rows):
            return [row["body"] for row in rows]

        def inference(self, texts):
            time.sleep(0.004 * len(texts))
            return texts

        def handle(self, rows, context):
            texts = self.inference(self.preprocess(rows))
            marks = [context.get_request_header(place, "x-mark") or "" for place in range(len(texts))]
            return [f"{text}{mark} of {len(texts)}" for text, mark in zip(texts, marks)]
"""

Write = Callable[..., Path]


SPYING = """
    import json, os

    def handle(rows, context):
        return rows and [json.dumps(dict(os.environ)) for _ in rows]
"""


@pytest.mark.usefixtures("processes")
def test_a_measured_or_optimized_archive_sees_no_secrets(
    model: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "TSX_MANAGEMENT_TOKEN"):
        monkeypatch.setenv(name, "a-secret")
    monkeypatch.setenv("HARMLESS", "seen")
    with (
        open_archive(model(SPYING)) as archive,
        standalone_worker.start_worker(standalone_worker.worker_spec(archive, HERE, 1)) as worker,
    ):
        (answer,) = worker.answer(batch_of(items_of(PAYLOADS), 1, 0)).answers
    visible_variables = json.loads(answer.body)
    assert visible_variables["HARMLESS"] == "seen"
    assert "a-secret" not in visible_variables.values()
    assert "a-secret" not in standalone_worker.model_variables().values()


@pytest.fixture
def model(tmp_path: Path) -> Write:
    """Return a function that makes a model directory from a handler and configuration keys."""

    def write(source: str, **config: Any) -> Path:
        return make_model(tmp_path / "m", textwrap.dedent(source), config=json.dumps(config))

    return write


def measured(
    directory: Path, variant: Configuration, sizes: Sequence[int], seconds: float = 0.3
) -> Curve:
    with open_archive(directory) as archive:
        return measure_curve(archive, variant, sizes, PAYLOADS, budget_seconds=seconds)


@pytest.mark.usefixtures("processes")
def test_times_and_steps_come_from_the_worker(model: Write) -> None:
    curve = measured(model(TELLING), HERE, (4, 1, 4), 1.0)
    assert (curve.failed, [point.batch_size for point in curve.points]) == (None, [1, 4])
    for point in curve.points:
        assert point.low_ms <= point.median_ms <= point.high_ms
        assert point.samples >= 3
        assert point.inference_ms is not None
        assert 4 * point.batch_size <= point.inference_ms <= point.median_ms
        assert point.preprocess_ms is not None
        assert point.postprocess_ms is None


@pytest.mark.usefixtures("processes")
def test_each_response_belongs_to_its_input(model: Write) -> None:
    with (
        open_archive(model(TELLING)) as archive,
        standalone_worker.start_worker(standalone_worker.worker_spec(archive, HERE, 2)) as worker,
    ):
        answers = worker.answer(batch_of(items_of(PAYLOADS), 2, 0)).answers
    assert [(reply.status, reply.body) for reply in answers] == [
        (200, b"a of 2"),
        (200, b"b! of 2"),
    ]


@pytest.mark.usefixtures("processes")
def test_a_worker_crash_ends_the_curve_and_keeps_its_points(model: Write) -> None:
    source = """
        import os, sys

        def handle(data, context):
            if data and len(data) > 2:
                print("no room for", len(data), file=sys.stderr, flush=True)
                os._exit(3)
            return data and ["ok"] * len(data)
    """
    curve = measured(model(source), HERE, (1, 2, 4, 8))
    assert [point.batch_size for point in curve.points] == [1, 2]
    assert curve.failed is not None
    assert curve.failed.startswith("the worker ended (exit code 3)")
    assert "no room for 4" in curve.failed


@pytest.mark.usefixtures("processes")
def test_a_batch_that_was_split_for_lack_of_memory_is_a_failure(model: Write) -> None:
    source = """
        def handle(data, context):
            if data and len(data) > 1:
                raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return data and ["ok"] * len(data)
    """
    curve = measured(model(source), HERE, (1, 2))
    assert [point.batch_size for point in curve.points] == [1]
    assert curve.failed == "a batch of 2 does not fit the memory of cpu"


STREAMS = """
    from ts.handler_utils.utils import send_intermediate_predict_response

    def handle(data, context):
        if data is None:
            return None
        send_intermediate_predict_response(["one "] * len(data), context.request_ids, "ok", 200, context)
        return ["two"] * len(data)
"""


@pytest.mark.usefixtures("processes")
def test_a_handler_that_streams_is_measured_too(model: Write) -> None:
    curve = measured(model(STREAMS), HERE, (1,))
    assert (curve.failed, len(curve.points)) == (None, 1)


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("source", "config", "variant", "problem"),
    [
        ("raise RuntimeError('no weights here')", {}, HERE, "no weights here"),
        (
            "def handle(data, context):\n    return data and data[3]\n",
            {},
            HERE,
            "a batch of 1 was answered 500: .*list index out of range",
        ),
        (
            "def handle(data, context):\n    return data\n",
            {},
            Configuration(precision="bf16"),
            "its handler ignores `precision`: see",
        ),
        (TELLING.replace('"cpu"', '"cuda:0"'), {}, HERE, "runs on cuda:0, not on cpu"),
        (
            "import signal\n\ndef handle(data, context):\n    return data and signal.pause()\n",
            {"responseTimeout": 1},
            HERE,
            r"a batch of 1 was not answered within 1 seconds \(responseTimeout\)",
        ),
    ],
)
def test_a_failed_measurement_has_a_reason(
    model: Write, source: str, config: dict[str, Any], variant: Configuration, problem: str
) -> None:
    curve = measured(model(source, **config), variant, (1, 2))
    assert (curve.points, curve.precision) == ([], variant.precision)
    assert curve.failed is not None
    assert re.search(problem, curve.failed, re.DOTALL)


@pytest.mark.parametrize(
    ("config", "variant", "problem"),
    [
        (
            {"sequenceBatching": True, "sequenceMaxIdleMSec": 10},
            HERE,
            "so the time of a batch cannot be measured",
        ),
        ({"asyncCommunication": True}, HERE, "so the time of a batch cannot be measured"),
        ({"useVenv": True}, HERE, "useVenv"),
        ({}, Configuration(device="cuda"), "there is no GPU here"),
    ],
)
def test_features_that_need_a_server_are_refused_before_the_worker_starts(
    model: Write,
    monkeypatch: pytest.MonkeyPatch,
    config: dict[str, Any],
    variant: Configuration,
    problem: str,
) -> None:
    monkeypatch.setattr(standalone_worker, "gpu_count", lambda: 0)
    monkeypatch.setattr("subprocess.Popen", None)
    curve = measured(model("", **config), variant, (1,))
    assert problem in (curve.failed or "")


def test_a_variant_sets_the_keys_of_the_configuration(model: Write) -> None:
    with open_archive(model("", pt2="inductor", warmup=["a.bin"], batchSize=3)) as archive:
        variant = Configuration(precision="bf16", compiled=True, threads=3, workers=4, batch_size=2)
        load = standalone_worker.worker_spec(archive, variant, 16).load
        config = yaml.safe_load(load["model_config"])
        assert (load["batch_size"], load["threads"], load["gpu_id"], load["handler"]) == (
            16,
            3,
            None,
            "handler.py",
        )
        assert (config["precision"], config["warmup"]) == ("bf16", ["a.bin"])
        assert config["pt2"] == {"compile": {"backend": "inductor", "enable": True}}


@given(st.integers(1, 7), st.integers(1, 9), st.integers(0, 20))
def test_batches_use_the_inputs_in_turn(count: int, size: int, number: int) -> None:
    items = items_of([Payload(str(position).encode()) for position in range(count)])
    expected_items = [
        item for previous in range(number + 1) for item in batch_of(items, size, previous)
    ]
    assert [int(bytes(body)) for _, _, body in expected_items] == [
        position % count for position in range(size * (number + 1))
    ]


TIMES = st.lists(st.floats(1e-6, 10.0), min_size=1, max_size=40)


@given(TIMES)
def test_percentiles_are_in_order_and_a_single_pause_is_not_noise(seconds: list[float]) -> None:
    low, middle, high = quartiles(seconds)
    assert min(seconds) <= low <= middle <= high <= max(seconds)
    steady = [0.01] * 20
    assert spread_of([*steady, 5.0]) == spread_of(steady) == pytest.approx(0.0)
    assert spread_of(seconds) >= 0.0
    assert is_precise([seconds[0]] * 3)
    point = point_of(4, [BatchTiming(time, (math.nan, time, math.nan)) for time in seconds], 0.5)
    assert (point.preprocess_ms, point.cpu_ms, point.samples) == (None, 500.0, len(seconds))
    assert point.inference_ms == pytest.approx(point.median_ms)


def test_warm_up_ends_when_batches_stop_getting_faster() -> None:
    assert not is_settled([[3.0, 1.0]])
    assert not is_settled([[3.0, 3.0], [1.0, 1.0]])
    assert is_settled([[3.0, 3.0], [1.0, 1.0], [0.99, 1.01]])
    assert is_settled([[1.0, 1.0], [2.0, 2.0]])


def test_few_or_varying_times_are_not_precise() -> None:
    assert not is_precise([1.0, 1.0])
    assert not is_precise([1.0, 2.0, 3.0, 4.0])
    assert is_precise([1.0 + 0.001 * position for position in range(20)])


def sized(*times: tuple[int, float]) -> list[CurvePoint]:
    return [
        CurvePoint(batch_size=size, median_ms=ms, low_ms=0.9 * ms, high_ms=1.1 * ms, samples=9)
        for size, ms in times
    ]


def test_a_time_is_implausible_if_a_larger_batch_takes_less() -> None:
    assert implausible(sized((1, 5), (2, 9), (4, 18), (8, 36))) == []
    assert implausible(sized((1, 63), (2, 6), (4, 9))) == [0]
    assert implausible(sized((1, 10), (2, 9.5))) == [], "within what both vary"
    assert implausible(sized((1, 10), (2, 20), (4, 90))) == [2], "44 a second after 100"


@pytest.mark.usefixtures("processes")
def test_a_disturbed_batch_size_is_measured_again(
    model: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure_point, disturbed = latency_curve._point, []

    def slow_at_first(worker: Any, items: Any, size: int, seconds: float, first: Any) -> Any:
        point, spread = measure_point(worker, items, size, seconds, first)
        if size == 1 and not disturbed:
            disturbed.append(size)
            point = point.model_copy(
                update={
                    name: 50 * getattr(point, name) for name in ("median_ms", "low_ms", "high_ms")
                }
            )
        return point, spread

    monkeypatch.setattr(latency_curve, "_point", slow_at_first)
    curve = measured(model(TELLING), HERE, (1, 4), 1.0)
    assert disturbed == [1]
    # The disturbed time was 50 times as long. Times of a busy machine differ by less than ten times.
    assert curve.points[0].median_ms < 10 * curve.points[1].median_ms


@pytest.mark.usefixtures("processes")
def test_batches_slower_than_any_limit_end_the_curve(model: Write) -> None:
    with open_archive(model(TELLING)) as archive:
        curve = measure_curve(archive, HERE, (1, 4, 8), PAYLOADS, budget_seconds=0.3, most_ms=10)
    assert [point.batch_size for point in curve.points] == [1, 4]
