"""The measured server: a real `tsx serve` process on free loopback ports, without the user's
settings, on cores of its own where that is asked for.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tsx_archiver import CacheError
from tsx_archiver.storage.locks import CAN_LOCK, FileLock
from tsx_archiver.storage.private_directory import temporary_directory
from tsx_cli.bench.load.results import PinnedCores
from tsx_cli.common.client import Server
from tsx_cli.common.failure import CliError, UsageError
from tsx_runtime.core.placement.cpu_pinning import parse_cores

SERVER, GENERATOR = "--server-cores", "--generator-cores"


def chosen(
    server: str | None, generator: str | None, *, running: bool = False
) -> PinnedCores | None:
    """Both sides' cores; the side that names none gets what the other leaves, unless the server is
    `running` already. Raises UsageError.
    """
    sides = {
        option: _cores(text, option)
        for option, text in ((SERVER, server), (GENERATOR, generator))
        if text is not None
    }
    if not sides:
        return None
    both = set(sides.get(SERVER, ())) & set(sides.get(GENERATOR, ()))
    if both:
        raise UsageError(
            f"{SERVER} and {GENERATOR} both have core {min(both)}; give each side cores of its own"
        )
    if running:
        return PinnedCores(server=[], generator=sides[GENERATOR])
    for option in (SERVER, GENERATOR):
        if option not in sides:
            (other,) = sides
            sides[option] = sorted(os.sched_getaffinity(0) - set(sides[other]))
            if not sides[option]:
                raise UsageError(
                    f"{other}: {server or generator} are all cores, and none is left for the other"
                    " side; give fewer"
                )
    return PinnedCores(server=sides[SERVER], generator=sides[GENERATOR])


def _cores(text: str, option: str) -> list[int]:
    if not hasattr(os, "sched_setaffinity"):
        raise UsageError(
            f"{option}: this system does not let a process choose its cores, as Linux does; leave"
            " it out"
        )
    try:
        cores = sorted(parse_cores(text))
    except ValueError as error:
        raise UsageError(f"{option}: {error}; write cores such as 0-3 or 0,2") from error
    have = os.sched_getaffinity(0)
    missing = [core for core in cores if core not in have]
    if missing or not cores:
        wrong = f"core {missing[0]} is not one of those" if missing else "it names no core of those"
        raise UsageError(
            f"{option}: {wrong} that this process may use: {', '.join(map(str, sorted(have)))}"
        )
    return cores


@contextmanager
def pinned(cores: Sequence[int]) -> Iterator[None]:
    """This thread, and the processes that it starts meanwhile, on these cores; anywhere where there
    are none.

    A server counts the cores that it may use, so that its workers and threads follow.
    """
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


PLACES = "tsx-bench-"  # how the names of their directories begin
LOCK = "lock"  # a file of theirs, locked by the process that has the directory
LAST_LINES = 12  # of its log, in the reason of a failure
TRACEBACK_HINT = "--debug shows the whole traceback."
KEPT = (
    "TSX_WORKER_PRELOAD",
)  # of the user's settings: it changes how long a start takes, and nothing else
PATIENCE = 10.0  # seconds that it may take to end
# The server hears of this process's end whatever ends it, and Ctrl-C is for this process alone.
# `-c` and not `-m`: nothing of the working directory stands before tsx's own modules.
_BOOT = """
import sys
sys.path[:] = {path!r}
if sys.platform == "linux":
    import ctypes
    ctypes.CDLL(None).prctl(1, {term})
from tsx_cli.main import main
sys.exit(main(sys.argv[1:]))
"""


class NotStarted(Exception):
    """Says why, in the last words of its log."""


@dataclass
class ServerProcess:
    process: subprocess.Popen[str]
    log: Path
    inference: str
    management: str
    metrics: str

    @property
    def pid(self) -> int:
        return self.process.pid

    def fetch(self, address: str, path: str) -> str:
        """Raises OSError."""
        try:
            return Server(address, timeout=30).call("GET", path).body().decode(errors="replace")
        except CliError as error:
            raise OSError(error.message) from error

    def last_words(self) -> str:
        return last_lines(self.log)


@contextmanager
def serving(
    directory: Path | None,
    place: Path,
    *,
    start_seconds: float,
    more: Mapping[str, object] | None = None,
) -> Iterator[ServerProcess]:
    """A server of the model in `directory`, or of none yet, which is ready.

    Its files are in `place`; `more` are settings.

    Raises NotStarted.
    """
    log = place / "server.log"
    settings = {
        "state_dir": place / "state",
        "cache_dir": place / "cache",
        "enable_grpc": "false",
        "log_format": "text",
        "drain_timeout": 1,
        **(more or {}),
    }
    words = ["serve", *([directory] if directory is not None else []), "--host", "127.0.0.1"]
    words += ["--port", 0, "--management-port", 0, "--metrics-port", 0]
    for name, value in settings.items():
        words += ["--set", f"{name}={value}"]
    boot = _BOOT.format(path=[entry for entry in sys.path if entry], term=int(signal.SIGTERM))
    environment = {
        name: value
        for name, value in os.environ.items()
        if name in KEPT or not name.startswith(("TSX_", "TS_"))
    }
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", boot, *map(str, words)],
            cwd=place,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            start_new_session=True,
        )
    try:
        yield _ready(process, log, start_seconds)
    finally:
        end(process)


def _ready(process: subprocess.Popen[str], log: Path, seconds: float) -> ServerProcess:
    late = threading.Timer(seconds, process.kill)
    late.daemon = True
    late.start()
    addresses: dict[str, str] = {}
    assert process.stdout is not None
    try:
        for line in process.stdout:
            what, at, address = line.strip().partition(" at ")
            if at:
                addresses[what] = address
            if line.startswith("try: "):
                break
        else:
            code = process.wait()
            late_words = f"it was not ready after {seconds:.0f} s: {last_lines(log)}"
            raise NotStarted(late_words if code == -signal.SIGKILL else _why(log, code))
    finally:
        late.cancel()
    return ServerProcess(
        process, log, addresses["predictions"], addresses["models"], addresses["metrics"]
    )


def end(process: subprocess.Popen[str], patience: float = PATIENCE) -> None:
    """Its workers too, whatever state they are in."""
    family: list[psutil.Process] = []
    with suppress(psutil.Error):
        family = psutil.Process(process.pid).children(recursive=True)
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience)
    if process.poll() is None:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
    _, left = psutil.wait_procs(
        filter(_runs, family), timeout=0.1
    )  # with the server gone, they only end
    for member in left:
        with suppress(psutil.Error):
            member.kill()


def _runs(process: psutil.Process) -> bool:
    """A zombie does not, however long its new parent leaves it: in some containers nothing reaps
    them soon.
    """
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _why(log: Path, code: int) -> str:
    """What `tsx serve` says at its end, or else the last lines of its log."""
    words = last_lines(log)
    _, error, message = words.rpartition("Error: ")
    return message.replace(TRACEBACK_HINT, "").strip() if error else f"exit code {code}: {words}"


def last_lines(log: Path) -> str:
    try:
        with log.open(encoding="utf-8", errors="replace") as lines:
            kept = deque((line.rstrip() for line in lines if line.strip()), maxlen=LAST_LINES)
    except OSError:
        return "it left no log"
    return "\n".join(kept) or "it printed nothing"


@contextmanager
def new_place(name: str) -> Iterator[Path]:
    """A directory for as long as the context lasts; with a short name, since the server makes
    sockets in it.
    """
    with tempfile.TemporaryDirectory(
        prefix=f"{PLACES}{name}-", dir=temporary_directory(), ignore_cleanup_errors=True
    ) as made:
        lock = FileLock(Path(made) / LOCK)
        try:
            lock.lock_exclusive(wait=False)
            yield Path(made)
        finally:
            lock.close()


def sweep() -> None:
    """Remove the directories of runs that were killed."""
    if not CAN_LOCK:
        return
    for place in Path(tempfile.gettempdir()).glob(f"{PLACES}*"):
        with suppress(OSError, CacheError):
            if place.stat().st_uid != os.getuid() or not (place / LOCK).is_file():
                continue
            lock = FileLock(place / LOCK)
            try:
                if lock.lock_exclusive(wait=False):
                    shutil.rmtree(place, ignore_errors=True)
            finally:
                lock.close()
