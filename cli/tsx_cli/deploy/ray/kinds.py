"""What a deployment has on a Ray cluster: archives that travel, the records of versions, and the application of Ray Serve.

The application runs under the deployment's name, a canary beside it under `NAME-canary`. What runs, its tags and how far a canary is stand
in the application's own `user_config`, which Ray Serve shows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import ray

from tsx_cli.deploy.aws.kinds.s3 import SHA, S3Object
from tsx_cli.deploy.aws.session import translated_errors
from tsx_cli.deploy.engine.canary import Shift
from tsx_cli.deploy.engine.kind import CloudError, ResourceKind
from tsx_cli.deploy.engine.plan import Field
from tsx_cli.deploy.engine.resources import UNDER_WAY, Observed, Resource, Traits
from tsx_cli.deploy.kubernetes.canary import CanaryState, CanaryStep, Counters, Surroundings
from tsx_cli.deploy.kubernetes.canary_watch import CanaryWatch
from tsx_cli.deploy.ray.cluster import RayCluster
from tsx_cli.deploy.ray.on_nodes import counters, deploy
from tsx_cli.deploy.ray.resources import APPLICATION, ARCHIVE, NONE, UPLOAD, VERSION
from tsx_cli.deploy.ray.running import RELEASE, RunningApplication
from tsx_runtime.targets.ray.archives import holder, upload

LEFT = "Ray Serve continues what has started"


class Archive(ResourceKind):
    """In the cluster's object store, under its sha-256."""

    traits = Traits(is_tagged=False, unseen=frozenset({"Path", "Sha256"}), left=LEFT)

    def observe(self, cloud: RayCluster, name: str) -> Observed | None:
        cloud.connect()
        return Observed(name, {}) if ray.get(holder().has.remote(name)) else None

    def create(self, cloud: RayCluster, resource: Resource) -> None:
        upload(Path(resource.properties["Path"]))

    def delete(self, cloud: RayCluster, found: Observed) -> None:
        ray.get(holder().remove.remote(found.name))


class Upload(S3Object):
    """An archive in a bucket that the nodes read, as it is. Its name is `bucket/key`."""

    def observe(self, cloud: Any, name: str) -> Observed | None:
        return super().observe(cloud.aws, name)

    def create(self, cloud: Any, resource: Resource) -> None:
        bucket, _, key = resource.name.partition("/")
        extra = {"Metadata": {SHA: resource.properties["Sha256"]}}
        with translated_errors(f"uploading {resource.properties['Path']} to s3://{resource.name}"):
            cloud.aws.client("s3").upload_file(resource.properties["Path"], bucket, key, ExtraArgs=extra)

    def delete(self, cloud: Any, found: Observed) -> None:
        super().delete(cloud.aws, found)


class Version(ResourceKind):
    """The record of what was deployed once, which a rollback reads. Its name is made of what it says."""

    traits = Traits(left=LEFT)

    def observe(self, cloud: RayCluster, name: str) -> Observed | None:
        found = cloud.record(name)
        return None if found is None else Observed(name, {"Config": found["config"]}, found["tags"])

    def create(self, cloud: RayCluster, resource: Resource) -> None:
        earlier = cloud.record(resource.name) or {"made": datetime.now(timezone.utc).isoformat()}
        cloud.keep(resource.name, {"made": earlier["made"], "tags": dict(resource.tags), "config": resource.properties["Config"]})

    def delete(self, cloud: RayCluster, found: Observed) -> None:
        cloud.forget(found.name)


class Application(ResourceKind):
    """Its property `Canary` is what a canary beside it has of the requests."""

    traits = Traits(updates_failed=True, left=LEFT)
    poll = 0.5

    def __init__(self) -> None:
        self._watch = CanaryWatch()

    def observe(self, cloud: RayCluster, name: str) -> Observed | None:
        found = cloud.application(name)
        if found is None:
            return None
        record = cloud.record(found.version) if found.version else None
        properties = {"Version": found.version, "Config": record["config"] if record else {}, "Canary": NONE}
        other = cloud.application(beside(name))
        state, reason = found.condition if other is None or not other.is_ending else ("changing", "its canary ends")
        canary = found.canary
        if canary is None:
            return Observed(name, properties, found.tags, {}, state, reason)
        shown = f"{canary.percent:g} %{f' since {canary.since}' if canary.since else ''}{', which goes back' if canary.ended else ''}"
        return Observed(name, {**properties, "Canary": shown}, found.tags, {UNDER_WAY: canary}, state, reason)

    def create(self, cloud: RayCluster, resource: Resource) -> None:
        cloud.start()
        _run(cloud, resource.name, resource.properties, resource.tags)

    def update(self, cloud: RayCluster, resource: Resource, found: Observed, fields: Sequence[Field]) -> str | None:
        name, shift = resource.name, Shift(**resource.how) if resource.how else None
        canary: CanaryState | None = found.outputs.get(UNDER_WAY)
        wanted = resource.properties.get("Version", found.properties["Version"])
        version = wanted if wanted != found.properties["Version"] else None
        if canary is None and (version is None or shift is None):
            if "Config" in resource.properties:  # else the canary was to end, and has ended since the plan was made
                _run(cloud, name, resource.properties, resource.tags)
            return None
        stable, other = cloud.application(name), cloud.application(beside(name))
        percent = 0.0 if stable is None else stable.percent
        seen = Surroundings(canary, ("changing", "is not visible yet") if other is None else other.condition, percent, ("ready", ""))
        step = self._watch.step(version, shift, seen, lambda: _counters(cloud, other))
        self._carry_out(cloud, resource, found, seen, step)
        return step.text or "the canary is removed"

    def _carry_out(self, cloud: RayCluster, resource: Resource, found: Observed, seen: Surroundings, step: CanaryStep) -> None:
        name, canary, share = resource.name, seen.canary, seen.percent
        if step.action == "start":
            stable = cloud.application(name)
            copies = 1 if stable is None else max(1, math.ceil(stable.wanted * resource.how["percent"] / 100))
            _run(cloud, beside(name), resource.properties, resource.tags, copies=copies)
            canary = CanaryState(resource.properties["Version"], float(resource.how["percent"]))
        elif canary is None or step.action == "wait":
            return
        elif step.action == "move":
            _run(cloud, name, resource.properties, resource.tags, canary, share)
            return
        elif step.action == "bake":
            canary = replace(canary, since=datetime.now(timezone.utc).isoformat(timespec="seconds"))
        elif step.action == "end":
            canary = canary.ending(step.text)
        share = {"route": canary.percent, "unroute": 0.0}.get(step.action, share)
        _run(cloud, name, found.properties, found.tags, None if step.action == "remove" else canary, share)
        if step.action == "remove":
            cloud.delete(beside(name))
            if canary.ended:
                raise CloudError(f"the stable version of {name} has all requests again: {canary.ended}")

    def delete(self, cloud: RayCluster, found: Observed) -> None:
        cloud.delete(found.name)


def beside(name: str) -> str:
    """The application of its canary."""
    return f"{name}-canary"


def _run(
    cloud: RayCluster,
    name: str,
    properties: Mapping[str, Any],
    tags: Mapping[str, str],
    canary: CanaryState | None = None,
    percent: float = 0.0,
    *,
    copies: int | None = None,
) -> None:
    """With a number of `copies`, as a canary: without a route of its own."""
    config = properties["Config"]
    if not config:
        raise CloudError(f"the cluster has no record of the version of {name} that runs; deploy it once without a canary")
    release = {
        "version": properties["Version"],
        "tags": dict(tags),
        "canary": None if canary is None else asdict(canary),
        "percent": percent,
    }
    arguments = {**config["Application"], "name": name, RELEASE: release}
    if percent:
        arguments["canary"] = {"app": beside(name), "percent": percent}
    if copies is not None:
        arguments = {key: value for key, value in arguments.items() if key != "autoscaling"} | {"replicas": copies}
    prefix = config["RoutePrefix"] if copies is None else None
    cloud.run(deploy, arguments, prefix, config["Surge"], doing=f"deploying {name}", env=config["RuntimeEnv"])


def _counters(cloud: RayCluster, application: RunningApplication | None) -> dict[str, Counters]:
    actors = [] if application is None else [str(each["actor_name"]) for each in application.replicas if each["state"] == "RUNNING"]
    if not actors:
        raise CloudError("it has no replicas")
    found: dict[str, Counters] = cloud.run(counters, actors, doing="asking its replicas")
    return found


KINDS: Mapping[str, ResourceKind] = {ARCHIVE: Archive(), UPLOAD: Upload(), VERSION: Version(), APPLICATION: Application()}
