"""The variable `TS_BENCHMARK`, which makes a worker profile its handler."""

from __future__ import annotations

import pstats
from pathlib import Path

from tests.runtime.worker.conftest import StartWorker, Worker

SOURCE = """
    import tempfile
    tempfile.tempdir = {directory!r}

    def weigh(row):
        return "heavy"

    def handle(data, context):
        return data and [weigh(row) for row in data]
"""


def start(start_worker: StartWorker, directory: Path, benchmark: str) -> Worker:
    """Start a worker whose temporary files are in `directory`."""
    source = SOURCE.format(directory=str(directory))
    return start_worker(source, variables={"TS_BENCHMARK": benchmark})


def test_a_profiled_worker_writes_a_profile_of_the_handlers_functions(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    worker = start(start_worker, tmp_path, "True")
    assert worker.ask_bodies(b"1", b"2") == [b"heavy"] * 2
    assert worker.ask_bodies(b"3") == [b"heavy"]
    assert worker.close() == 0
    files = [tmp_path / "tsPythonProfile-m-9000.prof", tmp_path / "tsPythonProfile.prof"]
    assert sorted(tmp_path.glob("*.prof")) == files
    for file in files:
        calls = {name: count for (_, _, name), (count, *_) in pstats.Stats(str(file)).stats.items()}  # type: ignore[attr-defined]
        assert (calls["handle"], calls["weigh"]) == (2, 3)


def test_a_profile_that_cannot_be_renamed_keeps_its_first_name(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    newest = tmp_path / "tsPythonProfile.prof"
    newest.mkdir()
    assert start(start_worker, tmp_path, "True").close() == 0
    assert sorted(tmp_path.glob("*.prof")) == [tmp_path / "tsPythonProfile-m-9000.prof", newest]


def test_a_worker_is_not_profiled_by_default(start_worker: StartWorker, tmp_path: Path) -> None:
    worker = start(start_worker, tmp_path, "False")
    assert worker.ask_bodies(b"1") == [b"heavy"]
    assert worker.close() == 0
    assert not list(tmp_path.glob("*.prof"))
