"""A deployment on a Ray cluster: its application, versions and responses."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from tsx_cli.bench.report.archive_record import read_record
from tsx_cli.common.client import Response
from tsx_cli.common.failure import CliError, UsageError
from tsx_cli.deploy.engine.facts import Facts, read_archive
from tsx_cli.deploy.engine.kind import CloudError
from tsx_cli.deploy.engine.platform import DeployedVersion
from tsx_cli.deploy.engine.resources import Resource, numbered_resources
from tsx_cli.deploy.ray.cluster import RayCluster
from tsx_cli.deploy.ray.on_nodes import Lines, read_logs, send_request
from tsx_cli.deploy.ray.resources import (
    APPLICATION,
    ARCHIVE,
    UPLOAD,
    VERSION,
    canary_name,
    resources,
    route_prefix,
    split_into_canary,
)
from tsx_cli.deploy.ray.running import RunningApplication
from tsx_cli.deploy.spec import DeploySpec
from tsx_runtime.targets.ray.config import OBJECT, S3

FOLLOW_S = 1.0  # interval between readings of a node's log files


class RayPlatform:
    def wanted_resources(self, cloud: RayCluster, spec: DeploySpec, facts: Facts) -> list[Resource]:
        """Return the resources of a deployment.

        Raises:
            UsageError: The target does not support the specification.
            CliError: The cluster cannot be reached.
        """
        if spec.canary is not None and spec.canary.model_fields_set & {"bake", "alarms"}:
            raise UsageError(
                "--bake, --alarm: a canary on Ray keeps its share until `tsx deploy promote` or"
                " `tsx deploy rollback`. Remove them"
            )
        if spec.image is not None:
            raise UsageError(
                "image: the nodes of a cluster have theirs already; --emit ray writes one into a"
                " RayService. Remove it"
            )
        _refuse_conflicts(cloud.details().get("applications", {}), spec)
        archives = [facts, *(read_archive(archive)[1] for archive in spec.ray.models)]
        *dependencies, application = resources(spec, archives, read_record(spec.model))
        notes = _notes(
            cloud, spec, archives, application.properties["Config"]["Application"]["replica"]
        )
        application = replace(application, notes=tuple(notes))
        stable = cloud.find_owned(spec.name, spec.name)
        if (
            spec.canary is None
            or stable is None
            or stable.version == application.properties["Version"]
        ):
            return [*dependencies, application]
        return [*dependencies, *split_into_canary(application, spec.canary.percent)]

    def existing_resources(
        self, cloud: RayCluster, name: str, *, purge: bool = False
    ) -> list[Resource]:
        """Return the resources of a deployment.

        They include archives in the object store that no other deployment uses.
        """
        records = cloud.records()
        own_versions = {version for version in records if version.rpartition("-")[0] == name}
        existing = [
            *_unused_archives(records, own_versions),
            *numbered_resources("Version", VERSION, sorted(own_versions)),
        ]
        applications = [
            application
            for application in (canary_name(name), name)
            if cloud.find_owned(application, name) is not None
        ]
        existing += numbered_resources("Application", APPLICATION, applications)
        return [*(uploaded_archives(cloud, name) if purge else []), *existing]

    def obsolete_resources(
        self, cloud: RayCluster, spec: DeploySpec, wanted: Sequence[Resource]
    ) -> list[Resource]:
        names = {resource.name for resource in wanted}
        records = cloud.records()
        applications = [
            running
            for application in (spec.name, canary_name(spec.name))
            if (running := cloud.find_owned(application, spec.name)) is not None
        ]
        kept_names = names | {application.version for application in applications}
        superseded = [version for version in cloud.records(spec.name) if version not in kept_names]
        removed = superseded[: -(spec.keep - 1) or None]
        archives = [
            archive
            for archive in _unused_archives(records, set(removed))
            if archive.name not in names
        ]
        return [*archives, *numbered_resources("Version", VERSION, removed)]

    def versions(self, cloud: RayCluster, name: str) -> list[DeployedVersion]:
        application = cloud.find_owned(name, name)
        if application is None:
            return []
        canary = cloud.find_owned(canary_name(name), name)
        percentages = (
            {}
            if canary is None or canary.version == application.version
            else {canary.version: float(canary.release["percent"])}
        )
        return [
            DeployedVersion(
                n,
                version,
                datetime.fromisoformat(record["made"]),
                record["tags"],
                version == application.version,
                percentages.get(version, 0.0),
            )
            for n, (version, record) in enumerate(cloud.records(name).items(), start=1)
        ]

    def rollback_resources(
        self, cloud: RayCluster, name: str, version: DeployedVersion
    ) -> list[Resource]:
        """Return the resources of an earlier version, which also end a canary."""
        if version.percent:
            raise CliError(
                f"version {version.number} of {name} is its canary; `tsx deploy promote` gives it"
                " all requests"
            )
        return [_recorded_application(cloud, name, version.id)]

    def promotion_resources(self, cloud: RayCluster, name: str) -> list[Resource]:
        canary = cloud.find_owned(canary_name(name), name)
        if canary is None or canary.is_ending or canary.version is None:
            raise CliError(f"{name} has no canary: one version has all requests")
        state, reason = canary.condition
        if state != "ready":
            raise CliError(
                f"the canary of {name} is not ready: {reason}. `tsx deploy rollback` ends it"
            )
        return [_recorded_application(cloud, name, canary.version)]

    def status(self, cloud: RayCluster, name: str) -> dict[str, Any] | None:
        application, canary = (
            cloud.find_owned(name, name),
            cloud.find_owned(canary_name(name), name),
        )
        if application is None:
            return None
        state, reason = application.condition
        return {
            "cluster": cloud.settings.address,
            "status": str(application.details["status"]),
            "reason": reason if state == "failed" else "",
            "waiting": reason if state == "changing" else "",
            "model": application.tags.get("tsx:model"),
            "version": application.version,
            "replicas": (
                f"{sum(replica['state'] == 'RUNNING' for replica in application.replicas)} of"
                f" {application.target_replicas} running"
            ),
            "nodes": sorted(
                {
                    str(replica["node_ip"])
                    for replica in application.replicas
                    if replica.get("node_ip")
                }
            ),
            "canary": [] if canary is None else [_canary_status(application, canary)],
            "address": [
                f"{address}{application.details['route_prefix'] or ''}"
                for address in _addresses(cloud.details()).values()
            ],
        }

    def invoke(
        self, cloud: RayCluster, name: str, body: bytes, content_type: str, accept: str | None
    ) -> Response:
        """Send a request from a node, because this machine may not reach the port of Ray Serve."""
        application, addresses = cloud.find_owned(name, name), _addresses(cloud.details())
        if application is None or not addresses:
            raise CloudError(f"{name} does not run; see `tsx deploy status`")
        model = application.tags.get("tsx:model", name).partition("/")[0]
        node, address = next(iter(addresses.items()))
        prefix = (application.details["route_prefix"] or "").rstrip("/")
        content, content_type = cloud.run(
            send_request,
            f"{address}{prefix}",
            model,
            body,
            content_type,
            accept,
            doing=f"asking {name}",
            node=node,
        )
        return Response.complete(content, content_type)

    def logs(
        self, cloud: RayCluster, name: str, *, lines: int | None, since: str | None, follow: bool
    ) -> Iterator[str]:
        """Yield the log lines of all replicas, with the names of the replicas.

        Raises:
            CliError: There is no such deployment.
        """
        start = None if since is None else float(since.rstrip("s"))
        offsets: dict[str, dict[str, int]] = {}
        while True:
            application = cloud.find_owned(name, name)
            if application is None:
                raise CliError(f"there is no deployment '{name}' on {cloud.region}")
            lines_read = Lines()
            for node, patterns in application.logs().items():
                new_lines, offsets[node] = cloud.run(
                    read_logs,
                    patterns,
                    offsets.get(node, {}),
                    lines,
                    start,
                    doing=f"reading the log of {name}",
                    node=node,
                )
                lines_read += new_lines
            yield from (
                text
                for _, text in sorted(lines_read, key=lambda line: line[0])[
                    -lines if lines is not None else 0 :
                ]
            )
            if not follow:
                return
            lines = start = None
            time.sleep(FOLLOW_S)


def _refuse_conflicts(applications: Mapping[str, Mapping[str, Any]], spec: DeploySpec) -> None:
    for name, details in applications.items():
        if name not in (spec.name, canary_name(spec.name)) and details[
            "route_prefix"
        ] == route_prefix(spec):
            raise UsageError(
                f"requests below {details['route_prefix']} go to the application '{name}': choose"
                " another ray.route_prefix"
            )


def _notes(
    cloud: RayCluster, spec: DeploySpec, archives: Sequence[Facts], replica: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the notes of a plan."""
    requirements = {
        "CPU": replica["num_cpus"],
        "GPU": replica["num_gpus"],
        "memory": replica.get("memory", 0),
        **replica.get("resources", {}),
    }
    if not any(
        all(node.get(kind, 0) >= amount for kind, amount in requirements.items())
        for node in cloud.nodes()
    ):
        needs = ", ".join(f"{amount:g} {kind}" for kind, amount in requirements.items() if amount)
        yield (
            f"no node of the cluster has what a replica reserves ({needs}), so it waits for one"
            " that does; see ray.num_cpus and the like"
        )
    if spec.ray.archives == "object-store":
        advice = (
            "ray.archives=s3://BUCKET/PREFIX, or ray.archives=path where all nodes see the"
            " archive's path"
        )
        yield (
            "the archive is kept in the memory of the cluster's head node, and no replica starts"
            f" without it; to outlive it: {advice}"
        )
    if any(archive.requirements for archive in archives) and not spec.ray.runtime_env:
        yield (
            "the archive has requirements: the nodes must have them, or ray.runtime_env installs"
            " them: {pip = ['NAME==VERSION']}"
        )


def _recorded_application(cloud: RayCluster, name: str, version: str) -> Resource:
    record = cloud.record(version)
    if record is None:
        raise CliError(f"the cluster has no record of {version} any more; deploy its archive again")
    properties = {"Version": version, "Config": record["config"], "Canary": None}
    return Resource(
        "Application", APPLICATION, name, properties, tags=record["tags"], timeout_s=600
    )


def _unused_archives(records: Mapping[str, Mapping[str, Any]], removed: set[str]) -> list[Resource]:
    """Return the archives in the object store that only the given versions name."""

    def archives_of(versions: set[str]) -> set[str]:
        models = [
            model
            for version in versions
            for model in records[version]["config"]["Application"]["models"]
        ]
        return {
            model["source"].removeprefix(OBJECT)
            for model in models
            if model["source"].startswith(OBJECT)
        }

    unused_archives = archives_of(removed) - archives_of(records.keys() - removed)
    return [
        Resource(f"Archive{n}Unused", ARCHIVE, archive, {})
        for n, archive in enumerate(sorted(unused_archives))
    ]


def uploaded_archives(cloud: RayCluster, name: str) -> list[Resource]:
    """Return all uploads of a deployment, if the specification names the bucket."""
    if not cloud.settings.archives.startswith(S3):
        return []
    bucket, _, prefix = f"{cloud.settings.archives.removeprefix(S3).rstrip('/')}/{name}/".partition(
        "/"
    )
    pattern = re.compile(re.escape(prefix) + r"[0-9a-f]{16}/[^/]+")
    objects = cloud.aws.list_items(
        "s3",
        "list_objects_v2",
        "Contents",
        f"listing s3://{bucket}/{prefix}",
        Bucket=bucket,
        Prefix=prefix,
    )
    return [
        Resource(f"Upload{n}", UPLOAD, f"{bucket}/{item['Key']}", {})
        for n, item in enumerate(objects)
        if pattern.fullmatch(item["Key"])
    ]


def _addresses(details: Mapping[str, Any]) -> dict[str, str]:
    """Return the address of Ray Serve on each node.

    A loopback address can only be reached from the node itself.
    """
    options = details.get("http_options") or {}
    host = str(options.get("host") or "127.0.0.1")
    is_loopback = host in ("127.0.0.1", "localhost", "::1")
    nodes = {
        str(node): str(proxy["node_ip"])
        for node, proxy in (details.get("proxies") or {}).items()
        if proxy["status"] == "HEALTHY"
    }
    return {
        node: f"http://{host if is_loopback else ip}:{options.get('port', 8000)}"
        for node, ip in nodes.items()
    }


def _canary_status(application: RunningApplication, canary: RunningApplication) -> dict[str, Any]:
    fields = {
        "model": canary.tags.get("tsx:model"),
        "version": canary.version,
        "percent": application.canary_percent,
    }
    state, reason = canary.condition
    return fields if state == "ready" else {**fields, "state": state, "reason": reason}
