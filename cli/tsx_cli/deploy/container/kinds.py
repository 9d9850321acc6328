"""Containers and images of this machine, with docker or podman. Labels are the only state.

Each version is a container whose name contains a hash of its arguments. One container of a
deployment runs, and earlier ones are kept stopped. A container that does not become healthy is
removed, and the earlier one is started again.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tsx_cli.deploy.container.resources import HEALTH_RETRIES, engine_arguments
from tsx_cli.deploy.engine.kind import CloudError, ResourceKind
from tsx_cli.deploy.engine.resources import Observed, Resource, State, Traits
from tsx_cli.deploy.image.programs import Builder, Program, last_output
from tsx_cli.deploy.image.recipe import Recipe, own_tag_pattern

NAME, TARGET = "tsx.name", "tsx.target"
POLL_S = 2.0
LOG_LINES = 40  # number of last lines to show if a container does not become healthy


@dataclass(frozen=True)
class ContainerHost:
    """The containers of docker or podman on this machine."""

    program: Program
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic
    region: str = "this machine"

    def containers(self, name: str) -> list[Mapping[str, Any]]:
        """Return the containers of a deployment, oldest first."""
        arguments = (
            "ps",
            "--all",
            "--quiet",
            "--filter",
            f"label={NAME}={name}",
            "--filter",
            f"label={TARGET}=container",
        )
        ids = self.program.run(*arguments, doing=f"looking for the containers of {name}").split()
        if not ids:
            return []
        containers = json.loads(
            self.program.run(
                "inspect", "--type", "container", *ids, doing=f"looking at the containers of {name}"
            )
        )
        return sorted(containers, key=lambda container: str(container["Created"]))

    def container(self, name: str) -> Mapping[str, Any] | None:
        """Return the engine's report on a container.

        Without systemd, podman runs no health checks by itself, so this method runs one.
        """
        details: list[dict[str, Any]] = []
        for _ in range(HEALTH_RETRIES):
            check = ("healthcheck", "run", name)
            is_healthy = (
                self.program.name != "podman" or self.program.run_unchecked(*check).returncode == 0
            )
            result = self.program.run_unchecked("inspect", "--type", "container", name)
            details = json.loads(result.stdout) if result.returncode == 0 else []
            if is_healthy or not details or health_of(details[0]) != "healthy":
                break
        else:
            # podman ignores failures during the start period, so the health is set here.
            details[0]["State"]["Health"] = {"Status": "unhealthy"}
        return details[0] if details else None

    def images(self, name: str) -> list[str]:
        """Return the images of all versions that were built here for a deployment."""
        arguments = ("image", "ls", "--format", "{{.Repository}}:{{.Tag}}")
        names = self.program.run(*arguments, doing=f"looking for the images of {name}").splitlines()
        names = [image.removeprefix("localhost/") for image in names]  # podman adds this prefix.
        own_pattern = re.compile(f"{re.escape(name)}:tsx-[0-9a-f]{{12}}")
        shared_pattern = own_tag_pattern(name)
        return [
            image
            for image in names
            if own_pattern.fullmatch(image) or shared_pattern.fullmatch(image.rpartition(":")[2])
        ]

    def log(self, name: str) -> list[str]:
        result = self.program.run_unchecked("logs", "--tail", str(LOG_LINES), name)
        return [*result.stdout.splitlines(), *result.stderr.splitlines()][-LOG_LINES:]


def labels_of(container: Mapping[str, Any]) -> dict[str, str]:
    return dict(container["Config"].get("Labels") or {})


def tags_of(container: Mapping[str, Any]) -> dict[str, str]:
    """Return the labels of a container as tags."""
    return {
        name.replace(".", ":", 1): value
        for name, value in labels_of(container).items()
        if name.startswith("tsx.")
    }


def health_of(container: Mapping[str, Any]) -> str:
    """Return `healthy`, `starting` or `unhealthy` for a running container, or else its state.

    A running container without a health check is healthy.
    """
    state = container["State"]
    if not state.get("Running"):
        return str(state.get("Status") or "exited")
    health = state.get("Health") or state.get("Healthcheck") or {}  # The second key is podman 3's.
    return str(health.get("Status") or "healthy")


def ending_of(state: Mapping[str, Any]) -> str:
    """Tell how a container ended, or why the engine did not start it."""
    if state.get("OOMKilled"):
        return "was killed because it needs more memory than container.memory"
    if state.get("Error"):
        return f"was not started: {state['Error']}"
    if state.get("Running"):
        # The engine has restarted the container, and no longer knows the exit code.
        return "ends soon after each start"
    return f"ended with {state.get('ExitCode', 'no exit code')}"


def _condition(container: Mapping[str, Any]) -> tuple[State, str]:
    """Return the state of a container; one that restarts repeatedly counts as failed."""
    health = health_of(container)
    if health == "unhealthy" or (health == "starting" and container.get("RestartCount")):
        return "failed", "it is unhealthy"
    return ("changing", "is starting") if health == "starting" else ("ready", "")


class DockerContainer(ResourceKind):
    traits = Traits(
        is_tagged=False,
        unreported=frozenset({"Words", "Gpus", "Patience", "Deployment", "Image"}),
        can_update_failed=True,
        when_interrupted="the new container continues to start, and the previous one is stopped",
    )
    poll_interval_s, timeout_s = POLL_S, 3600.0

    def observe(self, cloud: ContainerHost, name: str) -> Observed | None:
        container = cloud.container(name)
        if container is None:
            return None
        tags = tags_of(container)
        state, reason = _condition(container)
        return Observed(
            name,
            {"Running": bool(container["State"].get("Running"))},
            tags,
            {"Ref": name},
            state,
            reason,
        )

    def create(self, cloud: ContainerHost, resource: Resource) -> None:
        """Start a container in place of the running one.

        Raises:
            CloudError: The container did not become healthy, and was removed.
        """
        properties = resource.properties
        arguments = list(properties["Words"])
        arguments[-1:-1] = engine_arguments(
            cloud.program.name,
            cloud.program.run_unchecked("run", "--help").stdout,
            properties["Gpus"],
        )
        stopped_names = self._stop_others(cloud, resource)
        try:
            cloud.program.run(*arguments, doing=f"starting {resource.name}", environment=os.environ)
            self._wait_until_healthy(cloud, resource)
        except CloudError as error:
            cloud.program.run_unchecked("rm", "--force", resource.name)
            self._restart_stopped(cloud, stopped_names, error)

    def update(
        self, cloud: ContainerHost, resource: Resource, observed: Observed, changed: set[str]
    ) -> None:
        """Start an existing container that is stopped or unhealthy."""
        stopped_names = self._stop_others(cloud, resource)
        try:
            if observed.properties["Running"]:
                cloud.program.run(
                    "stop", resource.name, doing=f"stopping {resource.name}, which is unhealthy"
                )
            cloud.program.run("start", resource.name, doing=f"starting {resource.name}")
            self._wait_until_healthy(cloud, resource)
        except CloudError as error:
            cloud.program.run_unchecked("stop", resource.name)
            self._restart_stopped(cloud, stopped_names, error)

    def delete(self, cloud: ContainerHost, observed: Observed) -> None:
        if observed.properties["Running"]:
            cloud.program.run("stop", observed.name, doing=f"stopping {observed.name}")
        cloud.program.run("rm", observed.name, doing=f"removing {observed.name}")

    def _stop_others(self, cloud: ContainerHost, resource: Resource) -> list[str]:
        """Stop the other running containers, which occupy the port, and return their names."""
        running = [
            container
            for container in cloud.containers(resource.properties["Deployment"])
            if container["State"].get("Running")
        ]
        names = [str(container["Name"]).removeprefix("/") for container in running]
        names = [name for name in names if name != resource.name]
        for name in names:
            cloud.program.run("stop", name, doing=f"stopping {name}, which has its port")
        return names

    def _wait_until_healthy(self, cloud: ContainerHost, resource: Resource) -> None:
        deadline = cloud.clock() + resource.properties["Patience"]
        while True:
            container = cloud.container(resource.name)
            health = "gone" if container is None else health_of(container)
            if health == "healthy":
                return
            restarts = 0 if container is None else int(container.get("RestartCount") or 0)
            is_late = cloud.clock() > deadline
            if health not in ("starting", "created", "initialized") or restarts or is_late:
                raise CloudError(
                    _failure_text(
                        resource.name, container, health, is_late, cloud.log(resource.name)
                    )
                )
            cloud.sleep(POLL_S)

    def _restart_stopped(
        self, cloud: ContainerHost, stopped_names: Sequence[str], error: CloudError
    ) -> None:
        message = error.message.rstrip(".")
        for name in stopped_names:
            result = cloud.program.run_unchecked("start", name)
            failure = f"could not be started again: {last_output(result)}"
            outcome = "was started again" if result.returncode == 0 else failure
            message += f". {name}, which ran before, {outcome}"
        raise CloudError(message) from error


class LocalImage(ResourceKind):
    """An image that is built and used on this machine."""

    traits = Traits(is_tagged=False)
    poll_interval_s, timeout_s = POLL_S, 3600.0

    def __init__(self, builder: Builder, recipe: Recipe | None = None) -> None:
        self._builder, self._recipe = builder, recipe

    def observe(self, cloud: Any, name: str) -> Observed | None:
        return Observed(name, {}, outputs={"Uri": name}) if self._builder.is_local(name) else None

    def create(self, cloud: Any, resource: Resource) -> None:
        assert self._recipe is not None
        self._builder.build(self._recipe, resource.name, None)

    def delete(self, cloud: Any, observed: Observed) -> None:
        self._builder.remove(observed.name)


class PushedImage(LocalImage):
    """An image that is built on this machine and pushed to a registry."""

    def __init__(self, builder: Builder, recipe: Recipe) -> None:
        super().__init__(builder, recipe)
        self._pushed: dict[str, str] = {}  # name -> name with digest

    def observe(self, cloud: Any, name: str) -> Observed | None:
        """Return the image; its Uri has the digest if a program of this machine can find it."""
        if name not in self._pushed and self._builder.is_pushed(name):
            self._pushed[name] = self._builder.pin_digest(name)
        return (
            Observed(name, {}, outputs={"Uri": self._pushed[name]})
            if name in self._pushed
            else None
        )

    def create(self, cloud: Any, resource: Resource) -> None:
        if not self._builder.is_local(resource.name):
            super().create(cloud, resource)
        self._pushed[resource.name] = self._builder.push(resource.name)

    def delete(self, cloud: Any, observed: Observed) -> None:
        pass  # The administrator of the registry removes images.


def _failure_text(
    name: str, container: Mapping[str, Any] | None, health: str, is_late: bool, log: Sequence[str]
) -> str:
    state = {} if container is None else container["State"]
    if health == "starting" and is_late:
        problem = "is not healthy yet; raise container.startup_timeout to give it more time"
    elif health == "unhealthy" and not state.get("OOMKilled"):
        problem = "is running but unhealthy"
    else:
        problem = ending_of(state)
    log_text = "\n".join(log)
    return (
        f"{name} {problem}. Its last log lines:\n{log_text}"
        if log_text
        else f"{name} {problem}, and printed nothing"
    )
