"""The Ray Serve application that serves archives.

`build` returns it for `serve.run`. A Serve config file names `build` by its import path.
"""

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

# Requests that one ingress forwards concurrently. `max_inflight_bytes` limits their bodies.
MAX_FORWARDED_REQUESTS = 10_000
CLOSING_S = 10.0  # time for workers to end after their last request
MODEL_FIELDS = {"name", "models", "settings", "replica", "multiplexed"}


def build(args: dict[str, Any]) -> Application:
    """Build the application from `args`, which is a `RayApplication` as JSON.

    Raises:
        SettingError: Arguments or settings are invalid.
    """
    application = parse_application(args)
    settings, _ = load_settings(application.settings, {})
    replica, scaling = application.replica, application.autoscaling
    arguments = application.model_dump(mode="json", include=MODEL_FIELDS)
    model = _deployment(
        ModelReplica,
        application,
        arguments,
        name=MODEL,
        ray_actor_options=replica.model_dump(exclude={"max_ongoing_requests"}, exclude_none=True),
        max_ongoing_requests=replica.max_ongoing_requests,
        logging_config={"enable_access_log": False},  # The ingress already logs each request.
        **(
            {"num_replicas": application.replicas or 1}
            if scaling is None
            else {"autoscaling_config": scaling}
        ),
    )
    limits = settings.max_request_size, settings.max_inflight_bytes
    names = [model.name for model in application.models] if application.multiplexed else []
    ingress = _deployment(
        serve.ingress(asgi_app)(Ingress),
        application,
        [*limits, names],
        name=INGRESS,
        ray_actor_options={"num_cpus": 0, "resources": application.ingress_resources},
        num_replicas=application.ingress_replicas,
        max_ongoing_requests=MAX_FORWARDED_REQUESTS,
        user_config=application.routing,
    )
    bound_application: Application = ingress.bind(*limits, names, model.bind(arguments))
    return bound_application


def _deployment(
    deployment_class: Any, application: RayApplication, arguments: Any, **options: Any
) -> Any:
    """Return a deployment whose version depends only on its `arguments`.

    Without a version, every `serve.run` would restart all replicas, even if nothing has changed.
    """
    version = hashlib.sha256(
        json.dumps([__version__, arguments], sort_keys=True).encode()
    ).hexdigest()
    shutdown_options = {
        "graceful_shutdown_timeout_s": application.drain + CLOSING_S,
        "graceful_shutdown_wait_loop_s": 1.0,
    }
    deployment: Any = serve.deployment(deployment_class)
    # `_internal` is needed, because Ray Serve accepts a version only from its own code.
    return deployment.options(
        _internal=True,
        version=version,
        max_surge_percent=application.surge,
        **shutdown_options,
        **options,
    )
