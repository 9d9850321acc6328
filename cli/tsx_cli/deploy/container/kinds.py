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

from tsx_cli.deploy.container.resources import RETRIES, engine_arguments
from tsx_cli.deploy.engine.kind import CloudError, ResourceKind
from tsx_cli.deploy.engine.resources import Observed, Resource, State, Traits
from tsx_cli.deploy.image.programs import Builder, Program, last_output
from tsx_cli.deploy.image.recipe import Recipe, own_tag_pattern

NAME, TARGET = "tsx.name", "tsx.target"
POLL_S = 2.0
LOG_LINES = 40  # last lines of a container that does not become healthy


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
        ids = self.program.ask(*arguments, doing=f"looking for the containers of {name}").split()
        if not ids:
            return []
        containers = json.loads(
            self.program.ask(
                "inspect", "--type", "container", *ids, doing=f"looking at the containers of {name}"
            )
        )
        return sorted(containers, key=lambda container: str(container["Created"]))

    def container(self, name: str) -> Mapping[str, Any] | None:
        """Return what the engine reports of a container.

        podman checks the health by itself only with systemd, so it is told to check now.
        """
        inspected: list[dict[str, Any]] = []
        for _ in range(RETRIES):
            check = ("healthcheck", "run", name)
            is_healthy = self.program.name != "podman" or self.program.try_(*check).returncode == 0
            done = self.program.try_("inspect", "--type", "container", name)
            inspected = json.loads(done.stdout) if done.returncode == 0 else []
            if is_healthy or not inspected or health_of(inspected[0]) != "healthy":
                break
        else:  # podman ignores failures during the start period
            inspected[0]["State"]["Health"] = {"Status": "unhealthy"}
        return inspected[0] if inspected else None

    def images(self, name: str) -> list[str]:
        """Return the images that were built here for a deployment, of all versions."""
        arguments = ("image", "ls", "--format", "{{.Repository}}:{{.Tag}}")
        names = self.program.ask(*arguments, doing=f"looking for the images of {name}").splitlines()
        names = [image.removeprefix("localhost/") for image in names]  # podman adds a prefix
        own_pattern = re.compile(f"{re.escape(name)}:tsx-[0-9a-f]{{12}}")
        shared = own_tag_pattern(name)
        return [
            image
            for image in names
            if own_pattern.fullmatch(image) or shared.fullmatch(image.rpartition(":")[2])
        ]

    def log(self, name: str) -> list[str]:
        done = self.program.try_("logs", "--tail", str(LOG_LINES), name)
        return [*done.stdout.splitlines(), *done.stderr.splitlines()][-LOG_LINES:]


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
    health = state.get("Health") or state.get("Healthcheck") or {}  # podman 3 has the second name
    return str(health.get("Status") or "healthy")


def ending_of(state: Mapping[str, Any]) -> str:
    """Tell how a container ended, or why the engine did not start it."""
    if state.get("OOMKilled"):
        return "was killed because it needs more memory than container.memory"
    if state.get("Error"):
        return f"was not started: {state['Error']}"
    if state.get("Running"):
        # The engine has started it again, and has lost the exit code.
        return "ends soon after each start"
    return f"ended with {state.get('ExitCode', 'no exit code')}"


def _condition(container: Mapping[str, Any]) -> tuple[State, str]:
    """Return the state of a container; one that restarts again and again has failed."""
    health = health_of(container)
    if health == "unhealthy" or (health == "starting" and container.get("RestartCount")):
        return "failed", "it is unhealthy"
    return ("changing", "is starting") if health == "starting" else ("ready", "")


class DockerContainer(ResourceKind):
    traits = Traits(
        is_tagged=False,
        unreported=frozenset({"Words", "Gpus", "Patience", "Deployment", "Grace", "Image"}),
        updates_failed=True,
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
            CloudError: It did not become healthy, and was removed.
        """
        properties = resource.properties
        arguments = list(properties["Words"])
        arguments[-1:-1] = engine_arguments(
            cloud.program.name, cloud.program.try_("run", "--help").stdout, properties["Gpus"]
        )
        before = self._stop_others(cloud, resource)
        try:
            cloud.program.ask(*arguments, doing=f"starting {resource.name}", environment=os.environ)
            self._wait_until_healthy(cloud, resource)
        except CloudError as error:
            cloud.program.try_("rm", "--force", resource.name)
            self._restart_former(cloud, before, error)

    def update(
        self, cloud: ContainerHost, resource: Resource, observed: Observed, changed: set[str]
    ) -> None:
        """Start an existing container that is stopped or unhealthy."""
        before = self._stop_others(cloud, resource)
        try:
            if observed.properties["Running"]:
                cloud.program.ask(
                    "stop", resource.name, doing=f"stopping {resource.name}, which is unhealthy"
                )
            cloud.program.ask("start", resource.name, doing=f"starting {resource.name}")
            self._wait_until_healthy(cloud, resource)
        except CloudError as error:
            cloud.program.try_("stop", resource.name)
            self._restart_former(cloud, before, error)

    def delete(self, cloud: ContainerHost, observed: Observed) -> None:
        if observed.properties["Running"]:
            cloud.program.ask("stop", observed.name, doing=f"stopping {observed.name}")
        cloud.program.ask("rm", observed.name, doing=f"removing {observed.name}")

    def _stop_others(self, cloud: ContainerHost, resource: Resource) -> list[str]:
        """Stop the running containers, which have the port, and return their names."""
        running = [
            container
            for container in cloud.containers(resource.properties["Deployment"])
            if container["State"].get("Running")
        ]
        names = [str(container["Name"]).removeprefix("/") for container in running]
        names = [name for name in names if name != resource.name]
        for name in names:
            cloud.program.ask("stop", name, doing=f"stopping {name}, which has its port")
        return names

    def _wait_until_healthy(self, cloud: ContainerHost, resource: Resource) -> None:
        deadline = cloud.clock() + resource.properties["Patience"]
        while True:
            container = cloud.container(resource.name)
            health = "gone" if container is None else health_of(container)
            if health == "healthy":
                return
            restarts = 0 if container is None else int(container.get("RestartCount") or 0)
            late = cloud.clock() > deadline
            if health not in ("starting", "created", "initialized") or restarts or late:
                raise CloudError(
                    _failure_text(resource.name, container, health, late, cloud.log(resource.name))
                )
            cloud.sleep(POLL_S)

    def _restart_former(
        self, cloud: ContainerHost, before: Sequence[str], error: CloudError
    ) -> None:
        message = error.message.rstrip(".")
        for name in before:
            done = cloud.program.try_("start", name)
            failure = f"could not be started again: {last_output(done)}"
            result = "was started again" if done.returncode == 0 else failure
            message += f". {name}, which ran before, {result}"
        raise CloudError(message) from error


class LocalImage(ResourceKind):
    """An image that is built and used on this machine."""

    traits = Traits(is_tagged=False)
    poll_interval_s, timeout_s = POLL_S, 3600.0

    def __init__(self, builder: Builder, recipe: Recipe | None = None) -> None:
        self._builder, self._recipe = builder, recipe

    def observe(self, cloud: Any, name: str) -> Observed | None:
        return Observed(name, {}, outputs={"Uri": name}) if self._builder.is_here(name) else None

    def create(self, cloud: Any, resource: Resource) -> None:
        assert self._recipe is not None
        self._builder.build(self._recipe, resource.name, None)

    def delete(self, cloud: Any, observed: Observed) -> None:
        self._builder.remove(observed.name)


class PushedImage(LocalImage):
    """An image that is built here and pushed to a registry."""

    def __init__(self, builder: Builder, recipe: Recipe) -> None:
        super().__init__(builder, recipe)
        self._pushed: dict[str, str] = {}  # name -> name with digest

    def observe(self, cloud: Any, name: str) -> Observed | None:
        """Return the image; its Uri has the digest if a program of this machine can tell it."""
        if name not in self._pushed and self._builder.is_pushed(name):
            self._pushed[name] = self._builder.pinned(name)
        return (
            Observed(name, {}, outputs={"Uri": self._pushed[name]})
            if name in self._pushed
            else None
        )

    def create(self, cloud: Any, resource: Resource) -> None:
        if not self._builder.is_here(resource.name):
            super().create(cloud, resource)
        self._pushed[resource.name] = self._builder.push(resource.name)

    def delete(self, cloud: Any, observed: Observed) -> None:
        pass  # The administrator of the registry removes images.


def _failure_text(
    name: str, container: Mapping[str, Any] | None, health: str, late: bool, log: Sequence[str]
) -> str:
    state = {} if container is None else container["State"]
    if health == "starting" and late:
        problem = "is not healthy yet; raise container.startup_timeout to give it more time"
    elif health == "unhealthy" and not state.get("OOMKilled"):
        problem = "is running but unhealthy"
    else:
        problem = ending_of(state)
    last = "\n".join(log)
    return (
        f"{name} {problem}. Its last log lines:\n{last}"
        if last
        else f"{name} {problem}, and printed nothing"
    )
