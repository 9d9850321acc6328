"""Which lines ran, in this process and in those forked from it, where LINE_COVERAGE names a data
file of coverage.py.

It is imported before the product, whose modules it changes as they are imported. Each process has a
file of its own beside that one: `python -m tests.support.line_coverage` makes one of them all,
since an SQLite file for each of thousands takes a minute of the processor.

Before Python 3.12 coverage.py has to trace every line of every library, which doubles what the
tests take of the processor. SlipCover adds a call to each line of the product alone, which reports
it once.
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
NEVER = (
    2**31 - 1
    # SlipCover would replace the functions of a running program after so many calls, to win a few
    # percent
)


class Popen(subprocess.Popen[bytes]):
    """Of a fork server as multiprocessing starts it (`python OPTIONS -c CODE`), whose workers count
    too.
    """

    def __init__(self, args: Sequence[str | bytes], **options: Any) -> None:
        *words, code = map(os.fsdecode, args)
        if "LINE_COVERAGE" in os.environ:
            begin = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {__name__}; del sys.path[0]; {FORK_SERVER}"
            code = code.replace(FORK_SERVER, begin)
        super().__init__([*words, code], **options)


def _start(files: str) -> Callable[[], None]:
    from slipcover import FileMatcher, ImportManager, Slipcover

    Slipcover.lines_from_code = Slipcover.branches_from_code = (
        lambda code: ()
    )  # coverage.py finds them; it takes longer than the probes do
    lines: Any = Slipcover(d_miss_threshold=NEVER)
    end = os._exit

    def save() -> None:
        ran = lines.newly_seen
        forget()
        with (
            suppress(OSError),
            open(f"{files}.{os.getpid()}.{time.time_ns()}", "xb") as file,
        ):  # which a sandbox may forbid
            marshal.dump({name: list(numbers) for name, numbers in ran.items()}, file)

    def forget() -> None:
        lines.newly_seen = defaultdict(set)

    def start_again() -> None:
        forget()
        lines.lock = (
            threading.RLock()
        )  # another thread of the parent may have held it, for an import

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

    ran = {
        str(path): set[int]() for name in MEASURED for path in (ROOT / name).rglob("*.py")
    }  # those that nothing imports too
    for part in Path(files).parent.glob(f"{Path(files).name}.*"):
        with suppress(EOFError, ValueError):  # of a process that was killed while it wrote
            for name, numbers in marshal.loads(part.read_bytes()).items():
                ran.setdefault(name, set()).update(numbers)
        part.unlink()
    data = CoverageData(files)
    data.add_lines(ran)
    data.write()


measured = "LINE_COVERAGE" in os.environ and __name__ != "__main__"
save = (
    _start(os.environ["LINE_COVERAGE"]) if measured else lambda: None
)  # for who does not come to its end

if __name__ == "__main__":
    combine(os.environ["LINE_COVERAGE"])
