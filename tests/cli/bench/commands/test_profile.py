"""`tsx bench --profile`: files about a worker's time, with py-spy and without."""

from __future__ import annotations

import os
import pstats
import shutil
import sys
import textwrap
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.support.benchmarked import a_run
from tests.support.models import make_model
from tsx_archiver import OpenArchive, open_archive
from tsx_cli.bench.commands.profile import profile_best, profile_worker, steps_table
from tsx_cli.bench.load.configuration import Configuration
from tsx_cli.bench.load.payloads import Payload
from tsx_cli.bench.load.results import Trial
from tsx_cli.bench.search.latency_curve import BatchTiming, point_of

pytestmark = pytest.mark.skipif(
    os.name == "nt", reason="workers that are programs need Linux or macOS"
)

PAYLOADS = [Payload(b"a", "text/plain")]
# tests/runtime/worker/handlers tests the profiler of BaseHandler.
SOURCE = """
    import os, tempfile
    from pathlib import Path

    def weigh(row):
        return sum(number * number for number in range(2000))

    def handle(data, context):
        if data is None:
            return None
        if os.environ.get("ENABLE_TORCH_PROFILER") and "b" in data[0]["body"]:
            place = Path(tempfile.gettempdir()) / "pytorch_profiler" / "m"
            place.mkdir(parents=True, exist_ok=True)
            (place / f"{len(list(place.iterdir()))}.pt.trace.json").write_text("{}")
        return [str(weigh(row)) for row in data]
"""


@pytest.fixture
def archive(tmp_path: Path) -> Iterator[OpenArchive]:
    with open_archive(make_model(tmp_path / "m", textwrap.dedent(SOURCE))) as opened:
        yield opened


def replace_py_spy(monkeypatch: pytest.MonkeyPatch, directory: Path, script: str | None) -> None:
    """Replace py-spy by a shell script, or remove it from the PATH if there is no script."""
    directory.mkdir()
    if script is not None:
        (directory / "py-spy").write_text(f"#!/bin/sh\n{script}\n")
        (directory / "py-spy").chmod(0o755)
    monkeypatch.setattr("sys.executable", str(directory / "python"))
    monkeypatch.setattr(
        "tsx_cli.bench.commands.profile.shutil.which",
        lambda name, path=None: next((str(file) for file in directory.glob(name)), None),
    )


@pytest.mark.usefixtures("processes")
def test_without_py_spy_cprofile_writes_a_profile_without_a_graph(
    archive: OpenArchive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_py_spy(monkeypatch, tmp_path / "bin", None)
    monkeypatch.chdir(tmp_path)
    profile = profile_worker(
        archive,
        Configuration(batch_size=2),
        [Payload(b"b", "text/plain")],
        Path("out"),
        seconds=0.2,
    )
    assert [file.name for file in profile.files] == [
        "steps.txt",
        "worker.prof",
        "torch-trace.json",
    ]
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == sorted(
        file.name for file in profile.files
    )
    assert len(profile.notes) == 1
    assert "pip install 'tsx-serve[bench]'" in profile.notes[0]
    functions = {name for _, _, name in pstats.Stats(str(tmp_path / "out" / "worker.prof")).stats}  # type: ignore[attr-defined]
    assert {"handle", "weigh"} <= functions
    assert "batch 2" in (tmp_path / "out" / "steps.txt").read_text()


@pytest.mark.usefixtures("processes")
def test_py_spy_writes_the_flame_graph(
    archive: OpenArchive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_py_spy(monkeypatch, tmp_path / "bin", 'kill -0 "$3" && echo "$@" > "$9"')
    profile = profile_worker(archive, Configuration(), PAYLOADS, tmp_path / "out", seconds=0.1)
    assert [file.name for file in profile.files] == ["steps.txt", "flame.svg", "worker.prof"], (
        profile.notes
    )
    assert "weigh" in {name for _, _, name in pstats.Stats(str(profile.files[2])).stats}  # type: ignore[attr-defined]
    command = profile.files[1].read_text().split()
    assert (command[:2], command[3:]) == (
        ["record", "--pid"],
        ["--duration", "1", "--rate", "200", "--output", str(profile.files[1])],
    )
    (note,) = profile.notes
    assert "does not run the steps of BaseHandler" in note


@pytest.mark.usefixtures("processes")
@pytest.mark.skipif(
    shutil.which("py-spy", path=str(Path(sys.executable).parent)) is None,
    reason="needs py-spy, which brings the extra bench",
)
def test_the_real_py_spy_records_the_calls_of_the_handler(
    archive: OpenArchive, tmp_path: Path
) -> None:
    profile = profile_worker(archive, Configuration(), PAYLOADS, tmp_path / "out", seconds=0.2)
    if any("could not look into the worker" in note for note in profile.notes):
        pytest.skip(profile.notes[0])
    assert [file.name for file in profile.files] == ["steps.txt", "flame.svg", "worker.prof"], (
        profile.notes
    )
    titles = [
        node.text or ""
        for node in ElementTree.parse(profile.files[1]).iter("{http://www.w3.org/2000/svg}title")
    ]
    assert any(title.startswith("weigh (") and "samples" in title for title in titles)


@pytest.mark.usefixtures("processes")
def test_the_reason_is_reported_if_py_spy_has_no_permission(
    archive: OpenArchive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_py_spy(monkeypatch, tmp_path / "bin", "echo Permission denied; exit 1")
    profile = profile_worker(archive, Configuration(), PAYLOADS, tmp_path / "out", seconds=0.1)
    assert "worker.prof" in [file.name for file in profile.files]
    assert profile.notes[0].endswith("the worker: Permission denied")


@pytest.mark.usefixtures("processes")
def test_the_best_configuration_is_profiled_and_a_failure_becomes_a_note(
    archive: OpenArchive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_py_spy(monkeypatch, tmp_path / "bin", 'touch "$9"')
    quick_profile = partial(profile_worker, seconds=0.1)
    monkeypatch.setattr("tsx_cli.bench.commands.profile.profile_worker", quick_profile)
    trials = [Trial(configuration=Configuration(batch_size=size).as_json()) for size in (1, 4)]
    results = a_run(trials=trials, baseline=0, winner=1)
    profile_best(archive, results, PAYLOADS, tmp_path / "out")
    assert results.notes[0].startswith("cpu, 1 worker, batch 4 was profiled")
    for file in ("steps.txt", "flame.svg", "worker.prof"):
        assert f"profile/{file}" in results.notes[0]
    assert "`snakeviz profile/worker.prof`" in results.notes[-1]
    assert (
        (tmp_path / "out" / "profile" / "steps.txt")
        .read_text()
        .startswith("m: cpu, 1 worker, batch 4\n")
    )

    failing_run = a_run(
        trials=[Trial(configuration=Configuration(device="cuda").as_json())], baseline=0
    )
    monkeypatch.setattr("tsx_cli.bench.search.worker.gpu_count", lambda: 0)
    profile_best(archive, failing_run, PAYLOADS, tmp_path / "out")
    (note,) = failing_run.notes
    assert "The profile failed: there is no GPU" in note
    empty_run = a_run()
    profile_best(archive, empty_run, PAYLOADS, tmp_path / "out")
    (note,) = empty_run.notes
    assert "Nothing was profiled" in note


def test_the_times_of_the_steps_add_up_to_the_batch_time() -> None:
    point = point_of(4, [BatchTiming(0.010, (0.002, 0.005, float("nan")))] * 3, 0.02)
    assert steps_table(point, "m").splitlines() == [
        "m",
        "",
        "preprocess           2.000 ms   20.0%",
        "inference            5.000 ms   50.0%",
        "everything else      3.000 ms   30.0%",
        "a batch             10.000 ms  100.0%",
        "",
        "The median of 3 batches of 4; it keeps 2.0 cores busy.",
    ]
