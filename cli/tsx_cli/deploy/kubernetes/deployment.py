"""A deployment on a Kubernetes cluster: its objects, versions and health."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from tsx_cli.common.client import Response
from tsx_cli.common.failure import CliError, UsageError
from tsx_cli.deploy.container.deployment import log_arguments, predict
from tsx_cli.deploy.engine.facts import Facts, owner_tags, tags_of
from tsx_cli.deploy.engine.kind import CloudError
from tsx_cli.deploy.engine.platform import DeployedVersion
from tsx_cli.deploy.engine.resources import Resource, numbered_resources
from tsx_cli.deploy.image.programs import ProgramError
from tsx_cli.deploy.kubernetes.gateway import annotations_of, canary_of
from tsx_cli.deploy.kubernetes.kinds import (
    FORBIDDEN_TEXT,
    KIND,
    REVISION,
    TYPES,
    Cluster,
    count_restarts,
    replica_sets,
    selector,
    tags_in,
    waiting_containers,
)
from tsx_cli.deploy.kubernetes.release import (
    NO_CANARY,
    canary_in,
    with_canary_percent,
    with_instance,
)
from tsx_cli.deploy.kubernetes.resources import (
    HTTP,
    INSTANCE,
    MANAGED_BY,
    NAME,
    Manifest,
    manifests,
)
from tsx_cli.deploy.kubernetes.security import TOKENS, token_secret
from tsx_cli.deploy.spec import DeploySpec

OBJECT_KINDS = (
    "Secret",
    "Deployment",
    "InferenceService",
    "Service",
    "HorizontalPodAutoscaler",
    "ScaledObject",
    "PodDisruptionBudget",
    "NetworkPolicy",
    "ServiceMonitor",
    "HTTPRoute",
)
ROUTING_S = 300  # limit for a Gateway to accept a route
PULL_S = 60  # time to pull images, in addition to the start of a model


class KubernetesPlatform:
    def wanted_resources(self, cloud: Cluster, spec: DeploySpec, facts: Facts) -> list[Resource]:
        if spec.image is None and spec.repository is None:
            advice = (
                "set --image to an image that your cluster can pull, or --set repository=HOST/NAME"
                " to push an image that is built here"
            )
            raise UsageError(f"neither image nor repository is given: {advice}")
        tags, notes = tags_of(spec, facts), _notes(spec, facts)
        objects = manifests(spec, facts.image, tags)
        timeouts = {
            "InferenceService": spec.kubernetes.startup_timeout + PULL_S,
            "HTTPRoute": ROUTING_S,
        }
        resources = _tokens(cloud, spec, tags, notes)
        for manifest in objects:
            kind = manifest["kind"]
            if (
                kind == "ServiceMonitor"
                and spec.kubernetes.monitoring is None
                and not cloud.has_type(kind, spec.name)
            ):
                notes.append(
                    "no ServiceMonitor is created, because the cluster does not have the Prometheus"
                    " operator"
                )
                continue
            # All deployments of the cluster share the runtime.
            object_tags = {} if kind == "ClusterServingRuntime" else tags
            name = manifest["metadata"]["name"]
            resources.append(
                Resource(
                    kind,
                    f"{KIND}{kind}",
                    name,
                    manifest,
                    ("Image",),
                    object_tags,
                    timeout_s=timeouts.get(kind, 0),
                )
            )
        resources[0] = replace(resources[0], notes=tuple(notes))
        if spec.kubernetes.kserve:
            return resources
        stable = cloud.find("Deployment", spec.name)
        if stable is None or tags_in(stable).get("tsx:name") != spec.name:
            return resources
        return [
            _adapt_to_cluster(cloud, spec, facts, resource, resources, stable)
            for resource in resources
        ]

    def existing_resources(
        self, cloud: Cluster, name: str, *, purge: bool = False
    ) -> list[Resource]:
        existing = []
        for kind in OBJECT_KINDS:
            objects = filter(_is_own, cloud.list_objects(TYPES[kind], name))
            existing += numbered_resources(
                kind, f"{KIND}{kind}", [manifest["metadata"]["name"] for manifest in objects]
            )
        return existing

    def obsolete_resources(
        self, cloud: Cluster, spec: DeploySpec, wanted: Sequence[Resource]
    ) -> list[Resource]:
        """Return objects that are no longer wanted.

        Kubernetes itself keeps and removes earlier versions of the pods. The Secret stays, because
        these versions may read it. The change of the Deployment removes a running canary.
        """
        kept_keys = {(resource.kind, resource.name) for resource in wanted} | {
            (f"{KIND}Secret", f"{spec.name}-tokens")
        }
        canary = canary_of(spec.name) if canary_in(cloud, spec.name) is not None else None
        return [
            resource
            for resource in self.existing_resources(cloud, spec.name)
            if (resource.kind, resource.name) not in kept_keys and resource.name != canary
        ]

    def versions(self, cloud: Cluster, name: str) -> list[DeployedVersion]:
        deployment = cloud.find("Deployment", name)
        if deployment is None:
            return []
        current_revision = annotations_of(deployment).get(REVISION)
        sorted_sets = sorted(
            replica_sets(cloud, name),
            key=lambda replica_set: int(annotations_of(replica_set).get(REVISION, 0)),
        )
        versions = [
            DeployedVersion(
                int(annotations_of(replica_set)[REVISION]),
                replica_set["metadata"]["name"],
                _creation_time(replica_set),
                tags_in(replica_set["spec"]["template"]),
                annotations_of(replica_set)[REVISION] == current_revision,
            )
            for replica_set in sorted_sets
            if REVISION in annotations_of(replica_set)
        ]
        canary = canary_in(cloud, name)
        if canary is not None and not canary.is_promoted(deployment):
            number = max((version.number for version in versions), default=0) + 1
            tags = tags_in(canary.deployment["spec"]["template"])
            versions.append(
                DeployedVersion(
                    number,
                    canary_of(name),
                    _creation_time(canary.deployment),
                    tags,
                    False,
                    canary.state.percent,
                )
            )
        return versions

    def rollback_resources(
        self, cloud: Cluster, name: str, version: DeployedVersion
    ) -> list[Resource]:
        """Return the resources of an earlier version.

        A running canary is removed first, or last if the stable Deployment already has the canary's
        version.
        """
        if version.id == canary_of(name):
            raise CliError(
                f"version {version.number} of {name} is its canary; `tsx deploy promote` gives it"
                " all requests"
            )
        canary = canary_in(cloud, name)
        canary_removal = (
            []
            if canary is None
            else [Resource("Deployment", f"{KIND}Deployment", name, {"Canary": NO_CANARY})]
        )
        if canary_removal and version.is_current:
            return canary_removal
        target = next(
            replica_set
            for replica_set in replica_sets(cloud, name)
            if replica_set["metadata"]["name"] == version.id
        )
        service = cloud.find("Service", name) or {"spec": {}}
        if (
            not (service["spec"].get("selector") or {}).items()
            <= target["spec"]["template"]["metadata"]["labels"].items()
        ):
            raise CliError(
                f"version {version.number} of {name} was made by an earlier tsx, and the Service"
                " would not find its pods; deploy its image"
            )
        rollback = Resource(
            "Revision",
            f"{KIND}Revision",
            name,
            {"ReplicaSet": version.id, "Revision": version.number},
        )
        stable = cloud.find("Deployment", name)
        is_promoted = canary is not None and stable is not None and canary.is_promoted(stable)
        return [rollback, *canary_removal] if is_promoted else [*canary_removal, rollback]

    def promotion_resources(self, cloud: Cluster, name: str) -> list[Resource]:
        """Return the stable Deployment with the version of the canary."""
        stable, canary = (cloud.find("Deployment", name), canary_in(cloud, name))
        if stable is None or canary is None:
            raise CliError(f"{name} has no canary: one version has all requests")
        body = {
            **canary.deployment["spec"],
            "selector": stable["spec"]["selector"],
            "replicas": stable["spec"].get("replicas", 1),
        }
        if any(
            cloud.list_objects(TYPES[kind], name)
            for kind in ("HorizontalPodAutoscaler", "ScaledObject")
        ):
            del body["replicas"]
        annotations = {
            key: value
            for key, value in annotations_of(canary.deployment).items()
            if key.startswith("tsx/")
        }
        metadata = {
            "name": name,
            "namespace": cloud.namespace,
            "labels": canary.deployment["metadata"]["labels"],
        }
        manifest = with_instance(
            {"metadata": {**metadata, "annotations": annotations}, "spec": body}, name
        )
        properties = {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            **manifest,
            "Canary": NO_CANARY,
        }
        return [Resource("Deployment", f"{KIND}Deployment", name, properties)]

    def status(self, cloud: Cluster, name: str) -> dict[str, Any] | None:
        deployment = cloud.find("Deployment", name)
        if deployment is None:
            return self._kserve_status(cloud, name)
        status, annotations = deployment.get("status") or {}, annotations_of(deployment)
        pods = cloud.list_objects("pods", name)
        return {
            "namespace": cloud.namespace,
            "model": annotations.get("tsx/model"),
            "image": deployment["spec"]["template"]["spec"]["containers"][0]["image"],
            "revision": annotations.get(REVISION),
            "pods": (
                f"{status.get('readyReplicas', 0)} of {deployment['spec'].get('replicas', 1)} ready"
            ),
            "scales": _scaling_ranges(cloud, name),
            "canary": self._canary_status(cloud, name),
            "tokens": _secret_of(deployment),
            "waiting": [f"{pod}: {reason}" for pod, reason in waiting_containers(pods)],
            "restarts": count_restarts(pods),
        }

    def _canary_status(self, cloud: Cluster, name: str) -> list[dict[str, Any]]:
        canary = canary_in(cloud, name)
        if canary is None:
            return []
        state = canary.state
        fields = {"percent": state.percent, "since": state.since, "ends because": state.ended}
        return [
            {
                "model": annotations_of(canary.deployment).get("tsx/model"),
                **{key: value for key, value in fields.items() if value},
            }
        ]

    def _kserve_status(self, cloud: Cluster, name: str) -> dict[str, Any] | None:
        """Return the status of an InferenceService of KServe."""
        service = next(iter(cloud.list_objects(TYPES["InferenceService"], name)), None)
        if service is None:
            return None
        status = service.get("status") or {}
        conditions = {
            condition["type"]: condition["status"] for condition in status.get("conditions") or []
        }
        return {
            "namespace": cloud.namespace,
            "model": annotations_of(service).get("tsx/model"),
            "storage": service["spec"]["predictor"]["model"].get("storageUri"),
            "address": status.get("url"),
            "conditions": conditions,
        }

    def invoke(
        self, cloud: Cluster, name: str, body: bytes, content_type: str, accept: str | None
    ) -> Response:
        """Send a request through kubectl's connection to the cluster."""
        deployment = cloud.find("Deployment", name)
        if deployment is None:
            raise CloudError(
                f"there is no Deployment {name} in {cloud.region}; `tsx deploy status` shows the"
                " address of an InferenceService"
            )
        model = annotations_of(deployment).get("tsx/model", name).partition("/")[0]
        token = cloud.token(deployment, "TSX_INFERENCE_TOKEN")
        with cloud.forward_port(f"service/{name}", HTTP) as address:
            return predict(address, model, body, content_type, accept, token)

    def logs(
        self, cloud: Cluster, name: str, *, lines: int, since: str | None, follow: bool
    ) -> Iterator[str]:
        """Yield the log lines of all pods, with the names of the pods."""
        pods = ("--namespace", cloud.namespace, "--selector", selector({NAME: name}))
        arguments = log_arguments(lines, since, follow=follow)
        return cloud.program.lines(
            "logs", *pods, "--prefix", "--max-log-requests", "50", *arguments
        )


def _is_own(manifest: Mapping[str, Any]) -> bool:
    """Tell whether tsx created an object.

    KEDA creates autoscalers with the labels of the ScaledObject, which it sets as their owner.
    Therefore objects with an owner do not count.
    """
    metadata = manifest["metadata"]
    return (metadata.get("labels") or {}).get(MANAGED_BY) == "tsx" and not metadata.get(
        "ownerReferences"
    )


def _scaling_ranges(cloud: Cluster, name: str) -> list[str]:
    autoscalers = filter(_is_own, cloud.list_objects(TYPES["HorizontalPodAutoscaler"], name))
    ranges = [
        f"{autoscaler['spec'].get('minReplicas', 1)} to {autoscaler['spec']['maxReplicas']}"
        for autoscaler in autoscalers
    ]
    for scaled_object in cloud.list_objects(TYPES["ScaledObject"], name):
        conditions = {
            condition["type"]: condition
            for condition in (scaled_object.get("status") or {}).get("conditions") or []
        }
        has_failed = conditions.get("Ready", {}).get("status") == "False"
        problem = (
            f", but KEDA cannot scale it: {conditions['Ready'].get('message', '')}"
            if has_failed
            else ""
        )
        ranges.append(
            f"{scaled_object['spec']['minReplicaCount']} to"
            f" {scaled_object['spec']['maxReplicaCount']}{problem}"
        )
    return ranges


def _creation_time(manifest: Mapping[str, Any]) -> datetime:
    return datetime.fromisoformat(manifest["metadata"]["creationTimestamp"].replace("Z", "+00:00"))


def _secret_of(deployment: Mapping[str, Any]) -> str | None:
    variables = deployment["spec"]["template"]["spec"]["containers"][0].get("env") or []
    references = [
        (variable.get("valueFrom") or {}).get("secretKeyRef")
        for variable in variables
        if variable["name"] in TOKENS
    ]
    return next(
        (f"in the Secret {reference['name']}" for reference in references if reference), None
    )


def _notes(spec: DeploySpec, facts: Facts) -> list[str]:
    """Return the notes of a plan."""
    notes = []
    if spec.kubernetes.kserve:
        notes.append(
            "requests need no token, because KServe's clients send none: every client that reaches"
            f" {spec.name} can use it"
        )
    elif token_secret(spec) is None and not {*spec.env, *spec.kubernetes.secrets} & TOKENS.keys():
        notes.append(
            f"requests need no token (kubernetes.tokens): every pod that reaches {spec.name} can"
            " use it"
        )
    if isinstance(facts.image, str) and "@" not in facts.image:
        advice = "crane, skopeo or docker on this machine can find its digest"
        notes.append(
            f"{facts.image} is deployed by its tag, which may mean another image tomorrow; {advice}"
            " if it is logged in"
        )
    return notes


def _tokens(
    cloud: Cluster, spec: DeploySpec, tags: Mapping[str, str], notes: list[str]
) -> list[Resource]:
    """Return the Secret to create if the specification names none, and add to `notes`.

    If somebody else has created a Secret of that name, it is used as it is.
    """
    name = token_secret(spec)
    if name is None or spec.kubernetes.token_secret is not None:
        return []
    try:
        secret = cloud.find("Secret", name)
    except ProgramError as error:
        if FORBIDDEN_TEXT not in error.output:
            raise
        notes.append(
            f"these credentials cannot read the Secret {name}, which the pods need; it is assumed"
            " to exist"
        )
        return []
    if secret is None:
        notes.append(
            f"requests must carry the token in the Secret {name}, key inference; `tsx deploy"
            " invoke` reads it by itself"
        )
    elif not tags_in(secret):
        return []
    return [
        Resource(
            "Secret",
            f"{KIND}Secret",
            name,
            {"Keys": dict.fromkeys(TOKENS.values(), True)},
            (),
            owner_tags(tags),
        )
    ]


def _adapt_to_cluster(
    cloud: Cluster,
    spec: DeploySpec,
    facts: Facts,
    resource: Resource,
    resources: Sequence[Resource],
    stable: Mapping[str, Any],
) -> Resource:
    """Adapt a resource to the existing Deployment, and to a running canary.

    The selector of a Deployment cannot change, and a canary keeps its percentage of the requests.
    """
    if resource.id == "HTTPRoute":
        return replace(resource, properties=with_canary_percent(cloud, resource.properties))
    if resource.id != "Deployment":
        return resource
    body = {
        **resource.properties["spec"],
        "selector": stable["spec"].get("selector", resource.properties["spec"]["selector"]),
    }
    properties = {**resource.properties, "spec": body, "Canary": NO_CANARY}
    if spec.canary is None and canary_in(cloud, spec.name) is None:
        return replace(resource, properties=properties)
    # The Deployment comes last, because a canary needs its route and the other objects.
    other_ids = tuple(resource.id for resource in resources if resource.id != "Deployment")
    if spec.canary is None:
        return replace(resource, properties=properties, needs=(*resource.needs, *other_ids))
    properties["Beside"] = _canary_objects(
        cloud, spec, facts, "ServiceMonitor" in other_ids, stable
    )
    change_settings = {
        "percent": spec.canary.percent,
        "bake": spec.canary.bake,
        "alarms": list(spec.canary.alarms),
    }
    return replace(
        resource,
        properties=properties,
        needs=(*resource.needs, *other_ids),
        change_settings=change_settings,
    )


def _canary_objects(
    cloud: Cluster, spec: DeploySpec, facts: Facts, has_monitor: bool, stable: Mapping[str, Any]
) -> list[Manifest]:
    """Return the objects of a canary, with as many pods as its share needs.

    Raises:
        CliError: The existing objects do not allow a canary.
    """
    name = canary_of(spec.name)
    if INSTANCE not in stable["spec"]["template"]["metadata"].get("labels", {}):
        raise CliError(
            f"the pods of {spec.name} have no label {INSTANCE}, which tells a canary's apart;"
            " deploy once without a canary"
        )
    for kind in ("Deployment", "Service"):
        existing = cloud.find(kind, name)
        if existing is not None and tags_in(existing).get("tsx:name") != spec.name:
            raise CliError(
                f"{kind} {name} already exists, and it is not the canary of {spec.name}; choose"
                " another --name"
            )
    assert spec.canary is not None
    pods = max(1, math.ceil(stable["spec"].get("replicas", 1) * spec.canary.percent / 100))
    fields = {
        "replicas": pods,
        "most_replicas": pods,
        "keda": None,
        "gateway": None,
        "hostnames": (),
        "monitoring": has_monitor,
    }
    settings = spec.kubernetes.model_copy(update={**fields, "token_secret": token_secret(spec)})
    return manifests(
        spec.model_copy(update={"name": name, "canary": None, "kubernetes": settings}),
        facts.image,
        tags_of(spec, facts),
    )
