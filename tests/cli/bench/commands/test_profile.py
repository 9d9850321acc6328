"""`tsx bench --profile`: files that say where a worker's time goes, with py-spy and without."""

from __future__ import annotations

import json
import os
import pstats
import shutil
import sys
import textwrap
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tsx_archiver import OpenArchive, open_archive
from tsx_cli.bench.commands.profile import profile, profile_best, steps_of
from tsx_cli.bench.load.configuration import Configuration
from tsx_cli.bench.load.payloads import Payload
from tsx_cli.bench.load.results import Results, Trial
from tsx_cli.bench.search.latency_curve import BatchTiming, point_of

pytestmark = pytest.mark.skipif(
    os.name == "nt", reason="workers that are programs need Linux or macOS"
)

PAYLOADS = [Payload(b"a", "text/plain")]
# What BaseHandler does under the switch is tested with it, in tests/runtime/worker/handlers.
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
    directory = tmp_path / "m"
    (directory / "MAR-INF").mkdir(parents=True)
    manifest = {
        "model": {"modelName": "m", "modelVersion": "1.0", "handler": "handler.py"},
        "runtime": "python",
    }
    (directory / "MAR-INF" / "MANIFEST.json").write_text(json.dumps(manifest))
    (directory / "handler.py").write_text(textwrap.dedent(SOURCE))
    with open_archive(directory) as opened:
        yield opened


def with_spy(monkeypatch: pytest.MonkeyPatch, place: Path, script: str | None) -> None:
    """Nothing else is on the path than this py-spy, or none."""
    place.mkdir()
    if script is not None:
        (place / "py-spy").write_text(f"#!/bin/sh\n{script}\n")
        (place / "py-spy").chmod(0o755)
    monkeypatch.setattr("sys.executable", str(place / "python"))
    monkeypatch.setattr(
        "tsx_cli.bench.commands.profile.shutil.which",
        lambda name, path=None: next((str(file) for file in place.glob(name)), None),
    )


@pytest.mark.usefixtures("processes")
def test_without_py_spy_there_is_no_graph_but_a_profile_by_cprofile(
    archive: OpenArchive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_spy(monkeypatch, tmp_path / "bin", None)
    monkeypatch.chdir(tmp_path)
    reported = profile(
        archive,
        Configuration(batch_size=2),
        [Payload(b"b", "text/plain")],
        Path("out"),
        seconds=0.2,
    )
    assert [file.name for file in reported.files] == [
        "steps.txt",
        "worker.prof",
        "torch-trace.json",
    ]
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == sorted(
        file.name for file in reported.files
    )
    assert len(reported.notes) == 1
    assert "pip install 'tsx-serve[bench]'" in reported.notes[0]
    functions = {name for _, _, name in pstats.Stats(str(tmp_path / "out" / "worker.prof")).stats}  # type: ignore[attr-defined]
    assert {"handle", "weigh"} <= functions
    assert "batch 2" in (tmp_path / "out" / "steps.txt").read_text()


@pytest.mark.usefixtures("processes")
def test_with_py_spy_the_graph_is_its_own(
    archive: OpenArchive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_spy(monkeypatch, tmp_path / "bin", 'kill -0 "$3" && echo "$@" > "$9"')
    reported = profile(archive, Configuration(), PAYLOADS, tmp_path / "out", seconds=0.1)
    assert [file.name for file in reported.files] == ["steps.txt", "flame.svg", "worker.prof"], (
        reported.notes
    )
    assert "weigh" in {name for _, _, name in pstats.Stats(str(reported.files[2])).stats}  # type: ignore[attr-defined]
    words = reported.files[1].read_text().split()
    assert (words[:2], words[3:]) == (
        ["record", "--pid"],
        ["--duration", "1", "--rate", "200", "--output", str(reported.files[1])],
    )
    assert reported.notes == [
        "There is no trace of torch's: the handler does not run the steps of BaseHandler."
    ]


@pytest.mark.usefixtures("processes")
@pytest.mark.skipif(
    shutil.which("py-spy", path=str(Path(sys.executable).parent)) is None,
    reason="needs py-spy, which brings the extra bench",
)
def test_the_real_py_spy_sees_what_the_handler_calls(archive: OpenArchive, tmp_path: Path) -> None:
    reported = profile(archive, Configuration(), PAYLOADS, tmp_path / "out", seconds=0.2)
    if any("could not look into the worker" in note for note in reported.notes):
        pytest.skip(reported.notes[0])  # a system may forbid it
    assert [file.name for file in reported.files] == ["steps.txt", "flame.svg", "worker.prof"], (
        reported.notes
    )
    titles = [
        node.text or ""
        for node in ElementTree.parse(reported.files[1]).iter("{http://www.w3.org/2000/svg}title")
    ]
    assert any(title.startswith("weigh (") and "samples" in title for title in titles)


@pytest.mark.usefixtures("processes")
def test_where_py_spy_may_not_look_the_reason_is_reported(
    archive: OpenArchive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_spy(monkeypatch, tmp_path / "bin", "echo Permission denied; exit 1")
    reported = profile(archive, Configuration(), PAYLOADS, tmp_path / "out", seconds=0.1)
    assert "worker.prof" in [file.name for file in reported.files]
    assert reported.notes[0].endswith("py-spy could not look into the worker: Permission denied")


def results_of(**more: Any) -> Results:
    given: dict[str, Any] = {
        "started": "",
        "model": {"name": "m"},
        "environment": {"fingerprint": ""},
        "inputs": {"source": "", "count": 1},
    }
    return Results.model_validate(given | more)


@pytest.mark.usefixtures("processes")
def test_the_best_is_what_is_profiled_and_what_fails_is_a_note(
    archive: OpenArchive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_spy(monkeypatch, tmp_path / "bin", 'touch "$9"')
    trials = [
        Trial(configuration=Configuration(batch_size=size).as_json()).model_dump()
        for size in (1, 4)
    ]
    results = results_of(trials=trials, baseline=0, winner=1)
    profile_best(archive, results, PAYLOADS, tmp_path / "out")
    assert (
        results.notes[0]
        == "cpu, 1 worker, batch 4 was profiled: profile/steps.txt, profile/flame.svg, profile/worker.prof"
    )
    assert (
        "`snakeviz profile/worker.prof` (pip install snakeviz) or `python -m pstats profile/worker.prof` opens"
        in results.notes[-1]
    )
    assert (
        (tmp_path / "out" / "profile" / "steps.txt")
        .read_text()
        .startswith("m: cpu, 1 worker, batch 4\n")
    )

    lost = results_of(
        trials=[Trial(configuration=Configuration(device="cuda").as_json()).model_dump()],
        baseline=0,
    )
    monkeypatch.setattr("tsx_cli.bench.search.worker.gpu_count", lambda: 0)
    profile_best(archive, lost, PAYLOADS, tmp_path / "out")
    assert lost.notes == ["The profile failed: there is no GPU here that torch could use"]
    nothing = results_of()
    profile_best(archive, nothing, PAYLOADS, tmp_path / "out")
    assert nothing.notes == ["Nothing was profiled, since nothing ran."]


def test_steps_are_a_table_that_adds_up() -> None:
    point = point_of(4, [BatchTiming(0.010, (0.002, 0.005, float("nan")))] * 3, 0.02)
    assert steps_of(point, "m").splitlines() == [
        "m",
        "",
        "preprocess           2.000 ms   20.0%",
        "inference            5.000 ms   50.0%",
        "everything else      3.000 ms   30.0%",
        "a batch             10.000 ms  100.0%",
        "",
        "The median of 3 batches of 4; it keeps 2.0 cores busy.",
    ]
