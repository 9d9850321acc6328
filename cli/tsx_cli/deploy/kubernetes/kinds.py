"""Objects of a Kubernetes cluster, by kubectl: applied on the server side, and compared with the current state.

What a pod template was is kept by Kubernetes itself, as replica sets, so going back is `kubectl rollout undo`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tsx_cli.deploy.engine.kind import ResourceKind
from tsx_cli.deploy.engine.plan import Field
from tsx_cli.deploy.engine.resources import Observed, Resource, State, Traits
from tsx_cli.deploy.image.programs import Program, ProgramError

KIND = "Kubernetes::"  # before the name of an object's kind
TYPES = {  # as kubectl is asked for them
    "Deployment": "deployments.v1.apps",
    "Service": "services",
    "HorizontalPodAutoscaler": "horizontalpodautoscalers.v2.autoscaling",
    "ScaledObject": "scaledobjects.v1alpha1.keda.sh",
    "PodDisruptionBudget": "poddisruptionbudgets.v1.policy",
    "NetworkPolicy": "networkpolicies.v1.networking.k8s.io",
    "ServiceMonitor": "servicemonitors.v1.monitoring.coreos.com",
    "ClusterServingRuntime": "clusterservingruntimes.v1alpha1.serving.kserve.io",
    "InferenceService": "inferenceservices.v1beta1.serving.kserve.io",
}
ADVICE = {
    "ScaledObject": "KEDA is not installed there; without kubernetes.keda, Kubernetes' own autoscaler scales, though never to no pods",
    "ServiceMonitor": "The Prometheus operator reads it; without the operator, omit it with --set kubernetes.monitoring=false",
    "ClusterServingRuntime": "KServe is not installed there; --set kubernetes.kserve=false creates a Deployment",
    "InferenceService": "KServe is not installed there; --set kubernetes.kserve=false creates a Deployment",
}
MANAGER = "tsx"  # the owner of the fields that are applied
KEEPER = "tsx-replicas"  # that of a Deployment's number of pods between this manager and an autoscaler
REVISION = "deployment.kubernetes.io/revision"
UNKNOWN = "doesn't have a resource type"


@dataclass(frozen=True)
class Cluster:
    """The cluster and the namespace that deployments are in."""

    program: Program
    namespace: str

    @property
    def region(self) -> str:
        return f"the namespace {self.namespace}"

    def get(self, type_: str, *words: str, doing: str) -> dict[str, Any] | None:
        """None where there is none."""
        output = self.program.ask(
            "get", type_, *words, "--namespace", self.namespace, "--output", "json", "--ignore-not-found", doing=doing
        )
        return dict(json.loads(output)) if output.strip() else None

    def listed(self, type_: str, name: str) -> list[dict[str, Any]]:
        """Of one deployment; none where the cluster does not know this type."""
        try:
            found = self.get(type_, "--selector", selector(name), doing=f"listing the {type_.partition('.')[0]} of {name}")
        except ProgramError as error:
            if UNKNOWN in error.output:
                return []
            raise
        return list((found or {}).get("items", []))


def selector(name: str) -> str:
    return f"app.kubernetes.io/name={name}"


class KubernetesObject(ResourceKind):
    """An object of one kind. Its properties are the object itself."""

    traits = Traits(is_tagged=False, unseen=frozenset({"apiVersion", "kind"}), updates_failed=True)
    poll, patience = 2.0, 7200.0

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def observe(self, cloud: Cluster, name: str) -> Observed | None:
        try:
            found = cloud.get(TYPES[self._kind], name, doing=f"looking for the {self._kind} {name}")
        except ProgramError as error:
            if UNKNOWN in error.output:
                raise ProgramError(f"{cloud.region} has no {self._kind}. {ADVICE.get(self._kind, '')}".strip(), error.output) from error
            raise
        if found is None:
            return None
        annotations = found["metadata"].get("annotations") or {}
        tags = {key.replace("/", ":", 1): value for key, value in annotations.items() if key.startswith("tsx/")}
        state, reason = STATES[self._kind](found) if self._kind in STATES else ("ready", "")
        if state == "failed" and self._kind == "Deployment":
            reason = "; ".join([reason, *(f"{pod}: {why}" for pod, why in waiting(cloud.listed("pods", name)))])
        return Observed(name, {"metadata": found["metadata"], "spec": found.get("spec", {})}, tags, {"Ref": name}, state, reason)

    def create(self, cloud: Cluster, resource: Resource) -> None:
        self._apply(cloud, resource.name, resource.properties, MANAGER)

    def update(self, cloud: Cluster, resource: Resource, found: Observed, fields: Sequence[Field]) -> None:
        if self._kind == "Deployment" and "replicas" not in resource.properties["spec"]:
            self._keep_replicas(cloud, resource)
        self.create(cloud, resource)

    def _keep_replicas(self, cloud: Cluster, resource: Resource) -> None:
        """Until the autoscaler decides: a number of pods that its only owner does not apply any more becomes 1."""
        doing = f"looking for the owner of the number of pods of {resource.name}"
        found = cloud.get(TYPES[self._kind], resource.name, "--show-managed-fields", doing=doing)
        owners = (found or {}).get("metadata", {}).get("managedFields") or []
        if found is not None and any(
            each.get("manager") == MANAGER and "f:replicas" in each.get("fieldsV1", {}).get("f:spec", {}) for each in owners
        ):
            kept = {key: found[key] for key in ("apiVersion", "kind")} | {"metadata": {"name": resource.name}}
            self._apply(cloud, resource.name, kept | {"spec": {"replicas": found["spec"]["replicas"]}}, KEEPER, "--validate=false")

    def _apply(self, cloud: Cluster, name: str, said: Mapping[str, Any], manager: str, *more: str) -> None:
        words = ["apply", "--server-side", "--force-conflicts", "--field-manager", manager, *more]
        words += ["--namespace", cloud.namespace, "--filename", "-"]
        cloud.program.ask(*words, doing=f"applying the {self._kind} {name}", stdin=json.dumps(said))

    def delete(self, cloud: Cluster, found: Observed) -> None:
        words = ("delete", TYPES[self._kind], found.name, "--namespace", cloud.namespace, "--ignore-not-found")
        cloud.program.ask(*words, doing=f"deleting the {self._kind} {found.name}")


class Revision(ResourceKind):
    """An earlier revision of a Deployment's pods: one of its replica sets, the target of a rollback."""

    traits = Traits(is_tagged=False, unseen=frozenset({"Revision"}), updates_failed=True)
    poll, patience = 2.0, 7200.0

    def observe(self, cloud: Cluster, name: str) -> Observed | None:
        deployment = KubernetesObject("Deployment").observe(cloud, name)
        if deployment is None:
            return None
        now = (deployment.properties["metadata"].get("annotations") or {}).get(REVISION)
        sets = cloud.listed("replicasets.v1.apps", name)
        current = next((each for each in sets if each["metadata"]["annotations"].get(REVISION) == now), None)
        output = {} if current is None else {"ReplicaSet": current["metadata"]["name"]}
        return Observed(name, output, deployment.tags, deployment.outputs, deployment.state, deployment.reason)

    def create(self, cloud: Cluster, resource: Resource) -> None:
        raise AssertionError("a rollback needs an existing resource")

    def update(self, cloud: Cluster, resource: Resource, found: Observed, fields: Sequence[Field]) -> None:
        words = ("rollout", "undo", f"deployment/{resource.name}", f"--to-revision={resource.properties['Revision']}")
        cloud.program.ask(*words, "--namespace", cloud.namespace, doing=f"rolling {resource.name} back")

    def delete(self, cloud: Cluster, found: Observed) -> None:
        raise AssertionError("a Deployment is removed as a whole")


def _deployment(found: Mapping[str, Any]) -> tuple[State, str]:
    """As `kubectl rollout status` says it."""
    status, wanted = found.get("status") or {}, found["spec"].get("replicas", 1)
    if status.get("observedGeneration", 0) < found["metadata"].get("generation", 0):
        return "changing", "has not been observed yet"
    for condition in status.get("conditions") or []:
        if condition.get("reason") == "ProgressDeadlineExceeded":
            return "failed", f"its new pods did not become ready in time ({condition.get('message', '')})"
    updated, available = status.get("updatedReplicas", 0), status.get("availableReplicas", 0)
    if updated < wanted:
        return "changing", f"{updated} of {wanted} pods are new"
    if status.get("replicas", 0) > updated:
        return "changing", f"{status['replicas'] - updated} old pods are ending"
    if available < updated:
        return "changing", f"{available} of {updated} pods are ready"
    return "ready", ""


def _service(found: Mapping[str, Any]) -> tuple[State, str]:
    """KServe's own."""
    ready = next((each for each in (found.get("status") or {}).get("conditions") or [] if each["type"] == "Ready"), None)
    if ready is None or ready["status"] == "Unknown":
        return "changing", "is not ready yet" if ready is None else str(ready.get("message") or "is not ready yet")
    return ("ready", "") if ready["status"] == "True" else ("changing", str(ready.get("message") or ready.get("reason") or "is not ready"))


STATES: Mapping[str, Callable[[Mapping[str, Any]], tuple[State, str]]] = {"Deployment": _deployment, "InferenceService": _service}


def waiting(pods: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Of each container that does not run, why."""
    found = []
    for pod in pods:
        for each in (pod.get("status") or {}).get("containerStatuses") or []:
            state = (each.get("state") or {}).get("waiting") or (each.get("state") or {}).get("terminated")
            if state:
                found.append((pod["metadata"]["name"], f"{state.get('reason', '')} {state.get('message', '')}".strip()))
    return found


KINDS = {f"{KIND}{kind}": KubernetesObject(kind) for kind in TYPES}
