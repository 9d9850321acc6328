"""Which lines ran, in this process and in those forked from it, in files for `coverage combine`, where LINE_COVERAGE names them.

It is imported before the product, whose modules it changes as they are imported.

Before Python 3.12 coverage.py has to trace every line of every library, which doubles what the tests take of the processor. SlipCover adds
a call to each line of the product alone, which reports it once.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[2]
MEASURED = ("archiver", "cli", "packages", "runtime", "templates")
FORK_SERVER = "from multiprocessing.forkserver import main;"
NEVER = 2**31 - 1  # SlipCover would replace the functions of a running program after so many calls, to win a few percent


class Popen(subprocess.Popen[bytes]):
    """Of a fork server as multiprocessing starts it (`python OPTIONS -c CODE`), whose workers count too."""

    def __init__(self, args: Sequence[str | bytes], **options: Any) -> None:
        *words, code = map(os.fsdecode, args)
        if "LINE_COVERAGE" in os.environ:
            begin = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {__name__}; del sys.path[0]; {FORK_SERVER}"
            code = code.replace(FORK_SERVER, begin)
        super().__init__([*words, code], **options)


def _start(files: str) -> Callable[[], None]:
    from coverage import CoverageData
    from slipcover import FileMatcher, ImportManager, Slipcover

    Slipcover.lines_from_code = Slipcover.branches_from_code = lambda code: ()  # coverage.py finds them; it takes longer than the probes do
    lines: Any = Slipcover(d_miss_threshold=NEVER)
    end = os._exit

    def save() -> None:
        ran = lines.newly_seen
        forget()
        with suppress(Exception):  # in a sandbox, or where a test has bounded what may be written
            data = CoverageData(files, suffix=True)
            data.add_lines(ran)
            data.write()

    def forget() -> None:
        lines.newly_seen = defaultdict(set)

    def start_again() -> None:
        forget()
        lines.lock = threading.RLock()  # another thread of the parent may have held it, for an import

    def save_and_end(status: int) -> NoReturn:
        save()
        end(status)

    lines.newly_seen |= {str(path): set() for name in MEASURED for path in (ROOT / name).rglob("*.py")}  # those that nothing imports too
    ImportManager(lines, FileMatcher([ROOT / name for name in MEASURED])).__enter__()
    os.register_at_fork(after_in_child=start_again)
    os._exit = save_and_end
    atexit.register(save)
    return save


save = _start(os.environ["LINE_COVERAGE"]) if "LINE_COVERAGE" in os.environ else lambda: None  # for who does not come to its end
