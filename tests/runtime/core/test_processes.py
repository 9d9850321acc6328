"""Processes that workers come from, and what a Ctrl-C at the terminal, which reaches all of them, does there."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from multiprocessing import forkserver
from pathlib import Path

import pytest

from tsx_runtime import wire
from tsx_runtime.core.jobs import WaitingJob
from tsx_runtime.core.local import open_model
from tsx_runtime.settings import Settings

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

HANDLER = """
import json, signal

def handle(data, context):
    if data is None:
        return None
    state = [signal.getsignal(signal.SIGINT) == signal.SIG_IGN, signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])]
    return [json.dumps(state) for _ in data]
"""


def blocked(pid: int) -> int:
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigBlk:")]
    return int(line.split()[1], 16)


async def ask(directory: Path, settings: Settings) -> list[bool]:
    async with open_model(directory, settings) as version:
        job = WaitingJob(wire.request_meta("id", b"", []), b"", time.monotonic())
        version.submit(job)
        answer = await asyncio.wait_for(job.done, 30)
        return json.loads(await answer.whole())


def test_ctrl_c_is_no_traceback_while_torch_is_imported(tmp_path):
    (tmp_path / "handler.py").write_text(HANDLER)
    ignored, held_back = asyncio.run(ask(tmp_path, Settings(default_service_handler="handler.py")))
    assert blocked(forkserver._forkserver._forkserver_pid) & 1 << (signal.SIGINT - 1)  # from its first moment on
    assert ignored
    assert not held_back  # what a handler starts could otherwise not be interrupted
