"""A server whose models answer OpenAI's API, and its client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.models import make_model
from tests.support.openai_models import COUNTER, WRITER

ASYNC = "minWorkers: 1\nmaxWorkers: 1\nasyncCommunication: true\n"
TOKEN = "sesame"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


@pytest.fixture(scope="session")
def openai_server(store: Path, start_server: Any) -> Iterator[Any]:
    for version in ("1.0", "2.0"):
        make_model(
            store / f"writer{version}.mar", WRITER, name="writer", version=version, config=ASYNC
        )
    make_model(store / "counter.mar", COUNTER)
    with start_server(inference_token=TOKEN, access_log=True, log_format="json") as server:
        server.register("writer1.0.mar", initial_workers=1)
        server.register("writer2.0.mar", initial_workers=1)
        server.register("counter.mar", initial_workers=1)
        yield server


@contextmanager
def client_of(server: Any, **options: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.addresses['inference']}/v1",
        **{"api_key": TOKEN, "max_retries": 0} | options,
    ) as client:
        yield client


@pytest.fixture
def client(openai_server: Any) -> Iterator[openai.OpenAI]:
    with client_of(openai_server) as client:
        yield client


@pytest.fixture
def chat(client: openai.OpenAI) -> Callable[..., Any]:
    """Return a function by which OpenAI's client makes `writer` answer with `reply`."""

    def create_completion(reply: str = "x", **parameters: Any) -> Any:
        defaults = {"model": "writer", "messages": messages(reply)}
        return client.chat.completions.create(**defaults | parameters)

    return create_completion


def messages(reply: str) -> list[Any]:
    """Return chat messages that make the model `writer` answer with this text."""
    return [{"role": "user", "content": f"say {reply}"}]
