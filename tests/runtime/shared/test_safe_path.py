"""Files in the working directory that are named like Python modules: tsx never runs them."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.support.models import make_model
from tests.support.servers import FREE_PORTS, clean, environment_of, started
from tsx_cli.serve import background
from tsx_runtime.core.workers.forked import _clean_start, _main_hidden
from tsx_runtime.core.workers.launch import Launch
from tsx_runtime.shared.safe_path import CLEAN, run_module
from tsx_runtime.worker.launch.group import RANK_PROGRAM

pytestmark = pytest.mark.usefixtures("processes")

NAMES = (
    "json torch yaml typing logging numpy socket selectors signal struct ctypes contextlib pathlib "
    "__future__ multiprocessing tempfile threading subprocess traceback random http typer psutil"
)
RELATIVE_PYTHONPATH = {"PYTHONPATH": "elsewhere:"}


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """Make a directory whose files create a marker file when they are run."""
    directory = tmp_path / "hostile"
    directory.mkdir()
    for name in NAMES.split():
        mark = str(tmp_path / f"ran-{name}")
        (directory / f"{name}.py").write_text(
            f"import os\nos.close(os.open({mark!r}, os.O_CREAT))\nraise SystemExit(9)\n"
        )
    return directory


def marks(hostile: Path) -> list[str]:
    return sorted(path.name for path in hostile.parent.glob("ran-*"))


def run(
    arguments: list[str], directory: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=directory,
        env=clean(environment),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def test_server_and_workers_run_no_file_of_the_working_directory(
    hostile: Path, tmp_path: Path
) -> None:
    handler = "def handle(data, context):\n    return data and ['ok'] * len(data)\n"
    archive = make_model(tmp_path / "m.mar", handler)
    environment = {
        "PYTHONPATH": f"{tmp_path}{os.pathsep}",
        "TSX_CACHE_DIR": str(tmp_path / "cache"),
        "TSX_WORKER_PRELOAD": "true",
    }
    command = [Path(sys.executable).with_name("tsx"), "serve", archive, *FREE_PORTS]
    with started(command, hostile, environment) as server:
        assert server.address("predictions").startswith("http:")
    assert marks(hostile) == []


ECHO, VERSION = ["echo", "a word"], ["--version"]


@pytest.mark.parametrize(
    ("arguments", "output", "environment"),
    [
        ([*run_module("tsx_runtime.targets.entry"), *ECHO], "a word\n", {}),
        ([*run_module("tsx_runtime.targets.entry"), *ECHO], "a word\n", RELATIVE_PYTHONPATH),
        (run_module("tsx_runtime.targets.health"), "", {}),
        ([*run_module("pip"), *VERSION], "pip ", {}),
        (background.command(["--help"])[1:], "TorchServe's command", {}),
        (background.command(["--help"])[1:], "TorchServe's command", RELATIVE_PYTHONPATH),
    ],
    ids=["entry", "entry with a path", "health", "pip", "torchserve", "torchserve with a path"],
)
def test_tsx_programs_run_no_file_of_the_working_directory(
    hostile: Path, arguments: list[str], output: str, environment: dict[str, str]
) -> None:
    program = run(arguments, hostile, **environment)
    assert marks(hostile) == [], program.stderr
    assert output in program.stdout, program.stderr


@pytest.mark.parametrize(
    "arguments",
    [["tsx_runtime.targets.entry", *ECHO], ["tsx_runtime.targets.health"], ["tsx_cli", *VERSION]],
)
def test_a_program_started_with_m_runs_only_what_python_imports(
    hostile: Path, arguments: list[str]
) -> None:
    for name in ("contextlib", "threading", "typing"):
        (hostile / f"{name}.py").unlink()
    program = run(["-m", *arguments], hostile)
    assert marks(hostile) == [], program.stderr


def test_a_worker_program_runs_no_file_of_the_working_directory(hostile: Path) -> None:
    front_socket, back_socket = socket.socketpair()
    front_socket.close()
    with back_socket:
        program = subprocess.run(
            Launch().command(back_socket.fileno(), None),
            cwd=hostile,
            pass_fds=[back_socket.fileno()],
            capture_output=True,
            timeout=120,
            check=False,
        )
    assert marks(hostile) == [], program.stderr
    path = json.dumps([directory for directory in sys.path if directory])
    rank = run(["-c", RANK_PROGRAM, path, "{}"], hostile)
    assert marks(hostile) == []
    assert "TypeError: run_rank() missing" in rank.stderr


def test_a_spawned_process_has_a_safe_path_and_no_hidden_variable(
    hostile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(hostile)
    monkeypatch.setenv("PLANTED", "1")
    process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    with _main_hidden(), _clean_start(["PLANTED"]):
        process.start()
    assert process.pid is not None
    variables = environment_of(process.pid)
    command = psutil.Process(process.pid).cmdline()
    process.kill()
    process.join(120)
    assert any(argument.startswith(CLEAN) for argument in command)
    assert "PATH" in variables
    assert "PLANTED" not in variables


def test_a_spawned_process_runs_no_file_of_the_working_directory(
    hostile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(hostile)
    process = multiprocessing.get_context("spawn").Process(target=time.time)
    with _main_hidden(), _clean_start([]):
        process.start()
    process.join(120)
    assert (process.exitcode, marks(hostile)) == (0, [])


def test_explicit_pythonpath_entries_are_kept(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("")
    program = (
        "from tsx_runtime.shared.safe_path import remove_working_directory as leave; leave(); "
        "import mine, os; print(os.environ['PYTHONPATH'])"
    )
    for path in (f"{tmp_path}{os.pathsep}", "."):
        result = run(["-c", program], tmp_path, PYTHONPATH=path)
        assert result.stdout.strip() == path.rstrip(os.pathsep), result.stderr
