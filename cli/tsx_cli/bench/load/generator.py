"""The load generator: it runs a plan and returns the figures, in this process or in a child."""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import os
import pickle
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tsx_cli.bench.load.accounting import account
from tsx_cli.bench.load.loops import SLOT_S, ClosedLoop, Load, OpenLoop
from tsx_cli.bench.load.plan import MAX_CONNECTIONS, LoadPlan, due_times
from tsx_cli.bench.load.protocols import GRPC
from tsx_cli.bench.load.results import Round
from tsx_cli.common.failure import CliError, UsageError
from tsx_cli.common.server_address import distrust
from tsx_runtime.core.placement.hardware import raise_file_limit

SLOTS_PER_REPORT = 5
RESERVED_FILES = 64  # file descriptors for other purposes than connections
TRUST_ADVICE = "give --certificate FILE with it, or with that of the authority that signed it"
_BOOT = "import sys; sys.path[:] = {path!r}; from tsx_cli.bench.load.generator import main; main()"


class LoadProgress(NamedTuple):
    """The progress of a load: `seconds` of `of`, and the number of answers so far."""

    seconds: float
    of: float
    answers: int


OnProgress = Callable[[LoadProgress], None]


async def run_load(plan: LoadPlan, on_progress: OnProgress | None = None) -> Round:
    """Run a load in this process, which should do nothing else.

    Raises:
        CliError: There is no server.
    """
    load = await _make_load(plan)
    slots = max(1, round((plan.lead + plan.seconds) / SLOT_S))
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        try:
            await load.open()
        except OSError as error:
            raise CliError(_no_connection(plan, error)) from error
        cpu_start_s, starved_start_s, start_time = (
            time.process_time(),
            starvation(),
            time.perf_counter(),
        )
        cpu_and_starved = (0.0, 0.0)

        def tick(number: int) -> None:
            nonlocal cpu_and_starved
            if number == slots:
                elapsed = time.perf_counter() - start_time
                cpu_and_starved = (
                    (time.process_time() - cpu_start_s) / elapsed,
                    (starvation() - starved_start_s) / elapsed,
                )
            elif on_progress is not None and number % SLOTS_PER_REPORT == 0:
                on_progress(LoadProgress(number * SLOT_S, slots * SLOT_S, load.answers))

        await load.run(slots, min(plan.grace, plan.timeout), tick)
    finally:
        await load.close()
        gc.enable()
    return account(plan, load, *cpu_and_starved)


def measure(plan: LoadPlan, *, on_progress: OnProgress | None = None) -> Round:
    """Run a load in a process of its own.

    Raises:
        CliError: The load failed, or its process died.
        UsageError: The plan is invalid.
    """
    # The child has the same sys.path, except the working directory.
    boot_code = _BOOT.format(path=[directory for directory in sys.path if directory])
    # The child is in a new session and does not receive Ctrl-C; this process ends it.
    command = [sys.executable, "-c", boot_code]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            pickle.dump(plan, child.stdin)
            # The pipe stays open. If this process dies, the pipe closes, which ends the child.
            child.stdin.flush()
            for line in child.stdout:
                message = json.loads(line)
                if "result" in message:
                    return Round.model_validate(message["result"])
                if "error" in message:
                    raise (UsageError if message["usage"] else CliError)(message["error"])
                if on_progress is not None:
                    on_progress(LoadProgress(*message["progress"]))
        except BrokenPipeError:
            pass
        finally:
            child.kill()
    raise CliError(
        f"the load generator ended by itself ({child.returncode}): it was killed, or printed the"
        " reason above"
    )


def max_connections() -> int:
    """Return how many connections this process may have in addition to its other files."""
    try:
        import resource
    except ImportError:  # Windows has no such limit.
        return MAX_CONNECTIONS
    max_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return (
        MAX_CONNECTIONS
        if max_files == resource.RLIM_INFINITY
        else max(1, min(MAX_CONNECTIONS, max_files - RESERVED_FILES))
    )


def _no_connection(plan: LoadPlan, error: OSError) -> str:
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return (
            f"{plan.connections} connections are more than this machine lets the generator have"
            f" ({error.strerror}): raise ulimit -n"
        )
    if isinstance(error, ssl.SSLError):
        return f"{plan.url}: {distrust(error, address='--against', trust=TRUST_ADVICE)}"
    return (
        f"no server answers at {plan.url} ({error.strerror or error}); start it, or give another"
        " address"
    )


def starvation() -> float:
    """Return the seconds in which this process was ready to run but waited for a core.

    It is 0 if the kernel does not count this time.
    """
    counts = Path("/proc/self/schedstat")
    return int(counts.read_text().split()[1]) / 1e9 if counts.exists() else 0.0


async def _make_load(plan: LoadPlan) -> Load:
    # rpc.py needs gRPC, which may not be installed.
    if plan.protocol in GRPC:
        from tsx_cli.bench.load.rpc import connector, render_requests
    else:
        from tsx_cli.bench.load.connection import connector, render_requests
    try:
        requests, connect = render_requests(plan), connector(plan)
    except OSError as error:
        raise CliError(f"{plan.certificate} cannot be read as a certificate: {error}") from error
    if plan.mode == "closed":
        return ClosedLoop(connect, requests, plan.connections, plan.timeout)
    return OpenLoop(
        connect, requests, plan.connections, plan.timeout, due_times(plan, plan.lead + plan.seconds)
    )


def main() -> None:
    """Run a plan from stdin in this process; print the progress and the result as lines of JSON."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent process handles Ctrl-C.
    raise_file_limit()  # Each connection is an open file.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # Printed text goes to stderr.

    def print_message(**message: Any) -> None:
        print(json.dumps(message), file=out, flush=True)

    try:
        plan = pickle.load(sys.stdin.buffer)
        if plan.cores:
            os.sched_setaffinity(0, plan.cores)
        result = _run(_main(plan, lambda progress: print_message(progress=list(progress))))
    except (EOFError, pickle.UnpicklingError):  # The parent ended before it sent the plan.
        return
    except CliError as error:
        print_message(error=error.message, usage=isinstance(error, UsageError))
        return
    print_message(result=result.model_dump(mode="json"))


async def _main(plan: LoadPlan, on_progress: Any) -> Any:
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), _end_with_parent)
    return await run_load(plan, on_progress)


def _end_with_parent() -> None:
    if not os.read(sys.stdin.fileno(), 1):
        os._exit(1)


def _run(coroutine: Any) -> Any:
    try:
        import uvloop
    except ImportError:  # uvloop does not support Windows.
        return asyncio.run(coroutine)
    return uvloop.run(coroutine)
