"""The batch engine on this machine: its recommended settings, and the models that it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.benchmarked import results
from tests.support.models import make_model
from tsx_cli.batch.local import Recommendation, open_local, recommendation
from tsx_cli.batch.rows import Row
from tsx_cli.bench.load.configuration import Configuration
from tsx_cli.bench.report.archive_record import record_of
from tsx_cli.common.failure import CliError
from tsx_runtime.core.placement.hardware import hardware
from tsx_runtime.settings.schema import Settings

ECHO_HANDLER = "def handle(data, context): return data"


def test_measured_settings_are_recommended_only_on_the_measured_machine(tmp_path: Path) -> None:
    record = record_of(results())
    best = record.best.configuration
    curve = next(
        curve for curve in record.curves if curve.variant.kind == Configuration(**best).variant.kind
    )
    make_model(tmp_path, ECHO_HANDLER)
    (tmp_path / "tsx-bench.json").write_bytes(record.content())
    assert recommendation(tmp_path) == Recommendation()
    record.environment.fingerprint = hardware().fingerprint
    (tmp_path / "tsx-bench.json").write_bytes(record.content())
    fastest = max(curve.points, key=lambda point: point.batch_size / point.median_ms)
    assert recommendation(tmp_path) == Recommendation(best["workers"], fastest.batch_size)


@pytest.mark.slow
def test_a_model_with_sequences_is_refused(tmp_path: Path, session_cache: Path) -> None:
    settings = Settings(cache_dir=session_cache, worker_preload=False)
    model = make_model(
        tmp_path / "s.mar",
        ECHO_HANDLER,
        config="sequenceBatching: true\nsequenceMaxIdleMSec: 1000\n",
    )
    with (
        pytest.raises(CliError, match="its requests belong to sequences"),
        open_local(model, settings),
    ):
        pass


STREAMING_HANDLER = """
from ts.handler_utils.utils import send_intermediate_predict_response

def handle(data, context):
    if data is not None:
        send_intermediate_predict_response(["one "] * len(data), context.request_ids, "", 200, context)
        return ["two"] * len(data)
"""


def rows(count: int, read_rows: list[int]) -> Iterator[Row]:
    for number in range(count):
        read_rows.append(number)
        yield Row(number, str(number), b'{"x": %d}' % number, "application/json")


@pytest.mark.slow
def test_few_rows_are_in_flight_at_once(
    doubling_model: Path, session_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_local(
        doubling_model, Settings(cache_dir=session_cache, worker_preload=False), 1, 1
    ) as engine:
        read_rows: list[int] = []
        results = engine.run(rows(100, read_rows))
        assert json.loads(next(results).body) == {"twice": 0}
        assert len(read_rows) == 4
        assert [result.index for result in results] == list(range(1, 100))
        # Each response is larger than this limit.
        monkeypatch.setattr("tsx_cli.batch.local.MAX_IN_FLIGHT_BYTES", 8)
        read_rows.clear()
        for number, _ in enumerate(engine.run(rows(20, read_rows))):
            assert number == 0 or len(read_rows) <= number + 4


@pytest.mark.slow
def test_the_parts_of_a_streamed_response_are_joined(tmp_path: Path, session_cache: Path) -> None:
    model = make_model(tmp_path / "streams.mar", STREAMING_HANDLER)
    with open_local(model, Settings(cache_dir=session_cache, worker_preload=False), 1, 2) as engine:
        assert [result.body for result in engine.run(rows(3, []))] == [b"one two"] * 3
