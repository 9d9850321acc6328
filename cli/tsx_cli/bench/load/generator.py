"""Runs a load, from its plan to its figures, in this process or in a separate one with its own
event loop.
"""

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
from tsx_cli.bench.load.loops import SLOT, ClosedLoop, Load, OpenLoop
from tsx_cli.bench.load.plan import MOST_CONNECTIONS, LoadPlan, due_times
from tsx_cli.bench.load.protocols import GRPC
from tsx_cli.bench.load.results import Round
from tsx_cli.common.failure import CliError, UsageError
from tsx_cli.common.server_address import distrust
from tsx_runtime.core.placement.hardware import raise_file_limit

TOLD_EVERY = 5  # slots
OTHER_FILES = 64
TRUST = "give --certificate FILE with it, or with that of the authority that signed it"
_BOOT = "import sys; sys.path[:] = {path!r}; from tsx_cli.bench.load.generator import main; main()"


class LoadProgress(NamedTuple):
    """The progress of a load; `answers` counts all answers so far."""

    seconds: float
    of: float
    answers: int


OnProgress = Callable[[LoadProgress], None]


async def run_load(plan: LoadPlan, on_progress: OnProgress | None = None) -> Round:
    """In this process, which had better do nothing else. Raises CliError where there is no
    server.
    """
    load = await _make(plan)
    slots = max(1, round((plan.lead + plan.seconds) / SLOT))
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
                took = time.perf_counter() - began
                shares = (time.process_time() - used) / took, (starvation() - starved) / took
            elif on_progress is not None and number % TOLD_EVERY == 0:
                on_progress(LoadProgress(number * SLOT, slots * SLOT, load.answers))

        await load.run(slots, min(plan.grace, plan.timeout), tick)
    finally:
        await load.close()
        gc.enable()
    return account(plan, load, *shares)


def measure(plan: LoadPlan, *, on_progress: OnProgress | None = None) -> Round:
    """In a process of its own. Raises CliError."""
    boot = _BOOT.format(
        path=[place for place in sys.path if place]
    )  # as here, and nothing from the working directory
    command = [
        sys.executable,
        "-c",
        boot,
    ]  # in a session of its own: Ctrl-C is for this process, which ends it
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            pickle.dump(plan, child.stdin)
            child.stdin.flush()  # it stays open: its end tells the child that the parent is gone
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


def most_connections() -> int:
    """That this process may have, beside its other files."""
    try:
        import resource
    except ImportError:  # Windows
        return MOST_CONNECTIONS
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return (
        MOST_CONNECTIONS
        if most == resource.RLIM_INFINITY
        else max(1, min(MOST_CONNECTIONS, most - OTHER_FILES))
    )


def _no_connection(plan: LoadPlan, error: OSError) -> str:
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return (
            f"{plan.connections} connections are more than this machine lets the generator have"
            f" ({error.strerror}): raise ulimit -n"
        )
    if isinstance(error, ssl.SSLError):
        return f"{plan.url}: {distrust(error, address='--against', trust=TRUST)}"
    return (
        f"no server answers at {plan.url} ({error.strerror or error}); start it, or give another"
        " address"
    )


def starvation() -> float:
    """Seconds that this process has been ready to run and waited for a core; 0 where the kernel
    does not count them.
    """
    counts = Path("/proc/self/schedstat")
    return int(counts.read_text().split()[1]) / 1e9 if counts.exists() else 0.0


async def _make(plan: LoadPlan) -> Load:
    if plan.protocol in GRPC:  # each here, as its package may be absent
        from tsx_cli.bench.load.rpc import connector, rendered
    else:
        from tsx_cli.bench.load.connection import connector, rendered
    try:
        requests, connect = rendered(plan), connector(plan)
    except OSError as error:
        raise CliError(f"{plan.certificate} cannot be read as a certificate: {error}") from error
    if plan.mode == "closed":
        return ClosedLoop(connect, requests, plan.connections, plan.timeout)
    return OpenLoop(
        connect, requests, plan.connections, plan.timeout, due_times(plan, plan.lead + plan.seconds)
    )


def main() -> None:
    """The process of its own: a plan comes in by stdin, progress and the result go out by stdout, a
    line of JSON each.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent, which waits for the result, decides
    raise_file_limit()  # a thousand connections are more than a shell lets its programs have
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # nothing else goes out there

    def tell(**what: Any) -> None:
        print(json.dumps(what), file=out, flush=True)

    try:
        plan = pickle.load(sys.stdin.buffer)
        if plan.cores:
            os.sched_setaffinity(0, plan.cores)
        measured = _run(_main(plan, lambda progress: tell(progress=list(progress))))
    except (EOFError, pickle.UnpicklingError):  # who wanted it was interrupted
        return
    except CliError as error:
        tell(error=error.message, usage=isinstance(error, UsageError))
        return
    tell(result=measured.model_dump(mode="json"))


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
