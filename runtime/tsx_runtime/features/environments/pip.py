"""Runs pip for a new environment, with its output logged as it appears, and with a time limit."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

from tsx_runtime.features.environments.requirements import Requirements

OPTIONS = (
    "--disable-pip-version-check",
    "--no-input",
    "--no-warn-script-location",
    "--progress-bar=off",
    "--upgrade-strategy=only-if-needed",
)
# Variables that would make pip install into another directory, or install nothing.
TARGET_VARIABLES = (
    "PIP_TARGET",
    "PIP_PREFIX",
    "PIP_ROOT",
    "PIP_USER",
    "PIP_DRY_RUN",
    "PIP_PYTHON",
    "PIP_REQUIREMENT",
    "PIP_EDITABLE",
)
MAX_ERROR_LINES = 8  # last lines of pip's output that an error quotes
MAX_LINE_CHARS = 300

logger = logging.getLogger("tsx.environments")


class PipFailed(Exception):
    """pip failed; the message holds the last lines of its output, or advice."""


class PipProcesses:
    """The running pip processes, so that a stopping server can kill them."""

    def __init__(self, hidden: Collection[str] = ()) -> None:
        self.hidden = frozenset(hidden)  # variables that pip and its build programs must not see
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._is_stopping = False

    def add(self, process: subprocess.Popen[str]) -> None:
        """Register a process; it is killed at once if `kill_all` was called before."""
        with self._lock:
            self._running.add(process)
            if self._is_stopping:
                kill_group(process)

    def remove(self, process: subprocess.Popen[str]) -> None:
        with self._lock:
            self._running.discard(process)

    def kill_all(self) -> None:
        with self._lock:
            self._is_stopping = True
            for process in self._running:
                kill_group(process)


def install(
    label: str,
    environment: Path,
    model_dir: Path,
    requirements: Requirements,
    *,
    timeout: float,
    runs: PipProcesses,
) -> None:
    """Install the requirements, only from the archive's own wheels if these suffice.

    Raises:
        PipFailed: pip ended with an error, or the timeout has passed.
        OSError: pip cannot be started.
    """
    deadline = time.monotonic() + timeout
    pip_command = [str(environment / "bin" / "python"), "-I", "-m", "pip", "install", *OPTIONS]
    links = [f"--find-links={directory}" for directory in requirements.wheel_directories]
    requirement_options = ["--requirement", str(requirements.file)]
    logger.info(
        "%s: installing the packages of %s into the model's own environment",
        label,
        requirements.file,
    )
    start_time, failure = time.monotonic(), ""
    for index in (["--no-index"], []) if links else ([],):
        last_lines = _run(
            [*pip_command, *index, *links, *requirement_options], label, model_dir, deadline, runs
        )
        if last_lines is None:
            logger.info(
                "%s: its environment is ready after %.1f s", label, time.monotonic() - start_time
            )
            return
        failure = last_lines
        if index:
            logger.info(
                "%s: the archive lacks wheels of some requirements, so pip uses the package index"
                " as well",
                label,
            )
    if "No module named pip" in failure:
        failure = (
            f"pip is not installed where the server runs ({sys.prefix}). Install it there: python"
            " -m ensurepip"
        )
    raise PipFailed(failure)


def environment_of_pip(environ: Mapping[str, str]) -> dict[str, str]:
    """Return pip's variables, except those that would make it install into another directory."""
    return {
        name: value
        for name, value in environ.items()
        if name.startswith("PIP_") and name not in TARGET_VARIABLES
    }


def kill_group(process: subprocess.Popen[str]) -> None:
    """Kill a process and its children, such as compilers and git."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _run(
    command: list[str], label: str, directory: Path, deadline: float, runs: PipProcesses
) -> str | None:
    """Run pip; return None, or the last lines of its output if it failed."""
    variables = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PIP_") and name not in runs.hidden
    }
    process = subprocess.Popen(
        command,
        cwd=directory,
        env={**variables, **environment_of_pip(os.environ), "PIP_USER": "0"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    )
    timed_out = threading.Event()

    def kill_after_timeout() -> None:
        timed_out.set()
        kill_group(process)

    timer = threading.Timer(max(0.0, deadline - time.monotonic()), kill_after_timeout)
    timer.daemon = True
    runs.add(process)
    timer.start()
    last_lines: deque[str] = deque(maxlen=MAX_ERROR_LINES)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if text := line.rstrip()[:MAX_LINE_CHARS]:
                last_lines.append(text)
                logger.info("%s: pip: %s", label, text)
        code = process.wait()
    finally:
        timer.cancel()
        runs.remove(process)
        if process.poll() is None:  # An exception has interrupted the loop.
            kill_group(process)
            process.wait()
    if timed_out.is_set():
        last_lines.append(
            "It was stopped after install_timeout: raise install_timeout, or put wheels into the"
            " archive."
        )
    return (
        None
        if code == 0
        else "\n".join(last_lines) or f"pip ended with exit code {code} and printed nothing."
    )
