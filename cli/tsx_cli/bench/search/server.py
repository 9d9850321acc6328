"""The measured server: a `tsx serve` process on free loopback ports.

It ignores the user's settings. If cores are given, it runs on these.
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


def choose_cores(
    server: str | None, generator: str | None, *, running: bool = False
) -> PinnedCores | None:
    """Return the cores of the server and of the generator.

    If only one option is given, the other side gets the remaining cores, unless the server is
    `running` already.

    Raises:
        UsageError: The cores do not exist, both sides share one, or none is left.
    """
    cores_by_option = {
        option: _cores(text, option)
        for option, text in ((SERVER, server), (GENERATOR, generator))
        if text is not None
    }
    if not cores_by_option:
        return None
    shared_cores = set(cores_by_option.get(SERVER, ())) & set(cores_by_option.get(GENERATOR, ()))
    if shared_cores:
        raise UsageError(
            f"{SERVER} and {GENERATOR} both have core {min(shared_cores)}; give each side"
            " cores of its own"
        )
    if running:
        return PinnedCores(server=[], generator=cores_by_option[GENERATOR])
    for option in (SERVER, GENERATOR):
        if option not in cores_by_option:
            (given_option,) = cores_by_option
            cores_by_option[option] = sorted(
                os.sched_getaffinity(0) - set(cores_by_option[given_option])
            )
            if not cores_by_option[option]:
                raise UsageError(
                    f"{given_option}: {server or generator} are all cores, and none is left for the"
                    " other side; give fewer"
                )
    return PinnedCores(server=cores_by_option[SERVER], generator=cores_by_option[GENERATOR])


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
    allowed = os.sched_getaffinity(0)
    missing = [core for core in cores if core not in allowed]
    if missing or not cores:
        problem = (
            f"core {missing[0]} is not one of those" if missing else "it names no core of those"
        )
        raise UsageError(
            f"{option}: {problem} that this process may use: {', '.join(map(str, sorted(allowed)))}"
        )
    return cores


@contextmanager
def pinned(cores: Sequence[int]) -> Iterator[None]:
    """Run this thread, and the processes that it starts, on these cores.

    If `cores` is empty, nothing changes. A server counts the cores that it may use, and chooses the
    numbers of workers and threads accordingly.
    """
    if not cores:
        yield
        return
    previous_cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, previous_cores)


DIRECTORY_PREFIX = "tsx-bench-"
LOCK = "lock"  # A process locks this file while it uses the directory.
LAST_LINES = 12  # lines of the log in an error message
TRACEBACK_HINT = "--debug shows the whole traceback."
# The user's settings that the server inherits. This one affects only the time of a start.
INHERITED_SETTINGS = ("TSX_WORKER_PRELOAD",)
END_TIMEOUT_S = 10.0
# The kernel ends the server when this process ends. The server is started by `-c`, because `-m`
# would add the working directory to the path.
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
    """The server did not start. The message ends with the last lines of its log."""


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
        """Return the body of a GET request.

        Raises:
            OSError: The server does not answer.
        """
        try:
            return Server(address, timeout=30).call("GET", path).body().decode(errors="replace")
        except CliError as error:
            raise OSError(error.message) from error

    def log_tail(self) -> str:
        return last_lines(self.log)


@contextmanager
def serving(
    directory: Path | None,
    scratch: Path,
    *,
    start_seconds: float,
    extra_settings: Mapping[str, object] | None = None,
) -> Iterator[ServerProcess]:
    """Yield a ready server with the model in `directory`, or with no model if it is None.

    The server's files are in `scratch`. `extra_settings` are passed with `--set`.

    Raises:
        NotStarted: The server does not start.
    """
    log = scratch / "server.log"
    settings = {
        "state_dir": scratch / "state",
        "cache_dir": scratch / "cache",
        "enable_grpc": "false",
        "log_format": "text",
        "drain_timeout": 1,
        **(extra_settings or {}),
    }
    command = ["serve", *([directory] if directory is not None else []), "--host", "127.0.0.1"]
    command += ["--port", 0, "--management-port", 0, "--metrics-port", 0]
    for name, value in settings.items():
        command += ["--set", f"{name}={value}"]
    boot_code = _BOOT.format(path=[entry for entry in sys.path if entry], term=int(signal.SIGTERM))
    environment = {
        name: value
        for name, value in os.environ.items()
        if name in INHERITED_SETTINGS or not name.startswith(("TSX_", "TS_"))
    }
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", boot_code, *map(str, command)],
            cwd=scratch,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            start_new_session=True,
        )
    try:
        yield _wait_until_ready(process, log, start_seconds)
    finally:
        end(process)


def _wait_until_ready(process: subprocess.Popen[str], log: Path, seconds: float) -> ServerProcess:
    timer = threading.Timer(seconds, process.kill)
    timer.daemon = True
    timer.start()
    addresses: dict[str, str] = {}
    assert process.stdout is not None
    try:
        for line in process.stdout:
            name, separator, address = line.strip().partition(" at ")
            if separator:
                addresses[name] = address
            if line.startswith("try: "):
                break
        else:
            code = process.wait()
            late_text = f"it was not ready after {seconds:.0f} s: {last_lines(log)}"
            raise NotStarted(late_text if code == -signal.SIGKILL else _exit_reason(log, code))
    finally:
        timer.cancel()
    return ServerProcess(
        process, log, addresses["predictions"], addresses["models"], addresses["metrics"]
    )


def end(process: subprocess.Popen[str], timeout_s: float = END_TIMEOUT_S) -> None:
    """End a server and its workers, in whatever state they are."""
    descendants: list[psutil.Process] = []
    with suppress(psutil.Error):
        descendants = psutil.Process(process.pid).children(recursive=True)
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout_s)
    if process.poll() is None:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
    # The workers usually end after the server without help.
    _, survivors = psutil.wait_procs(filter(_is_running, descendants), timeout=0.1)
    for survivor in survivors:
        with suppress(psutil.Error):
            survivor.kill()


def _is_running(process: psutil.Process) -> bool:
    """Tell whether a process runs; a zombie, which may stay in some containers, does not."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _exit_reason(log: Path, code: int) -> str:
    """Return the error message of `tsx serve`, or else the last lines of its log."""
    log_text = last_lines(log)
    _, error, message = log_text.rpartition("Error: ")
    return message.replace(TRACEBACK_HINT, "").strip() if error else f"exit code {code}: {log_text}"


def last_lines(log: Path) -> str:
    try:
        with log.open(encoding="utf-8", errors="replace") as lines:
            tail = deque((line.rstrip() for line in lines if line.strip()), maxlen=LAST_LINES)
    except OSError:
        return "it left no log"
    return "\n".join(tail) or "it printed nothing"


@contextmanager
def scratch_directory(name: str) -> Iterator[Path]:
    """Yield a temporary directory. Its name is short, since the server creates sockets in it."""
    with tempfile.TemporaryDirectory(
        prefix=f"{DIRECTORY_PREFIX}{name}-", dir=temporary_directory(), ignore_cleanup_errors=True
    ) as directory:
        lock = FileLock(Path(directory) / LOCK)
        try:
            lock.lock_exclusive(wait=False)
            yield Path(directory)
        finally:
            lock.close()


def sweep() -> None:
    """Remove directories that killed runs have left."""
    if not CAN_LOCK:
        return
    for directory in Path(tempfile.gettempdir()).glob(f"{DIRECTORY_PREFIX}*"):
        with suppress(OSError, CacheError):
            if directory.stat().st_uid != os.getuid() or not (directory / LOCK).is_file():
                continue
            lock = FileLock(directory / LOCK)
            try:
                if lock.lock_exclusive(wait=False):
                    shutil.rmtree(directory, ignore_errors=True)
            finally:
                lock.close()
