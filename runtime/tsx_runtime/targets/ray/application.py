"""Builds the Ray Serve application of an archive: `serve.run` takes it, and a Serve config names `build` by its import path."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from ray import serve
from ray.serve import Application

from tsx_runtime.settings.sources import load_settings
from tsx_runtime.targets.ray.config import INGRESS, MODEL, RayApplication, parse_application
from tsx_runtime.targets.ray.ingress import Ingress, asgi_app
from tsx_runtime.targets.ray.replica import ModelReplica
from tsx_runtime.version import __version__

FORWARDED = 10_000  # requests that one ingress forwards at a time; max_inflight_bytes bounds their bodies
CLOSING = 10.0  # seconds, after the requests, for workers to end
OF_MODEL = {"name", "models", "settings", "replica", "multiplexed"}
SCALING = {"min": "min_replicas", "max": "max_replicas", "initial": "initial_replicas"}  # what Ray Serve calls otherwise


def build(args: dict[str, Any]) -> Application:
    """`args`: a `RayApplication` as JSON. Raises SettingError."""
    application = parse_application(args)
    settings, _ = load_settings(application.settings, {})
    replica = application.replica
    resources = {"num_cpus": replica.num_cpus, "num_gpus": replica.num_gpus, "memory": replica.memory, "resources": replica.resources}
    arguments = application.model_dump(mode="json", include=OF_MODEL)
    model = _deployment(
        ModelReplica,
        name=MODEL,
        ray_actor_options={name: value for name, value in resources.items() if value or name == "num_cpus"},
        max_ongoing_requests=replica.max_ongoing_requests,
        max_queued_requests=replica.max_queued_requests,
        drain=application.drain,
        version=_version(arguments),
        logging_config={"enable_access_log": False},  # the ingress writes a line for each request
        **_scaling(application),
    )
    limits = settings.max_request_size, settings.max_inflight_bytes
    names = [model.name for model in application.models] if application.multiplexed else []
    ingress = _deployment(
        serve.ingress(asgi_app)(Ingress),
        name=INGRESS,
        ray_actor_options={"num_cpus": 0, "resources": application.ingress_resources},
        num_replicas=application.ingress_replicas,
        max_ongoing_requests=FORWARDED,
        user_config=application.routing,
        drain=application.drain,
        version=_version([*limits, names]),
    )
    bound: Application = ingress.bind(*limits, names, model.bind(arguments))
    return bound


def _deployment(kind: Any, *, drain: float, version: str, **options: Any) -> Any:
    """`version`: without one, each `serve.run` restarts all replicas, changed or not; Ray Serve takes it from its own code alone."""
    times = {"graceful_shutdown_timeout_s": drain + CLOSING, "graceful_shutdown_wait_loop_s": 1.0}
    deployment: Any = serve.deployment(kind)
    return deployment.options(_internal=True, version=version, **times, **options)


def _scaling(application: RayApplication) -> dict[str, Any]:
    if application.autoscaling is None:
        return {"num_replicas": application.replicas or 1}
    given = application.autoscaling.model_dump(exclude_none=True)
    return {"autoscaling_config": {SCALING.get(name, name): value for name, value in given.items()}}


def _version(arguments: Any) -> str:
    """Changes with what replicas are made of."""
    return hashlib.sha256(json.dumps([__version__, arguments], sort_keys=True).encode()).hexdigest()
