"""Proofs with a real Ray cluster of three nodes on this machine.

    python benchmarks/ray_cluster.py [lost] [scaling] [many] [throughput] [--json FILE]

    lost        nodes are killed under load: all repeatable requests are answered; others get an
                answer or an error that tells of the loss
    scaling     from no replica to three and back, without a failed request
    many        100 archives over two replicas that hold ten each
    throughput  of a model that computes: two replicas reach at least 1.5 times the rate of one
                (on two idle cores)

Failed goals raise an error; the figures are printed, or written as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import machine
import ray
from ray import serve
from ray.cluster_utils import Cluster

from tsx_cli.main import main as tsx
from tsx_runtime.targets.ray.application import build

HTTP_PORT = 18_000
MAX_WAIT_S = 120.0
WARM_UP_S = 20
HANDLER = """
import hashlib, time

BLOCK = bytes(1 << 20)

def handle(data, context):
    if data is None:
        return None
    answers = []
    for idx, row in enumerate(data):
        word = context.get_request_header(idx, "x-work") or ""
        if word.startswith("sleep"):
            time.sleep(float(word.split()[1]))
        elif word:
            for _ in range(int(word)):
                hashlib.sha256(BLOCK).digest()
        answers.append(context.manifest["model"]["modelName"])
    return answers
"""


class Nodes:
    """A head with the proxy and the ingresses, and two nodes with a slot for a replica each."""

    def __init__(self) -> None:
        self.cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 2, **NODE, "include_dashboard": False}
        )
        self.others = [self.add(), self.add()]

    def add(self) -> Any:
        return self.cluster.add_node(num_cpus=2, resources={"slot": 1}, **NODE)

    def kill(self) -> None:
        self.cluster.remove_node(self.others.pop(0), allow_graceful=False)


NODE = {"object_store_memory": 80 << 20}
RESOURCES = {"num_cpus": 0.1, "resources": {"slot": 1}}


@contextlib.contextmanager
def start_cluster() -> Iterator[Nodes]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    nodes = Nodes()
    try:
        ray.init(nodes.cluster.address, log_to_driver=False, logging_level="ERROR")
        serve.start(
            proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": HTTP_PORT}
        )
        yield nodes
        serve.shutdown()
    finally:
        ray.shutdown()
        nodes.cluster.shutdown()


def archives(directory: Path, names: list[str]) -> list[dict[str, Any]]:
    handler = directory / "handler.py"
    handler.write_text(HANDLER)
    with contextlib.redirect_stdout(io.StringIO()):
        for name in names:
            assert (
                tsx(
                    [
                        "archive",
                        "--name",
                        name,
                        "--handler",
                        str(handler),
                        "-o",
                        str(directory / f"{name}.mar"),
                    ]
                )
                == 0
            )
    return [{"name": name, "source": str(directory / f"{name}.mar")} for name in names]


def deploy(directory: Path, models: list[dict[str, Any]], **options: Any) -> None:
    settings = {"cache_dir": str(directory / "cache"), "worker_preload": False}
    head = {"ingress_replicas": 1, "ingress_resources": {"node:__internal_head__": 0.001}}
    args = {
        "name": "app",
        "models": models,
        "settings": settings,
        "replica": {"num_cpus": 0.1},
        **head,
        **options,
    }
    serve.run(build(args), name="app", route_prefix="/app")


class Load:
    """Clients in threads, each of which sends its next request after the last response."""

    def __init__(
        self, clients: int, ask: Callable[[httpx.Client, int], tuple[str, httpx.Response]]
    ) -> None:
        self.answers: Counter[tuple[str, int]] = Counter()
        self.bodies: set[str] = set()
        self._ask, self._over = ask, threading.Event()
        self._pool = ThreadPoolExecutor(clients)
        self._running = [self._pool.submit(self._run, number) for number in range(clients)]

    def _run(self, number: int) -> None:
        with httpx.Client(timeout=MAX_WAIT_S) as client:
            while not self._over.is_set():
                kind, answer = self._ask(client, number)
                self.answers[kind, answer.status_code] += 1
                if answer.status_code != 200:
                    self.bodies.add(answer.text)

    def stop(self) -> Counter[tuple[str, int]]:
        self._over.set()
        for running in self._running:
            running.result()
        return self.answers


def ask_model(
    client: httpx.Client, model: str = "m", method: str = "POST", **headers: str
) -> httpx.Response:
    header_values = {name.replace("_", "-"): value for name, value in headers.items()}
    return client.request(
        method, f"http://127.0.0.1:{HTTP_PORT}/app/predictions/{model}", headers=header_values
    )


def wait_until(condition: Callable[[], bool]) -> float:
    """Wait until a condition holds, and return the seconds."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() < start + MAX_WAIT_S
        time.sleep(0.1)
    return time.monotonic() - start


def replicas() -> int:
    return serve.status().applications["app"].deployments["Model"].replica_states.get("RUNNING", 0)


def lost(nodes: Nodes, directory: Path) -> dict[str, Any]:
    deploy(directory, archives(directory, ["m"]), replicas=2, replica=RESOURCES)

    def ask(client: httpx.Client, number: int) -> tuple[str, httpx.Response]:
        kind, method = ("repeatable", "PUT") if number % 2 else ("plain", "POST")
        return kind, ask_model(client, method=method, x_work="sleep 0.05")

    load = Load(8, ask)
    for _ in range(3):
        wait_until(lambda: replicas() == 2)
        time.sleep(2)
        nodes.kill()
        nodes.others.append(nodes.add())
        time.sleep(2)
    answers = load.stop()
    assert {status for kind, status in answers if kind == "repeatable"} == {200}, answers
    assert {status for kind, status in answers if kind == "plain"} <= {200, 503}, answers
    assert all("may have run" in body for body in load.bodies), load.bodies
    return {f"{kind} {status}": count for (kind, status), count in answers.items()}


def scaling(nodes: Nodes, directory: Path) -> dict[str, Any]:
    quick = {
        "target_ongoing_requests": 2,
        "initial_replicas": 0,
        "upscale_delay_s": 1.0,
        "downscale_delay_s": 3.0,
        "metrics_interval_s": 0.5,
        "look_back_period_s": 2.0,
    }
    deploy(
        directory,
        archives(directory, ["m"]),
        autoscaling={"min_replicas": 0, "max_replicas": 3, **quick},
    )
    assert replicas() == 0
    load = Load(8, lambda client, number: ("all", ask_model(client, x_work="sleep 0.1")))
    seconds_to_three = wait_until(lambda: replicas() == 3)
    answers = load.stop()
    seconds_to_none = wait_until(lambda: replicas() == 0)
    start = time.monotonic()
    with httpx.Client(timeout=MAX_WAIT_S) as client:
        assert ask_model(client).status_code == 200
    assert set(answers) == {("all", 200)}, answers
    wake_up_s = time.monotonic() - start
    return {
        "seconds to three": seconds_to_three,
        "seconds to none": seconds_to_none,
        "seconds of a request that wakes one": wake_up_s,
        "requests": sum(answers.values()),
    }


def many(nodes: Nodes, directory: Path) -> dict[str, Any]:
    names = [f"m{number}" for number in range(100)]
    deploy(directory, archives(directory, names), multiplexed=10, replicas=2, replica=RESOURCES)
    weighted_names = [name for rank, name in enumerate(names) for _ in range(1 + 40 // (rank + 1))]
    requested_names = [*names, *random.Random(1).choices(weighted_names, k=400)]

    def is_right(name: str) -> bool:
        with httpx.Client(timeout=MAX_WAIT_S) as client:
            answer = ask_model(client, name)
        return answer.status_code == 200 and answer.text == name

    start = time.monotonic()
    with ThreadPoolExecutor(8) as clients:
        assert all(clients.map(is_right, requested_names))
    return {
        "models": len(names),
        "requests": len(requested_names),
        "requests/s": len(requested_names) / (time.monotonic() - start),
    }


def throughput(nodes: Nodes, directory: Path) -> dict[str, Any]:
    models, rates = archives(directory, ["m"]), {}
    for count in (1, 2):
        deploy(directory, models, replicas=count, replica=RESOURCES)
        wait_until(lambda count=count: replicas() == count)
        load = Load(4 * count, lambda client, number: ("all", ask_model(client, x_work="500")))
        # Wait until the nodes have started their spare processes, which use the same cores.
        time.sleep(WARM_UP_S)
        earlier_answers, start = sum(load.answers.values()), time.monotonic()
        time.sleep(25)
        rates[count] = (sum(load.answers.values()) - earlier_answers) / (time.monotonic() - start)
        assert set(load.stop()) == {("all", 200)}
    ratio = rates[2] / rates[1]
    assert ratio >= 1.5, rates
    return {"1 replica, requests/s": rates[1], "2 replicas, requests/s": rates[2], "ratio": ratio}


PROOFS = {"lost": lost, "scaling": scaling, "many": many, "throughput": throughput}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("proofs", nargs="*", choices=[*PROOFS, []], help="all, if none is named")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    options = parser.parse_args()
    results: dict[str, Any] = {"machine": machine.describe(), "ray": ray.__version__}
    for name in options.proofs or PROOFS:
        with tempfile.TemporaryDirectory() as temporary, start_cluster() as nodes:
            results[name] = PROOFS[name](nodes, Path(temporary))
        print(name, json.dumps(results[name]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
