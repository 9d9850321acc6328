"""`--emit ray`: a config file of Ray Serve, and a RayService for KubeRay on Kubernetes."""

from __future__ import annotations

import math
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from tsx_cli.bench.report.archive_record import read_record
from tsx_cli.common.failure import UsageError
from tsx_cli.deploy.emit.yaml_text import yaml_text
from tsx_cli.deploy.engine.facts import Facts, read_archive
from tsx_cli.deploy.engine.shapes import fill, read_shapes
from tsx_cli.deploy.ray.resources import GRPC, configuration
from tsx_cli.deploy.spec import DeploySpec
from tsx_runtime.targets.ray.config import IMPORT_PATH
from tsx_runtime.version import __version__

CONFIG, SERVICE = "serve-config.yaml", "rayservice.yaml"
NEXT_STEP = (
    "kubectl apply --filename rayservice.yaml, where KubeRay is installed; on another cluster serve"
    " deploy serve-config.yaml, which ends applications of other config files"
)
SHAPES = Path(__file__).with_name("shapes.yaml")
GRPC_PORT = 9000


def ray_files(spec: DeploySpec, facts: Facts) -> tuple[dict[str, str], list[str]]:
    """Return the files by their names, and notes for the user.

    Raises:
        UsageError: The archive is meant for the object store, or Ray is not installed.
    """
    if spec.ray.archives == "object-store":
        raise UsageError(
            "--emit ray: files cannot put the archive into the cluster's memory: --set"
            " ray.archives=s3://BUCKET/PREFIX, or path for a path that all nodes see"
        )
    config = configuration(
        spec,
        [facts, *(read_archive(archive)[1] for archive in spec.ray.models)],
        read_record(spec.model),
    )
    image, env = spec.image, config["RuntimeEnv"]
    models = config["Application"]["models"]
    notes = [
        f"the nodes look for the model {model['name']} at {model['source']}: put its archive there"
        for model in models
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
    settings, replica, shapes = spec.ray, config["Application"]["replica"], read_shapes(SHAPES)
    sizes: dict[str, Any] = {
        "cpu": str(max(1, math.ceil(replica["num_cpus"]))),
        "memory": settings.memory or "4Gi",
    }
    if replica["num_gpus"]:
        sizes["nvidia.com/gpu"] = math.ceil(replica["num_gpus"])
    ports = {"gcs-server": 6379, "dashboard": 8265, "client": 10001, "serve": settings.port}
    ports |= {"grpc": GRPC_PORT} if settings.grpc else {}
    grpc = {"port": GRPC_PORT, "grpc_servicer_functions": [GRPC]}
    # During an update, new replicas run in addition to the old ones.
    max_replicas = math.ceil(
        (settings.max_replicas or settings.replicas) * (1 + settings.surge / 100)
    )
    values = {
        "name": spec.name,
        "port": settings.port,
        "grpc": grpc if settings.grpc else None,
        "import_path": IMPORT_PATH,
        "route_prefix": config["RoutePrefix"],
        "runtime_env": env,
        "application": config["Application"],
        "image": image,
        "ray": _ray_version(),
        "ports": [{"name": name, "containerPort": port} for name, port in ports.items()],
        "fewest": settings.replicas if settings.min_replicas is None else settings.min_replicas,
        "most": max_replicas,
        "sizes": sizes,
    }
    serve = yaml_text([fill(shapes["serve"], values)])
    service = fill(shapes["RayService"], {**values, "serve": serve})
    return {CONFIG: serve, SERVICE: yaml_text([service])}, notes


def _ray_version() -> str:
    """Return the installed version of Ray.

    Raises:
        UsageError: Ray is not installed.
    """
    try:
        return metadata.version("ray")
    except metadata.PackageNotFoundError:
        raise UsageError(
            "--emit ray names the version of Ray that is installed here, and none is: pip install"
            " 'tsx-serve[ray]'"
        ) from None
