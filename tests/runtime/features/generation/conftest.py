"""A tiny language model, and the event loop of its engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.worker.conftest import start_shared_worker as start_shared_worker
from tests.runtime.worker.conftest import start_worker as start_worker
from tests.support.language_models import lora_adapter, tiny_llama

Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="session")
def adapters(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("adapters")
    return {
        name: lora_adapter(llama, directory / name, seed)
        for seed, name in enumerate(("polite", "terse"), 1)
    }


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    loop = asyncio.new_event_loop()
    yield lambda coroutine: loop.run_until_complete(asyncio.wait_for(coroutine, 60))
    loop.close()
