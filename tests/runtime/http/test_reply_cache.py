"""A model with a reply cache behind a server, and the answers of its versions."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.runtime.conftest import RunningServer, make_settings, running_server
from tests.support.models import make_model

COUNTING = """
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
def served(processes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    store = tmp_path_factory.mktemp("cached")
    for number in ("1.0", "2.0"):
        make_model(
            store / f"counting-{number}.mar",
            COUNTING,
            name="counting",
            version=number,
            config=CACHE,
        )
    make_model(store / "plain.mar", COUNTING)
    make_model(store / "off.mar", COUNTING, config=CACHE)
    make_model(
        store / "sequences.mar",
        COUNTING,
        config=CACHE + "sequenceBatching: true\nsequenceMaxIdleMSec: 1000\n",
    )
    models = {"plain": {"cache": {"size": "1MB"}}, "off": {"cache": '{"size": 0}'}}
    with running_server(make_settings(store, models=models)) as running:
        for file in ("counting-1.0.mar", "counting-2.0.mar", "plain.mar", "off.mar"):
            running.register(file, initial_workers=1)
        yield running


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


def test_both_lanes_share_one_answer(served):
    first = ask(served, b"lanes")
    again = [ask(served, b"lanes", lane=lane) for lane in ("fast", "asgi", "fast")]
    assert {call(answer) for answer in again} == {call(first)}
    assert "x-cache" not in first.headers
    for answer in again:
        assert answer.headers["x-cache"] == "hit"
        assert int(answer.headers["age"]) >= 0
        assert answer.headers["x-request-id"] != first.headers["x-request-id"]


@pytest.mark.parametrize("lane", ["fast", "asgi"])
def test_a_cached_answer_can_be_timed(served, lane):
    ask(served, b"timed")
    answer = ask(served, b"timed", lane=lane, x_tsx_timing="1")
    assert answer.headers["x-cache"] == "hit"
    assert "total;dur=" in answer.headers["server-timing"]
    assert "nan" not in answer.headers["server-timing"]


def test_settings_switch_the_cache_on_and_off(served):
    assert call(ask(served, b"x", "plain")) == call(ask(served, b"x", "plain"))
    assert call(ask(served, b"x", "off")) != call(ask(served, b"x", "off"))
    assert served.registry.models["off"].versions["1.0"].cache is None


def test_a_split_picks_the_version_first(served):
    split = {"weights": {"2.0": 1}}
    served.management.put("/models/counting/traffic?force=true", json=split).raise_for_status()
    try:
        answers = [ask(served, b"split", model) for model in ("counting/1.0", "counting")]
        assert [answer.json()["version"] for answer in answers] == ["1.0", "2.0"]
        assert ask(served, b"split").headers["x-cache"] == "hit"
    finally:
        served.management.put("/models/counting/traffic", json={}).raise_for_status()


def test_a_change_or_a_replacement_of_the_version_empties_the_cache(served):
    first = call(ask(served, b"emptied"))
    served.management.put("/models/counting/1.0?batch_size=2").raise_for_status()
    changed = call(ask(served, b"emptied"))
    assert changed != first
    served.register("counting-1.0.mar", replaces=True, version="1.0")
    assert "x-cache" not in ask(served, b"emptied").headers


def test_metrics_count_hits_and_misses(served):
    def metrics() -> dict[str, float]:
        lines = served.metrics.get("/metrics").text.splitlines()
        ours = [
            line for line in lines if line.startswith("tsx_cache_") and 'model_name="plain"' in line
        ]
        return {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in ours}

    before = metrics()
    for _ in range(3):
        ask(served, b"counted", "plain")
    after = metrics()
    assert after["tsx_cache_misses_total"] - before["tsx_cache_misses_total"] == 1
    assert after["tsx_cache_hits_total"] - before["tsx_cache_hits_total"] == 2
    assert after["tsx_cache_bytes"] > before["tsx_cache_bytes"]
    assert after["tsx_cache_evictions_total"] == 0


def test_the_description_and_the_page_show_the_state_of_the_cache(served):
    for _ in range(4):
        ask(served, b"described", "plain")
    described = served.management.get("/models/plain").json()[0]["cache"]
    cache = served.registry.models["plain"].versions["1.0"].cache
    assert described["entries"] == len(cache) >= 1
    assert (described["size"], described["maxSize"]) == (cache.size, cache.config.size)
    assert described["hitRatio"] == described["hits"] / (described["hits"] + described["misses"])
    state = served.management.get("/ui/api/state").json()
    caches = {model["name"]: model["versions"][0]["cache"] for model in state["models"]}
    assert (caches["plain"], caches["off"]) == (described, None)
    assert "cache" not in served.management.get("/models/off").json()[0]


def test_a_model_with_sequences_has_no_cache(served):
    answer = served.management.post("/models?url=sequences.mar")
    assert answer.status_code == 400
    assert "cache does not apply" in answer.text
