"""Whole runs of `tsx bench` with real servers and short loads."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.support import forked
from tests.support.models import make_model
from tests.support.servers import FREE_PORTS, clean, serving, tsx
from tsx_archiver import inspect_archive, verify_archive
from tsx_cli.bench.load.results import PinnedCores, Results, read_results
from tsx_cli.bench.report.archive_record import read_record
from tsx_cli.bench.search.points import best_point

# A worker with batches of two dies under load, batches of four are answered otherwise than one
# request alone, larger ones do not load.
HANDLER = """
import os
import signal
import time

asked = 0

def handle(data, context):
    size = context.model_yaml_config.get("batchSize", 1)
    if size > 4:
        raise RuntimeError("no room for so much")
    if data is None:
        return None
    global asked
    asked += len(data)
    if size == 2 and asked > 20:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.003 + 0.0005 * len(data))
    return [{"length": len(row.get("data") or row.get("body")) + (size == 4)} for row in data]
"""
CONFIG = "# its own words\nbatchSize: 1  # alone\nmaxBatchDelay: 50\nthreads: 1\n"
SHORT_LOAD = ("--duration", "0.2s", "--rounds", "1", "--confidence-width", "99%", "--workers", "1")
TIMEOUT_S = 120.0
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
PINNING_OPTIONS = (
    ("--server-cores", str(CORES[0]), "--generator-cores", str(CORES[-1])) if CORES else ()
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a directory with lengths.mar."""
    directory = tmp_path_factory.mktemp("bench")
    source = make_model(directory / "lengths", HANDLER, config=CONFIG)
    with zipfile.ZipFile(directory / "lengths.mar", "w") as archive:
        for file in sorted(path for path in source.rglob("*") if path.is_file()):
            archive.write(file, file.relative_to(source).as_posix())
        for name in ("short", "longer"):
            archive.writestr(f"samples/{name}.txt", name)
    return directory


@pytest.fixture(scope="module")
def results(processes: None, directory: Path) -> Results:
    """Run a benchmark that writes its results into the archive."""
    loads = ("--batch-sizes", "1,2,4,8", "--connections", "4", "--exhaustive")
    command = [
        "bench",
        "lengths.mar",
        "--slo",
        "p99<20s",
        *loads,
        *SHORT_LOAD,
        "-o",
        "out",
        "--write",
    ]
    result = tsx(command, directory, {})
    assert result.returncode == 0, result.stderr
    assert "lengths.mar now runs with" in result.stdout
    return read_results(directory / "out" / "results.json")


def test_a_run_has_a_winner_with_a_reason(results: Results) -> None:
    assert results.complete
    assert results.winner is not None
    assert results.baseline == 0
    best = results.trials[results.winner]
    assert best.chosen is not None
    assert best.as_configuration().batch_size == 1
    assert str(best.as_configuration()) in results.why
    assert results.inputs.count == 2
    assert results.environment.fingerprint


def test_a_trial_has_stages_and_usage(results: Results) -> None:
    trial = results.trials[0]
    assert trial.stages is not None
    assert trial.stages.inference_ms > 3
    assert trial.batch_sizes.keys() == {1}
    assert all(usage.memory_mib > 10 for usage in trial.usage)
    first = trial.points[0].rounds[0]
    assert first.ok > 0
    assert first.over_time
    assert {(size.smallest, size.ok > 0) for size in first.by_size} == {(5, True), (6, True)}
    (start, *_) = trial.starts
    assert start.ready_seconds > 0
    assert start.first_answer_ms is not None
    assert start.first_answer_ms > 3
    assert any(point.offered.mode == "open" for trial in results.trials for point in trial.points)


def test_trials_that_crash_fail_or_change_responses_cannot_win(
    results: Results,
) -> None:
    by_batch_size = {trial.as_configuration().batch_size: trial for trial in results.trials}
    assert by_batch_size[2].state == "failed"
    assert "a worker died" in str(by_batch_size[2].reason)
    assert by_batch_size[8].state == "failed"
    assert "no room for so much" in str(by_batch_size[8].reason)
    assert by_batch_size[1].accuracy is not None
    assert by_batch_size[1].accuracy.same
    assert by_batch_size[4].accuracy is not None
    assert not by_batch_size[4].accuracy.same
    assert "its answers differ: input 1" in str(by_batch_size[4].reason)
    assert results.curves[0].failed


def test_the_archive_has_the_winners_settings_and_figures(
    directory: Path, results: Results
) -> None:
    archive = directory / "lengths.mar"
    assert not [finding for finding in verify_archive(archive) if finding.is_fault]
    inspection = inspect_archive(archive)
    assert results.winner is not None
    winner = results.trials[results.winner].as_configuration()
    assert (
        inspection.config.batch_size,
        inspection.config.max_workers,
        inspection.config.max_batch_delay,
    ) == (winner.batch_size, 1, 50)
    assert "jobQueueSize" not in inspection.config.raw
    record = read_record(archive)
    assert record is not None
    assert record.here
    assert record.best.configuration == winner.as_json()
    assert record.best.throughput > 0
    assert {point.offered.mode for point in record.points} == {"closed", "open"}
    assert all(0 < (point.utilisation or 0) <= 1 for point in record.points), [
        point.utilisation for point in record.points
    ]
    output = tsx(["archive", "inspect", archive], directory, {}).stdout
    assert f"measured {record.measured[:10]} on " in output


def test_a_server_reports_the_measured_figures(directory: Path, results: Results) -> None:
    with serving(["serve", "lengths.mar", *FREE_PORTS], directory, {}) as server:
        with urllib.request.urlopen(
            f"{server.address('models')}/models/lengths", timeout=30
        ) as answer:
            (description,) = json.load(answer)
        assert description["measured"]["here"] is True
        assert description["measured"]["slo"] == "p99<20s"
        assert description["measured"]["throughput"] > 0
        command = ["models", "describe", "lengths", "--url", server.address("models")]
        assert "measured configuration" in tsx(command, directory, {}).stdout
        assert "requests/s, p99" in server.log


@pytest.fixture
def start_run(directory: Path, tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Return a function that starts a long run and waits until it has printed `text`."""
    loads = ("--exhaustive", "--connections", "1,2,3,4,5,6")
    arguments = [
        *shlex.split(f"bench {directory / 'lengths.mar'} --batch-sizes 1,3"),
        *SHORT_LOAD,
        *loads,
        *(PINNING_OPTIONS if len(CORES) > 1 else ()),
        "-o",
        "out",
    ]
    started_processes = []

    def start(text: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tsx_cli", *map(str, arguments)]
        environment = clean({"TMPDIR": str(temporary)})
        process = forked.Popen(
            command,
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started_processes.append(process)
        assert process.stderr is not None
        assert any(text in line for line in process.stderr)
        return process

    # Servers make sockets in this directory, so its path must be short.
    with tempfile.TemporaryDirectory() as temporary:
        yield start
        for process in started_processes:
            process.kill()
            process.communicate()
        assert not list(Path(temporary).glob("tsx-bench-*")), (
            "a run leaves nothing behind, however it ends"
        )


@pytest.mark.usefixtures("processes")
def test_an_interrupted_run_has_a_report_and_can_be_resumed(
    start_run: Callable[[str], subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = start_run("requests/s")
    servers = psutil.Process(process.pid).children(recursive=True)
    assert servers
    if len(CORES) > 1:
        assert CORES[:1] in [server.cpu_affinity() for server in servers]
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130, errors
    assert not psutil.wait_procs(servers, timeout=30)[1]
    partial_results = read_results(tmp_path / "out" / "results.json")
    assert not partial_results.complete
    assert (partial_results.winner, partial_results.faster_unmeasured) == (None, 1)
    assert [trial.state for trial in partial_results.trials] == ["measured", "predicted"]
    assert "The time was too short to choose" in output
    assert "The run was interrupted" in output
    result = tsx(["bench", "--resume", "out", "--time-limit", "1s", "--json"], tmp_path, {})
    # Exit code 1 means that the time was too short to choose a configuration.
    assert result.returncode in (0, 1), result.stderr
    final_results = Results.model_validate_json(result.stdout)
    assert final_results.complete
    assert final_results.started == partial_results.started
    if len(CORES) > 1:
        assert (
            final_results.pinning
            == partial_results.pinning
            == PinnedCores(server=CORES[:1], generator=CORES[-1:])
        )
        assert final_results.environment.cores == 1
    first_point, resumed_point = (
        partial_results.trials[0].points[0],
        final_results.trials[0].points[0],
    )
    assert (resumed_point.offered, resumed_point.rounds[: len(first_point.rounds)]) == (
        first_point.offered,
        first_point.rounds,
    )
    assert best_point(final_results.trials[0].points) is not None


@pytest.mark.usefixtures("processes")
def test_a_second_interrupt_ends_the_run_at_once_without_leftover_servers(
    start_run: Callable[[str], subprocess.Popen[str]],
) -> None:
    process = start_run("a batch takes")
    servers = psutil.Process(process.pid).children(recursive=True)
    assert servers
    # A terminal sends this signal when it closes.
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    assert not psutil.wait_procs(servers, timeout=30)[1]
