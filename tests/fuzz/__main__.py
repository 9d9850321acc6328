"""`python -m tests.fuzz TARGET [--minutes M]` fuzzes by Atheris; `python -m tests.fuzz TARGET FILE
...` replays inputs, without it.

A finding is an input that raises, that takes more than 50 ms of processor time where nothing else
is instrumented, or a process that grows. Exits 1 where there is one, and keeps its input in the
directory that it names.
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

NAMES = (
    "archive",
    "form",
    "frame",
    "lanes",
    "traffic",
)  # of tests/fuzz/targets.py, which is imported once it can be instrumented
STALL = 0.05  # seconds of processor time
INSTRUMENTED = 10  # times as slow, or nearly
GROWTH = 100 << 20  # bytes, after the first tenth of the time
CORPORA = Path(__file__).parent / "corpora"


def replay(target: Callable[[bytes], None], files: list[Path]) -> int:
    for file in files:
        data = file.read_bytes()
        took = min(_timed(target, data) for _ in range(3))
        if took > STALL:
            print(f"{file}: {took * 1000:.0f} ms for {len(data)} bytes")
            return 1
    return 0


def _timed(target: Callable[[bytes], None], data: bytes) -> float:
    before = time.thread_time()
    target(data)
    return time.thread_time() - before


def fuzz(name: str, seconds: float, found: Path) -> None:
    """Does not return: libFuzzer ends the process."""
    import atheris  # here, because replaying does without it

    with atheris.instrument_imports(include=["tsx_runtime", "tsx_archiver"]):
        from tests.fuzz import targets
    target = targets.TARGETS[name]()
    began, memory, process = time.monotonic(), [0], psutil.Process()

    def once(data: bytes) -> None:
        if _timed(target, data) > STALL * INSTRUMENTED:
            raise RuntimeError(f"a stall: {len(data)} bytes")
        if not memory[0] and time.monotonic() - began > seconds / 10:
            memory[0] = process.memory_info().rss
        elif memory[0] and process.memory_info().rss > memory[0] + GROWTH:
            raise RuntimeError(f"it has grown by {GROWTH >> 20} MB")

    corpus = found / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    options = [
        f"-max_total_time={seconds:.0f}",
        "-max_len=20000",
        "-print_final_stats=1",
        f"-artifact_prefix={found}/",
        "-verbosity=0",
    ]
    atheris.Setup([sys.argv[0], *options, str(corpus), str(CORPORA / name)], once)
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", choices=NAMES)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument(
        "--inside", type=Path, help=argparse.SUPPRESS
    )  # the process that libFuzzer ends
    options = parser.parse_args()
    if options.inside:
        fuzz(options.target, options.minutes * 60, options.inside)
    if options.files:
        from tests.fuzz.targets import TARGETS  # here, as above

        return replay(TARGETS[options.target](), options.files)
    found = Path(tempfile.mkdtemp(prefix=f"fuzz-{options.target}-"))
    end = time.monotonic() + options.minutes * 60
    while (left := end - time.monotonic()) > 1:
        command = [
            sys.executable,
            "-m",
            "tests.fuzz",
            options.target,
            "--minutes",
            str(left / 60),
            "--inside",
            str(found),
        ]
        if subprocess.run(command, check=False).returncode == 0:
            break
        inputs = sorted(path for path in found.iterdir() if path.is_file())
        again = [sys.executable, "-m", "tests.fuzz", options.target, *map(str, inputs)]
        if not inputs or subprocess.run(again, check=False).returncode != 0:
            print(f"{options.target}: a finding, in {found}")
            return 1
        for path in inputs:  # it was the instrumentation, or the machine
            path.unlink()
    print(f"{options.target}: nothing found in {options.minutes:g} minutes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
