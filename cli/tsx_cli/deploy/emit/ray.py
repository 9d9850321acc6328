"""`--emit ray`: a Serve config file, and a RayService by which KubeRay keeps a cluster with it on
Kubernetes.
"""

from __future__ import annotations

import math
import sys
from importlib import metadata
from typing import Any

from tsx_cli.bench.report.archive_record import read_record
from tsx_cli.common.failure import UsageError
from tsx_cli.deploy.emit.yaml_text import yaml_text
from tsx_cli.deploy.engine.facts import Facts, look_at
from tsx_cli.deploy.ray.resources import GRPC, configuration
from tsx_cli.deploy.spec import DeploySpec
from tsx_runtime.targets.ray.config import IMPORT_PATH
from tsx_runtime.version import __version__

CONFIG, SERVICE = "serve-config.yaml", "rayservice.yaml"
STEP = (
    "kubectl apply --filename rayservice.yaml, where KubeRay is installed; on another cluster serve"
    " deploy serve-config.yaml, which ends applications of other config files"
)
HEAD = {"cpu": "2", "memory": "4Gi"}  # it runs no replicas
GRPC_PORT = 9000


def ray_files(spec: DeploySpec, facts: Facts) -> tuple[dict[str, str], list[str]]:
    """The files by their names, and what to know of them. Raises UsageError."""
    if spec.ray.archives == "object-store":
        raise UsageError(
            "--emit ray: files cannot put the archive into the cluster's memory: --set"
            " ray.archives=s3://BUCKET/PREFIX, or path for a path that all nodes see"
        )
    config = configuration(
        spec, [facts, *(look_at(each)[1] for each in spec.ray.models)], read_record(spec.model)
    )
    image, env = spec.image, config["RuntimeEnv"]
    models = config["Application"]["models"]
    notes = [
        f"the nodes look for the model {each['name']} at {each['source']}: put its archive there"
        for each in models
    ]
    if image is None:
        image = (
            f"rayproject/ray:{_ray_version()}-py{sys.version_info.major}{sys.version_info.minor}"
        )
        env = {"pip": [f"tsx-serve[ray]=={__version__}"], **env}
        notes.append(
            f"each start of a node installs tsx into {image}; an image that has it starts faster:"
            " --image"
        )
    serve = _serve_config(spec, {**config, "RuntimeEnv": env})
    return {
        CONFIG: yaml_text([serve]),
        SERVICE: yaml_text([_service(spec, config, yaml_text([serve]), image)]),
    }, notes


def _serve_config(spec: DeploySpec, config: dict[str, Any]) -> dict[str, Any]:
    grpc = (
        {"grpc_options": {"port": GRPC_PORT, "grpc_servicer_functions": [GRPC]}}
        if spec.ray.grpc
        else {}
    )
    application = {
        "name": spec.name,
        "import_path": IMPORT_PATH,
        "route_prefix": config["RoutePrefix"],
        "runtime_env": config["RuntimeEnv"],
        "args": config["Application"],
    }
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": "0.0.0.0", "port": spec.ray.port},
        **grpc,
        "applications": [application],
    }


def _service(spec: DeploySpec, config: dict[str, Any], serve: str, image: str) -> dict[str, Any]:
    own, replica = spec.ray, config["Application"]["replica"]
    sizes: dict[str, Any] = {
        "cpu": str(max(1, math.ceil(replica["num_cpus"]))),
        "memory": own.memory or HEAD["memory"],
    }
    if replica["num_gpus"]:
        sizes["nvidia.com/gpu"] = math.ceil(replica["num_gpus"])
    ports = {
        "gcs-server": 6379,
        "dashboard": 8265,
        "client": 10001,
        "serve": own.port,
        **({"grpc": GRPC_PORT} if own.grpc else {}),
    }
    fewest = own.replicas if own.min_replicas is None else own.min_replicas
    most = math.ceil(
        (own.max_replicas or own.replicas) * (1 + own.surge / 100)
    )  # a replica that takes another's place needs room
    workers = {
        "groupName": "replicas",
        "replicas": fewest,
        "minReplicas": fewest,
        "maxReplicas": most,
    }
    head = {
        **_container("ray-head", image, HEAD),
        "ports": [{"name": name, "containerPort": port} for name, port in ports.items()],
    }
    cluster = {
        "rayVersion": _ray_version(),
        "enableInTreeAutoscaling": True,
        "headGroupSpec": {
            "rayStartParams": {"num-cpus": "0"},
            "template": {"spec": {"containers": [head]}},
        },
        "workerGroupSpecs": [
            {
                **workers,
                "rayStartParams": {},
                "template": {"spec": {"containers": [_container("ray-worker", image, sizes)]}},
            },
        ],
    }
    metadata = {
        "name": spec.name,
        "labels": {"app.kubernetes.io/name": spec.name, "app.kubernetes.io/managed-by": "tsx"},
    }
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": metadata,
        "spec": {"serveConfigV2": serve, "rayClusterConfig": cluster},
    }


def _container(name: str, image: str, sizes: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "image": image, "resources": {"requests": sizes, "limits": sizes}}


def _ray_version() -> str:
    """Raises UsageError."""
    try:
        return metadata.version("ray")
    except metadata.PackageNotFoundError:
        raise UsageError(
            "--emit ray names the version of Ray that is installed here, and none is: pip install"
            " 'tsx-serve[ray]'"
        ) from None
