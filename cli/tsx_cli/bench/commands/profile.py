"""`--profile`: shows where a worker spends its time, as files: a flame graph, a profile for
SnakeViz, a torch trace, the time of each step.

The flame graph is py-spy's where that is installed (the extra `bench`) and may look into other
processes; it slows nothing down. The profile is cProfile's, from the switch `TS_BENCHMARK`, and the
trace comes by `ENABLE_TORCH_PROFILER`, for handlers that are BaseHandlers: both slow the worker
down, so each gets a worker of its own.
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
from tsx_cli.bench.search.latency_curve import CHUNK, chunk_of, point_of
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

SECONDS = 4.0  # that the worker is watched
RATE = 200  # looks a second
TRACED = 5  # batches under torch's profiler, the last of which is kept
DIRECTORY = "profile"  # beside the report
FLAME, PROFILE, TRACE, STEPS = "flame.svg", "worker.prof", "torch-trace.json", "steps.txt"


@dataclass
class ProfileReport:
    """The written files, and why others are missing."""

    files: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def profile(
    archive: OpenArchive,
    configuration: Configuration,
    payloads: Sequence[Payload],
    directory: Path,
    *,
    seconds: float = SECONDS,
) -> ProfileReport:
    """Of one worker as the configuration has it, with batches of its size.

    Raises WorkerFailed, OSError.
    """
    directory.mkdir(parents=True, exist_ok=True)
    directory = directory.absolute()  # workers go into the model's directory
    spec, items, written = (
        worker_spec(archive, configuration, configuration.batch_size),
        items_of(payloads),
        ProfileReport(),
    )
    title = f"{archive.manifest.model_name}: {replace(configuration, workers=1)}"
    with start_worker(spec) as worker:
        point = _warm(worker, items, configuration.batch_size, seconds / 4)
        written.files += write_files({STEPS: steps_of(point, title)}, directory)
        flame, why_not = _watched(worker, items, configuration.batch_size, directory, seconds)
    if flame is None:
        written.notes.append(f"There is no flame graph: {why_not}")
    else:
        written.files.append(flame)
    found = _by_cprofile(spec, items, configuration.batch_size, directory, seconds)
    if found is None:
        written.notes.append("There is no profile by cProfile: the worker wrote none.")
    else:
        written.files.append(found)
    trace = _traced(spec, items, configuration.batch_size, directory)
    if trace is None:
        written.notes.append(
            "There is no trace of torch's: the handler does not run the steps of BaseHandler."
        )
    else:
        written.files.append(trace)
    return written


def profile_best(
    archive: OpenArchive, results: Results, payloads: Sequence[Payload], directory: Path
) -> None:
    """Of the winner, else of the baseline, into `directory`/profile, which reports link; what there
    is to know of it becomes notes.
    """
    at = results.baseline if results.winner is None else results.winner
    if at is None:
        results.notes.append("Nothing was profiled, since nothing ran.")
        return
    try:
        text = profile(archive, results.trials[at].how(), payloads, directory / DIRECTORY)
    except (WorkerFailed, OSError, ValueError) as error:
        results.notes.append(f"The profile failed: {error}")
        return
    results.notes.append(
        f"{results.trials[at].how()} was profiled:"
        f" {', '.join(f'{DIRECTORY}/{file.name}' for file in text.files)}"
    )
    results.notes += text.notes
    if any(file.name == PROFILE for file in text.files):
        place = f"{DIRECTORY}/{PROFILE}"
        how = (
            f"`snakeviz {place}` (pip install snakeviz) or `python -m pstats {place}` opens the"
            " profile by cProfile"
        )
        results.notes.append(
            f"{how}, which slows Python down: look at shares of the time, not at times."
        )


def steps_of(point: CurvePoint, title: str) -> str:
    """As a table for people."""
    known = [
        ("preprocess", point.preprocess_ms),
        ("inference", point.inference_ms),
        ("postprocess", point.postprocess_ms),
    ]
    rows = [(name, value) for name, value in known if value is not None]
    rest = point.median_ms - sum(value for _, value in rows)
    lines = [title, ""]
    for name, value in [*rows, ("everything else", max(0.0, rest)), ("a batch", point.median_ms)]:
        lines.append(f"{name:<16}{value:>10.3f} ms{value / point.median_ms:>8.1%}")
    cpu = (
        ""
        if point.cpu_ms is None
        else f"; it keeps {point.cpu_ms / point.median_ms:.1f} cores busy"
    )
    return "\n".join(
        [*lines, "", f"The median of {point.samples} batches of {point.batch_size}{cpu}.", ""]
    )


def _warm(worker: StandaloneWorker, items: Sequence[Item], size: int, seconds: float) -> CurvePoint:
    chunk_of(worker, items, size, 0, seconds)
    used, samples = worker.cpu_seconds(), chunk_of(worker, items, size, 1, max(seconds, CHUNK))
    return point_of(size, samples, (worker.cpu_seconds() - used) / len(samples))


def _watched(
    worker: StandaloneWorker, items: Sequence[Item], size: int, directory: Path, seconds: float
) -> tuple[Path | None, str]:
    """By py-spy, while batch follows batch; None and the reason where it cannot."""
    spy = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if spy is None:
        return None, "py-spy is not installed: pip install 'tsx-serve[bench]'"
    flame = directory / FLAME
    words = [spy, "record", "--pid", str(worker.pid), "--duration", str(max(1, round(seconds)))]
    words += ["--rate", str(RATE), "--output", str(flame)]
    looking = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        batches, ends = 0, time.monotonic() + 10 * max(1.0, seconds)
        while looking.poll() is None and time.monotonic() < ends:
            batches += len(chunk_of(worker, items, size, batches, CHUNK / 2))
    finally:
        with suppress(ProcessLookupError):
            looking.kill()
        output, _ = looking.communicate()
    if looking.returncode == 0 and flame.exists():
        return flame, ""
    return (
        None,
        (
            "py-spy could not look into the worker:"
            f" {output.strip().splitlines()[-1] if output.strip() else looking.returncode}"
        ),
    )


def _by_cprofile(
    spec: WorkerSpec, items: Sequence[Item], size: int, directory: Path, seconds: float
) -> Path | None:
    """By the switch that TorchServe's users know."""
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        with start_worker(spec, {"TS_BENCHMARK": "true", "TMPDIR": scratch}) as worker:
            chunk_of(worker, items, size, 0, seconds)
        written = next(Path(scratch).glob("tsPythonProfile-*.prof"), None)
        return None if written is None else Path(shutil.move(written, directory / PROFILE))


def _traced(spec: WorkerSpec, items: Sequence[Item], size: int, directory: Path) -> Path | None:
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        with start_worker(spec, {"ENABLE_TORCH_PROFILER": "1", "TMPDIR": scratch}) as worker:
            for number in range(TRACED):
                worker.answer(batch_of(items, size, number))
        written = sorted(
            Path(scratch).rglob("*.pt.trace.json"), key=lambda file: file.stat().st_mtime_ns
        )
        if not written:
            return None
        return Path(shutil.move(written[-1], directory / TRACE))
