"""The resources of a deployment on a Ray cluster: archives, version and application.

The functions are pure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tsx_cli.bench.load.configuration import Configuration
from tsx_cli.bench.report.archive_record import ArchiveRecord
from tsx_cli.common.failure import UsageError
from tsx_cli.deploy.engine.facts import Facts, tags_of
from tsx_cli.deploy.engine.resources import OWNER, Resource, digest
from tsx_cli.deploy.preflight.outlook import DeploymentScaling, Outlook
from tsx_cli.deploy.spec import DeploySpec
from tsx_runtime.targets.ray.config import (
    OBJECT,
    S3,
    RayApplication,
    ReplicaResources,
    parse_application,
)

ARCHIVE = "Tsx::Ray::Archive"
UPLOAD = "Tsx::Ray::Upload"
VERSION = "Tsx::Ray::Version"
APPLICATION = "Tsx::Ray::Application"
GRPC = "tsx_runtime.targets.ray.grpc_bridge.add_services_to_server"
# Time to install packages and copy archives, in addition to the start of a model.
MARGIN_S = 120
UNITS = {"Mi": 1 << 20, "Gi": 1 << 30}


def resources(
    spec: DeploySpec, archives: Sequence[Facts], measured: ArchiveRecord | None
) -> list[Resource]:
    """Return the resources of a deployment; the archive of `model` is the first of `archives`.

    Raises:
        UsageError: Two archives have the same model name.
    """
    config = configuration(spec, archives, measured)
    tags = tags_of(spec, archives[0])
    archives_by_id = {
        resource.id: resource
        for resource in (_archive_resource(spec, facts, n) for n, facts in enumerate(archives))
        if resource is not None
    }
    version = f"{spec.name}-{digest(config, 12)}"
    properties = {"Version": version, "Config": config, "Canary": None}
    return [
        *archives_by_id.values(),
        Resource("Version", VERSION, version, {"Config": config}, tuple(archives_by_id), tags),
        Resource(
            "Application",
            APPLICATION,
            spec.name,
            properties,
            ("Version",),
            tags,
            timeout_s=spec.ray.startup_timeout + MARGIN_S,
        ),
    ]


def split_into_canary(application: Resource, percent: float) -> list[Resource]:
    """Return an application as a canary, and the stable application with its percentage."""
    version, config = application.properties["Version"], application.properties["Config"]
    canary_properties = {"Version": version, "Config": config, "Percent": percent}
    stable_properties = {"Canary": {"Version": version, "Percent": percent}}
    return [
        replace(
            application,
            id="Canary",
            name=canary_name(application.name),
            properties=canary_properties,
        ),
        replace(
            application,
            properties=stable_properties,
            needs=("Canary",),
            tags={OWNER: application.name},
            notes=(),
        ),
    ]


def canary_name(name: str) -> str:
    """Return the name of the application of a deployment's canary."""
    return f"{name}-canary"


def configuration(
    spec: DeploySpec, archives: Sequence[Facts], measured: ArchiveRecord | None
) -> dict[str, Any]:
    """Return the configuration for Ray Serve.

    `Application` contains the arguments of `application.build`.
    """
    variables = {"env_vars": dict(spec.env)} if spec.env else {}
    arguments = _arguments(spec, archives, measured).model_dump(mode="json", exclude_unset=True)
    environment = {**spec.ray.runtime_env, **variables}
    return {"Application": arguments, "RoutePrefix": route_prefix(spec), "RuntimeEnv": environment}


def route_prefix(spec: DeploySpec) -> str:
    return spec.ray.route_prefix or f"/{spec.name}"


def source_of(spec: DeploySpec, facts: Facts) -> str:
    if spec.ray.archives == "path":
        return str(facts.archive.absolute())
    if spec.ray.archives == "object-store":
        return f"{OBJECT}{facts.sha256}"
    return f"{spec.ray.archives.rstrip('/')}/{spec.name}/{facts.sha256[:16]}/{facts.archive.name}"


def _archive_resource(spec: DeploySpec, facts: Facts, number: int) -> Resource | None:
    """Return the resource that brings an archive to the nodes; None if they see its path."""
    source = source_of(spec, facts)
    properties = {"Path": str(facts.archive), "Sha256": facts.sha256}
    if source.startswith(S3):
        return Resource(f"Archive{number}", UPLOAD, source.removeprefix(S3), properties)
    return (
        Resource(f"Archive{number}", ARCHIVE, facts.sha256, properties)
        if source.startswith(OBJECT)
        else None
    )


def _arguments(
    spec: DeploySpec, archives: Sequence[Facts], measured: ArchiveRecord | None
) -> RayApplication:
    settings = spec.ray
    best = None if measured is None else Configuration(**measured.best.configuration)
    names = [facts.model_name for facts in archives]
    if duplicates := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(
            f"ray.models: several archives have the model name {', '.join(duplicates)}, which"
            " requests name; pack one under another"
        )
    cpus, gpus = settings.num_cpus, settings.num_gpus
    if best is not None and measured is not None:
        uses_gpu = best.device != "cpu"
        cores = (
            best.workers
            if uses_gpu
            else best.workers * best.threads_per_worker(measured.environment.cores)
        )
        cpus = cpus if cpus is not None else float(cores)
        gpus = gpus if gpus is not None else float(uses_gpu)
    target = settings.target_ongoing_requests
    if target is None and measured is not None:
        target = Outlook(measured, spec.model.name, DeploymentScaling()).fitting_target
    defaults = ReplicaResources.model_validate({})
    max_requests = settings.max_ongoing_requests or max(
        defaults.max_ongoing_requests, math.ceil(2 * (target or 0))
    )
    replica = {
        "num_cpus": defaults.num_cpus if cpus is None else cpus,
        "num_gpus": defaults.num_gpus if gpus is None else gpus,
        "max_ongoing_requests": max_requests,
        **({"memory": _bytes(settings.memory)} if settings.memory else {}),
        **({"resources": settings.resources} if settings.resources else {}),
    }
    scaling: dict[str, Any] = {"replicas": settings.replicas}
    if settings.max_replicas is not None:
        target_argument = {} if target is None else {"target_ongoing_requests": float(target)}
        scaling = {
            "autoscaling": {
                "min_replicas": settings.min_replicas,
                "max_replicas": settings.max_replicas,
                **target_argument,
            }
        }
    models = [
        {"name": facts.model_name, "source": source_of(spec, facts), "sha256": facts.sha256}
        for facts in archives
    ]
    common_arguments: dict[str, Any] = {
        "repeat": settings.repeat,
        "ingress_replicas": settings.ingress_replicas,
    }
    common_arguments |= {"surge": math.ceil(settings.surge), "drain": settings.grace}
    common_arguments |= (
        {} if settings.models_per_replica is None else {"multiplexed": settings.models_per_replica}
    )
    return parse_application(
        {"name": spec.name, "models": models, "replica": replica, **scaling, **common_arguments}
    )


def _bytes(memory: str) -> int:
    # The text matches, because the specification has validated it.
    number, unit = re.fullmatch(r"(\d+)(\w+)", memory).groups()  # type: ignore[union-attr]
    return int(number) * UNITS[unit]
