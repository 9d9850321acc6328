"""A Ray cluster of three nodes on this machine, tsx applications in it, and `tsx serve`."""

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

# The handler of the conformance table, extended with actions for the Ray tests.
HANDLER = (
    TALKER
    + """
from ts.handler_utils.utils import send_intermediate_predict_response

talk = act


def act(idx, row, context):
    headers = context.get_all_request_header(idx)
    action, file = headers.get("x-do", ""), headers.get("x-file", "")
    if action == "forever":
        try:
            while True:
                send_intermediate_predict_response(["x" * 1000], {idx: context.get_request_id(idx)}, "", 200, context)
                time.sleep(0.01)
        finally:
            Path(file).touch()
    if action == "wait":
        Path(file + f".{os.getpid()}").touch()
    if action:
        return talk(idx, row, context)
    names = {"name": context.manifest["model"]["modelName"], "trace": headers.get("traceparent")}
    return json.dumps(json.loads(talk(idx, row, context)) | names)
"""
)
MODEL_NAMES = [f"model-{number}" for number in range(5)]
GRPC = ["tsx_runtime.targets.ray.grpc_bridge.add_services_to_server"]
DEADLINE = 60.0  # seconds, for a busy machine
ON_HEAD = {"node:__internal_head__": 0.001}


@dataclass
class RayServe:
    """The cluster, its applications, and `tsx serve` with the archive of `talker`."""

    cluster: Cluster
    address: str
    grpc: str
    tsx: Running
    directory: Path
    settings: dict[str, Any]

    def target(self, name: str, models: list[dict[str, Any]], **options: Any) -> serve.RunTarget:
        args = {
            "name": name,
            "models": models,
            "settings": self.settings,
            "replica": {"num_cpus": 0.1},
            "ingress_replicas": 1,
        }
        return serve.RunTarget(
            build({**args, "ingress_resources": ON_HEAD, **options}),
            name=name,
            route_prefix=f"/{name}",
        )

    def post(self, path: str, **headers: str) -> httpx.Response:
        header_fields = {name.replace("_", "-"): value for name, value in headers.items()}
        return httpx.post(
            f"{self.address}{path}", content=b"{}", headers=header_fields, timeout=DEADLINE
        )

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.address}{path}", timeout=DEADLINE)


@pytest.fixture(scope="module")
def ray_serve(
    processes: None,
    tmp_path_factory: pytest.TempPathFactory,
    free_ports: FreePorts,
) -> Iterator[RayServe]:
    directory = tmp_path_factory.mktemp("ray")
    archive = make_model(directory / "talker.mar", HANDLER)
    http, grpc = free_ports(2)
    settings = {
        "cache_dir": str(directory / "cache"),
        "worker_preload": False,
        "max_request_size": 100_000,
    }
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        # Ray's sockets need a short path.
        short_directory = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True)
        )
        variables = {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            "RAY_TMPDIR": short_directory,
            "TMPDIR": str(directory),
        }
        for name, value in variables.items():
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
        stack.callback(cluster.shutdown)
        for _ in range(2):
            cluster.add_node(**node, resources={"slot": 1})
        ray.init(
            cluster.address,
            namespace="tests",
            log_to_driver=bool(os.environ.get("TSX_TEST_RAY_LOG")),
        )
        stack.callback(ray.shutdown)
        options = {"port": grpc, "grpc_servicer_functions": GRPC}
        serve.start(
            proxy_location="HeadOnly",
            http_options={"host": "127.0.0.1", "port": http},
            grpc_options=options,
        )
        arguments = [archive, *FREE_PORTS, *FREE_GRPC_PORTS, "--set", "max_request_size=100000"]
        environment = {"TSX_CACHE_DIR": settings["cache_dir"]}
        tsx = stack.enter_context(serving(["serve", *arguments], directory, environment))
        address = f"http://127.0.0.1:{http}"
        started = RayServe(cluster, address, f"127.0.0.1:{grpc}", tsx, directory, settings)
        models = [
            {"name": name, "source": str(make_model(directory / f"{name}.mar", HANDLER))}
            for name in MODEL_NAMES
        ]
        # Two nodes have one slot each; therefore each of them gets one replica.
        resources = {"num_cpus": 0.1, "resources": {"slot": 1.0}}
        talker = [{"name": "talker", "source": f"object://{upload(archive)}"}]
        targets = [
            started.target("talker", talker, replica=resources, replicas=2),
            started.target("many", models, multiplexed=2),
        ]
        serve.run_many(targets)
        yield started
