"""A Ray cluster of three nodes on this machine, with Ray Serve and applications of tsx, and `tsx
serve` beside it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from ray import serve
from ray.cluster_utils import Cluster

from tests.runtime.conftest import TALKER
from tests.support.models import make_model
from tests.support.servers import FREE_GRPC_PORTS, FREE_PORTS, FreePorts, Running, serving
from tsx_runtime.targets.ray.application import build
from tsx_runtime.targets.ray.archives import upload

# The handler of every target's table, and what tests of Ray ask of it besides.
HANDLER = (
    TALKER
    + """
from ts.handler_utils.utils import send_intermediate_predict_response

LOADED = Path(__file__).name  # read once
talk = act


def act(idx, row, context):
    headers = context.get_all_request_header(idx)
    word, file = headers.get("x-do", ""), headers.get("x-file", "")
    if word == "forever":
        try:
            while True:
                send_intermediate_predict_response(["x" * 1000], {idx: context.get_request_id(idx)}, "", 200, context)
                time.sleep(0.01)
        finally:
            Path(file).touch()
    if word == "wait":
        Path(file + f".{os.getpid()}").touch()
    if word:
        return talk(idx, row, context)
    shown = {"name": context.manifest["model"]["modelName"], "trace": headers.get("traceparent")}
    return json.dumps(json.loads(talk(idx, row, context)) | shown)
"""
)
MANY = [f"model-{number}" for number in range(5)]
GRPC = ["tsx_runtime.targets.ray.grpc_bridge.add_services_to_server"]
DEADLINE = 60.0  # seconds; of a machine that has other things to do
ON_HEAD = {"node:__internal_head__": 0.001}


@dataclass
class RayServe:
    """The cluster and what runs in it."""

    cluster: Cluster
    address: str
    grpc: str
    tsx: Running  # `tsx serve` with the archive of the application `talker`
    place: Path
    settings: dict[str, Any]

    def target(self, name: str, models: list[dict[str, Any]], **more: Any) -> serve.RunTarget:
        args = {
            "name": name,
            "models": models,
            "settings": self.settings,
            "replica": {"num_cpus": 0.1},
            "ingress_replicas": 1,
        }
        return serve.RunTarget(
            build({**args, "ingress_resources": ON_HEAD, **more}),
            name=name,
            route_prefix=f"/{name}",
        )

    def post(self, path: str, **headers: str) -> httpx.Response:
        words = {name.replace("_", "-"): word for name, word in headers.items()}
        return httpx.post(f"{self.address}{path}", content=b"{}", headers=words, timeout=DEADLINE)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.address}{path}", timeout=DEADLINE)


@pytest.fixture(scope="module")
def ray_serve(
    processes: None,
    tmp_path_factory: pytest.TempPathFactory,
    free_ports: FreePorts,
) -> Iterator[RayServe]:
    place = tmp_path_factory.mktemp("ray")
    archive = make_model(place / "talker.mar", HANDLER)
    http, grpc = free_ports(2)
    settings = {
        "cache_dir": str(place / "cache"),
        "worker_preload": False,
        "max_request_size": 100_000,
    }
    with pytest.MonkeyPatch.context() as patch, ExitStack() as held:
        short = held.enter_context(
            tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True)
        )  # Ray has sockets in it
        own = {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            "RAY_TMPDIR": short,
            "TMPDIR": str(place),
        }
        for name, value in own.items():
            patch.setenv(name, value)
        node = {"num_cpus": 1, "object_store_memory": 80 << 20}
        system = {
            "health_check_initial_delay_ms": 1000,
            "health_check_period_ms": 500,
            "health_check_failure_threshold": 3,
        }
        cluster = Cluster(
            initialize_head=True,
            head_node_args={**node, "include_dashboard": False, "_system_config": system},
        )
        held.callback(cluster.shutdown)
        for _ in range(2):
            cluster.add_node(**node, resources={"slot": 1})
        ray.init(
            cluster.address,
            namespace="tests",
            log_to_driver=bool(os.environ.get("TSX_TEST_RAY_LOG")),
        )
        held.callback(ray.shutdown)
        options = {"port": grpc, "grpc_servicer_functions": GRPC}
        serve.start(
            proxy_location="HeadOnly",
            http_options={"host": "127.0.0.1", "port": http},
            grpc_options=options,
        )
        words = [
            "serve",
            archive,
            *FREE_PORTS,
            *FREE_GRPC_PORTS,
            "--set",
            "max_request_size=100000",
        ]
        tsx = held.enter_context(serving(words, place, {"TSX_CACHE_DIR": settings["cache_dir"]}))
        address = f"http://127.0.0.1:{http}"
        started = RayServe(cluster, address, f"127.0.0.1:{grpc}", tsx, place, settings)
        models = [
            {"name": name, "source": str(make_model(place / f"{name}.mar", HANDLER))}
            for name in MANY
        ]
        resources = {"num_cpus": 0.1, "resources": {"slot": 1.0}}  # a replica on each of two nodes
        talker = [{"name": "talker", "source": f"object://{upload(archive)}"}]
        targets = [
            started.target("talker", talker, replica=resources, replicas=2),
            started.target("many", models, multiplexed=2),
        ]
        serve.run_many(targets)
        yield started
