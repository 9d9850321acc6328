"""What applications of tsx do in a Ray cluster: canaries, shared replicas, updates, lost nodes, clients that leave."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import httpx
import ray
from ray import serve

from tests.runtime.targets.ray.conftest import DEADLINE, MANY, RayServe
from tsx_runtime.grpc.protos.inference_pb2 import PredictionsRequest
from tsx_runtime.targets.ray.grpc_bridge import INFERENCE


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_client_that_leaves_stops_its_stream(ray_serve: RayServe) -> None:
    file = ray_serve.place / "left"
    headers = {"x-do": "forever", "x-file": str(file)}
    with httpx.stream("POST", f"{ray_serve.address}/talker/predictions/talker", headers=headers) as answer:
        next(answer.iter_raw())
        assert not file.exists()
    until(file.exists)


def test_models_share_replicas_and_the_one_used_longest_ago_makes_room(ray_serve: RayServe) -> None:
    for name in [*MANY, *MANY[:2]]:
        answer = ray_serve.post(f"/many/predictions/{name}")
        assert (answer.status_code, answer.json()["name"]) == (200, name)
    assert ray_serve.post("/many/predictions/nobody").status_code == 404
    form = httpx.post(f"{ray_serve.address}/many/invocations", data={"model_name": MANY[2], "data": "1"}, timeout=DEADLINE)
    assert form.json()["name"] == MANY[2]
    assert ray_serve.get(f"/many/v2/models/{MANY[3]}/ready").status_code == 200
    with ThreadPoolExecutor(8) as clients:
        answers = clients.map(lambda name: ray_serve.post(f"/many/predictions/{name}"), MANY * 4)
        assert [answer.json()["name"] for answer in answers] == MANY * 4


def test_grpc_reaches_a_model_that_shares_its_replica(ray_serve: RayServe) -> None:
    request = PredictionsRequest(model_name=MANY[3], input={"data": b"abc"}).SerializeToString()
    with grpc.insecure_channel(ray_serve.grpc) as channel:
        ask: Any = channel.unary_unary(f"/{INFERENCE}/Predictions")
        assert MANY[3].encode() in ask(request, metadata=[("application", "many")])


def test_a_canary_takes_its_share_and_gives_it_back_without_a_restart(ray_serve: RayServe) -> None:
    def processes() -> set[int]:
        return {ray_serve.post("/talker/predictions/talker", x_show="1").json()["pid"] for _ in range(30)}

    stable = processes()
    serve.run_many([ray_serve.talker(canary={"app": "canary", "percent": 50})])
    until(lambda: len(processes() - stable) == 1)
    serve.run_many([ray_serve.talker(canary={"app": "canary", "percent": 0}, release={"version": 2})])
    until(lambda: processes() == stable)
    serve.delete("canary")


def test_an_update_under_load_loses_no_request(ray_serve: RayServe) -> None:
    stopping, statuses = threading.Event(), Counter[int]()

    def load() -> None:
        with httpx.Client() as client:
            while not stopping.is_set():
                statuses[client.post(f"{ray_serve.address}/talker/predictions/talker", timeout=DEADLINE).status_code] += 1

    loading = [threading.Thread(target=load) for _ in range(4)]
    for thread in loading:
        thread.start()
    try:
        serve.run_many([ray_serve.talker(settings={**ray_serve.settings, "job_queue_size": 50})])
    finally:
        stopping.set()
        for thread in loading:
            thread.join()
    assert set(statuses) == {200}


def test_a_lost_node_fails_only_requests_that_may_not_be_repeated(ray_serve: RayServe) -> None:
    """Each request of the lost node is answered: by the other replica, or by an error that says whether it may be repeated."""
    file = ray_serve.place / "gate"

    def ask(headers: dict[str, str]) -> httpx.Response:
        words = {"x-do": "wait", "x-file": str(file), **headers}
        return httpx.post(f"{ray_serve.address}/talker/predictions/talker", headers=words, timeout=DEADLINE)

    with ThreadPoolExecutor(8) as clients:
        plain = [clients.submit(ask, {}) for _ in range(4)]
        keyed = [clients.submit(ask, {"Idempotency-Key": "1"}) for _ in range(4)]
        until(lambda: len(list(ray_serve.place.glob("gate.*"))) == 2)  # both replicas are at work
        lost = ray_serve.cluster.list_all_nodes()[-1]
        ray_serve.cluster.remove_node(lost, allow_graceful=False)
        until(lambda: sum(node["Alive"] for node in ray.nodes()) == 2)
        file.touch()
    assert {future.result().status_code for future in keyed} == {200}
    answers = [future.result() for future in plain]
    assert {answer.status_code for answer in answers} <= {200, 503}
    for failed in [answer.json() for answer in answers if answer.status_code == 503]:
        assert failed["type"] == "ServiceUnavailableException"
        assert "may have run" in failed["message"]
        assert "Idempotency-Key" in failed["message"]
