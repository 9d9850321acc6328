"""The peak memory of packing, verifying and opening a large file, each in its own process.

    python benchmarks/archive_memory.py [--gigabytes 4] [--format default] [--directory DIR]

The file is random in its first half and sparse in its second, so it needs half its size on disk.
Since random bytes do not compress, the archive and the unpacked files need as much each. The goal
is a peak of less than 300 MB for a file of 4 GB.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MAX_MB = 300
STEPS = {
    "pack": (
        "write_archive(ArchiveSpec('big', 'handler.py', serialized_file='weights.bin'),"
        " Path('out'), format=FORMAT)"
    ),
    "verify": "assert verify_archive(next(Path('out').iterdir())) == []",
    "open": "open_archive(next(Path('out').iterdir()), cache=Path('cache')).close()",
    "open again": "open_archive(next(Path('out').iterdir()), cache=Path('cache')).close()",
}


# The peak in kilobytes. On Linux, ru_maxrss starts with the parent's value, so VmHWM is read there.
PEAK = """
import re, resource, sys
if sys.platform == "linux":
    print(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
else:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1000)
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument(
        "--format", default="default", choices=["default", "zip-store", "tgz", "no-archive"]
    )
    parser.add_argument(
        "--directory", type=Path, help="where to work; needs room for three times the size"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        directory = Path(name)
        (directory / "handler.py").write_text("def handle(data, context):\n    return data\n")
        write_weights(directory / "weights.bin", int(arguments.gigabytes * 1e9))
        peaks = [
            measure(step, code.replace("FORMAT", repr(arguments.format)), directory)
            for step, code in STEPS.items()
        ]
    return 0 if max(peaks) < MAX_MB else 1


def write_weights(path: Path, size: int) -> None:
    block = os.urandom(1 << 24)
    with path.open("wb") as file:
        while file.tell() < size // 2:
            file.write(block)
        file.truncate(size)
    os.utime(path, (1, 1))


def measure(step: str, code: str, directory: Path) -> float:
    start = time.monotonic()
    program = f"from pathlib import Path\nfrom tsx_archiver import *\n{code}\n{PEAK}"
    process = subprocess.run(
        [sys.executable, "-c", program],
        cwd=directory,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    peak = int(process.stdout) / 1000
    print(
        f"{step:12} {peak:6.0f} MB resident at most   {time.monotonic() - start:6.1f} s", flush=True
    )
    return peak


if __name__ == "__main__":
    raise SystemExit(main())
