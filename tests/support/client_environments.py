"""The clients of OpenAI's API that other programs use, each in an environment of its own.

An environment is made at its first use, from PyPI or npm, and kept for later runs.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import venv
from pathlib import Path

import pytest

from benchmarks import servers

# The versions of the table in docs/guides/openai.md.
PYTHON_CLIENTS = {
    "instructor": "instructor==1.17.0",
    "litellm": "litellm==1.110.2",
    "llama-index": "llama-index-llms-openai-like==0.8.1",
    "openai-agents": "openai-agents==0.24.0",
    "pydantic-ai": "pydantic-ai-slim[openai]==2.68.0",
}
NODE_CLIENTS = {"ai": "7.0.173", "@ai-sdk/openai-compatible": "3.0.92"}
# What the AI SDK needs beside it; Debian's Node is too old for it.
NODE_PACKAGES = {**NODE_CLIENTS, "node": "22.23.3", "zod": "4.6.7"}


def cache_directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tsx-tests"


def python_of(client: str) -> Path:
    """Return the interpreter that has a client; skip the test where it cannot be installed."""
    requirement = PYTHON_CLIENTS[client]
    directory = cache_directory() / client
    python = directory / "bin" / "python"
    if _is_made(directory, label := f"Python {platform.python_version()}: {requirement}"):
        return python
    venv.create(directory, with_pip=True)
    _install([python, "-m", "pip", "install", "--quiet", "--no-input", requirement], directory)
    _finish(directory, label)
    return python


def node_packages() -> Path:
    """Return a directory with the AI SDK; skip the test where it cannot be installed."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("needs npm (on Debian: apt install npm)")
    directory = cache_directory() / "ai-sdk"
    if _is_made(directory, label := json.dumps({"dependencies": NODE_PACKAGES})):
        return directory
    directory.mkdir(parents=True)
    (directory / "package.json").write_text(label)
    _install([npm, "install", "--silent", "--no-audit", "--no-fund"], directory)
    _finish(directory, label)
    return directory


def _is_made(directory: Path, label: str) -> bool:
    """Tell whether an environment is complete; remove an incomplete or outdated one."""
    file = directory / "made-of.txt"
    if file.exists() and file.read_text() == label:
        return True
    shutil.rmtree(directory, ignore_errors=True)
    return False


def _finish(directory: Path, label: str) -> None:
    (directory / "made-of.txt").write_text(label)


def _install(command: list[str | Path], directory: Path) -> None:
    finished = subprocess.run(
        command,
        cwd=directory,
        env=servers.foreign_environment(),
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    if finished.returncode:
        reason = (finished.stderr.strip().splitlines() or [f"it ended with {finished.returncode}"])[
            -1
        ]
        pytest.skip(f"{Path(command[0]).name} could not install the client ({reason})")
