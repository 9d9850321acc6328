"""The generator's process: it reads a plan from stdin, and writes progress and result to stdout, a line of JSON each."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from typing import Any

from tsx_cli.bench.generator.plan import LoadPlan, read_plan
from tsx_cli.bench.generator.run import run_load
from tsx_cli.common.failure import CliError, UsageError
from tsx_runtime.core.placement.file_limits import raise_limit


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent, which waits for the result, decides
    raise_limit()  # a thousand connections are more than a shell lets its programs have
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # nothing else goes out there

    def tell(**what: Any) -> None:
        print(json.dumps(what), file=out, flush=True)

    try:
        plan = read_plan(sys.stdin.buffer)
        if plan is None:
            return
        measured = _run(_main(plan, lambda progress: tell(progress=list(progress))))
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
