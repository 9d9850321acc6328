"""The lines that ran in this process and its forks, where LINE_COVERAGE names a data file.

It is imported before the product, whose modules it changes as they are imported. Each process
writes a file of its own, since thousands of SQLite files take a minute of the processor.
`python -m tests.support.line_coverage` combines them into a data file of coverage.py.

Before Python 3.12 coverage.py has to trace every line of every library, which doubles the time of
the tests. SlipCover adds a call to each line of the product alone, which reports it once.
"""

from __future__ import annotations

import atexit
import marshal
import os
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[2]
MEASURED = ("archiver", "cli", "packages", "runtime", "templates")
FORK_SERVER = "from multiprocessing.forkserver import main;"
# SlipCover replaces the functions of a running program after so many calls, to win a few percent.
NEVER = 2**31 - 1


class Popen(subprocess.Popen[bytes]):
    """A fork server of multiprocessing (`python OPTIONS -c CODE`) whose workers count too."""

    def __init__(self, args: Sequence[str | bytes], **options: Any) -> None:
        *flags, code = map(os.fsdecode, args)
        if "LINE_COVERAGE" in os.environ:
            begin = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {__name__}; del sys.path[0]; {FORK_SERVER}"
            code = code.replace(FORK_SERVER, begin)
        super().__init__([*flags, code], **options)


def _start(files: str) -> Callable[[], None]:
    from slipcover import FileMatcher, ImportManager, Slipcover

    # coverage.py finds the lines; here that would take longer than the probes.
    Slipcover.lines_from_code = Slipcover.branches_from_code = lambda code: ()
    lines: Any = Slipcover(d_miss_threshold=NEVER)
    end = os._exit

    def save() -> None:
        ran = lines.newly_seen
        forget()
        # A sandbox may forbid the file.
        with suppress(OSError), open(f"{files}.{os.getpid()}.{time.time_ns()}", "xb") as file:
            marshal.dump({name: list(numbers) for name, numbers in ran.items()}, file)

    def forget() -> None:
        lines.newly_seen = defaultdict(set)

    def start_again() -> None:
        forget()
        # Another thread of the parent may have held the lock, for an import.
        lines.lock = threading.RLock()

    def save_and_end(status: int) -> NoReturn:
        save()
        end(status)

    ImportManager(lines, FileMatcher([ROOT / name for name in MEASURED])).__enter__()
    os.register_at_fork(after_in_child=start_again)
    os._exit = save_and_end
    atexit.register(save)
    return save


def combine(files: str) -> None:
    from coverage import CoverageData

    # Files that nothing imports count too.
    ran = {str(path): set[int]() for name in MEASURED for path in (ROOT / name).rglob("*.py")}
    for part in Path(files).parent.glob(f"{Path(files).name}.*"):
        # A process may have been killed while it wrote.
        with suppress(EOFError, ValueError):
            for name, numbers in marshal.loads(part.read_bytes()).items():
                ran.setdefault(name, set()).update(numbers)
        part.unlink()
    data = CoverageData(files)
    data.add_lines(ran)
    data.write()


measured = "LINE_COVERAGE" in os.environ and __name__ != "__main__"
# A process that does not come to its end calls `save`.
save = _start(os.environ["LINE_COVERAGE"]) if measured else lambda: None

if __name__ == "__main__":
    combine(os.environ["LINE_COVERAGE"])
