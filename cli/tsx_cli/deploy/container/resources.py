"""A container on one machine, as arguments of `docker run` or as a compose file; pure functions."""

from __future__ import annotations

import ipaddress
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tsx_cli.deploy.engine.shapes import fill, read_shapes
from tsx_cli.deploy.spec import DeploySpec
from tsx_runtime.shared.safe_path import run_module

HEALTH_COMMAND = ("python", *run_module("tsx_runtime.targets.health"))
TOKENS = ("TSX_INFERENCE_TOKEN", "TSX_MANAGEMENT_TOKEN")
OPEN_VARIABLE, DEFAULTS_VARIABLE = "TSX_DISABLE_TOKEN_AUTHORIZATION", "TSX_DEFAULTS"
CONTAINER_PORT, CONTAINER_METRICS_PORT = 8080, 8082
SHAPES = Path(__file__).with_name("compose.yaml")
MAX_PROCESSES = 4096  # limit of processes and threads
LOG_OPTIONS: dict[str, Any] = {
    "driver": "json-file",
    "options": {"max-size": "20m", "max-file": "5"},
}
START_INTERVAL = "2s"  # interval of health checks until the first success
HEALTH_RETRIES = 3  # number of failed health checks after which a container is unhealthy
# /tmp must be executable, because torch.compile writes libraries there.
FIXED_FLAGS = (
    "--init --restart unless-stopped --read-only --tmpfs /tmp:exec --cap-drop ALL"
    f" --security-opt no-new-privileges --shm-size 1g --pids-limit {MAX_PROCESSES}"
)
HEALTH_FLAGS = f"--health-interval 10s --health-timeout 5s --health-retries {HEALTH_RETRIES}"
MARGIN_S = 5  # time between the end of draining and the end of the grace period


def environment(spec: DeploySpec) -> dict[str, str]:
    """Return the environment of the container.

    Derived values are only defaults: the settings file of the image and `env` override them.
    """
    # During this delay the server still takes requests, so it shortens the time for draining.
    delay = spec.env.get("TSX_SHUTDOWN_DELAY", "")
    defaults: dict[str, object] = {
        "drain_timeout": max(
            1, spec.container.grace - MARGIN_S - (int(delay) if delay.isdecimal() else 0)
        )
    }
    defaults["default_startup_timeout"] = spec.container.startup_timeout
    if is_loopback(spec.container.host):
        # `tsx serve` does the same on a loopback address.
        defaults["disable_token_authorization"] = "true"
    return {DEFAULTS_VARIABLE: defaults_text(defaults)} | dict(spec.env)


def defaults_text(defaults: Mapping[str, object]) -> str:
    """Return defaults in the form that the image's entry point reads."""
    return " ".join(f"{name}={value}" for name, value in defaults.items())


def required_tokens(spec: DeploySpec) -> list[str]:
    """Return the variables with tokens that this command's environment must have."""
    is_open = spec.env.get(OPEN_VARIABLE, str(is_loopback(spec.container.host))).lower() == "true"
    return [] if is_open else [name for name in TOKENS if name not in spec.env]


def labels_from_tags(tags: Mapping[str, str]) -> dict[str, str]:
    """Return tags as labels of a container, whose names contain dots by convention."""
    return {name.replace(":", "."): value for name, value in tags.items() if value}


def published_ports(spec: DeploySpec) -> list[str]:
    host = f"[{spec.container.host}]" if ":" in spec.container.host else spec.container.host
    return [
        f"{host}:{spec.container.port}:{CONTAINER_PORT}",
        f"{host}:{spec.container.metrics_port}:{CONTAINER_METRICS_PORT}",
    ]


def compose(
    spec: DeploySpec, image: str, *, stage: str | None, labels: Mapping[str, str]
) -> dict[str, Any]:
    """Return a compose file.

    With a `stage`, compose builds the image from the Dockerfile in the directory of the file.
    """
    settings = spec.container
    token_variables = {
        name: f"${{{name}:?clients carry it as a bearer token}}" for name in required_tokens(spec)
    }
    devices = [{"driver": "nvidia", "count": settings.gpus, "capabilities": ["gpu"]}]
    values = {
        "image": image,
        "build": stage and {"context": ".", "target": stage},
        "processes": MAX_PROCESSES,
        "logging": LOG_OPTIONS,
        "environment": _escape_dollars(environment(spec)) | token_variables,
        "ports": published_ports(spec),
        "labels": _escape_dollars(labels_from_tags(labels)),
        "grace": f"{settings.grace}s",
        "health": ["CMD", *HEALTH_COMMAND],
        "retries": HEALTH_RETRIES,
        "start_period": f"{settings.startup_timeout}s",
        "cpus": settings.cpus,
        "memory": settings.memory,
        "devices": {"resources": {"reservations": {"devices": devices}}} if settings.gpus else None,
    }
    service = fill(read_shapes(SHAPES)["service"], values)
    return {"name": spec.name, "services": {spec.name: service}}


def run_arguments(
    spec: DeploySpec, image: str, *, name: str, labels: Mapping[str, str]
) -> list[str]:
    """Return the arguments of `docker` or `podman`.

    Tokens come from this command's environment, so that no list of processes shows them.
    """
    settings = spec.container
    arguments = [
        "run",
        "--detach",
        "--name",
        name,
        *FIXED_FLAGS.split(),
        "--stop-timeout",
        str(settings.grace),
    ]
    arguments += ["--health-cmd", shlex.join(HEALTH_COMMAND), *HEALTH_FLAGS.split()]
    arguments += ["--health-start-period", f"{settings.startup_timeout}s"]
    for key, value in environment(spec).items():
        arguments += ["--env", f"{key}={value}"]
    for key in required_tokens(spec):
        arguments += ["--env", key]
    for port in published_ports(spec):
        arguments += ["--publish", port]
    for key, value in labels_from_tags(labels).items():
        arguments += ["--label", f"{key}={value}"]
    if settings.cpus is not None:
        arguments += ["--cpus", f"{settings.cpus:g}"]
    if settings.memory is not None:
        arguments += ["--memory", settings.memory]
    return [*arguments, image]


def engine_arguments(engine: str, run_help: str, gpus: int) -> list[str]:
    """Return the arguments that differ between docker and podman.

    They limit the size of the log, which is otherwise unlimited. podman itself prefers the journal
    if there is one.

    Args:
        engine: The name of the program.
        run_help: The output of `run --help`.
        gpus: The number of GPUs.
    """
    if engine == "docker":
        arguments = ["--log-driver", LOG_OPTIONS["driver"]]
        arguments += [
            argument
            for key, value in LOG_OPTIONS["options"].items()
            for argument in ("--log-opt", f"{key}={value}")
        ]
        if "--health-start-interval" in run_help:  # The flag exists from Docker 25 on.
            arguments += ["--health-start-interval", START_INTERVAL]
        return arguments + (["--gpus", str(gpus)] if gpus else [])
    log = ["--log-opt", f"max-size={LOG_OPTIONS['options']['max-size']}"]
    return log + [argument for n in range(gpus) for argument in ("--device", f"nvidia.com/gpu={n}")]


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _escape_dollars(texts: Mapping[str, str]) -> dict[str, str]:
    """Escape the dollars of texts, which begin variables in a compose file."""
    return {name: text.replace("$", "$$") for name, text in texts.items()}
