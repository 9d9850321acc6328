"""`Popen` and `run` for Python programs, forked from a process that has imported tsx and torch.

Starting a program then takes 30 ms of processor time instead of two seconds. A server's fork
server and its workers are forked in the same way. Tests of the start itself (its imports,
`sys.path`, an installed command) use `subprocess`.

Speed is the only reason: with TSX_REAL_PROCESSES=1 every program starts as a user starts it.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import itertools
import json
import logging
import os
import resource
import runpy
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import thread
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from typing import Any, NoReturn

from tests.support import line_coverage  # isort: skip  # noqa: F401  # before the product
from tsx_runtime.core import hidden_credentials

FORKS = os.environ.get("TSX_REAL_PROCESSES", "0") == "0" and sys.platform == "linux"
COMMANDS = {"tsx": "tsx_cli.main", "torchserve": "tsx_cli.serve.torchserve"}
IMPORTED = (
    "multiprocessing.popen_forkserver",
    "pydantic.v1",
    "torch",
    "tsx_cli.archive.command",
    "tsx_cli.main",
    "tsx_cli.serve.command",
    "tsx_cli.serve.startup_page",
    "tsx_cli.serve.torchserve",
    "tsx_runtime.features.grpc.service",
    "tsx_runtime.http.fast_lane.connection",
    "tsx_runtime.targets.entry",
    "tsx_runtime.server.server",
    "tsx_runtime.worker.main",
    "uvicorn.lifespan.off",
    "uvloop",
)
STARTERS = {"bench", "check", "optimize"}  # commands that start Python programs themselves
# The module in which torchrun starts its programs.
TORCHRUN_MODULE = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
# Workers of a real server have this variable, which torch reads at its import.
PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE"}
# Variables that huggingface_hub reads at its import.
HUB_VARIABLES = {name: value for name, value in os.environ.items() if name.startswith("HF_")}
NUMBER = struct.Struct("!I")
MAX_FILES = 16  # descriptors that a program may inherit


class Popen(subprocess.Popen[Any]):
    """A process that is forked if it runs Python or a tsx command, or else started."""

    _ended: socket.socket | None = None  # the socket that receives a forked program's exit status

    def _execute_child(  # type: ignore[override]  # private, and of other arguments in each version
        self,
        args: Any,
        executable: Any,
        preexec_fn: Any,
        close_fds: Any,
        pass_fds: Any,
        cwd: Any,
        env: Any,
        *remaining: Any,
    ) -> None:
        in_shell, in_session = remaining[2], any(remaining[14:15])
        must_start = not FORKS or preexec_fn or in_shell or _changes_imports(env)
        program = None if must_start else _program(args)
        if program is None:
            super()._execute_child(
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *remaining
            )  # type: ignore[misc]
            return
        p2cread, _, _, c2pwrite, _, errwrite = remaining[3:9]
        streams = [
            number if descriptor == -1 else descriptor
            for number, descriptor in enumerate((p2cread, c2pwrite, errwrite))
        ]
        environment = {
            os.fsdecode(name): os.fsdecode(value)
            for name, value in (os.environ if env is None else env).items()
        }
        self._ended, child_socket = socket.socketpair()
        sys.audit("subprocess.Popen", executable, args, cwd, env)
        with child_socket:
            order = {
                "program": program,
                "cwd": os.fspath(cwd or Path.cwd()),
                "environment": environment,
                "session": in_session,
            }
            order |= {"files": resource.getrlimit(resource.RLIMIT_NOFILE), "passed": list(pass_fds)}
            blocked = [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())]
            order |= {"blocked": blocked, "cores": list(os.sched_getaffinity(0))}
            self.pid = self._fork(order, [*streams, *pass_fds, child_socket.fileno()])
        self._child_created = True
        self._close_pipe_fds(*remaining[3:9])  # type: ignore[attr-defined]  # private

    def _fork(self, order: dict[str, Any], files: list[int]) -> int:
        return _forker().fork(order, files)

    def _internal_poll(self, *args: Any, **kwargs: Any) -> int | None:  # type: ignore[override]  # private
        if self._ended is None:
            return super()._internal_poll(*args, **kwargs)  # type: ignore[misc, no-any-return]
        if self.returncode is None and self._waitpid_lock.acquire(False):  # type: ignore[attr-defined]  # private
            try:
                pid, status = self._try_wait(os.WNOHANG) if self.returncode is None else (0, 0)
                if pid:
                    self._handle_exitstatus(status)  # type: ignore[attr-defined]  # private
            finally:
                self._waitpid_lock.release()  # type: ignore[attr-defined]  # private
        return self.returncode

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._ended is None:
            return super()._try_wait(wait_flags)  # type: ignore[misc, no-any-return]
        try:
            status = self._ended.recv(
                NUMBER.size, socket.MSG_DONTWAIT if wait_flags & os.WNOHANG else 0
            )
        except BlockingIOError:
            return 0, 0
        self._ended.close()
        return self.pid, NUMBER.unpack(status)[0] if status else signal.SIGKILL


def run(
    command: Sequence[Any],
    *,
    input: str | None = None,
    timeout: float | None = None,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """Run a program like `subprocess.run` without `check`."""
    if options.pop("capture_output", False):
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    options.pop("check", None)
    with Popen(command, stdin=None if input is None else subprocess.PIPE, **options) as process:
        try:
            output, errors = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


# A replacement for the module `subprocess`.
SUBPROCESS = types.SimpleNamespace(**{**vars(subprocess), "Popen": Popen, "run": run})


def _changes_imports(environment: Mapping[str, str] | None) -> bool:
    """Tell whether an environment would change modules that are already imported.

    That is the case for other variables of huggingface_hub, and for a PYTHONPATH with a
    sitecustomize or with modules of the same names.
    """
    if any(
        name.startswith("HF_") and value != HUB_VARIABLES.get(name)
        for name, value in (environment or os.environ).items()
    ):
        return True
    if environment is None:
        return False
    inherited, required = (
        set(variables.get("PYTHONPATH", "").split(os.pathsep)) - {""}
        for variables in (os.environ, environment)
    )
    new = [
        path
        for directory in required - inherited
        for path in Path(directory).glob("*")
        if directory not in sys.path
    ]
    return not inherited <= required or any(
        path.stem == "sitecustomize" or path.stem in sys.modules for path in new
    )


def _program(command: Any) -> list[str] | None:
    """Return the kind, the name and the arguments of a program for this Python.

    Return None for other programs and for interpreter options.
    """
    if isinstance(command, (str, bytes)):
        return None
    first, *arguments = (os.fspath(argument) for argument in command)
    name = Path(first).name
    if name in COMMANDS and Path(first).parent in (Path(), Path(sys.executable).parent):
        return ["main", COMMANDS[name], name, *arguments]
    if first != sys.executable or not arguments:
        return None
    if arguments[0] in ("-m", "-c"):
        return arguments
    return None if arguments[0].startswith("-") else ["file", *arguments]


class Forker:
    """A connection to the process from which programs are forked."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._lock = threading.Lock()
        atexit.register(self._socket.close)  # the process ends when this socket closes

    def fork(self, order: dict[str, Any], files: list[int]) -> int:
        message = json.dumps(order).encode()
        with self._lock:
            socket.send_fds(self._socket, [NUMBER.pack(len(message))], files)
            self._socket.sendall(message)
            return int(NUMBER.unpack(_receive(self._socket, NUMBER.size))[0])


def _receive(source: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = source.recv(count - len(data))
        if not part:
            raise EOFError("the process that programs are forked from has ended")
        data += part
    return data


_forkers: list[Forker] = []


def _forker() -> Forker:
    """Return this process's forker, which is started at the first call."""
    if not _forkers:
        own_socket, child_socket = socket.socketpair()
        with child_socket:
            command = [sys.executable, "-m", __name__, str(child_socket.fileno())]
            directory, variables = Path(__file__).parents[2], os.environ | PASSIVE
            subprocess.Popen(
                command, cwd=directory, env=variables, pass_fds=[child_socket.fileno()]
            ).returncode = 0  # avoids a warning, since nobody waits for its end
        _forkers.append(Forker(own_socket))
    return _forkers[0]


def get_ready() -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def serve(orders: socket.socket) -> None:
    """Fork a program for each received request, and report each program's exit status."""
    waiting: dict[int, int] = {}

    def report(*_: object) -> None:
        while waiting:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            status_file = waiting.pop(pid)
            with contextlib.suppress(OSError):
                os.write(status_file, NUMBER.pack(status))
            os.close(status_file)

    signal.signal(signal.SIGCHLD, report)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        head, files, _, _ = socket.recv_fds(orders, NUMBER.size, MAX_FILES)
        if not head:
            return
        order = json.loads(_receive(orders, NUMBER.unpack(head)[0]))
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        pid = os.fork()
        if not pid:
            _become(order, files)
        waiting[pid] = files.pop()
        for file in files:
            os.close(file)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        orders.sendall(NUMBER.pack(pid))


def _become(order: dict[str, Any], files: list[int]) -> NoReturn:
    """Run the requested program in a newly forked process."""
    numbers = [0, 1, 2, *order["passed"]]
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD, max(numbers) + 1) for file in files]
    for number, file in zip(numbers, moved, strict=False):
        os.dup2(file, number)
    for number, next_number in itertools.pairwise([*sorted(numbers), max(1024, *moved) + 1]):
        os.closerange(number + 1, next_number)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, order["blocked"])
    os.sched_setaffinity(0, order["cores"])
    if "forker" in order:
        _forkers[:] = [Forker(socket.socket(fileno=order["forker"]))]
        os.set_inheritable(order["forker"], False)
    elif _starts_programs(*order["program"]):
        _have_forker()
    if order["session"]:
        os.setsid()
    resource.setrlimit(resource.RLIMIT_NOFILE, order["files"])
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["environment"])
    tempfile.tempdir = None
    sys.path[:0] = [
        path
        for path in os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if path and path not in sys.path
    ]
    if order["program"][0] == "-c":
        sys.path.insert(0, "")
    _open_streams()
    # A server starts its fork server and its resource tracker with this function.
    hidden_credentials.Popen = _fork_program  # type: ignore[assignment]
    _end(lambda: _run(*order["program"]))


def _starts_programs(kind: str, program: str, *arguments: str) -> bool:
    options = arguments[1:] if kind == "main" else arguments
    return (program.startswith("tsx_cli") and not STARTERS.isdisjoint(options[:1])) or (
        kind == "-c" and '"group":' in "".join(options[:1])
    )


def _have_forker() -> None:
    """Fork a forker for this program's own programs, which ends with this process.

    It is a copy of this process before the program begins.
    """
    own_socket, child_socket = socket.socketpair()
    if not os.fork():
        descriptor = (
            os.dup2(child_socket.fileno(), 3, inheritable=False)
            if child_socket.fileno() != 3
            else 3
        )
        os.closerange(4, max(1024, own_socket.fileno(), child_socket.fileno()) + 1)
        with open(os.devnull, "r+b") as null_file:
            for number in range(3):
                os.dup2(null_file.fileno(), number)
        serve(socket.socket(fileno=descriptor))
        os._exit(0)
    child_socket.close()
    _forkers[:] = [Forker(own_socket)]
    subprocess.Popen = Popen  # type: ignore[misc]
    if TORCHRUN_MODULE in sys.modules:
        sys.modules[TORCHRUN_MODULE].Popen = Popen  # type: ignore[attr-defined]


def _fork_program(
    args: Sequence[Any],
    *,
    executable: Any,
    pass_fds: Sequence[int],
    env: Mapping[str, str],
    restore_signals: bool,
) -> types.SimpleNamespace:
    """Fork `python OPTIONS -c CODE` in the way that multiprocessing starts it."""
    with warnings.catch_warnings():
        # Python 3.12 warns of threads, and the warning would be part of the program's output.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        return types.SimpleNamespace(pid=pid, returncode=None)
    os.environ.clear()
    os.environ.update(env)
    gc.freeze()  # the server's objects are never collected here
    # Closed descriptors would be reused, and libuv would close them at the next fork. Therefore they
    # are redirected to a null file.
    with open(os.devnull) as null_file:
        for number in {int(entry.name) for entry in Path("/proc/self/fd").iterdir()} - {
            0,
            1,
            2,
            *pass_fds,
            null_file.fileno(),
        }:
            with contextlib.suppress(
                OSError
            ):  # the descriptor of the directory listing is already closed
                os.fstat(number)
                os.dup2(null_file.fileno(), number, inheritable=False)
    # The server's logging configuration is removed.
    for logger in (logging.root, *map(logging.getLogger, logging.root.manager.loggerDict)):
        logger.handlers.clear()
        logger.setLevel(logging.WARNING if logger is logging.root else logging.NOTSET)
        logger.propagate, logger.disabled = True, False
    # Another thread of the server may have been in the middle of an import.
    importlib._bootstrap._module_locks.clear()  # type: ignore[attr-defined]  # private
    for name in [
        name
        for name, module in sys.modules.items()
        if getattr(getattr(module, "__spec__", None), "_initializing", False)
    ]:
        del sys.modules[name]
    atexit._clear()
    # The thread that forked is now the main thread, so other threads must not be joined.
    thread._threads_queues.clear()  # type: ignore[attr-defined]  # private
    util._finalizer_registry.clear()  # type: ignore[attr-defined]  # private
    resource_tracker._resource_tracker.__init__()  # type: ignore[misc]
    forkserver._forkserver.__init__()  # type: ignore[attr-defined]  # private
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.set_wakeup_fd(-1)
    arguments = [os.fsdecode(argument) for argument in args]
    return _end(lambda: _run("-c", arguments[arguments.index("-c") + 1]))


def _run(kind: str, program: str, *arguments: str) -> object:
    sys.argv = [kind if kind in ("-c", "-m") else program, *arguments]
    if kind == "main":
        sys.argv = list(arguments)
        return importlib.import_module(program).main()
    if kind == "-c":
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(program, "<string>", "exec"), vars(sys.modules["__main__"]))
    elif kind == "-m":
        with warnings.catch_warnings():
            # runpy warns, since the module is already imported.
            warnings.simplefilter("ignore", RuntimeWarning)
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(program).resolve().parent))
        runpy.run_path(program, run_name="__main__")
    return None


def _end(program: Callable[[], object]) -> NoReturn:
    """Run a program, and end this process as the interpreter would."""
    code: object = 1
    try:
        code = program()
    except SystemExit as end:
        code = end.code
    except KeyboardInterrupt:
        code = -signal.SIGINT
    except BaseException:
        traceback.print_exc()
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]  # private
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code if isinstance(code, int) else 0)


def _open_streams() -> None:
    write_through = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    sys.stdout.reconfigure(line_buffering=sys.stdout.isatty(), write_through=write_through)
    sys.stderr = open(  # noqa: SIM115
        2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False
    )


if __name__ == "__main__":
    get_ready()
    serve(socket.socket(fileno=int(sys.argv[1])))
