"""What a deployment has on a Ray cluster: archives that travel, the records of versions, and the
application of Ray Serve.

The application runs under the deployment's name, a canary beside it under `NAME-canary`. What runs,
its tags and the canary's share are in the application's own `user_config`, which Ray Serve shows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import ray

from tsx_cli.deploy.aws.kinds.s3 import SHA, S3Object
from tsx_cli.deploy.aws.session import translated_errors
from tsx_cli.deploy.engine.kind import CloudError, ResourceKind
from tsx_cli.deploy.engine.resources import Observed, Resource, Traits
from tsx_cli.deploy.ray.cluster import RayCluster
from tsx_cli.deploy.ray.on_nodes import deploy
from tsx_cli.deploy.ray.resources import APPLICATION, ARCHIVE, UPLOAD, VERSION, canary_name
from tsx_cli.deploy.ray.running import RELEASE
from tsx_runtime.targets.ray.archives import has_archive, holder, upload

LEFT = "Ray Serve continues what has started"


class Archive(ResourceKind):
    """In the cluster's object store, under its sha-256."""

    traits = Traits(is_tagged=False, unseen=frozenset({"Path", "Sha256"}), when_interrupted=LEFT)

    def observe(self, cloud: RayCluster, name: str) -> Observed | None:
        cloud.connect()
        with cloud.translated("looking for the archive"):
            return Observed(name, {}) if has_archive(name) else None

    def create(self, cloud: RayCluster, resource: Resource) -> None:
        with cloud.translated(f"uploading {resource.properties['Path']}"):
            upload(Path(resource.properties["Path"]))

    def delete(self, cloud: RayCluster, found: Observed) -> None:
        with cloud.translated("removing the archive"):
            ray.get(holder().remove.remote(found.name))


class Upload(S3Object):
    """An archive in a bucket that the nodes read, as it is. Its name is `bucket/key`."""

    def observe(self, cloud: Any, name: str) -> Observed | None:
        return super().observe(cloud.aws, name)

    def create(self, cloud: Any, resource: Resource) -> None:
        bucket, _, key = resource.name.partition("/")
        extra = {"Metadata": {SHA: resource.properties["Sha256"]}}
        with translated_errors(f"uploading {resource.properties['Path']} to s3://{resource.name}"):
            cloud.aws.client("s3").upload_file(
                resource.properties["Path"], bucket, key, ExtraArgs=extra
            )

    def delete(self, cloud: Any, found: Observed) -> None:
        super().delete(cloud.aws, found)


class Version(ResourceKind):
    """The record of what was deployed once, which a rollback reads.

    Its name is made of what it says.
    """

    traits = Traits(when_interrupted=LEFT)

    def observe(self, cloud: RayCluster, name: str) -> Observed | None:
        found = cloud.record(name)
        return None if found is None else Observed(name, {"Config": found["config"]}, found["tags"])

    def create(self, cloud: RayCluster, resource: Resource) -> None:
        earlier = cloud.record(resource.name) or {"made": datetime.now(timezone.utc).isoformat()}
        cloud.keep(
            resource.name,
            {
                "made": earlier["made"],
                "tags": dict(resource.tags),
                "config": resource.properties["Config"],
            },
        )

    def delete(self, cloud: RayCluster, found: Observed) -> None:
        cloud.forget(found.name)


class Application(ResourceKind):
    """A stable one has the property `Canary`: the version beside it, with its share.

    A canary has `Percent`: the share it is to have.
    """

    traits = Traits(updates_failed=True, when_interrupted=LEFT)
    poll = 0.5

    def observe(self, cloud: RayCluster, name: str) -> Observed | None:
        found, other = cloud.application(name), cloud.owned(canary_name(name), name)
        if found is None:
            return None
        record = cloud.record(found.version) if found.version else None
        properties = {
            "Version": found.version,
            "Config": record["config"] if record else {},
            "Percent": found.release.get("percent"),
        }
        is_alone = other is None and not found.share
        properties["Canary"] = (
            None if is_alone else {"Version": other and other.version, "Percent": found.share}
        )
        if other is not None and other.is_ending:
            return Observed(name, properties, found.tags, {}, "changing", "its canary ends")
        return Observed(name, properties, found.tags, {}, *found.condition)

    def create(self, cloud: RayCluster, resource: Resource) -> None:
        cloud.start()
        _run(cloud, resource.name, resource.properties, resource.tags)

    def update(
        self, cloud: RayCluster, resource: Resource, found: Observed, changed: set[str]
    ) -> str | None:
        """The requests of a canary go back before it ends."""
        canary = found.properties["Canary"]
        if (
            canary is not None
            and not canary["Percent"]
            and changed == {"Canary"}
            and resource.properties["Canary"] is None
        ):
            cloud.delete(canary_name(resource.name))
            return None
        properties = {
            **found.properties,
            **resource.properties,
        }  # the stable one stays what it is while it gets a canary
        _run(
            cloud,
            resource.name,
            properties,
            resource.tags if "Version" in resource.properties else found.tags,
        )
        return (
            "its canary ends next" if canary is not None and properties["Canary"] is None else None
        )

    def delete(self, cloud: RayCluster, found: Observed) -> None:
        cloud.delete(found.name)


def _run(
    cloud: RayCluster, name: str, properties: Mapping[str, Any], tags: Mapping[str, str]
) -> None:
    config, percent, canary = (
        properties["Config"],
        properties.get("Percent"),
        properties.get("Canary"),
    )
    if not config:
        raise CloudError(
            f"the cluster has no record of the version of {name} that runs; deploy it once without"
            " a canary"
        )
    release = {"version": properties["Version"], "tags": dict(tags), "percent": percent}
    arguments = {**config["Application"], "name": name, RELEASE: release}
    if canary is not None:
        arguments["canary"] = {"app": canary_name(name), "percent": canary["Percent"]}
    if percent is not None and "replicas" in arguments:
        arguments["replicas"] = max(1, math.ceil(arguments["replicas"] * percent / 100))
    prefix = config["RoutePrefix"] if percent is None else None
    cloud.run(deploy, arguments, prefix, doing=f"deploying {name}", env=config["RuntimeEnv"])


KINDS: Mapping[str, ResourceKind] = {
    ARCHIVE: Archive(),
    UPLOAD: Upload(),
    VERSION: Version(),
    APPLICATION: Application(),
}
