"""Files of the working directory that are called as Python's modules are: nothing of tsx runs
them.
"""

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
from tests.support.servers import clean, environment_of, started
from tsx_cli.serve import background
from tsx_runtime.core.workers.forked import _no_main, _started_clean
from tsx_runtime.core.workers.launch import Launch
from tsx_runtime.shared.safe_path import CLEAN, run_module
from tsx_runtime.worker.launch.group import RANK_BOOT

pytestmark = pytest.mark.usefixtures("processes")

NAMES = (
    "json",
    "torch",
    "yaml",
    "typing",
    "logging",
    "numpy",
    "socket",
    "selectors",
    "signal",
    "struct",
    "ctypes",
    "contextlib",
    "pathlib",
    "__future__",
    "multiprocessing",
    "tempfile",
    "threading",
    "subprocess",
    "traceback",
    "random",
    "http",
    "typer",
    "psutil",
)


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A directory whose files leave a mark where they are run."""
    place = tmp_path / "hostile"
    place.mkdir()
    for name in NAMES:
        mark = str(tmp_path / f"ran-{name}")
        (place / f"{name}.py").write_text(
            f"import os\nos.close(os.open({mark!r}, os.O_CREAT))\nraise SystemExit(9)\n"
        )
    return place


def ran(hostile: Path) -> list[str]:
    return sorted(path.name for path in hostile.parent.glob("ran-*"))


def run(words: list[str], place: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    env = clean(environment)
    return subprocess.run(
        words,
        cwd=place,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def test_a_server_and_its_workers_run_no_file_of_the_working_directory(
    hostile: Path, tmp_path: Path
) -> None:
    make_model(
        tmp_path / "m.mar", "def handle(data, context):\n    return data and ['ok'] * len(data)\n"
    )
    words = [
        "serve",
        tmp_path / "m.mar",
        "--port",
        "0",
        "--management-port",
        "0",
        "--metrics-port",
        "0",
    ]
    environment = {
        "PYTHONPATH": f"{tmp_path}{os.pathsep}",
        "TSX_CACHE_DIR": str(tmp_path / "cache"),
        "TSX_WORKER_PRELOAD": "true",
    }
    command = [Path(sys.executable).with_name("tsx"), *map(str, words)]
    with started(command, hostile, environment) as server:
        assert server.address("predictions").startswith("http:")
    assert ran(hostile) == []


ECHO, VERSION = ["echo", "a word"], ["--version"]


@pytest.mark.parametrize("python_path", [None, "elsewhere:"])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([*run_module("tsx_runtime.targets.entry"), *ECHO], "a word\n"),
        (run_module("tsx_runtime.targets.health"), ""),
        ([*run_module("pip"), *VERSION], "pip "),
        (background.command(["--help"])[1:], "TorchServe's command"),
    ],
    ids=["entry", "health", "pip", "torchserve"],
)
def test_a_program_of_tsx_runs_no_file_of_the_working_directory(
    hostile: Path, words: list[str], said: str, python_path: str | None
) -> None:
    done = run(
        [sys.executable, *words], hostile, **({"PYTHONPATH": python_path} if python_path else {})
    )
    assert ran(hostile) == [], done.stderr
    assert said in done.stdout, done.stderr


@pytest.mark.parametrize(
    "words",
    [["tsx_runtime.targets.entry", *ECHO], ["tsx_runtime.targets.health"], ["tsx_cli", *VERSION]],
)
def test_nor_does_one_that_is_started_by_m_beyond_what_python_itself_imports(
    hostile: Path, words: list[str]
) -> None:
    for name in ("contextlib", "threading", "typing"):
        (hostile / f"{name}.py").unlink()
    done = run([sys.executable, "-m", *words], hostile)
    assert ran(hostile) == [], done.stderr


def test_a_worker_that_is_a_program_runs_no_file_of_the_working_directory(hostile: Path) -> None:
    front, back = socket.socketpair()
    front.close()
    with back:
        done = subprocess.run(
            Launch().command(back.fileno(), None),
            cwd=hostile,
            pass_fds=[back.fileno()],
            capture_output=True,
            timeout=120,
            check=False,
        )
    assert ran(hostile) == [], done.stderr
    words = [
        sys.executable,
        "-c",
        RANK_BOOT,
        json.dumps([place for place in sys.path if place]),
        "{}",
    ]
    done = subprocess.run(words, cwd=hostile, capture_output=True, check=False)
    assert ran(hostile) == []
    assert b"TypeError: run_rank() missing" in done.stderr


def test_a_spawned_process_has_neither_the_working_directory_on_its_path_nor_a_hidden_variable(
    hostile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(hostile)
    monkeypatch.setenv("PLANTED", "1")
    process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    with _no_main(), _started_clean(["PLANTED"]):
        process.start()
    assert process.pid is not None
    variables = environment_of(process.pid)
    command = psutil.Process(process.pid).cmdline()
    process.kill()
    process.join(120)
    assert any(word.startswith(CLEAN) for word in command)
    assert "PATH" in variables
    assert "PLANTED" not in variables


def test_a_spawned_process_runs_no_file_of_the_working_directory(
    hostile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(hostile)
    process = multiprocessing.get_context("spawn").Process(target=time.time)
    with _no_main(), _started_clean([]):
        process.start()
    process.join(120)
    assert (process.exitcode, ran(hostile)) == (0, [])


def test_what_a_person_names_in_pythonpath_stays(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("")
    program = (
        "from tsx_runtime.shared.safe_path import remove_working_directory as leave; leave(); "
        "import mine, os; print(os.environ['PYTHONPATH'])"
    )
    for python_path in (str(tmp_path), f"{tmp_path}{os.pathsep}", "."):
        done = run([sys.executable, "-c", program], tmp_path, PYTHONPATH=python_path)
        assert done.stdout.strip() == python_path.rstrip(os.pathsep), done.stderr
