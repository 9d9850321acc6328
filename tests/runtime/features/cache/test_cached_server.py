"""The reply cache of a model behind a server with several versions."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.runtime.conftest import RunningServer, make_settings, running_server
from tests.support.models import make_model
from tsx_runtime.features.cache.feature import CacheFeature

COUNTING_HANDLER = """
import json
calls = 0

def handle(data, context):
    global calls
    answers = []
    for idx, row in enumerate(data or []):
        calls += 1
        answers.append(json.dumps({"call": calls, "version": context.manifest["model"]["modelVersion"]}))
    return answers
"""
CACHE = "batchSize: 4\ncache: {size: 1MiB, ttl: 1h, key: [x-user]}\n"


@pytest.fixture(scope="module")
def cache_server(
    processes: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    store = tmp_path_factory.mktemp("cached")
    for number in ("1.0", "2.0"):
        make_model(
            store / f"counting-{number}.mar",
            COUNTING_HANDLER,
            name="counting",
            version=number,
            config=CACHE,
        )
    make_model(store / "plain.mar", COUNTING_HANDLER)
    make_model(store / "off.mar", COUNTING_HANDLER, config=CACHE)
    make_model(
        store / "sequences.mar",
        COUNTING_HANDLER,
        config=CACHE + "sequenceBatching: true\nsequenceMaxIdleMSec: 1000\n",
    )
    models = {"plain": {"cache": {"size": "1MB"}}, "off": {"cache": '{"size": 0}'}}
    with running_server(make_settings(store, models=models)) as server:
        for file in ("counting-1.0.mar", "counting-2.0.mar", "plain.mar", "off.mar"):
            server.register(file, initial_workers=1)
        yield server


def ask(
    server: RunningServer,
    body: bytes,
    model: str = "counting",
    *,
    lane: str = "fast",
    **headers: str,
) -> httpx.Response:
    return server.ask(body, f"/predictions/{model}", lane=lane, **headers)


def call(answer: httpx.Response) -> int:
    answer.raise_for_status()
    return int(answer.json()["call"])


def test_both_lanes_share_cached_answers(cache_server):
    first = ask(cache_server, b"lanes")
    repeated_responses = [
        ask(cache_server, b"lanes", lane=lane) for lane in ("fast", "asgi", "fast")
    ]
    assert {call(answer) for answer in repeated_responses} == {call(first)}
    assert "x-cache" not in first.headers
    for answer in repeated_responses:
        assert answer.headers["x-cache"] == "hit"
        assert int(answer.headers["age"]) >= 0
        assert answer.headers["x-request-id"] != first.headers["x-request-id"]


@pytest.mark.parametrize("lane", ["fast", "asgi"])
def test_a_cached_answer_can_be_timed(cache_server, lane):
    ask(cache_server, b"timed")
    answer = ask(cache_server, b"timed", lane=lane, x_tsx_timing="1")
    assert answer.headers["x-cache"] == "hit"
    assert "total;dur=" in answer.headers["server-timing"]
    assert "nan" not in answer.headers["server-timing"]


def test_settings_enable_and_disable_the_cache(cache_server):
    assert call(ask(cache_server, b"x", "plain")) == call(ask(cache_server, b"x", "plain"))
    assert call(ask(cache_server, b"x", "off")) != call(ask(cache_server, b"x", "off"))
    off = cache_server.registry.models["off"].versions["1.0"]
    assert off not in cache_server.registry.feature(CacheFeature).caches


def test_a_traffic_split_selects_the_version_before_the_cache(cache_server):
    split = {"weights": {"2.0": 1}}
    cache_server.management.put(
        "/models/counting/traffic?force=true", json=split
    ).raise_for_status()
    try:
        answers = [ask(cache_server, b"split", model) for model in ("counting/1.0", "counting")]
        assert [answer.json()["version"] for answer in answers] == ["1.0", "2.0"]
        assert ask(cache_server, b"split").headers["x-cache"] == "hit"
    finally:
        cache_server.management.put("/models/counting/traffic", json={}).raise_for_status()


def test_changing_or_replacing_the_version_clears_the_cache(cache_server):
    first = call(ask(cache_server, b"emptied"))
    cache_server.management.put("/models/counting/1.0?batch_size=2").raise_for_status()
    call_after_change = call(ask(cache_server, b"emptied"))
    assert call_after_change != first
    cache_server.register("counting-1.0.mar", replaces=True, version="1.0")
    assert "x-cache" not in ask(cache_server, b"emptied").headers


def test_metrics_count_hits_and_misses(cache_server):
    def metrics() -> dict[str, float]:
        lines = cache_server.metrics.get("/metrics").text.splitlines()
        cache_lines = [
            line for line in lines if line.startswith("tsx_cache_") and 'model_name="plain"' in line
        ]
        return {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in cache_lines}

    metrics_before = metrics()
    for _ in range(3):
        ask(cache_server, b"counted", "plain")
    metrics_after = metrics()
    assert metrics_after["tsx_cache_misses_total"] - metrics_before["tsx_cache_misses_total"] == 1
    assert metrics_after["tsx_cache_hits_total"] - metrics_before["tsx_cache_hits_total"] == 2
    assert metrics_after["tsx_cache_bytes"] > metrics_before["tsx_cache_bytes"]
    assert metrics_after["tsx_cache_evictions_total"] == 0


def test_the_description_and_the_page_show_the_state_of_the_cache(cache_server):
    for _ in range(4):
        ask(cache_server, b"described", "plain")
    cache_description = cache_server.management.get("/models/plain").json()[0]["cache"]
    cache = cache_server.registry.feature(CacheFeature).caches[
        cache_server.registry.models["plain"].versions["1.0"]
    ]
    assert cache_description["entries"] == len(cache) >= 1
    assert (cache_description["size"], cache_description["maxSize"]) == (
        cache.size,
        cache.config.size,
    )
    assert cache_description["hitRatio"] == cache_description["hits"] / (
        cache_description["hits"] + cache_description["misses"]
    )
    state = cache_server.management.get("/ui/api/state").json()
    caches = {model["name"]: model["versions"][0].get("cache") for model in state["models"]}
    assert (caches["plain"], caches["off"]) == (cache_description, None)
    assert "cache" not in cache_server.management.get("/models/off").json()[0]


def test_a_model_with_sequences_has_no_cache(cache_server):
    answer = cache_server.management.post("/models?url=sequences.mar")
    assert answer.status_code == 400
    assert "cache does not apply" in answer.text
