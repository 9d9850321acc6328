"""OpenAI's client at limits per client, with wrong keys, and over https."""

from __future__ import annotations

import json
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.kit.clock import Clock
from tests.runtime.api.access.test_client_limits import use_clock
from tests.runtime.features.openai.http.conftest import ASYNC, messages
from tests.support.certificates import make_certificate
from tests.support.models import make_model
from tests.support.openai_models import COUNTER, WRITER
from tsx_runtime.testing import ServerUnderTest, serve

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("processes")]
RATE = 4
Call = Callable[[openai.OpenAI], Any]
CALLS: list[Call] = [
    lambda client: client.embeddings.create(model="counter", input="ab"),
    lambda client: client.audio.transcriptions.create(model="counter", file=b"hello"),
    lambda client: list(
        client.chat.completions.create(model="writer", messages=messages("hi"), stream=True)
    ),
    lambda client: client.models.list(),
]


@pytest.fixture(scope="module")
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("guarded")


@pytest.fixture(scope="module")
def limits_server(directory: Path, clock: Clock) -> Iterator[ServerUnderTest]:
    """Run a server at an https address with generated keys.

    Its trusted proxy is 127.0.0.1, so that each test can use its own client addresses.
    """
    pair = make_certificate(directory)
    archives = (
        make_model(directory / "counter.mar", COUNTER),
        make_model(directory / "writer.mar", WRITER, config=ASYNC),
    )
    settings: dict[str, Any] = {
        "inference_address": "https://127.0.0.1:0",
        "certificate_file": pair.certificate,
        "private_key_file": pair.key,
        "generate_tokens": True,
        "key_file": directory / "keys.json",
        "disable_token_authorization": False,
        "max_requests_per_client": RATE,
        "max_failed_tokens": 1,
        "trusted_proxies": ["127.0.0.1"],
        "cache_dir": directory / "cache",
        "worker_preload": False,
    }
    with pytest.MonkeyPatch.context() as patch:
        use_clock(patch, clock)
        with serve(*archives, **settings) as server:
            yield server


def key_of(directory: Path, kind: str) -> str:
    return str(json.loads((directory / "keys.json").read_text())[kind]["key"])


@contextmanager
def proxied_client(
    server: ServerUnderTest, directory: Path, address: str, **options: Any
) -> Iterator[openai.OpenAI]:
    """Make a client that appears at `address` behind the proxy and trusts the certificate."""
    http = httpx.Client(verify=ssl.create_default_context(cafile=directory / "tls.pem"))
    defaults: dict[str, Any] = {
        "api_key": key_of(directory, "inference"),
        "max_retries": 0,
        "default_headers": {"x-forwarded-for": address},
    }
    with openai.OpenAI(
        base_url=f"{server.url}/v1", http_client=http, **defaults | options
    ) as client:
        yield client


def test_answers_over_https_are_the_same(limits_server: ServerUnderTest, directory: Path) -> None:
    with proxied_client(limits_server, directory, "203.0.113.1") as client:
        embeddings, transcription, chunks, models = (call(client) for call in CALLS)
    assert embeddings.data[0].embedding == [1.0, 1.0, 0.0]
    assert transcription.text == "hello"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "hi"
    assert [model.id for model in models] == ["counter", "writer"]
    with (
        openai.OpenAI(
            base_url=f"{limits_server.url}/v1", api_key="x", max_retries=0
        ) as untrusting_client,
        pytest.raises(openai.APIConnectionError),
    ):
        untrusting_client.models.list()


def test_requests_beyond_the_limit_are_refused_with_retry_after(
    limits_server: ServerUnderTest, directory: Path, clock: Clock
) -> None:
    with proxied_client(limits_server, directory, "203.0.113.2") as client:
        for call in CALLS[:RATE]:
            call(client)
        for call in CALLS:
            with pytest.raises(openai.RateLimitError, match="max_requests_per_client") as exc_info:
                call(client)
            assert exc_info.value.type == "rate_limit_error"
            assert exc_info.value.code == "rate_limit_exceeded"
            assert exc_info.value.response.headers["retry-after"] == "1"
        clock.now += 1
        CALLS[0](client)


def test_wrong_keys_are_refused_and_too_many_are_limited(
    limits_server: ServerUnderTest, directory: Path
) -> None:
    with proxied_client(
        limits_server, directory, "203.0.113.3", api_key="wrong"
    ) as guessing_client:
        for call in (CALLS[0], CALLS[3]):
            with pytest.raises(openai.AuthenticationError) as exc_info:
                call(guessing_client)
            assert exc_info.value.type == "invalid_request_error"
            assert exc_info.value.code == "invalid_api_key"
            assert exc_info.value.response.headers["www-authenticate"] == "Bearer"
        with pytest.raises(openai.RateLimitError, match="max_failed_tokens") as refusal:
            CALLS[0](guessing_client)
        assert int(refusal.value.response.headers["retry-after"]) >= 1
    with proxied_client(limits_server, directory, "203.0.113.3") as right:
        CALLS[0](right)
