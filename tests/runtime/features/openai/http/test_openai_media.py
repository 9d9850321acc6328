"""Images in chats with a model behind a real server."""

from __future__ import annotations

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.runtime.features.openai.http.conftest import client_of
from tests.runtime.sources.conftest import http_server, send
from tests.support.language_models import generation_model
from tests.support.multimodal_models import image_part, png, text_part, tiny_model

IMAGE = png()


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with http_server(
        lambda request: send(request, 200, IMAGE, Content_Length=len(IMAGE))
    ) as port:
        yield port


@pytest.fixture(scope="module")
def client(
    port: int, tmp_path_factory: pytest.TempPathFactory, start_server: Any
) -> Iterator[openai.OpenAI]:
    directory = tmp_path_factory.mktemp("media")
    model = generation_model(
        directory / "eyes",
        tiny_model(directory / "weights", "llava"),
        config="minWorkers: 1\nmaxWorkers: 1\nresponseTimeout: 120\n",
    )
    with (
        start_server(
            archives=[str(model)], trust_model_code=True, allowed_urls=[f"127.0.0.1:{port}"]
        ) as server,
        client_of(server) as client,
    ):
        yield client
