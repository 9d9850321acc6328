"""A language model behind a real server: HTTP, gRPC, metrics, and a worker that dies."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.runtime.features.grpc.conftest import TIMEOUT, Client, a_server, connected
from tests.support.language_models import character_model, generation_model, zen
from tests.support.servers import Running

TEXT = zen().split("\n\n")[1][:120]
REQUEST = {"inputs": TEXT[:12], "parameters": {"max_new_tokens": 80, "do_sample": False}}
CONFIG = "minWorkers: 1\nmaxWorkers: 1\nhuggingface: {maxSequences: 2}\n"
STREAM = json.dumps({**REQUEST, "stream": True}).encode()

pytestmark = pytest.mark.usefixtures("processes")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    directory = tmp_path_factory.mktemp("generation")
    model = generation_model(
        directory / "zen", character_model(directory / "weights", TEXT), config=CONFIG
    )
    with a_server(directory, model) as server_process:
        yield server_process


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.address("predictions"), timeout=TIMEOUT) as client:
        yield client


@pytest.fixture(scope="module")
def client(server: Running, generated: dict[str, Any]) -> Iterator[Client]:
    with connected(server, generated) as client:
        yield client


def events(parts: Any) -> list[Any]:
    return [
        json.loads(event.removeprefix("data:")) for event in "".join(parts).split("\n\n") if event
    ]


def samples(server: Running, name: str) -> dict[str, float]:
    text = httpx.get(f"{server.address('metrics')}/metrics", timeout=TIMEOUT).text
    return {
        labels: float(value)
        for labels, value in re.findall(rf"^{name}{{(.*)}} (\S+)$", text, re.MULTILINE)
    }


def test_the_model_continues_its_training_text(http: httpx.Client) -> None:
    assert http.post("/predictions/zen", json=REQUEST).json() == [{"generated_text": TEXT[12:92]}]


def test_http_and_grpc_streams_have_the_same_tokens(http: httpx.Client, client: Client) -> None:
    with http.stream("POST", "/predictions/zen", content=STREAM) as answer:
        assert answer.headers["content-type"] == "text/event-stream"
        over_http = events(answer.iter_text())
    parts = client.stream("zen", data=STREAM)
    over_grpc = events(part.prediction.decode() for part in parts)
    assert over_http == over_grpc
    assert (
        "".join(event["token"]["text"] for event in over_http)
        == over_http[-1]["generated_text"]
        == TEXT[12:92]
    )
    assert len(over_http) == 80


def test_clients_that_leave_free_the_kv_cache(server: Running, http: httpx.Client) -> None:
    for _ in range(10):
        with http.stream("POST", "/predictions/zen", content=STREAM) as answer:
            parts = answer.iter_raw()
            for _ in range(3):
                next(parts)
    assert (
        http.post(
            "/predictions/zen", json={**REQUEST, "parameters": {"max_new_tokens": 1}}
        ).status_code
        == 200
    )
    for name in ("running_sequences", "waiting_sequences", "cache_use_ratio"):
        assert set(samples(server, f"tsx_generation_{name}").values()) == {0.0}
    (labels,) = samples(server, "tsx_generation_tokens_total")
    assert 'ModelName="zen"' in labels
    assert 'ModelVersion="1.0"' in labels
    assert 'adapter=""' in labels
    assert sum(samples(server, "tsx_generation_time_to_first_token_seconds_count").values()) > 10


def test_only_clients_with_equal_credentials_share_the_beginnings_of_prompts(
    server: Running, http: httpx.Client
) -> None:
    """Send one prompt over both lanes, and by OpenAI's API, whose bodies name the model."""

    def cached_tokens(user: str | None, lane: str = "fast") -> int:
        before = sum(samples(server, "tsx_generation_cached_tokens_total").values())
        path, body = "/predictions/zen", REQUEST | {"inputs": TEXT[2:60]}
        if lane == "openai":
            path, body = "/v1/completions", {"model": "zen", "prompt": TEXT[2:60], "max_tokens": 2}
        content = json.dumps(body).encode()
        answer = http.post(
            path,
            content=iter([content]) if lane == "framework" else content,
            headers={"authorization": f"Bearer {user}"} if user else {},
        )
        assert answer.status_code == 200
        return int(sum(samples(server, "tsx_generation_cached_tokens_total").values()) - before)

    assert [cached_tokens(user) for user in (None, "ann", "bob")] == [0, 0, 0]
    assert [cached_tokens(user) for user in (None, "ann", "bob")] == [48, 48, 48]
    assert [cached_tokens("ann", lane) for lane in ("framework", "openai")] == [48, 48]
    assert [cached_tokens("eve", lane) for lane in ("openai", "framework", "fast")] == [0, 48, 48]


def test_requests_waiting_in_the_engine_are_reported_as_a_metric(
    server: Running, http: httpx.Client, until: Callable[[Callable[[], object]], None]
) -> None:
    def count_waiting() -> float:
        return sum(samples(server, "tsx_requests_waiting").values())

    def ask(_: int) -> None:
        while not part_seen.is_set():
            assert http.post("/predictions/zen", json=REQUEST).status_code == 200

    part_seen = threading.Event()
    with ThreadPoolExecutor(6) as clients:
        answers = clients.map(ask, range(6))
        try:
            until(lambda: count_waiting() >= 2)
            assert sum(samples(server, "tsx_queue_depth").values()) == 0
        finally:
            part_seen.set()
        list(answers)
    assert count_waiting() == 0


def test_a_bad_request_is_refused_before_the_stream_starts(http: httpx.Client) -> None:
    answer = http.post(
        "/predictions/zen",
        json={"inputs": "B", "parameters": {"temperature": "hot"}, "stream": True},
    )
    assert answer.status_code == 400
    assert "'parameters.temperature' is \"hot\"" in answer.json()["message"]


def test_a_worker_death_breaks_only_the_streams_that_had_started(
    server: Running, http: httpx.Client, until: Callable[[Callable[[], object]], None]
) -> None:
    def workers() -> list[int]:
        management = httpx.get(f"{server.address('models')}/models/zen", timeout=TIMEOUT).json()
        return [worker["pid"] for worker in management[0]["workers"] if worker["status"] == "READY"]

    (worker,) = workers()
    long_body = json.dumps(
        {"inputs": "Q", "parameters": {"max_new_tokens": 240, "temperature": 2.0}, "stream": True}
    ).encode()
    part_seen = ""
    try:
        with http.stream("POST", "/predictions/zen", content=long_body) as answer:
            for part in answer.iter_text():
                if not part_seen:
                    os.kill(worker, signal.SIGKILL)
                part_seen += part
    except httpx.RemoteProtocolError:
        pass
    assert '"generated_text":"' not in part_seen
    until(lambda: workers() not in ([], [worker]))
    assert http.post("/predictions/zen", json=REQUEST).json() == [{"generated_text": TEXT[12:92]}]
