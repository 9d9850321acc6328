"""A model whose handler obeys the text of a request, and calls of it without a server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest

from tests.kit.jobs import TIMEOUT, a_waiting_job, answer_of
from tests.support.models import make_model
from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.models.plan import RegisterOrder
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.core.scheduling.job import WaitingJob
from tsx_runtime.settings.schema import Settings

HANDLER = """
import json, os, sys, time
from pathlib import Path

def handle(data, context):
    if data is None:
        return None
    return [act(row["body"].decode(), context) for row in data]

def act(word, context):
    if word == "exit":
        os._exit(3)
    if word == "hang":
        time.sleep(600)
    if word == "slow":
        time.sleep(0.5)
    if word.startswith("until "):  # the test decides how long
        while not Path(word[6:]).exists():
            time.sleep(0.005)
    if word == "modules":
        return json.dumps(sorted(sys.modules))
    if word == "pid":
        return str(os.getpid())
    if word == "threads":
        import torch
        return str(torch.get_num_threads())
    if word == "wait policy":
        return os.environ["OMP_WAIT_POLICY"]
    return word
"""


def talker(directory: Path, handler: str = HANDLER, **values: str) -> Path:
    return make_model(directory, handler, **{"name": "talker", **values})


def submit(version: ModelVersion, body: str, timeout: float | None = None) -> WaitingJob:
    due = None if timeout is None else time.monotonic() + timeout
    job = a_waiting_job(body.encode(), due)
    version.submit(job)
    return job


async def ask(version: ModelVersion, body: str) -> str:
    return (await answer_of(submit(version, body))).body.decode()


async def until(condition) -> None:
    """Poll a condition for which no event exists, such as a worker's state."""
    end = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        await asyncio.sleep(0.005)


async def cancel(task: asyncio.Task[Any]) -> None:
    """Cancel a call as the server does when a client disconnects, and wait for its end."""
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def gone(pid: int) -> bool:
    """Tell whether a process has ended, even if it is still a zombie."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@asynccontextmanager
async def a_registry(heartbeat: float = 2, **settings) -> AsyncIterator[Registry]:
    """Make a registry in this process, which checks its workers every `heartbeat` seconds."""
    with patch("tsx_runtime.core.models.model.HEARTBEAT_INTERVAL_S", heartbeat):
        registry = Registry(Settings(**settings))
        try:
            yield registry
        finally:
            await registry.close()


def order(**values) -> RegisterOrder:
    return RegisterOrder(url="talker", **{"initial_workers": 1, **values})


async def register(
    registry: Registry,
    path: Path,
    handler: str = HANDLER,
    *,
    name: str = "talker",
    version: str = "1.0",
    config: str = "",
    wait: bool = True,
    **values: Any,
) -> ModelVersion:
    """Write and register a model with one worker, or with the settings in `values`."""
    talker(path, handler, name=name, version=version, config=config)
    return await registry.register_path(path, order(**values), wait=wait)


async def a_talker(
    registry: Registry, directory: Path, handler: str = HANDLER, **values: Any
) -> ModelVersion:
    """Register a talking model in `directory / "m"`."""
    return await register(registry, directory / "m", handler, **values)
