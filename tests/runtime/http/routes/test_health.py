"""`/livez` and `/readyz` on every listener, and TorchServe's `/ping`."""

from __future__ import annotations

import os
import re
import signal

from tsx_runtime.core.workers.worker import WorkerState

SLOW = """
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


def test_a_server_is_alive_and_ready_at_all_its_addresses_without_a_token(start_server):
    with start_server(inference_token="in", management_token="man") as server:
        for client in (server.inference, server.management, server.metrics):
            assert client.get("/livez").json() == {"status": "Alive"}
            assert client.head("/livez").status_code == client.head("/readyz").status_code == 200
            assert ready_of(client) == {"status": "Ready", "notReady": []}
        assert server.inference.get("/ping").json() == {"status": "Healthy"}
        assert server.management.get("/ping").status_code == 404


def test_it_is_ready_when_every_default_version_has_a_ready_worker(empty, tmp_path, until):
    go = tmp_path / "go"
    empty.write_mar("slow.mar", handler=SLOW.format(go=str(go)))
    empty.register("talker.mar", initial_workers=0)  # serves nothing, as was asked for
    assert ready_of(empty.inference)["status"] == "Ready"
    answer = empty.management.post(
        "/models", params={"url": "slow.mar", "initial_workers": 1, "synchronous": "false"}
    )
    assert answer.status_code == 202
    reason = {
        "modelName": "slow",
        "modelVersion": "1.0",
        "reason": "no worker is ready; workers: 1 LOADING",
    }
    assert ready_of(empty.inference) == {"status": "Not ready", "notReady": [reason]}
    assert (
        empty.inference.get("/livez").status_code == empty.inference.get("/ping").status_code == 200
    )
    described = empty.management.get("/models/slow", params={"customized": "true"})
    assert (described.status_code, described.headers["retry-after"].isdigit()) == (503, True)
    described = empty.management.get("/models/talker", params={"customized": "true"})
    assert (described.status_code, "retry-after" in described.headers) == (503, False)
    go.touch()
    until(lambda: ready_of(empty.inference)["status"] == "Ready")


def test_it_is_not_ready_while_its_only_worker_is_started_again(empty, tmp_path, until):
    go = tmp_path / "go"
    go.touch()
    empty.write_mar("slow.mar", handler=SLOW.format(go=str(go)))
    empty.register("slow.mar", initial_workers=1)
    go.unlink()
    (worker,) = empty.registry.find("slow").workers
    os.kill(worker.pid, signal.SIGKILL)
    until(lambda: ready_of(empty.inference)["status"] == "Not ready")
    assert empty.inference.get("/ping").status_code == 200  # only after it was given up
    go.touch()
    until(lambda: ready_of(empty.inference)["status"] == "Ready")


def test_a_model_whose_workers_are_given_up_is_neither_ready_nor_healthy(empty, until):
    empty.write_mar("ends.mar", handler=ENDS)
    empty.management.post(
        "/models", params={"url": "ends.mar", "initial_workers": 1, "synchronous": "false"}
    )
    until(lambda: empty.registry.find("ends").workers[0].state is WorkerState.FAILED)
    reason = ready_of(empty.inference)["notReady"][0]["reason"]
    assert re.fullmatch(
        r"no worker is ready; workers: 1 FAILED; the next attempt is in \d+ s", reason
    )
    assert empty.inference.get("/ping").status_code == 500
    assert empty.inference.get("/livez").status_code == 200


def test_a_server_with_a_dead_model_is_restarted_where_that_is_wanted(start_server, until):
    with start_server(restart_when_dead=True) as server:
        assert server.inference.get("/livez").status_code == 200
        server.write_mar("ends.mar", handler=ENDS)
        server.management.post(
            "/models", params={"url": "ends.mar", "initial_workers": 1, "synchronous": "false"}
        )
        until(lambda: server.registry.find("ends").workers[0].state is WorkerState.FAILED)
        answer = server.management.get("/livez")
        assert (answer.status_code, answer.json()) == (503, {"status": "Dead"})


def test_an_unloaded_model_is_ready_and_says_how_long_its_first_request_waited(empty):
    empty.write_mar(
        "rests.mar",
        handler="def handle(data, context):\n    return data and ['x'] * len(data)\n",
        config="scaleToZero: 5m\ncache: {size: 1MiB, ttl: 10m}\n",
    )
    empty.management.post(
        "/models", params={"url": "rests.mar", "initial_workers": 0, "max_workers": 2}
    ).raise_for_status()
    assert ready_of(empty.inference)["status"] == "Ready"
    described = empty.management.get("/models/rests").json()[0]
    assert (
        described["asleep"],
        described["scaleToZero"],
        described["maxWorkers"],
        described["workers"],
    ) == (True, 300.0, 2, [])
    answer = empty.inference.post("/predictions/rests", content=b"x")
    assert answer.status_code == 200
    assert float(answer.headers["x-tsx-cold-start"]) > 0
    assert (
        "x-tsx-cold-start" not in empty.inference.post("/predictions/rests", content=b"y").headers
    )
    hit = empty.inference.post("/predictions/rests", content=b"x").headers
    assert (hit["x-cache"], "x-tsx-cold-start" in hit) == (
        "hit",
        False,
    )  # another client did not wait
    described = empty.management.get("/models/rests").json()[0]
    assert described["lastScaling"] == "from 0 to 1 workers (request): the model was not loaded"
    metrics = empty.metrics.get("/metrics").text
    assert "tsx_worker_scalings_total{" in metrics
