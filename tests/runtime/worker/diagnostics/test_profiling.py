"""`TS_BENCHMARK`: contract section 9.3."""

from __future__ import annotations

import pstats
from pathlib import Path

from tests.runtime.worker.conftest import StartWorker


def test_a_worker_that_is_profiled_leaves_a_file_that_names_the_handlers_functions(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    source = f"""
        import tempfile
        tempfile.tempdir = {str(tmp_path)!r}

        def weigh(row):
            return "heavy"

        def handle(data, context):
            return data and [weigh(row) for row in data]
    """
    worker = start_worker(source, variables={"TS_BENCHMARK": "True"})
    assert [answer.body for answer in worker.ask(b"1", b"2")] == [b"heavy"] * 2
    assert [answer.body for answer in worker.ask(b"3")] == [b"heavy"]
    assert worker.close() == 0
    own, newest = tmp_path / "tsPythonProfile-m-9000.prof", tmp_path / "tsPythonProfile.prof"
    assert sorted(tmp_path.glob("*.prof")) == [own, newest]
    for file in (own, newest):
        calls = {name: count for (_, _, name), (count, *_) in pstats.Stats(str(file)).stats.items()}  # type: ignore[attr-defined]
        assert (calls["handle"], calls["weigh"]) == (2, 3)


def test_a_profile_that_cannot_be_put_into_its_place_leaves_nothing_else_behind(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    newest = tmp_path / "tsPythonProfile.prof"
    newest.mkdir()
    source = f"import tempfile\ntempfile.tempdir = {str(tmp_path)!r}\n\ndef handle(data, context):\n    return data\n"
    worker = start_worker(source, variables={"TS_BENCHMARK": "True"})
    assert worker.close() == 0
    assert sorted(tmp_path.glob("*.prof")) == [tmp_path / "tsPythonProfile-m-9000.prof", newest]


def test_without_it_nothing_is_profiled(start_worker: StartWorker, tmp_path: Path) -> None:
    source = f"""
        import tempfile
        tempfile.tempdir = {str(tmp_path)!r}

        def handle(data, context):
            return data and ["light"] * len(data)
    """
    worker = start_worker(source, variables={"TS_BENCHMARK": "False"})
    assert [answer.body for answer in worker.ask(b"1")] == [b"light"]
    assert worker.close() == 0
    assert not list(tmp_path.glob("*.prof"))
