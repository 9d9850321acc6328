"""`--emit ray`: a Serve config file, and a RayService by which KubeRay keeps a cluster with it on
Kubernetes.
"""

from __future__ import annotations

import math
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from tsx_cli.bench.report.archive_record import read_record
from tsx_cli.common.failure import UsageError
from tsx_cli.deploy.emit.yaml_text import yaml_text
from tsx_cli.deploy.engine.facts import Facts, look_at
from tsx_cli.deploy.engine.shapes import filled, shapes
from tsx_cli.deploy.ray.resources import GRPC, configuration
from tsx_cli.deploy.spec import DeploySpec
from tsx_runtime.targets.ray.config import IMPORT_PATH
from tsx_runtime.version import __version__

CONFIG, SERVICE = "serve-config.yaml", "rayservice.yaml"
STEP = (
    "kubectl apply --filename rayservice.yaml, where KubeRay is installed; on another cluster serve"
    " deploy serve-config.yaml, which ends applications of other config files"
)
SHAPES = Path(__file__).with_name("shapes.yaml")
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
    own, replica, kinds = spec.ray, config["Application"]["replica"], shapes(SHAPES)
    sizes: dict[str, Any] = {
        "cpu": str(max(1, math.ceil(replica["num_cpus"]))),
        "memory": own.memory or "4Gi",
    }
    if replica["num_gpus"]:
        sizes["nvidia.com/gpu"] = math.ceil(replica["num_gpus"])
    ports = {"gcs-server": 6379, "dashboard": 8265, "client": 10001, "serve": own.port}
    ports |= {"grpc": GRPC_PORT} if own.grpc else {}
    grpc = {"port": GRPC_PORT, "grpc_servicer_functions": [GRPC]}
    # A replica that takes another's place needs room.
    most = math.ceil((own.max_replicas or own.replicas) * (1 + own.surge / 100))
    values = {
        "name": spec.name,
        "port": own.port,
        "grpc": grpc if own.grpc else None,
        "import_path": IMPORT_PATH,
        "route_prefix": config["RoutePrefix"],
        "runtime_env": env,
        "application": config["Application"],
        "image": image,
        "ray": _ray_version(),
        "ports": [{"name": name, "containerPort": port} for name, port in ports.items()],
        "fewest": own.replicas if own.min_replicas is None else own.min_replicas,
        "most": most,
        "sizes": sizes,
    }
    serve = yaml_text([filled(kinds["serve"], values)])
    service = filled(kinds["RayService"], {**values, "serve": serve})
    return {CONFIG: serve, SERVICE: yaml_text([service])}, notes


def _ray_version() -> str:
    """Raises UsageError."""
    try:
        return metadata.version("ray")
    except metadata.PackageNotFoundError:
        raise UsageError(
            "--emit ray names the version of Ray that is installed here, and none is: pip install"
            " 'tsx-serve[ray]'"
        ) from None
