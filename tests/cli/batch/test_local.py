"""What the engine of this machine makes of an archive's measurement, and which models it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.benchmarked import results
from tests.support.models import make_model
from tsx_cli.batch.local import Recommendation, open_local, recommendation
from tsx_cli.bench.model.configuration import Configuration
from tsx_cli.bench.storage.archive_record import record_of
from tsx_cli.common.failure import CliError
from tsx_runtime.core.placement.hardware import hardware
from tsx_runtime.settings.schema import Settings

NOTHING = "def handle(data, context): return data"


def test_the_measured_workers_and_the_best_measured_batch_size_count_on_the_measured_machine_only(tmp_path: Path) -> None:
    record = record_of(results())
    best = record.best.configuration
    curve = next(curve for curve in record.curves if curve.variant.kind == Configuration(**best).variant.kind)
    make_model(tmp_path, NOTHING)
    (tmp_path / "tsx-bench.json").write_bytes(record.content())
    assert recommendation(tmp_path) == Recommendation()
    record.environment.fingerprint = hardware().fingerprint
    (tmp_path / "tsx-bench.json").write_bytes(record.content())
    fastest = max(curve.points, key=lambda point: point.batch_size / point.median_ms)
    assert recommendation(tmp_path) == Recommendation(best["workers"], fastest.batch_size)


@pytest.mark.slow
def test_a_model_whose_rows_belong_together_is_refused(tmp_path: Path, session_cache: Path) -> None:
    settings = Settings(cache_dir=session_cache, worker_preload=False)
    model = make_model(tmp_path / "s.mar", NOTHING, config="sequenceBatching: true\nsequenceMaxIdleMSec: 1000\n")
    with pytest.raises(CliError, match="its requests belong to sequences"), open_local(model, settings):
        pass
