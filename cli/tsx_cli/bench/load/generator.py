"""The run of a load from its plan to its figures, in this process or in one of its own."""

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
RESERVED_FILES = 64  # descriptors that the process needs for other files
TRUST_ADVICE = "give --certificate FILE with it, or with that of the authority that signed it"
_BOOT = "import sys; sys.path[:] = {path!r}; from tsx_cli.bench.load.generator import main; main()"


class LoadProgress(NamedTuple):
    """The progress of a load; `answers` counts all answers so far."""

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
        used, starved, began = time.process_time(), starvation(), time.perf_counter()
        shares = (0.0, 0.0)

        def tick(number: int) -> None:
            nonlocal shares
            if number == slots:
                elapsed = time.perf_counter() - began
                shares = (time.process_time() - used) / elapsed, (starvation() - starved) / elapsed
            elif on_progress is not None and number % SLOTS_PER_REPORT == 0:
                on_progress(LoadProgress(number * SLOT_S, slots * SLOT_S, load.answers))

        await load.run(slots, min(plan.grace, plan.timeout), tick)
    finally:
        await load.close()
        gc.enable()
    return account(plan, load, *shares)


def measure(plan: LoadPlan, *, on_progress: OnProgress | None = None) -> Round:
    """Run a load in a process of its own.

    Raises:
        CliError: The load failed, or its process died.
        UsageError: The plan is not possible.
    """
    # The child has the same paths, without the working directory.
    boot = _BOOT.format(path=[directory for directory in sys.path if directory])
    # In a session of its own, the child ignores Ctrl-C; this process ends it.
    command = [sys.executable, "-c", boot]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            pickle.dump(plan, child.stdin)
            child.stdin.flush()  # Its end, on the parent's death, ends the child.
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
    """Return the number of connections that this process may have beside its other files."""
    try:
        import resource
    except ImportError:  # Windows
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
    """Return the seconds in which this process was ready to run and waited for a core.

    It is 0 if the kernel does not count them.
    """
    counts = Path("/proc/self/schedstat")
    return int(counts.read_text().split()[1]) / 1e9 if counts.exists() else 0.0


async def _make_load(plan: LoadPlan) -> Load:
    # Imported here, because gRPC may be absent.
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
    """Run a plan from stdin in this process; print progress and the result as lines of JSON."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The waiting parent decides.
    raise_file_limit()  # The shell's limit may be below the number of connections.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # Printed text goes to stderr.

    def print_message(**message: Any) -> None:
        print(json.dumps(message), file=out, flush=True)

    try:
        plan = pickle.load(sys.stdin.buffer)
        if plan.cores:
            os.sched_setaffinity(0, plan.cores)
        result = _run(_main(plan, lambda progress: print_message(progress=list(progress))))
    except (EOFError, pickle.UnpicklingError):  # The parent was interrupted.
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


def _run(work: Any) -> Any:
    try:
        import uvloop
    except ImportError:  # Windows
        return asyncio.run(work)
    return uvloop.run(work)
