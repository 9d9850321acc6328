"""Monitoring of a real server with the real monitor process."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.runtime.conftest import make_settings, running_server
from tests.support.models import make_model
from tests.support.servers import Running, running_children, serving

ADULTS = """
def handle(data, context):
    if data is None:
        return None
    ages = [row["body"]["age"] for row in data]
    return [{"adult": 0.9, "child": 0.1} if age >= 18 else {"adult": 0.2, "child": 0.8} for age in ages]
"""
MONITOR = "/models/adults/monitor"
CONFIG = "monitor: {share: 100, groups: sex, windowSamples: 50, minGroup: 5}\n"
Until = Callable[[Callable[[], object]], None]
pytestmark = pytest.mark.usefixtures("processes")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    make_model(tmp_path / "adults.mar", ADULTS, config=CONFIG)
    return tmp_path


def ask(client: httpx.Client, age: int, *, chunks: bool = False) -> str:
    body = json.dumps({"age": age, "sex": "fm"[age % 2]}).encode()
    answer = client.post(
        "/predictions/adults",
        content=iter([body]) if chunks else body,
        headers={"content-type": "application/json"},
    )
    assert answer.status_code == 200, answer.text
    return answer.headers["x-request-id"]


def test_truth_is_joined_with_the_answers_of_both_lanes(store: Path, until: Until) -> None:
    with running_server(make_settings(store)) as server:
        server.register("adults.mar", initial_workers=1)
        ids = [ask(server.inference, age, chunks=age % 3 == 0) for age in range(60)]
        feedback = [
            {"request_id": id, "truth": "adult" if age >= 21 else "child"}
            for age, id in enumerate(ids)
        ]
        result = server.inference.post("/feedback/adults", json=feedback)
        assert result.json() == {"accepted": 60, "duplicates": 0, "errors": []}
        again = server.inference.post(
            "/feedback/adults", content=iter([json.dumps(feedback).encode()])
        )
        assert again.json()["duplicates"] == 60
        report = server.management.get(MONITOR).json()
        assert (report["monitoring"], report["samples"], report["dropped"]) == (True, 60, {})
        (version,) = report["versions"]
        assert version["quality"]["accuracy"]["count"] == 60
        assert version["quality"]["accuracy"]["value"] == pytest.approx(57 / 60)
        (attribute,) = version["groups"]
        assert {group["group"]: group["count"] for group in attribute["groups"]} == {
            "f": 30,
            "m": 30,
        }
        until(lambda: "tsx_monitor_accuracy{" in server.metrics.get("/metrics").text)
        quality: Any = server.registry.quality_source
        until(lambda: server.call(lambda: quality.quality_of("adults", "1.0", 0.0)))
        known = server.call(lambda: quality.quality_of("adults", "1.0", 0.0))
        assert (known.accuracy.count, known.accuracy.total) == (60, 57)
        assert quality.is_monitored("adults")
        worst = server.management.get(f"{MONITOR}/worst?count=5").json()
        assert {row["request_id"] for row in worst} == {*ids[18:21]}
        contest = {"request_id": ids[20], "contest": {"reason": "I am 20."}}
        assert server.inference.post("/feedback/adults", json=contest).json()["accepted"] == 1
        (listed,) = server.management.get(f"{MONITOR}/contests?state=open").json()
        answered = server.management.post(
            f"{MONITOR}/contests/{listed['id']}", json={"state": "upheld", "response": "No."}
        )
        assert answered.json()["state"] == "upheld"
        malformed = server.inference.post("/feedback/adults", content=b"{")
        assert (malformed.status_code, malformed.json()["type"]) == (400, "BadRequestException")


def test_feedback_needs_the_token_of_inference(store: Path) -> None:
    tokens = {"inference_token": "i" * 20, "management_token": "m" * 20}
    with running_server(make_settings(store, **tokens)) as server:
        server.register("adults.mar", initial_workers=0)
        for client, path, token in (
            (server.inference, "/feedback/adults", "i" * 20),
            (server.management, f"{MONITOR}/contests/x", "m" * 20),
        ):
            refused = client.post(path, json={"key": "a", "truth": "b"})
            assert (refused.status_code, refused.json()["type"]) == (400, "InvalidKeyException")
            accepted = client.post(path, json=[], headers={"authorization": f"Bearer {token}"})
            assert accepted.json().get("type") != "InvalidKeyException"


@pytest.fixture
def started(store: Path, user_environment: Mapping[str, str]) -> Callable[..., Any]:
    """Return a function that starts a server of the model at fixed addresses."""
    environment = {**user_environment, "TSX_STATE_DIR": str(store / "state")}

    def start(*options: str) -> Any:
        return serving(["serve", "adults.mar", *options], store, environment)

    return start


@pytest.fixture
def inference(user_environment: Mapping[str, str]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=user_environment["TSX_INFERENCE_ADDRESS"], timeout=90) as client:
        yield client


def monitor_process(server: Running) -> psutil.Process:
    (process,) = running_children(server.process.pid, "monitor.process.main")
    return process


@pytest.mark.nightly
def test_the_monitor_process_ends_with_a_killed_server(
    started: Callable[..., Any], inference: httpx.Client
) -> None:
    with started() as server:
        ask(inference, 20)
        process = monitor_process(server)
        server.process.send_signal(signal.SIGKILL)
        process.wait(90)
        assert not process.is_running()


@pytest.mark.nightly
@pytest.mark.slow
def test_feedback_reaches_answers_of_a_replaced_server(
    started: Callable[..., Any], inference: httpx.Client, until: Until
) -> None:
    def accepted(id: str, truth: str) -> bool:
        with httpx.Client(base_url=inference.base_url, timeout=90) as client:
            answer = client.post("/feedback/adults", json={"request_id": id, "truth": truth})
        return answer.status_code == 200 and answer.json()["accepted"] == 1

    with started() as old:
        id = ask(inference, 20)
        old_process = monitor_process(old)
        inference.close()  # The old server waits for idle connections.
        with started("--replace") as new:
            assert old.process.wait(90) == 0
            assert not old_process.is_running()
            until(lambda: accepted(id, "child"))
            assert new.stop() == 0
