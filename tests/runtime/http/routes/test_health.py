"""`/livez` and `/readyz` on every listener, and TorchServe's `/ping`."""

from __future__ import annotations

import os
import re
import signal

import pytest

from tests.kit.management import describe, post_model
from tsx_runtime.core.workers.worker import WorkerState

SLOW_LOAD = """
import time
from pathlib import Path

while not Path({go!r}).exists():
    time.sleep(0.01)

def handle(data, context):
    return None if data is None else ["OK"] * len(data)
"""

ENDS = """
import os

def handle(data, context):
    os._exit(7)
"""


def ready_of(client):
    answer = client.get("/readyz")
    assert answer.status_code == (200 if answer.json()["status"] == "Ready" else 503)
    assert answer.headers["cache-control"].startswith("no-cache")
    return answer.json()


def start_without_waiting(server, handler, **content):
    """Register a model `m` with one worker, without waiting for its load."""
    server.write_mar("m.mar", handler=handler, **content)
    assert post_model(server, "m.mar", initial_workers=1, synchronous="false").status_code == 202


def test_liveness_and_readiness_need_no_token_on_any_address(start_server):
    with start_server(inference_token="in", management_token="man") as server:
        for client in (server.inference, server.management, server.metrics):
            assert client.get("/livez").json() == {"status": "Alive"}
            assert client.head("/livez").status_code == client.head("/readyz").status_code == 200
            assert ready_of(client) == {"status": "Ready", "notReady": []}
        assert server.inference.get("/ping").json() == {"status": "Healthy"}
        assert server.management.get("/ping").status_code == 404


def test_the_server_is_ready_if_every_default_version_has_a_ready_worker(empty, tmp_path, until):
    gate = tmp_path / "go"
    # No worker was requested, so none is missing.
    empty.register("talker.mar", initial_workers=0)
    assert ready_of(empty.inference)["status"] == "Ready"
    start_without_waiting(empty, SLOW_LOAD.format(go=str(gate)))
    reason = {
        "modelName": "m",
        "modelVersion": "1.0",
        "reason": "no worker is ready; workers: 1 LOADING",
    }
    assert ready_of(empty.inference) == {"status": "Not ready", "notReady": [reason]}
    for path in ("/livez", "/ping"):
        assert empty.inference.get(path).status_code == 200
    for model, retries in (("m", True), ("talker", False)):
        answer = empty.management.get(f"/models/{model}?customized=true")
        assert (answer.status_code, "retry-after" in answer.headers) == (503, retries)
    gate.touch()
    until(lambda: ready_of(empty.inference)["status"] == "Ready")
    gate.unlink()
    (worker,) = empty.registry.find("m").workers
    os.kill(worker.pid, signal.SIGKILL)
    until(lambda: ready_of(empty.inference)["status"] == "Not ready")
    # A model is unhealthy once its worker is given up.
    assert empty.inference.get("/ping").status_code == 200
    gate.touch()
    until(lambda: ready_of(empty.inference)["status"] == "Ready")


@pytest.mark.parametrize("restart", [False, True])
def test_a_model_with_given_up_workers_is_not_ready_or_healthy(start_server, until, restart):
    with start_server(restart_when_dead=restart) as server:
        assert server.management.get("/livez").json() == {"status": "Alive"}
        start_without_waiting(server, ENDS)
        until(lambda: server.registry.find("m").workers[0].state is WorkerState.FAILED)
        reason = ready_of(server.inference)["notReady"][0]["reason"]
        assert re.fullmatch(
            r"no worker is ready; workers: 1 FAILED; the next attempt is in \d+ s", reason
        )
        assert server.inference.get("/ping").status_code == 500
        liveness = server.management.get("/livez")
        assert (liveness.status_code, liveness.json()["status"]) == (
            (503, "Dead") if restart else (200, "Alive")
        )


def test_an_unloaded_model_is_ready_and_reports_its_cold_start(empty):
    empty.write_mar(
        "rests.mar",
        handler="def handle(data, context):\n    return data and ['x'] * len(data)\n",
        config="scaleToZero: 5m\ncache: {size: 1MiB, ttl: 10m}\n",
    )
    post_model(empty, "rests.mar", initial_workers=0, max_workers=2).raise_for_status()
    assert ready_of(empty.inference)["status"] == "Ready"
    model = describe(empty, "rests")
    assert (model["asleep"], model["scaleToZero"]) == (True, 300.0)
    assert (model["maxWorkers"], model["workers"]) == (2, [])
    first, second, cached = (empty.ask(body, "/predictions/rests") for body in (b"x", b"y", b"x"))
    assert float(first.headers["x-tsx-cold-start"]) > 0
    assert "x-tsx-cold-start" not in second.headers
    # The client of the cached answer did not wait.
    assert cached.headers["x-cache"] == "hit"
    assert "x-tsx-cold-start" not in cached.headers
    scaling = describe(empty, "rests")["lastScaling"]
    assert scaling == "from 0 to 1 workers (request): the model was not loaded"
    assert "tsx_worker_scalings_total{" in empty.metrics.get("/metrics").text
