"""The fork server of workers: its signals and its sockets."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

from tests.kit.jobs import a_waiting_job, answer_of
from tsx_runtime.core.registry.standalone import open_model
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


def read_signals(signal_set: str, status: str) -> int:
    (line,) = [line for line in status.splitlines() if line.startswith(f"{signal_set}:")]
    return int(line.split()[1], 16)


async def ask_model(directory: Path, **settings: Any) -> str:
    """Serve a model in this process and return the /proc status of a program that it starts."""
    (directory / "handler.py").write_text(HANDLER)
    values = Settings(default_service_handler="handler.py", **settings)
    async with open_model(directory, values) as version:
        version.submit(job := a_waiting_job())
        return (await (await answer_of(job)).read_all(1 << 20)).decode()


@pytest.mark.usefixtures("processes")
def test_ctrl_c_stops_handler_programs_but_not_the_fork_server(tmp_path):
    status = asyncio.run(ask_model(tmp_path))
    assert not read_signals("SigIgn", status) & STOPS
    assert not read_signals("SigBlk", status) & STOPS
    server = Path(f"/proc/{forkserver._forkserver._forkserver_pid}/status").read_text()
    assert read_signals("SigBlk", server) & STOPS == STOPS


SERVE_SCRIPT = """
import asyncio, sys
from multiprocessing import util
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.runtime.core.workers.test_forked import ask_model

print("SigIgn" in asyncio.run(ask_model(Path(sys.argv[2]), worker_preload=False)))
print(util.get_temp_dir())
"""


def serve_with_tmpdir(directory: Path, tmpdir: Path) -> tuple[str, str]:
    """Serve a model in a program; return whether it answered, and the directory of its sockets."""
    command = [sys.executable, "-c", SERVE_SCRIPT, str(Path(__file__).parents[4]), str(directory)]
    environment = os.environ | {"TMPDIR": str(tmpdir)}
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    has_answered, sockets = result.stdout.splitlines()
    return has_answered, sockets


@pytest.mark.usefixtures("processes")
def test_workers_start_with_a_long_tmpdir_path(tmp_path):
    directory = tmp_path / ("long" * 30)
    directory.mkdir()
    assert serve_with_tmpdir(tmp_path, directory)[0] == "True"


@pytest.mark.usefixtures("processes")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
def test_sockets_are_not_in_directories_of_other_users(tmp_path, short_path, monkeypatch):
    """Refuse these, since the owner could replace the directory and receive start requests."""
    foreign_directory = short_path / "theirs"
    foreign_directory.mkdir()
    foreign_directory.chmod(0o1777)
    os.chown(foreign_directory, 54321, 54321)
    has_answered, sockets = serve_with_tmpdir(tmp_path, foreign_directory)
    assert has_answered == "True"
    assert not sockets.startswith(str(foreign_directory))
    monkeypatch.setattr(tempfile, "tempdir", str(foreign_directory))
    monkeypatch.setattr(socket_paths, "SHORT_DIRECTORIES", ("/absent",))
    with pytest.raises(SettingError, match=r"theirs belongs to another user \(uid 54321\)"):
        ProcessStarter()


def test_the_error_without_a_usable_socket_path_says_what_to_do(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/" + "long" * 30)
    monkeypatch.setattr(socket_paths, "SHORT_DIRECTORIES", ("/absent",))
    with pytest.raises(SettingError, match=r"^TMPDIR is /long.* at most 64 characters"):
        ProcessStarter()
