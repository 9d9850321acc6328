"""The lines that ran in this process and its forks, if LINE_COVERAGE names a data file.

It must be imported before the product, whose modules it changes as they are imported. Each process
writes its own file, since thousands of SQLite files take a minute of processor time.
`python -m tests.support.line_coverage` combines them into a data file of coverage.py.

Before Python 3.12, coverage.py must trace every line of every library, which doubles the time of
the tests. SlipCover instruments only the product's lines, each of which reports itself once.
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
# SlipCover would replace instrumented functions after this number of calls to save a few percent.
MAX_CALLS = 2**31 - 1


class Popen(subprocess.Popen[bytes]):
    """A multiprocessing fork server (`python OPTIONS -c CODE`) with measured workers."""

    def __init__(self, args: Sequence[str | bytes], **options: Any) -> None:
        *flags, code = map(os.fsdecode, args)
        if "LINE_COVERAGE" in os.environ:
            import_code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {__name__}; del sys.path[0]; {FORK_SERVER}"
            code = code.replace(FORK_SERVER, import_code)
        super().__init__([*flags, code], **options)


def _start(files: str) -> Callable[[], None]:
    from slipcover import FileMatcher, ImportManager, Slipcover

    # SlipCover need not list all lines, since coverage.py does it later and it takes long.
    Slipcover.lines_from_code = Slipcover.branches_from_code = lambda code: ()
    lines: Any = Slipcover(d_miss_threshold=MAX_CALLS)
    end = os._exit

    def save() -> None:
        executed_lines = lines.newly_seen
        forget()
        # A sandbox may forbid writing the file.
        with suppress(OSError), open(f"{files}.{os.getpid()}.{time.time_ns()}", "xb") as file:
            marshal.dump({name: list(numbers) for name, numbers in executed_lines.items()}, file)

    def forget() -> None:
        lines.newly_seen = defaultdict(set)

    def start_again() -> None:
        forget()
        # Another thread of the parent may have held the old lock during an import.
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

    # Files that are never imported also count.
    executed_lines = {
        str(path): set[int]() for name in MEASURED for path in (ROOT / name).rglob("*.py")
    }
    for part in Path(files).parent.glob(f"{Path(files).name}.*"):
        # A file may be incomplete if its process was killed.
        with suppress(EOFError, ValueError):
            for name, numbers in marshal.loads(part.read_bytes()).items():
                executed_lines.setdefault(name, set()).update(numbers)
        part.unlink()
    data = CoverageData(files)
    data.add_lines(executed_lines)
    data.write()


measured = "LINE_COVERAGE" in os.environ and __name__ != "__main__"
# Processes that do not end normally call `save` themselves.
save = _start(os.environ["LINE_COVERAGE"]) if measured else lambda: None

if __name__ == "__main__":
    combine(os.environ["LINE_COVERAGE"])
