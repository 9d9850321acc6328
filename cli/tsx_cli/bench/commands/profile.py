"""The profiles of a worker: a flame graph, a cProfile file, a torch trace, and times of steps.

py-spy draws the flame graph without slowing the worker down. It must be installed (the extra
`bench`) and be allowed to read other processes. The switch `TS_BENCHMARK` makes the cProfile file.
`ENABLE_TORCH_PROFILER` makes the trace, for handlers that extend BaseHandler. These two slow a
worker down, so each profile has a worker of its own.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from tsx_archiver import OpenArchive
from tsx_cli.bench.load.configuration import Configuration
from tsx_cli.bench.load.payloads import Payload
from tsx_cli.bench.load.results import CurvePoint, Results
from tsx_cli.bench.search.latency_curve import CHUNK_S, measure_chunk, point_of
from tsx_cli.bench.search.worker import (
    StandaloneWorker,
    WorkerFailed,
    WorkerSpec,
    batch_of,
    items_of,
    start_worker,
    worker_spec,
)
from tsx_cli.common.run_directory import write_files
from tsx_runtime.wire import Item

PROFILE_S = 4.0
SAMPLES_PER_SECOND = 200
TRACED_BATCHES = 5  # batches under torch's profiler; only the last trace is kept
PROFILE_FOLDER = "profile"  # subdirectory of the report's directory
FLAME_GRAPH_FILE, PROFILE_FILE, TRACE_FILE, STEPS_FILE = (
    "flame.svg",
    "worker.prof",
    "torch-trace.json",
    "steps.txt",
)


@dataclass
class ProfileReport:
    """The written files, and the reasons why others are missing."""

    files: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def profile_worker(
    archive: OpenArchive,
    configuration: Configuration,
    payloads: Sequence[Payload],
    directory: Path,
    *,
    seconds: float = PROFILE_S,
) -> ProfileReport:
    """Profile one worker of the configuration, with batches of the configuration's size.

    Raises:
        WorkerFailed: The worker failed.
        OSError: A file could not be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    directory = directory.absolute()  # Workers change their working directory to the model's.
    spec, items, report = (
        worker_spec(archive, configuration, configuration.batch_size),
        items_of(payloads),
        ProfileReport(),
    )
    title = f"{archive.manifest.model_name}: {replace(configuration, workers=1)}"
    with start_worker(spec) as worker:
        point = _measure_steps(worker, items, configuration.batch_size, seconds / 4)
        report.files += write_files({STEPS_FILE: steps_table(point, title)}, directory)
        flame, failure = _record_flame_graph(
            worker, items, configuration.batch_size, directory, seconds
        )
    if flame is None:
        report.notes.append(f"There is no flame graph: {failure}")
    else:
        report.files.append(flame)
    cprofile = _record_cprofile(spec, items, configuration.batch_size, directory, seconds)
    if cprofile is None:
        report.notes.append("There is no profile by cProfile: the worker wrote none.")
    else:
        report.files.append(cprofile)
    trace = _record_trace(spec, items, configuration.batch_size, directory)
    if trace is None:
        report.notes.append(
            "There is no trace of torch's: the handler does not run the steps of BaseHandler."
        )
    else:
        report.files.append(trace)
    return report


def profile_best(
    archive: OpenArchive, results: Results, payloads: Sequence[Payload], directory: Path
) -> None:
    """Profile the winner, or else the baseline, into a subdirectory of the report's directory.

    The names of the files, and failures, become notes of the results.
    """
    best_trial = results.baseline if results.winner is None else results.winner
    if best_trial is None:
        results.notes.append("Nothing was profiled, since nothing ran.")
        return
    try:
        report = profile_worker(
            archive,
            results.trials[best_trial].as_configuration(),
            payloads,
            directory / PROFILE_FOLDER,
        )
    except (WorkerFailed, OSError, ValueError) as error:
        results.notes.append(f"The profile failed: {error}")
        return
    results.notes.append(
        f"{results.trials[best_trial].as_configuration()} was profiled:"
        f" {', '.join(f'{PROFILE_FOLDER}/{file.name}' for file in report.files)}"
    )
    results.notes += report.notes
    if any(file.name == PROFILE_FILE for file in report.files):
        file = f"{PROFILE_FOLDER}/{PROFILE_FILE}"
        advice = (
            f"`snakeviz {file}` (pip install snakeviz) or `python -m pstats {file}` opens the"
            " profile by cProfile"
        )
        results.notes.append(
            f"{advice}, which slows Python down: look at shares of the time, not at times."
        )


def steps_table(point: CurvePoint, title: str) -> str:
    """Format the times of a batch's steps as a table."""
    step_times = [
        ("preprocess", point.preprocess_ms),
        ("inference", point.inference_ms),
        ("postprocess", point.postprocess_ms),
    ]
    rows = [(name, value) for name, value in step_times if value is not None]
    other_ms = point.median_ms - sum(value for _, value in rows)
    lines = [title, ""]
    for name, value in [
        *rows,
        ("everything else", max(0.0, other_ms)),
        ("a batch", point.median_ms),
    ]:
        lines.append(f"{name:<16}{value:>10.3f} ms{value / point.median_ms:>8.1%}")
    cpu = (
        ""
        if point.cpu_ms is None
        else f"; it keeps {point.cpu_ms / point.median_ms:.1f} cores busy"
    )
    return "\n".join(
        [*lines, "", f"The median of {point.samples} batches of {point.batch_size}{cpu}.", ""]
    )


def _measure_steps(
    worker: StandaloneWorker, items: Sequence[Item], size: int, seconds: float
) -> CurvePoint:
    measure_chunk(worker, items, size, 0, seconds)
    cpu_start_s, samples = (
        worker.cpu_seconds(),
        measure_chunk(worker, items, size, 1, max(seconds, CHUNK_S)),
    )
    return point_of(size, samples, (worker.cpu_seconds() - cpu_start_s) / len(samples))


def _record_flame_graph(
    worker: StandaloneWorker, items: Sequence[Item], size: int, directory: Path, seconds: float
) -> tuple[Path | None, str]:
    """Record a flame graph by py-spy while batches run.

    Return its file, or None and the reason.
    """
    py_spy = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if py_spy is None:
        return None, "py-spy is not installed: pip install 'tsx-serve[bench]'"
    flame = directory / FLAME_GRAPH_FILE
    command = [
        py_spy,
        "record",
        "--pid",
        str(worker.pid),
        "--duration",
        str(max(1, round(seconds))),
    ]
    command += ["--rate", str(SAMPLES_PER_SECOND), "--output", str(flame)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        batches, deadline = 0, time.monotonic() + 10 * max(1.0, seconds)
        while process.poll() is None and time.monotonic() < deadline:
            batches += len(measure_chunk(worker, items, size, batches, CHUNK_S / 2))
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        output, _ = process.communicate()
    if process.returncode == 0 and flame.exists():
        return flame, ""
    return (
        None,
        (
            "py-spy could not look into the worker:"
            f" {output.strip().splitlines()[-1] if output.strip() else process.returncode}"
        ),
    )


def _record_cprofile(
    spec: WorkerSpec, items: Sequence[Item], size: int, directory: Path, seconds: float
) -> Path | None:
    """Profile a worker by cProfile, through TorchServe's switch."""
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        with start_worker(spec, {"TS_BENCHMARK": "true", "TMPDIR": scratch}) as worker:
            measure_chunk(worker, items, size, 0, seconds)
        profile_file = next(Path(scratch).glob("tsPythonProfile-*.prof"), None)
        return (
            None
            if profile_file is None
            else Path(shutil.move(profile_file, directory / PROFILE_FILE))
        )


def _record_trace(
    spec: WorkerSpec, items: Sequence[Item], size: int, directory: Path
) -> Path | None:
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        with start_worker(spec, {"ENABLE_TORCH_PROFILER": "1", "TMPDIR": scratch}) as worker:
            for number in range(TRACED_BATCHES):
                worker.answer(batch_of(items, size, number))
        trace_files = sorted(
            Path(scratch).rglob("*.pt.trace.json"), key=lambda file: file.stat().st_mtime_ns
        )
        if not trace_files:
            return None
        return Path(shutil.move(trace_files[-1], directory / TRACE_FILE))
