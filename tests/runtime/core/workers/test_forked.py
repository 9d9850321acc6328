"""The fork server of workers: its signals and its sockets."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing import forkserver
from pathlib import Path

import pytest

from tests.kit.jobs import answer_of
from tsx_runtime import wire
from tsx_runtime.core.registry.registry import open_model
from tsx_runtime.core.scheduling.job import WaitingJob
from tsx_runtime.core.workers.forked import ProcessStarter
from tsx_runtime.errors import SettingError
from tsx_runtime.settings.schema import Settings
from tsx_runtime.shared import socket_paths

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

HANDLER = """
import subprocess

def handle(data, context):
    if data is None:
        return None
    return [subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True, check=True).stdout for _ in data]
"""
STOPS = (1 << (signal.SIGINT - 1)) | (1 << (signal.SIGTERM - 1))


def signals(which: str, status: str) -> int:
    (line,) = [line for line in status.splitlines() if line.startswith(f"{which}:")]
    return int(line.split()[1], 16)


async def ask(directory: Path, settings: Settings) -> str:
    async with open_model(directory, settings) as version:
        job = WaitingJob(wire.request_meta("id", b"", []), b"", time.monotonic())
        version.submit(job)
        answer = await answer_of(job)
        return (await answer.whole(1 << 20)).decode()


@pytest.mark.usefixtures("processes")
def test_ctrl_c_is_no_traceback_while_torch_is_imported(tmp_path):
    (tmp_path / "handler.py").write_text(HANDLER)
    asyncio.run(ask(tmp_path, Settings(default_service_handler="handler.py")))
    status = Path(f"/proc/{forkserver._forkserver._forkserver_pid}/status").read_text()
    assert signals("SigBlk", status) & STOPS == STOPS


@pytest.mark.usefixtures("processes")
def test_a_program_that_a_handler_starts_can_be_stopped(tmp_path):
    (tmp_path / "handler.py").write_text(HANDLER)
    status = asyncio.run(ask(tmp_path, Settings(default_service_handler="handler.py")))
    assert not signals("SigIgn", status) & STOPS
    assert not signals("SigBlk", status) & STOPS


LONG_TMPDIR = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.runtime.core.workers.test_forked import ask
from tsx_runtime.settings.schema import Settings

directory = Path(sys.argv[2])
print("SigIgn" in asyncio.run(ask(directory, Settings(default_service_handler="handler.py", worker_preload=False))))
"""


@pytest.mark.usefixtures("processes")
def test_workers_start_however_long_the_path_of_tmpdir_is(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "handler.py").write_text(HANDLER)
    directory = tmp_path / ("long" * 30)
    directory.mkdir()
    command = [
        sys.executable,
        "-c",
        LONG_TMPDIR,
        str(Path(__file__).parents[4]),
        str(tmp_path / "model"),
    ]
    ended = subprocess.run(
        command,
        env=os.environ | {"TMPDIR": str(directory)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.stdout == "True\n", ended.stderr


@pytest.mark.usefixtures("processes")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
def test_sockets_lie_in_no_directory_of_another_user(tmp_path, short_path, monkeypatch):
    """The owner could replace the directory, and be asked for workers."""
    theirs = short_path / "theirs"
    theirs.mkdir()
    theirs.chmod(0o1777)
    os.chown(theirs, 54321, 54321)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "handler.py").write_text(HANDLER)
    source = LONG_TMPDIR + "from multiprocessing import util\nprint(util.get_temp_dir())\n"
    command = [
        sys.executable,
        "-c",
        source,
        str(Path(__file__).parents[4]),
        str(tmp_path / "model"),
    ]
    ended = subprocess.run(
        command,
        env=os.environ | {"TMPDIR": str(theirs)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    started, directory = ended.stdout.splitlines()
    assert started == "True", ended.stderr
    assert not directory.startswith(str(theirs))
    monkeypatch.setattr(tempfile, "tempdir", str(theirs))
    monkeypatch.setattr(socket_paths, "SHORT", ("/absent",))
    with pytest.raises(SettingError, match=r"theirs belongs to another user \(uid 54321\)"):
        ProcessStarter()


def test_where_no_socket_can_be_it_is_said_what_to_do(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/" + "long" * 30)
    monkeypatch.setattr(socket_paths, "SHORT", ("/absent",))
    with pytest.raises(
        SettingError,
        match=r"^TMPDIR is /long.*path is too long.* Set TMPDIR to .* of at most 64 characters\.$",
    ):
        ProcessStarter()
