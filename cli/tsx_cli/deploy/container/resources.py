"""A container on one machine: the arguments of `docker run`, and the same as a compose file.

Pure functions.
"""

from __future__ import annotations

import ipaddress
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tsx_cli.deploy.engine.shapes import filled, shapes
from tsx_cli.deploy.spec import DeploySpec
from tsx_runtime.shared.safe_path import run_module

HEALTH = ("python", *run_module("tsx_runtime.targets.health"))
TOKENS = ("TSX_INFERENCE_TOKEN", "TSX_MANAGEMENT_TOKEN")
OPEN, DEFAULTS = "TSX_DISABLE_TOKEN_AUTHORIZATION", "TSX_DEFAULTS"
INSIDE, METRICS_INSIDE = 8080, 8082
SHAPES = Path(__file__).with_name("compose.yaml")
PROCESSES = 4096  # and threads, at most
LOG: dict[str, Any] = {"driver": "json-file", "options": {"max-size": "20m", "max-file": "5"}}
START_INTERVAL = "2s"  # between two health checks until the first that succeeds
RETRIES = 3  # failed health checks that make a container unhealthy
# torch.compile puts libraries into /tmp
FIXED = (
    "--init --restart unless-stopped --read-only --tmpfs /tmp:exec --cap-drop ALL"
    f" --security-opt no-new-privileges --shm-size 1g --pids-limit {PROCESSES}"
)
CHECKED = f"--health-interval 10s --health-timeout 5s --health-retries {RETRIES}"
MARGIN = 5  # seconds of the grace period that are left for the end itself


def environment(spec: DeploySpec) -> dict[str, str]:
    """What the deployment derives is a default, below the image's settings file and `env`."""
    delay = spec.env.get(
        "TSX_SHUTDOWN_DELAY", ""
    )  # for which it still takes requests, before it drains
    own: dict[str, object] = {
        "drain_timeout": max(
            1, spec.container.grace - MARGIN - (int(delay) if delay.isdecimal() else 0)
        )
    }
    own["default_startup_timeout"] = spec.container.startup_timeout
    if is_loopback(spec.container.host):
        own["disable_token_authorization"] = (
            "true"  # which is what `tsx serve` does where only this machine reaches it, too
        )
    return {DEFAULTS: in_words(own)} | dict(spec.env)


def in_words(defaults: Mapping[str, object]) -> str:
    """As the image's entry point reads them."""
    return " ".join(f"{name}={value}" for name, value in defaults.items())


def wants_tokens(spec: DeploySpec) -> list[str]:
    """The variables that must be set where it is deployed, as others reach it."""
    is_open = spec.env.get(OPEN, str(is_loopback(spec.container.host))).lower() == "true"
    return [] if is_open else [name for name in TOKENS if name not in spec.env]


def shown(tags: Mapping[str, str]) -> dict[str, str]:
    """As labels of a container, whose names have dots by custom."""
    return {name.replace(":", "."): value for name, value in tags.items() if value}


def published(spec: DeploySpec) -> list[str]:
    host = f"[{spec.container.host}]" if ":" in spec.container.host else spec.container.host
    return [
        f"{host}:{spec.container.port}:{INSIDE}",
        f"{host}:{spec.container.metrics_port}:{METRICS_INSIDE}",
    ]


def compose(
    spec: DeploySpec, image: str, *, stage: str | None, labels: Mapping[str, str]
) -> dict[str, Any]:
    """With a `stage`, compose builds the image from the Dockerfile beside it."""
    own = spec.container
    asked = {
        name: f"${{{name}:?clients carry it as a bearer token}}" for name in wants_tokens(spec)
    }
    devices = [{"driver": "nvidia", "count": own.gpus, "capabilities": ["gpu"]}]
    values = {
        "image": image,
        "build": stage and {"context": ".", "target": stage},
        "processes": PROCESSES,
        "logging": LOG,
        "environment": _literal(environment(spec)) | asked,
        "ports": published(spec),
        "labels": _literal(shown(labels)),
        "grace": f"{own.grace}s",
        "health": ["CMD", *HEALTH],
        "retries": RETRIES,
        "start_period": f"{own.startup_timeout}s",
        "cpus": own.cpus,
        "memory": own.memory,
        "devices": {"resources": {"reservations": {"devices": devices}}} if own.gpus else None,
    }
    service = filled(shapes(SHAPES)["service"], values)
    return {"name": spec.name, "services": {spec.name: service}}


def run_words(spec: DeploySpec, image: str, *, name: str, labels: Mapping[str, str]) -> list[str]:
    """What follows `docker` or `podman`.

    Tokens are taken from this command's environment, so that no list of processes shows them.
    """
    own = spec.container
    words = ["run", "--detach", "--name", name, *FIXED.split(), "--stop-timeout", str(own.grace)]
    words += ["--health-cmd", shlex.join(HEALTH), *CHECKED.split()]
    words += ["--health-start-period", f"{own.startup_timeout}s"]
    for key, value in environment(spec).items():
        words += ["--env", f"{key}={value}"]
    for key in wants_tokens(spec):
        words += ["--env", key]
    for port in published(spec):
        words += ["--publish", port]
    for key, value in shown(labels).items():
        words += ["--label", f"{key}={value}"]
    if own.cpus is not None:
        words += ["--cpus", f"{own.cpus:g}"]
    if own.memory is not None:
        words += ["--memory", own.memory]
    return [*words, image]


def engine_words(engine: str, known: str, gpus: int) -> list[str]:
    """The arguments that docker and podman do not share; `known` is the help of `run`. Podman names
    GPUs by the container device interface.

    Both keep a log without bound in a file by default; podman prefers the journal where there is
    one.
    """
    if engine == "docker":
        words = ["--log-driver", LOG["driver"]]
        words += [
            word
            for key, value in LOG["options"].items()
            for word in ("--log-opt", f"{key}={value}")
        ]
        words += (
            ["--health-start-interval", START_INTERVAL]
            if "--health-start-interval" in known
            else []
        )  # since Docker 25
        return words + (["--gpus", str(gpus)] if gpus else [])
    log = ["--log-opt", f"max-size={LOG['options']['max-size']}"]
    return log + [word for n in range(gpus) for word in ("--device", f"nvidia.com/gpu={n}")]


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _literal(texts: Mapping[str, str]) -> dict[str, str]:
    """A dollar is a variable's in a compose file."""
    return {name: text.replace("$", "$$") for name, text in texts.items()}
