"""The resources on a Ray cluster: archives, records of versions, and applications of Ray Serve.

The application has the name of the deployment, and a canary is `NAME-canary`. The `user_config` of
the application holds the version, its tags and the share of the canary.
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
from tsx_runtime.targets.ray.archives import get_holder, has_archive, upload

WHEN_INTERRUPTED = "Ray Serve continues what has started"


class Archive(ResourceKind):
    """An archive in the cluster's object store, under its SHA-256."""

    traits = Traits(
        is_tagged=False, unreported=frozenset({"Path", "Sha256"}), when_interrupted=WHEN_INTERRUPTED
    )

    def observe(self, cloud: RayCluster, name: str) -> Observed | None:
        cloud.connect()
        with cloud.translated("looking for the archive"):
            return Observed(name, {}) if has_archive(name) else None

    def create(self, cloud: RayCluster, resource: Resource) -> None:
        with cloud.translated(f"uploading {resource.properties['Path']}"):
            upload(Path(resource.properties["Path"]))

    def delete(self, cloud: RayCluster, observed: Observed) -> None:
        with cloud.translated("removing the archive"):
            ray.get(get_holder().remove.remote(observed.name))


class Upload(S3Object):
    """An archive in a bucket that the nodes read; its name is `bucket/key`."""

    def observe(self, cloud: Any, name: str) -> Observed | None:
        return super().observe(cloud.aws, name)

    def create(self, cloud: Any, resource: Resource) -> None:
        bucket, _, key = resource.name.partition("/")
        extra = {"Metadata": {SHA: resource.properties["Sha256"]}}
        with translated_errors(f"uploading {resource.properties['Path']} to s3://{resource.name}"):
            cloud.aws.client("s3").upload_file(
                resource.properties["Path"], bucket, key, ExtraArgs=extra
            )

    def delete(self, cloud: Any, observed: Observed) -> None:
        super().delete(cloud.aws, observed)


class Version(ResourceKind):
    """The record of a version, which a rollback reads; its name contains a hash of its content."""

    traits = Traits(when_interrupted=WHEN_INTERRUPTED)

    def observe(self, cloud: RayCluster, name: str) -> Observed | None:
        record = cloud.record(name)
        return (
            None if record is None else Observed(name, {"Config": record["config"]}, record["tags"])
        )

    def create(self, cloud: RayCluster, resource: Resource) -> None:
        earlier = cloud.record(resource.name) or {"made": datetime.now(timezone.utc).isoformat()}
        cloud.put_record(
            resource.name,
            {
                "made": earlier["made"],
                "tags": dict(resource.tags),
                "config": resource.properties["Config"],
            },
        )

    def delete(self, cloud: RayCluster, observed: Observed) -> None:
        cloud.delete_record(observed.name)


class Application(ResourceKind):
    """An application of Ray Serve.

    A stable application has the property `Canary`: the version beside it, and its share. A canary
    has `Percent`: its wanted share.
    """

    traits = Traits(updates_failed=True, when_interrupted=WHEN_INTERRUPTED)
    poll_interval_s = 0.5

    def observe(self, cloud: RayCluster, name: str) -> Observed | None:
        application, canary = cloud.application(name), cloud.owned(canary_name(name), name)
        if application is None:
            return None
        record = cloud.record(application.version) if application.version else None
        properties = {
            "Version": application.version,
            "Config": record["config"] if record else {},
            "Percent": application.release.get("percent"),
        }
        is_alone = canary is None and not application.share
        properties["Canary"] = (
            None
            if is_alone
            else {"Version": canary and canary.version, "Percent": application.share}
        )
        if canary is not None and canary.is_ending:
            return Observed(name, properties, application.tags, {}, "changing", "its canary ends")
        return Observed(name, properties, application.tags, {}, *application.condition)

    def create(self, cloud: RayCluster, resource: Resource) -> None:
        cloud.start()
        _run(cloud, resource.name, resource.properties, resource.tags)

    def update(
        self, cloud: RayCluster, resource: Resource, observed: Observed, changed: set[str]
    ) -> str | None:
        """Update an application; the requests of a canary go back before it ends."""
        canary = observed.properties["Canary"]
        if (
            canary is not None
            and not canary["Percent"]
            and changed == {"Canary"}
            and resource.properties["Canary"] is None
        ):
            cloud.delete(canary_name(resource.name))
            return None
        # The stable application keeps its version when it gets a canary.
        properties = {**observed.properties, **resource.properties}
        _run(
            cloud,
            resource.name,
            properties,
            resource.tags if "Version" in resource.properties else observed.tags,
        )
        return (
            "its canary ends next" if canary is not None and properties["Canary"] is None else None
        )

    def delete(self, cloud: RayCluster, observed: Observed) -> None:
        cloud.delete(observed.name)


def _run(
    cloud: RayCluster, name: str, properties: Mapping[str, Any], tags: Mapping[str, str]
) -> None:
    config = properties["Config"]
    percent = properties.get("Percent")
    canary = properties.get("Canary")
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
