"""`python -m tests.fuzz TARGET [--minutes M]` fuzzes with Atheris; with files, it replays them.

A finding is an input that raises an exception, takes more than 50 ms of processor time without
instrumentation, or makes the process grow. The exit code is then 1, and the output names the
directory with the input.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

# The targets are imported later, so that they can be instrumented.
NAMES = ("archive", "form", "frame", "lanes", "traffic")
MAX_CPU_SECONDS = 0.05  # seconds of processor time
# the approximate slowdown by the instrumentation
INSTRUMENTATION_FACTOR = 10
MAX_GROWTH_BYTES = 100 << 20  # bytes, after the first tenth of the time
CORPORA = Path(__file__).parent / "corpora"


def replay(target: Callable[[bytes], None], files: list[Path]) -> int:
    for file in files:
        data = file.read_bytes()
        cpu_seconds = min(_timed(target, data) for _ in range(3))
        if cpu_seconds > MAX_CPU_SECONDS:
            print(f"{file}: {cpu_seconds * 1000:.0f} ms for {len(data)} bytes")
            return 1
    return 0


def _timed(target: Callable[[bytes], None], data: bytes) -> float:
    start = time.thread_time()
    target(data)
    return time.thread_time() - start


def fuzz(name: str, seconds: float, directory: Path) -> None:
    """Fuzz until libFuzzer ends the process."""
    # The import is here, since replays do not need Atheris.
    import atheris

    with atheris.instrument_imports(include=["tsx_runtime", "tsx_archiver"]):
        from tests.fuzz import targets
    target = targets.TARGETS[name]()
    start, memory, process = time.monotonic(), [0], psutil.Process()

    def run_input(data: bytes) -> None:
        if _timed(target, data) > MAX_CPU_SECONDS * INSTRUMENTATION_FACTOR:
            raise RuntimeError(f"a stall: {len(data)} bytes")
        if not memory[0] and time.monotonic() - start > seconds / 10:
            memory[0] = process.memory_info().rss
        elif memory[0] and process.memory_info().rss > memory[0] + MAX_GROWTH_BYTES:
            raise RuntimeError(f"it has grown by {MAX_GROWTH_BYTES >> 20} MB")

    corpus = directory / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    options = [
        f"-max_total_time={seconds:.0f}",
        "-max_len=20000",
        "-print_final_stats=1",
        f"-artifact_prefix={directory}/",
        "-verbosity=0",
    ]
    atheris.Setup([sys.argv[0], *options, str(corpus), str(CORPORA / name)], run_input)
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", choices=NAMES)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--minutes", type=float, default=10)
    # The option is for a subprocess, since libFuzzer ends its process.
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        fuzz(options.target, options.minutes * 60, options.inside)
    if options.files:
        from tests.fuzz.targets import TARGETS

        return replay(TARGETS[options.target](), options.files)
    findings = Path(tempfile.mkdtemp(prefix=f"fuzz-{options.target}-"))
    end = time.monotonic() + options.minutes * 60
    while (remaining := end - time.monotonic()) > 1:
        command = [
            sys.executable,
            "-m",
            "tests.fuzz",
            options.target,
            "--minutes",
            str(remaining / 60),
            "--inside",
            str(findings),
        ]
        if subprocess.run(command, check=False).returncode == 0:
            break
        inputs = sorted(path for path in findings.iterdir() if path.is_file())
        replay_command = [sys.executable, "-m", "tests.fuzz", options.target, *map(str, inputs)]
        if not inputs or subprocess.run(replay_command, check=False).returncode != 0:
            print(f"{options.target}: a finding, in {findings}")
            return 1
        # The inputs are replayed, since the instrumentation or the machine may have been slow.
        for path in inputs:
            path.unlink()
    print(f"{options.target}: nothing found in {options.minutes:g} minutes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
