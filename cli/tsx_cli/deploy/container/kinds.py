"""Containers and images of this machine, by docker or podman. Labels are the only state.

Each version is a container of its own, whose name is made of what it says; one of a deployment's
runs, those before it are kept, stopped. One that does not get well is removed, and the one before
it is started again.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tsx_cli.deploy.container.resources import RETRIES, engine_words
from tsx_cli.deploy.engine.kind import CloudError, ResourceKind
from tsx_cli.deploy.engine.resources import Observed, Resource, State, Traits
from tsx_cli.deploy.image.programs import Builder, Program, last_output
from tsx_cli.deploy.image.recipe import Recipe, own_tag

NAME, TARGET = "tsx.name", "tsx.target"
POLL = 2.0  # seconds between two looks at a container that is starting
LINES = 40  # of its log, where it does not get well


@dataclass(frozen=True)
class ContainerHost:
    """Runs docker or podman on this machine."""

    program: Program
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic
    region: str = "this machine"

    def containers(self, name: str) -> list[Mapping[str, Any]]:
        """Of a deployment, the oldest first."""
        words = (
            "ps",
            "--all",
            "--quiet",
            "--filter",
            f"label={NAME}={name}",
            "--filter",
            f"label={TARGET}=container",
        )
        ids = self.program.ask(*words, doing=f"looking for the containers of {name}").split()
        if not ids:
            return []
        found = json.loads(
            self.program.ask(
                "inspect", "--type", "container", *ids, doing=f"looking at the containers of {name}"
            )
        )
        return sorted(found, key=lambda each: str(each["Created"]))

    def container(self, name: str) -> Mapping[str, Any] | None:
        """Return what the engine reports of a container.

        podman checks the container's health now: it does so by itself only on machines with
        systemd.
        """
        found: list[dict[str, Any]] = []
        for _ in range(RETRIES):
            check = ("healthcheck", "run", name)
            is_well = self.program.name != "podman" or self.program.try_(*check).returncode == 0
            done = self.program.try_("inspect", "--type", "container", name)
            found = json.loads(done.stdout) if done.returncode == 0 else []
            if is_well or not found or health_of(found[0]) != "healthy":
                break
        else:  # podman counts no failure of its start period
            found[0]["State"]["Health"] = {"Status": "unhealthy"}
        return found[0] if found else None

    def images(self, name: str) -> list[str]:
        """That were built here for a deployment, also for versions that are not kept any more."""
        words = ("image", "ls", "--format", "{{.Repository}}:{{.Tag}}")
        found = self.program.ask(*words, doing=f"looking for the images of {name}").splitlines()
        found = [each.removeprefix("localhost/") for each in found]  # as podman says it
        own, shared = re.compile(f"{re.escape(name)}:tsx-[0-9a-f]{{12}}"), own_tag(name)
        return [
            each
            for each in found
            if own.fullmatch(each) or shared.fullmatch(each.rpartition(":")[2])
        ]

    def log(self, name: str) -> list[str]:
        done = self.program.try_("logs", "--tail", str(LINES), name)
        return [*done.stdout.splitlines(), *done.stderr.splitlines()][-LINES:]


def labels_of(container: Mapping[str, Any]) -> dict[str, str]:
    return dict(container["Config"].get("Labels") or {})


def tags_of(container: Mapping[str, Any]) -> dict[str, str]:
    """Labels in the words of every target's tags."""
    return {
        name.replace(".", ":", 1): value
        for name, value in labels_of(container).items()
        if name.startswith("tsx.")
    }


def health_of(container: Mapping[str, Any]) -> str:
    """`healthy`, `starting`, `unhealthy` while it runs; else its state.

    Without a health check to run is to be well.
    """
    state = container["State"]
    if not state.get("Running"):
        return str(state.get("Status") or "exited")
    health = state.get("Health") or state.get("Healthcheck") or {}  # podman 3 has the second name
    return str(health.get("Status") or "healthy")


def ending_of(state: Mapping[str, Any]) -> str:
    """Say how a container that no longer runs came to its end, or why the engine never started
    it.
    """
    if state.get("OOMKilled"):
        return "was killed because it needs more memory than container.memory"
    if state.get("Error"):
        return f"was not started: {state['Error']}"
    if state.get("Running"):
        # the engine has started it again, and no longer has the exit code
        return "ends soon after each start"
    return f"ended with {state.get('ExitCode', 'no exit code')}"


def _condition(container: Mapping[str, Any]) -> tuple[State, str]:
    """One that a run has left while it was starting is not yet as it should be, and one that starts
    again and again never will.
    """
    health = health_of(container)
    if health == "unhealthy" or (health == "starting" and container.get("RestartCount")):
        return "failed", "it is unhealthy"
    return ("changing", "is starting") if health == "starting" else ("ready", "")


class DockerContainer(ResourceKind):
    traits = Traits(
        is_tagged=False,
        unseen=frozenset({"Words", "Gpus", "Patience", "Deployment", "Grace", "Image"}),
        updates_failed=True,
        when_interrupted="the new container continues to start, and the previous one is stopped",
    )
    poll, patience = POLL, 3600.0

    def observe(self, cloud: ContainerHost, name: str) -> Observed | None:
        found = cloud.container(name)
        if found is None:
            return None
        tags = tags_of(found)
        state, reason = _condition(found)
        return Observed(
            name,
            {"Running": bool(found["State"].get("Running"))},
            tags,
            {"Ref": name},
            state,
            reason,
        )

    def create(self, cloud: ContainerHost, resource: Resource) -> None:
        """Raises CloudError for one that does not get well, which then is not there any more."""
        properties = resource.properties
        words = list(properties["Words"])
        words[-1:-1] = engine_words(
            cloud.program.name, cloud.program.try_("run", "--help").stdout, properties["Gpus"]
        )
        before = self._stop_others(cloud, resource)
        try:
            cloud.program.ask(*words, doing=f"starting {resource.name}", environment=os.environ)
            self._until_well(cloud, resource)
        except CloudError as error:
            cloud.program.try_("rm", "--force", resource.name)
            self._put_back(cloud, before, error)

    def update(
        self, cloud: ContainerHost, resource: Resource, found: Observed, changed: set[str]
    ) -> None:
        """An earlier one is started again, or one that has stopped or is not well."""
        before = self._stop_others(cloud, resource)
        try:
            if found.properties["Running"]:
                cloud.program.ask(
                    "stop", resource.name, doing=f"stopping {resource.name}, which is unhealthy"
                )
            cloud.program.ask("start", resource.name, doing=f"starting {resource.name}")
            self._until_well(cloud, resource)
        except CloudError as error:
            cloud.program.try_("stop", resource.name)
            self._put_back(cloud, before, error)

    def delete(self, cloud: ContainerHost, found: Observed) -> None:
        if found.properties["Running"]:
            cloud.program.ask("stop", found.name, doing=f"stopping {found.name}")
        cloud.program.ask("rm", found.name, doing=f"removing {found.name}")

    def _stop_others(self, cloud: ContainerHost, resource: Resource) -> list[str]:
        """They have its port."""
        others = [
            each
            for each in cloud.containers(resource.properties["Deployment"])
            if each["State"].get("Running")
        ]
        names = [str(each["Name"]).removeprefix("/") for each in others]
        names = [name for name in names if name != resource.name]
        for name in names:
            cloud.program.ask("stop", name, doing=f"stopping {name}, which has its port")
        return names

    def _until_well(self, cloud: ContainerHost, resource: Resource) -> None:
        deadline = cloud.clock() + resource.properties["Patience"]
        while True:
            found = cloud.container(resource.name)
            health = "gone" if found is None else health_of(found)
            if health == "healthy":
                return
            restarts = 0 if found is None else int(found.get("RestartCount") or 0)
            late = cloud.clock() > deadline
            if health not in ("starting", "created", "initialized") or restarts or late:
                raise CloudError(
                    _story(resource.name, found, health, late, cloud.log(resource.name))
                )
            cloud.sleep(POLL)

    def _put_back(self, cloud: ContainerHost, before: Sequence[str], error: CloudError) -> None:
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
    poll, patience = POLL, 3600.0

    def __init__(self, builder: Builder, recipe: Recipe | None = None) -> None:
        self._builder, self._recipe = builder, recipe

    def observe(self, cloud: Any, name: str) -> Observed | None:
        return Observed(name, {}, outputs={"Uri": name}) if self._builder.is_here(name) else None

    def create(self, cloud: Any, resource: Resource) -> None:
        assert self._recipe is not None
        self._builder.build(self._recipe, resource.name, None)

    def delete(self, cloud: Any, found: Observed) -> None:
        self._builder.remove(found.name)


class PushedImage(LocalImage):
    """An image that is built here and pushed to a registry that this machine is logged in to."""

    def __init__(self, builder: Builder, recipe: Recipe) -> None:
        super().__init__(builder, recipe)
        self._pushed: dict[str, str] = {}  # by their names, with their digests

    def observe(self, cloud: Any, name: str) -> Observed | None:
        """Its Uri has the digest, where a program of this machine can tell it."""
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

    def delete(self, cloud: Any, found: Observed) -> None:
        pass  # a registry's images are its administrator's


def _story(
    name: str, found: Mapping[str, Any] | None, health: str, late: bool, log: Sequence[str]
) -> str:
    state = {} if found is None else found["State"]
    if health == "starting" and late:
        what = "is not healthy yet; raise container.startup_timeout to give it more time"
    elif health == "unhealthy" and not state.get("OOMKilled"):
        what = "is running but unhealthy"
    else:
        what = ending_of(state)
    last = "\n".join(log)
    return (
        f"{name} {what}. Its last log lines:\n{last}"
        if last
        else f"{name} {what}, and printed nothing"
    )
