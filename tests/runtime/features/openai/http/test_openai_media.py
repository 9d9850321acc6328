"""Images in chats with a model behind a real server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.runtime.sources.conftest import http_server, send
from tests.support.language_models import generation_model
from tests.support.multimodal_models import image_part, png, text_part, tiny_model
from tests.support.servers import FREE_PORTS, serving

IMAGE = png()

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("processes")]


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with http_server(lambda request: send(request, 200, IMAGE, Content_Length=len(IMAGE))) as port:
        yield port


@pytest.fixture(scope="module")
def client(port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    directory = tmp_path_factory.mktemp("media")
    weights = tiny_model(directory / "weights", "llava")
    model = generation_model(directory / "eyes", weights, config="minWorkers: 1\nmaxWorkers: 1\n")
    environment = {
        "TSX_CACHE_DIR": str(directory / "cache"),
        "TSX_STATE_DIR": str(directory / "state"),
        "TSX_ALLOWED_URLS": f"127.0.0.1:{port}",
    }
    with (
        serving(["serve", model, *FREE_PORTS], directory, environment) as server,
        openai.OpenAI(
            base_url=f"{server.address('predictions')}/v1", api_key="x", max_retries=0
        ) as client,
    ):
        yield client


def answer(client: openai.OpenAI, *content: Any) -> Any:
    return client.chat.completions.create(
        model="eyes",
        messages=[{"role": "user", "content": [*content, text_part("What is it?")]}],
        max_tokens=8,
        temperature=0,
    )


def test_an_image_may_be_a_data_url_or_an_allowed_url(client: openai.OpenAI, port: int) -> None:
    url = {"type": "image_url", "image_url": {"url": f"http://127.0.0.1:{port}/a.png"}}
    inline, fetched = answer(client, image_part(IMAGE)), answer(client, url)
    assert inline.choices[0].message.content == fetched.choices[0].message.content
    assert inline.usage.prompt_tokens == answer(client).usage.prompt_tokens + 4
    stream = client.chat.completions.create(
        model="eyes",
        messages=[{"role": "user", "content": [image_part(IMAGE), text_part("What is it?")]}],
        max_tokens=8,
        temperature=0,
        stream=True,
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == inline.choices[0].message.content


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/a.png", "data:image/png;base64,aGVsbG8="])
def test_an_image_that_cannot_be_read_is_refused(client: openai.OpenAI, url: str) -> None:
    with pytest.raises(openai.BadRequestError) as exc_info:
        answer(client, {"type": "image_url", "image_url": {"url": url}})
    assert exc_info.value.param == "messages[0].content[0].image_url"
