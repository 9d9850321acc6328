"""OpenAI's client where it is refused for what others, or it, have sent: limits per client, keys,
full queues; and over https.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.runtime.api.access.test_client_limits import Clock, use
from tests.runtime.http.openai_api.conftest import ASYNC, client_of, said
from tests.support.certificates import make_certificate
from tests.support.models import make_model
from tests.support.openai_models import COUNTER, WRITER
from tsx_runtime.testing import ServerUnderTest, serve

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("processes")]
RATE = 4
WAIT: dict[str, Any] = {"model": "talker", "input": "a"}
Call = Callable[[openai.OpenAI], Any]
CALLS: list[Call] = [
    lambda client: client.embeddings.create(model="counter", input="ab"),
    lambda client: client.audio.transcriptions.create(model="counter", file=b"hello"),
    lambda client: list(
        client.chat.completions.create(model="writer", messages=said("hi"), stream=True)
    ),
    lambda client: client.models.list(),
]


@pytest.fixture(scope="module")
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("guarded")


@pytest.fixture(scope="module")
def guarded(place: Path, clock: Clock) -> Iterator[ServerUnderTest]:
    """An https address with keys that the server made up.

    Its proxy is 127.0.0.1, so that each test has clients of its own.
    """
    pair = make_certificate(place)
    archives = (
        make_model(place / "counter.mar", COUNTER),
        make_model(place / "writer.mar", WRITER, config=ASYNC),
    )
    tls: dict[str, Any] = {
        "inference_address": "https://127.0.0.1:0",
        "certificate_file": pair.certificate,
        "private_key_file": pair.key,
    }
    keys: dict[str, Any] = {
        "generate_tokens": True,
        "key_file": place / "keys.json",
        "disable_token_authorization": False,
    }
    limits: dict[str, Any] = {
        "max_requests_per_client": RATE,
        "max_failed_tokens": 1,
        "trusted_proxies": ["127.0.0.1"],
    }
    with pytest.MonkeyPatch.context() as patch:
        use(patch, clock)
        with serve(
            *archives, **tls, **keys, **limits, cache_dir=place / "cache", worker_preload=False
        ) as server:
            yield server


def key_of(place: Path, kind: str) -> str:
    return str(httpx.Response(200, content=(place / "keys.json").read_bytes()).json()[kind]["key"])


@contextmanager
def trusting(
    server: ServerUnderTest, place: Path, address: str, **options: Any
) -> Iterator[openai.OpenAI]:
    """A client at that address, behind the proxy."""
    http = httpx.Client(verify=ssl.create_default_context(cafile=place / "tls.pem"))
    usual: dict[str, Any] = {
        "api_key": key_of(place, "inference"),
        "max_retries": 0,
        "default_headers": {"x-forwarded-for": address},
    }
    with openai.OpenAI(base_url=f"{server.url}/v1", http_client=http, **usual | options) as client:
        yield client


def test_over_https_answers_are_the_same(guarded: ServerUnderTest, place: Path) -> None:
    with trusting(guarded, place, "203.0.113.1") as client:
        embeddings, transcription, chunks, models = (call(client) for call in CALLS)
    assert embeddings.data[0].embedding == [1.0, 1.0, 0.0]
    assert transcription.text == "hello"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "hi"
    assert [model.id for model in models] == ["counter", "writer"]
    with (
        openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="x", max_retries=0) as stranger,
        pytest.raises(openai.APIConnectionError),
    ):
        stranger.models.list()


def test_requests_beyond_the_limit_are_refused_and_say_when_to_come_again(
    guarded: ServerUnderTest, place: Path, clock: Clock
) -> None:
    with trusting(guarded, place, "203.0.113.2") as client:
        for call in CALLS[:RATE]:
            call(client)
        for call in CALLS:
            with pytest.raises(openai.RateLimitError, match="max_requests_per_client") as refused:
                call(client)
            assert (refused.value.type, refused.value.code) == (
                "rate_limit_error",
                "rate_limit_exceeded",
            )
            assert refused.value.response.headers["retry-after"] == "1"
        clock.now += 1
        CALLS[0](client)


def test_wrong_keys_are_refused_and_too_many_of_them_are_not_looked_at(
    guarded: ServerUnderTest, place: Path
) -> None:
    with trusting(guarded, place, "203.0.113.3", api_key="wrong") as guessing:
        for call in (CALLS[0], CALLS[3]):
            with pytest.raises(openai.AuthenticationError) as wrong:
                call(guessing)
            assert (wrong.value.type, wrong.value.code) == (
                "invalid_request_error",
                "invalid_api_key",
            )
            assert wrong.value.response.headers["www-authenticate"] == "Bearer"
        with pytest.raises(openai.RateLimitError, match="max_failed_tokens") as refused:
            CALLS[0](guessing)
        assert int(refused.value.response.headers["retry-after"]) >= 1
    with trusting(guarded, place, "203.0.113.3") as right:
        CALLS[0](right)


def test_a_key_that_was_renewed_is_refused_and_the_new_one_taken(
    guarded: ServerUnderTest, place: Path
) -> None:
    head = {"authorization": f"Bearer {key_of(place, 'API')}"}
    with trusting(guarded, place, "203.0.113.4") as before:
        CALLS[0](before)
        renewed = httpx.get(
            f"{guarded.addresses['management']}/token", params={"type": "inference"}, headers=head
        )
        assert renewed.status_code == 200, renewed.text
        for call in (CALLS[0], CALLS[3]):
            with pytest.raises(openai.AuthenticationError):
                call(before)
    with trusting(guarded, place, "203.0.113.4") as after:
        CALLS[0](after)


def test_a_client_with_too_many_connections_is_refused(start_server: Any) -> None:
    with (
        start_server(max_connections_per_client=2) as server,
        client_of(server) as first,
        client_of(server) as second,
    ):
        server.register("talker.mar", initial_workers=0)
        assert [each.models.list().data[0].id for each in (first, second)] == ["talker"] * 2
        with (
            client_of(server) as third,
            pytest.raises(openai.RateLimitError, match="max_connections_per_client") as refused,
        ):
            third.models.list()
        assert refused.value.response.headers["retry-after"] == "1"


def test_a_full_queue_says_when_to_come_again_and_a_model_without_workers_how_to_start_one(
    start_server: Any, tmp_path: Path, until: Any
) -> None:
    with start_server() as server, client_of(server) as client, ThreadPoolExecutor(2) as others:
        server.register("talker.mar", initial_workers=1, job_queue_size=1)
        server.register("talker2.mar", initial_workers=0)
        version, held = server.registry.find("talker"), []
        ask = client.embeddings.with_raw_response.create
        try:
            for number in (1, 2):  # one under way, one that waits
                held.append(
                    others.submit(
                        ask, **WAIT, extra_headers={"x-do": "wait", "x-file": str(tmp_path / "go")}
                    )
                )
                until(lambda number=number: server.call(lambda: version.stats.requests == number))
            until(lambda: server.call(lambda: version.pending == 1))
            refusals = []
            for model in ("talker", "talker:2.0"):
                with pytest.raises(openai.InternalServerError) as refused:
                    ask(**WAIT | {"model": model})
                assert (refused.value.status_code, refused.value.type) == (503, "server_error")
                refusals.append(refused.value)
            assert int(refusals[0].response.headers["retry-after"]) >= 1
            assert "use scale workers API" in refusals[1].message
            assert (
                "retry-after" not in refusals[1].response.headers
            )  # nothing will change by itself
        finally:
            (tmp_path / "go").touch()
        assert [each.result().status_code for each in held] == [200, 200]
