"""The state of a deployment on a Kubernetes cluster, and its health."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from tsx_cli.common.client import Response
from tsx_cli.common.failure import CliError, UsageError
from tsx_cli.deploy.container.deployment import log_words, predict
from tsx_cli.deploy.engine.facts import Facts, tags_of
from tsx_cli.deploy.engine.kind import CloudError
from tsx_cli.deploy.engine.platform import DeployedVersion
from tsx_cli.deploy.engine.resources import Resource, numbered
from tsx_cli.deploy.image.programs import ProgramError
from tsx_cli.deploy.kubernetes.gateway import canary_of
from tsx_cli.deploy.kubernetes.kinds import (
    FORBIDDEN,
    KIND,
    REVISION,
    TYPES,
    Cluster,
    replica_sets,
    restarts,
    selector,
    tags_in,
    waiting,
)
from tsx_cli.deploy.kubernetes.release import NONE, canary_in, with_instance, with_share
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

OWN = (
    *(
        "Secret",
        "Deployment",
        "InferenceService",
        "Service",
        "HorizontalPodAutoscaler",
        "ScaledObject",
        "PodDisruptionBudget",
    ),
    *("NetworkPolicy", "ServiceMonitor", "HTTPRoute"),
)
ROUTING = 300  # seconds until a Gateway has taken a route
MARGIN = 60  # seconds for images to be pulled, beside the time until a model is ready


class KubernetesTarget:
    def wanted(self, cloud: Cluster, spec: DeploySpec, facts: Facts) -> list[Resource]:
        if spec.image is None and spec.repository is None:
            ways = (
                "set --image to an image that your cluster can pull, or --set repository=HOST/NAME"
                " to push an image that is built here"
            )
            raise UsageError(f"neither image nor repository is given: {ways}")
        tags, notes = tags_of(spec, facts), _notes(spec, facts)
        objects = manifests(spec, facts.image, tags)
        patience = {
            "InferenceService": spec.kubernetes.startup_timeout + MARGIN,
            "HTTPRoute": ROUTING,
        }
        made = _tokens(cloud, spec, tags, notes)
        for manifest in objects:
            kind = manifest["kind"]
            if (
                kind == "ServiceMonitor"
                and spec.kubernetes.monitoring is None
                and not cloud.knows(kind, spec.name)
            ):
                notes.append(
                    "no ServiceMonitor is created, because the cluster does not have the Prometheus"
                    " operator"
                )
                continue
            own = (
                {} if kind == "ClusterServingRuntime" else tags
            )  # which every deployment of the cluster shares
            name = manifest["metadata"]["name"]
            made.append(
                Resource(
                    kind,
                    f"{KIND}{kind}",
                    name,
                    manifest,
                    ("Image",),
                    own,
                    patience=patience.get(kind, 0),
                )
            )
        made[0] = replace(made[0], notes=tuple(notes))
        if spec.kubernetes.kserve:
            return made
        stable = cloud.find("Deployment", spec.name)
        if stable is None or tags_in(stable).get("tsx:name") != spec.name:
            return made
        return [_continued(cloud, spec, facts, each, made, stable) for each in made]

    def belongings(self, cloud: Cluster, name: str, *, purge: bool = False) -> list[Resource]:
        found = []
        for kind in OWN:
            there = filter(_is_own, cloud.list_objects(TYPES[kind], name))
            found += numbered(kind, f"{KIND}{kind}", [each["metadata"]["name"] for each in there])
        return found

    def obsolete(
        self, cloud: Cluster, spec: DeploySpec, wanted: Sequence[Resource]
    ) -> list[Resource]:
        """What was asked for once and is not any more.

        Earlier versions of its pods Kubernetes itself keeps and removes.

        They may read the Secret, so it is kept; and a canary that is under way is removed by the
        change of the Deployment.
        """
        kept = {(each.kind, each.name) for each in wanted} | {
            (f"{KIND}Secret", f"{spec.name}-tokens")
        }
        canary = canary_of(spec.name) if canary_in(cloud, spec.name) is not None else None
        return [
            each
            for each in self.belongings(cloud, spec.name)
            if (each.kind, each.name) not in kept and each.name != canary
        ]

    def versions(self, cloud: Cluster, name: str) -> list[DeployedVersion]:
        deployment = cloud.find("Deployment", name)
        if deployment is None:
            return []
        now = _annotations(deployment).get(REVISION)
        sets = sorted(
            replica_sets(cloud, name), key=lambda each: int(_annotations(each).get(REVISION, 0))
        )
        found = [
            DeployedVersion(
                int(_annotations(each)[REVISION]),
                each["metadata"]["name"],
                _made(each),
                tags_in(each["spec"]["template"]),
                _annotations(each)[REVISION] == now,
            )
            for each in sets
            if REVISION in _annotations(each)
        ]
        canary = canary_in(cloud, name)
        if canary is not None and not canary.is_promoted(deployment):
            number = max((each.number for each in found), default=0) + 1
            tags = tags_in(canary.deployment["spec"]["template"])
            found.append(
                DeployedVersion(
                    number,
                    canary_of(name),
                    _made(canary.deployment),
                    tags,
                    False,
                    canary.state.percent,
                )
            )
        return found

    def going_back(self, cloud: Cluster, name: str, version: DeployedVersion) -> list[Resource]:
        """A canary that is under way is removed first, or last where the stable Deployment has its
        version already.
        """
        if version.id == canary_of(name):
            raise CliError(
                f"version {version.number} of {name} is its canary; `tsx deploy promote` gives it"
                " all requests"
            )
        canary = canary_in(cloud, name)
        ending = (
            []
            if canary is None
            else [Resource("Deployment", f"{KIND}Deployment", name, {"Canary": NONE})]
        )
        if ending and version.is_current:
            return ending
        earlier = next(
            each for each in replica_sets(cloud, name) if each["metadata"]["name"] == version.id
        )
        service = cloud.find("Service", name) or {"spec": {}}
        if (
            not (service["spec"].get("selector") or {}).items()
            <= earlier["spec"]["template"]["metadata"]["labels"].items()
        ):
            raise CliError(
                f"version {version.number} of {name} was made by an earlier tsx, and the Service"
                " would not find its pods; deploy its image"
            )
        undo = Resource(
            "Revision",
            f"{KIND}Revision",
            name,
            {"ReplicaSet": version.id, "Revision": version.number},
        )
        stable = cloud.find("Deployment", name)
        is_promoted = canary is not None and stable is not None and canary.is_promoted(stable)
        return [undo, *ending] if is_promoted else [*ending, undo]

    def promoting(self, cloud: Cluster, name: str) -> list[Resource]:
        """The stable Deployment as the canary's is."""
        stable, canary = (
            cloud.find("Deployment", name),
            canary_in(cloud, name),
        )
        if stable is None or canary is None:
            raise CliError(f"{name} has no canary: one version has all requests")
        body = {
            **canary.deployment["spec"],
            "selector": stable["spec"]["selector"],
            "replicas": stable["spec"].get("replicas", 1),
        }
        if any(
            cloud.list_objects(TYPES[each], name)
            for each in ("HorizontalPodAutoscaler", "ScaledObject")
        ):
            del body["replicas"]
        notes = {
            key: value
            for key, value in _annotations(canary.deployment).items()
            if key.startswith("tsx/")
        }
        metadata = {
            "name": name,
            "namespace": cloud.namespace,
            "labels": canary.deployment["metadata"]["labels"],
        }
        whole = with_instance({"metadata": {**metadata, "annotations": notes}, "spec": body}, name)
        properties = {"apiVersion": "apps/v1", "kind": "Deployment", **whole, "Canary": NONE}
        return [Resource("Deployment", f"{KIND}Deployment", name, properties)]

    def status(self, cloud: Cluster, name: str) -> dict[str, Any] | None:
        deployment = cloud.find("Deployment", name)
        if deployment is None:
            return self._served(cloud, name)
        status, annotations = deployment.get("status") or {}, _annotations(deployment)
        pods = cloud.list_objects("pods", name)
        return {
            "name": name,
            "target": "kubernetes",
            "namespace": cloud.namespace,
            "model": annotations.get("tsx/model"),
            "image": deployment["spec"]["template"]["spec"]["containers"][0]["image"],
            "revision": annotations.get(REVISION),
            "pods": (
                f"{status.get('readyReplicas', 0)} of {deployment['spec'].get('replicas', 1)} ready"
            ),
            "scales": _scales(cloud, name),
            "canary": self._canary(cloud, name),
            "tokens": _secret_of(deployment),
            "waiting": [f"{pod}: {reason}" for pod, reason in waiting(pods)],
            "restarts": restarts(pods),
        }

    def _canary(self, cloud: Cluster, name: str) -> list[dict[str, Any]]:
        canary = canary_in(cloud, name)
        if canary is None:
            return []
        state = canary.state
        shown = {"percent": state.percent, "since": state.since, "ends because": state.ended}
        return [
            {
                "model": _annotations(canary.deployment).get("tsx/model"),
                **{key: value for key, value in shown.items() if value},
            }
        ]

    def _served(self, cloud: Cluster, name: str) -> dict[str, Any] | None:
        """By KServe."""
        found = next(iter(cloud.list_objects(TYPES["InferenceService"], name)), None)
        if found is None:
            return None
        status = found.get("status") or {}
        conditions = {each["type"]: each["status"] for each in status.get("conditions") or []}
        shown = {
            "name": name,
            "target": "kubernetes",
            "namespace": cloud.namespace,
            "model": _annotations(found).get("tsx/model"),
        }
        return shown | {
            "storage": found["spec"]["predictor"]["model"].get("storageUri"),
            "address": status.get("url"),
            "conditions": conditions,
        }

    def invoke(
        self, cloud: Cluster, name: str, body: bytes, content_type: str, accept: str | None
    ) -> Response:
        """Through the connection that kubectl has to the cluster."""
        there = cloud.find("Deployment", name)
        if there is None:
            raise CloudError(
                f"there is no Deployment {name} in {cloud.region}; `tsx deploy status` shows the"
                " address of an InferenceService"
            )
        model = _annotations(there).get("tsx/model", name).partition("/")[0]
        token = cloud.token(there, "TSX_INFERENCE_TOKEN")
        with cloud.forwarded(f"service/{name}", HTTP) as address:
            return predict(address, model, body, content_type, accept, token)

    def logs(
        self, cloud: Cluster, name: str, *, lines: int, since: str | None, follow: bool
    ) -> Iterator[str]:
        """Of all its pods, each line with its pod's name."""
        pods = ("--namespace", cloud.namespace, "--selector", selector({NAME: name}))
        words = log_words(lines, since, follow=follow)
        return cloud.program.lines("logs", *pods, "--prefix", "--max-log-requests", "50", *words)


def _is_own(found: Mapping[str, Any]) -> bool:
    """KEDA makes an autoscaler of its own, with the labels of the ScaledObject, which owns it."""
    metadata = found["metadata"]
    return (metadata.get("labels") or {}).get(MANAGED_BY) == "tsx" and not metadata.get(
        "ownerReferences"
    )


def _scales(cloud: Cluster, name: str) -> list[str]:
    own = filter(_is_own, cloud.list_objects(TYPES["HorizontalPodAutoscaler"], name))
    found = [
        f"{each['spec'].get('minReplicas', 1)} to {each['spec']['maxReplicas']}" for each in own
    ]
    for scaled in cloud.list_objects(TYPES["ScaledObject"], name):
        conditions = {
            each["type"]: each for each in (scaled.get("status") or {}).get("conditions") or []
        }
        is_stuck = conditions.get("Ready", {}).get("status") == "False"
        problem = (
            f", but KEDA cannot scale it: {conditions['Ready'].get('message', '')}"
            if is_stuck
            else ""
        )
        found.append(
            f"{scaled['spec']['minReplicaCount']} to {scaled['spec']['maxReplicaCount']}{problem}"
        )
    return found


def _annotations(found: Mapping[str, Any]) -> dict[str, str]:
    return dict(found["metadata"].get("annotations") or {})


def _made(found: Mapping[str, Any]) -> datetime:
    return datetime.fromisoformat(found["metadata"]["creationTimestamp"].replace("Z", "+00:00"))


def _secret_of(deployment: Mapping[str, Any]) -> str | None:
    variables = deployment["spec"]["template"]["spec"]["containers"][0].get("env") or []
    places = [
        (each.get("valueFrom") or {}).get("secretKeyRef")
        for each in variables
        if each["name"] in TOKENS
    ]
    return next((f"in the Secret {place['name']}" for place in places if place), None)


def _notes(spec: DeploySpec, facts: Facts) -> list[str]:
    """What a plan warns about."""
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
        tools = "crane, skopeo or docker on this machine can find its digest"
        notes.append(
            f"{facts.image} is deployed by its tag, which may mean another image tomorrow; {tools}"
            " if it is logged in"
        )
    return notes


def _tokens(
    cloud: Cluster, spec: DeploySpec, tags: Mapping[str, str], notes: list[str]
) -> list[Resource]:
    """The Secret that is created where none is named.

    One that a person has created under its name is used as it is. Adds to `notes`.
    """
    name = token_secret(spec)
    if name is None or spec.kubernetes.token_secret is not None:
        return []
    try:
        found = cloud.find("Secret", name)
    except ProgramError as error:
        if FORBIDDEN not in error.output:
            raise
        notes.append(
            f"these credentials cannot read the Secret {name}, which the pods need; it is assumed"
            " to exist"
        )
        return []
    if found is None:
        notes.append(
            f"requests must carry the token in the Secret {name}, key inference; `tsx deploy"
            " invoke` reads it by itself"
        )
    elif not tags_in(found):
        return []
    own = {key: tags[key] for key in ("tsx:name", "tsx:target")}
    return [
        Resource(
            "Secret", f"{KIND}Secret", name, {"Keys": dict.fromkeys(TOKENS.values(), True)}, (), own
        )
    ]


def _continued(
    cloud: Cluster,
    spec: DeploySpec,
    facts: Facts,
    resource: Resource,
    made: Sequence[Resource],
    stable: Mapping[str, Any],
) -> Resource:
    """As it fits the existing Deployment, whose selector cannot be changed, and a canary that is
    under way, which keeps its share.
    """
    if resource.id == "HTTPRoute":
        return replace(resource, properties=with_share(cloud, resource.properties))
    if resource.id != "Deployment":
        return resource
    body = {
        **resource.properties["spec"],
        "selector": stable["spec"].get("selector", resource.properties["spec"]["selector"]),
    }
    properties = {**resource.properties, "spec": body, "Canary": NONE}
    if spec.canary is None and canary_in(cloud, spec.name) is None:
        return replace(resource, properties=properties)
    others = tuple(
        each.id for each in made if each.id != "Deployment"
    )  # a canary needs its route, and all of them serve both versions
    if spec.canary is None:
        return replace(resource, properties=properties, needs=(*resource.needs, *others))
    properties["Beside"] = _canary(cloud, spec, facts, "ServiceMonitor" in others, stable)
    how = {
        "percent": spec.canary.percent,
        "bake": spec.canary.bake,
        "alarms": list(spec.canary.alarms),
    }
    return replace(resource, properties=properties, needs=(*resource.needs, *others), how=how)


def _canary(
    cloud: Cluster, spec: DeploySpec, facts: Facts, monitored: bool, stable: Mapping[str, Any]
) -> list[Manifest]:
    """The objects of the new version: a deployment of its own, with as many pods as its share
    needs. Raises CliError.
    """
    name = canary_of(spec.name)
    if INSTANCE not in stable["spec"]["template"]["metadata"].get("labels", {}):
        raise CliError(
            f"the pods of {spec.name} have no label {INSTANCE}, which tells a canary's apart;"
            " deploy once without a canary"
        )
    for kind in ("Deployment", "Service"):
        there = cloud.find(kind, name)
        if there is not None and tags_in(there).get("tsx:name") != spec.name:
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
        "monitoring": monitored,
    }
    own = spec.kubernetes.model_copy(update={**fields, "token_secret": token_secret(spec)})
    return manifests(
        spec.model_copy(update={"name": name, "canary": None, "kubernetes": own}),
        facts.image,
        tags_of(spec, facts),
    )
