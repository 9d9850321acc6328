"""Objects of a Kubernetes cluster, applied by kubectl on the server side.

Kubernetes keeps earlier pod templates as replica sets, so a rollback is `kubectl rollout undo`.
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
import secrets
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tsx_cli.deploy.engine.kind import CloudError, ResourceKind
from tsx_cli.deploy.engine.resources import Observed, Resource, State, Traits
from tsx_cli.deploy.image.programs import Program, ProgramError
from tsx_cli.deploy.kubernetes.gateway import annotations_of, canary_of
from tsx_cli.deploy.kubernetes.resources import INSTANCE, MANAGED_BY, NAME

KIND = "Kubernetes::"  # prefix of the kinds of objects
TYPES = {  # kind -> type for kubectl
    "Deployment": "deployments.v1.apps",
    "Secret": "secrets",
    "Service": "services",
    "HorizontalPodAutoscaler": "horizontalpodautoscalers.v2.autoscaling",
    "ScaledObject": "scaledobjects.v1alpha1.keda.sh",
    "PodDisruptionBudget": "poddisruptionbudgets.v1.policy",
    "NetworkPolicy": "networkpolicies.v1.networking.k8s.io",
    "ServiceMonitor": "servicemonitors.v1.monitoring.coreos.com",
    "HTTPRoute": "httproutes.v1.gateway.networking.k8s.io",
    "ClusterServingRuntime": "clusterservingruntimes.v1alpha1.serving.kserve.io",
    "InferenceService": "inferenceservices.v1beta1.serving.kserve.io",
}
ADVICE = {
    "HTTPRoute": (
        "The Gateway API is not installed there; remove kubernetes.gateway, or install its CRDs and"
        " a controller"
    ),
    "ScaledObject": (
        "KEDA is not installed there; without kubernetes.keda, Kubernetes' own autoscaler scales,"
        " though never to no pods"
    ),
    "ServiceMonitor": (
        "The Prometheus operator reads it; without the operator, omit it with --set"
        " kubernetes.monitoring=false"
    ),
    "ClusterServingRuntime": (
        "KServe is not installed there; --set kubernetes.kserve=false creates a Deployment"
    ),
    "InferenceService": (
        "KServe is not installed there; --set kubernetes.kserve=false creates a Deployment"
    ),
}
MANAGER = "tsx"  # field manager of applied objects
REPLICAS_MANAGER = "tsx-replicas"  # field manager of the number of pods before autoscaling
REVISION = "deployment.kubernetes.io/revision"
# Parts of kubectl's error messages.
UNKNOWN_TYPE_TEXT, FORBIDDEN_TEXT = "doesn't have a resource type", "(Forbidden)"
WHEN_INTERRUPTED = (
    "the cluster continues what has started. A canary that has begun keeps its share of the"
    " requests, and nobody watches it until this command runs again. `tsx deploy promote` gives it"
    " all requests, `tsx deploy rollback` removes it"
)
_FORWARDING = re.compile(r"Forwarding from 127\.0\.0\.1:(\d+)")


@dataclass(frozen=True)
class Cluster:
    """A namespace of a cluster that contains deployments."""

    program: Program
    namespace: str

    @property
    def region(self) -> str:
        return f"the namespace {self.namespace}"

    def get(self, type_: str, *arguments: str, doing: str) -> dict[str, Any] | None:
        """Return an object, or None if there is none."""
        output = self.program.run(
            "get",
            type_,
            *arguments,
            "--namespace",
            self.namespace,
            "--output",
            "json",
            "--ignore-not-found",
            doing=doing,
        )
        return dict(json.loads(output)) if output.strip() else None

    def find(self, kind: str, name: str) -> dict[str, Any] | None:
        return self.get(TYPES[kind], name, doing=f"looking for the {kind} {name}")

    def list_objects(
        self, type_: str, name: str, labels: Mapping[str, str] | None = None
    ) -> list[dict[str, Any]]:
        """Return the objects of a deployment with these labels.

        The list is empty if the cluster does not know the type.
        """
        return self._find_items(type_, name, labels or {}) or []

    def has_type(self, kind: str, name: str) -> bool:
        return self._find_items(TYPES[kind], name, {}) is not None

    def _find_items(
        self, type_: str, name: str, labels: Mapping[str, str]
    ) -> list[dict[str, Any]] | None:
        arguments = ("--selector", selector({NAME: name} | dict(labels)))
        try:
            response = self.get(
                type_, *arguments, doing=f"listing the {type_.partition('.')[0]} of {name}"
            )
        except ProgramError as error:
            # Credentials without the permission to list Secrets cannot have created one.
            if UNKNOWN_TYPE_TEXT in error.output or (
                FORBIDDEN_TEXT in error.output and type_ == TYPES["Secret"]
            ):
                return None
            raise
        return list((response or {}).get("items", []))

    def token(self, deployment: Mapping[str, Any], variable: str) -> str | None:
        """Return the value of a pod's variable, which may come from a Secret.

        Raises:
            CloudError: The Secret or its key is missing.
        """
        variables = deployment["spec"]["template"]["spec"]["containers"][0].get("env") or []
        entry: Mapping[str, Any] = next(
            (candidate for candidate in variables if candidate["name"] == variable), {}
        )
        reference = (entry.get("valueFrom") or {}).get("secretKeyRef")
        if reference is None:
            return entry.get("value")
        secret = self.get(
            TYPES["Secret"],
            reference["name"],
            doing=f"reading the token in the Secret {reference['name']}",
        )
        value = ((secret or {}).get("data") or {}).get(reference["key"])
        if value is None:
            raise CloudError(
                f"{self.region} has no Secret {reference['name']} with the key {reference['key']},"
                f" which {variable} is read from"
            )
        return base64.b64decode(value).decode()

    @contextlib.contextmanager
    def forward_port(self, target: str, port: int) -> Generator[str, None, None]:
        """Forward a port of `pod/NAME` or `service/NAME`, and yield its address on this machine.

        Raises:
            CloudError: The port cannot be reached.
        """
        lines = self.program.lines(
            "port-forward", "--namespace", self.namespace, target, f":{port}"
        )
        with contextlib.closing(lines):
            first_line = next(lines, "kubectl port-forward printed nothing")
            match = _FORWARDING.match(first_line)
            if match is None:
                raise CloudError(f"{target.partition('/')[2]} cannot be reached: {first_line}")
            yield f"http://127.0.0.1:{match[1]}"


def replica_sets(cloud: Cluster, name: str) -> list[dict[str, Any]]:
    """Return the replica sets of the stable Deployment.

    The replica sets of a canary have the same name label, and maybe the same revision, so they are
    left out.
    """
    sets = cloud.list_objects("replicasets.v1.apps", name)
    return [
        replica_set
        for replica_set in sets
        if replica_set["metadata"]["labels"].get(INSTANCE) != canary_of(name)
    ]


def selector(labels: Mapping[str, str]) -> str:
    return ",".join(f"{key}={value}" for key, value in labels.items())


def apply(cloud: Cluster, manifest: Mapping[str, Any], manager: str = MANAGER, *flags: str) -> None:
    arguments = ["apply", "--server-side", "--force-conflicts", "--field-manager", manager, *flags]
    arguments += ["--namespace", cloud.namespace, "--filename", "-"]
    cloud.program.run(
        *arguments,
        doing=f"applying the {manifest['kind']} {manifest['metadata']['name']}",
        stdin=json.dumps(manifest),
    )


def remove(cloud: Cluster, kind: str, name: str) -> None:
    arguments = ("delete", TYPES[kind], name, "--namespace", cloud.namespace, "--ignore-not-found")
    cloud.program.run(*arguments, doing=f"deleting the {kind} {name}")


class KubernetesObject(ResourceKind):
    """An object of one kind; its properties are its manifest."""

    traits = Traits(
        is_tagged=False,
        unreported=frozenset({"apiVersion", "kind"}),
        can_update_failed=True,
        when_interrupted=WHEN_INTERRUPTED,
    )
    poll_interval_s, timeout_s = 2.0, 7200.0

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def observe(self, cloud: Cluster, name: str) -> Observed | None:
        try:
            manifest = cloud.find(self._kind, name)
        except ProgramError as error:
            if UNKNOWN_TYPE_TEXT in error.output:
                raise ProgramError(
                    f"{cloud.region} has no {self._kind}. {ADVICE.get(self._kind, '')}".strip(),
                    error.output,
                ) from error
            raise
        if manifest is None:
            return None
        state, reason = STATES[self._kind](manifest) if self._kind in STATES else ("ready", "")
        if state == "failed" and self._kind == "Deployment":
            labels = manifest["spec"]["selector"].get("matchLabels") or {}
            pods = cloud.list_objects("pods", labels.get(NAME, name), labels)
            reason = "; ".join(
                [reason, *(f"{pod}: {cause}" for pod, cause in waiting_containers(pods))]
            )
        return Observed(
            name,
            {"metadata": manifest["metadata"], "spec": manifest.get("spec", {})},
            tags_in(manifest),
            {"Ref": name},
            state,
            reason,
        )

    def create(self, cloud: Cluster, resource: Resource) -> None:
        apply(cloud, resource.properties)

    def update(
        self, cloud: Cluster, resource: Resource, observed: Observed, changed: set[str]
    ) -> str | None:
        if self._kind == "Deployment" and "replicas" not in resource.properties["spec"]:
            self._keep_replicas(cloud, resource)
        self.create(cloud, resource)
        return None

    def _keep_replicas(self, cloud: Cluster, resource: Resource) -> None:
        """Keep the number of pods until the autoscaler decides.

        Otherwise the number would become 1 as soon as its only field manager no longer applies it.
        """
        doing = f"looking for the owner of the number of pods of {resource.name}"
        manifest = cloud.get(TYPES[self._kind], resource.name, "--show-managed-fields", doing=doing)
        owners = (manifest or {}).get("metadata", {}).get("managedFields") or []
        if manifest is not None and any(
            owner.get("manager") == MANAGER
            and "f:replicas" in owner.get("fieldsV1", {}).get("f:spec", {})
            for owner in owners
        ):
            header = {key: manifest[key] for key in ("apiVersion", "kind")} | {
                "metadata": {"name": resource.name}
            }
            apply(
                cloud,
                header | {"spec": {"replicas": manifest["spec"]["replicas"]}},
                REPLICAS_MANAGER,
                "--validate=false",
            )

    def delete(self, cloud: Cluster, observed: Observed) -> None:
        remove(cloud, self._kind, observed.name)


class TokenSecret(KubernetesObject):
    """A Secret with random tokens, created once and kept.

    Plans contain the keys (`Keys`), without the values.
    """

    traits = Traits(is_tagged=False)

    def __init__(self) -> None:
        super().__init__("Secret")

    def observe(self, cloud: Cluster, name: str) -> Observed | None:
        secret = cloud.find("Secret", name)
        if secret is None:
            return None
        return Observed(
            name,
            {"Keys": dict.fromkeys(secret.get("data") or {}, True)},
            tags_in(secret),
            {"Ref": name},
        )

    def create(self, cloud: Cluster, resource: Resource) -> None:
        """Create the Secret; `apply` would replace the tokens of an existing one."""
        annotations = {key.replace(":", "/"): value for key, value in resource.tags.items()}
        labels = {NAME: resource.tags["tsx:name"], MANAGED_BY: "tsx"}
        body = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {
                "name": resource.name,
                "namespace": cloud.namespace,
                "labels": labels,
                "annotations": annotations,
            },
            "type": "Opaque",
            "data": {
                key: base64.b64encode(secrets.token_urlsafe(32).encode()).decode()
                for key in resource.properties["Keys"]
            },
        }
        arguments = ("create", "--namespace", cloud.namespace, "--filename", "-")
        cloud.program.run(
            *arguments, doing=f"creating the Secret {resource.name}", stdin=json.dumps(body)
        )

    def update(
        self, cloud: Cluster, resource: Resource, observed: Observed, changed: set[str]
    ) -> None:
        missing = ", ".join(
            key for key in resource.properties["Keys"] if key not in observed.properties["Keys"]
        )
        raise CloudError(
            f"the Secret {resource.name} has no {missing}; add it, or delete the Secret: the next"
            " run creates new tokens"
        )


class Revision(ResourceKind):
    """An earlier revision of a Deployment's pods, to which a rollback returns.

    Kubernetes keeps it as a replica set.
    """

    traits = Traits(is_tagged=False, unreported=frozenset({"Revision"}), can_update_failed=True)
    poll_interval_s, timeout_s = 2.0, 7200.0

    def observe(self, cloud: Cluster, name: str) -> Observed | None:
        deployment = KubernetesObject("Deployment").observe(cloud, name)
        if deployment is None:
            return None
        current_revision = annotations_of(deployment.properties).get(REVISION)
        current = next(
            (
                replica_set
                for replica_set in replica_sets(cloud, name)
                if replica_set["metadata"]["annotations"].get(REVISION) == current_revision
            ),
            None,
        )
        output = {} if current is None else {"ReplicaSet": current["metadata"]["name"]}
        return Observed(
            name, output, deployment.tags, deployment.outputs, deployment.state, deployment.reason
        )

    def create(self, cloud: Cluster, resource: Resource) -> None:
        raise AssertionError("a rollback needs an existing resource")

    def update(
        self, cloud: Cluster, resource: Resource, observed: Observed, changed: set[str]
    ) -> None:
        arguments = (
            "rollout",
            "undo",
            f"deployment/{resource.name}",
            f"--to-revision={resource.properties['Revision']}",
        )
        cloud.program.run(
            *arguments, "--namespace", cloud.namespace, doing=f"rolling {resource.name} back"
        )

    def delete(self, cloud: Cluster, observed: Observed) -> None:
        raise AssertionError("a Deployment is removed as a whole")


def _deployment_state(manifest: Mapping[str, Any]) -> tuple[State, str]:
    """Return the state of a Deployment, as `kubectl rollout status` shows it."""
    status, wanted_pods = manifest.get("status") or {}, manifest["spec"].get("replicas", 1)
    if status.get("observedGeneration", 0) < manifest["metadata"].get("generation", 0):
        return "changing", "has not been observed yet"
    for condition in status.get("conditions") or []:
        if condition.get("reason") == "ProgressDeadlineExceeded":
            return (
                "failed",
                f"its new pods did not become ready in time ({condition.get('message', '')})",
            )
    updated, available = status.get("updatedReplicas", 0), status.get("availableReplicas", 0)
    if updated < wanted_pods:
        return "changing", f"{updated} of {wanted_pods} pods are new"
    if status.get("replicas", 0) > updated:
        return "changing", f"{status['replicas'] - updated} old pods are ending"
    if available < updated:
        return "changing", f"{available} of {updated} pods are ready"
    return "ready", ""


def _inference_service_state(manifest: Mapping[str, Any]) -> tuple[State, str]:
    """Return the state of an InferenceService.

    https://kserve.github.io/website/docs/reference/crd-api#servingkserveiov1beta1
    """
    status = manifest.get("status") or {}
    model = status.get("modelStatus") or {}
    generation = manifest["metadata"].get("generation", 0)
    if status.get("observedGeneration", generation) < generation:
        return "changing", "has not been observed yet"
    if model.get("transitionStatus") in ("BlockedByFailedLoad", "InvalidSpec"):
        failure = model.get("lastFailureInfo") or {}
        return (
            "failed",
            (
                f"its model was not loaded ({model['transitionStatus']}):"
                f" {failure.get('message') or failure.get('reason', '')}"
            ),
        )
    ready = next(
        (condition for condition in status.get("conditions") or [] if condition["type"] == "Ready"),
        None,
    )
    if ready is None or ready["status"] == "Unknown":
        return "changing", (
            "is not ready yet" if ready is None else str(ready.get("message") or "is not ready yet")
        )
    return (
        ("ready", "")
        if ready["status"] == "True"
        else ("changing", str(ready.get("message") or ready.get("reason") or "is not ready"))
    )


def _route_state(manifest: Mapping[str, Any]) -> tuple[State, str]:
    """Return the state of a route: whether a Gateway has accepted this generation of it.

    https://gateway-api.sigs.k8s.io/guides/implementers/#standard-status-fields-and-conditions
    """
    parents = (manifest.get("status") or {}).get("parents") or []
    conditions = [
        condition
        for parent in parents
        for condition in parent.get("conditions") or []
        if condition["type"] in ("Accepted", "ResolvedRefs")
    ]
    if not conditions:
        return "changing", "no Gateway has taken it yet"
    for condition in conditions:
        if condition.get("observedGeneration", 0) < manifest["metadata"].get("generation", 0):
            return "changing", "its Gateway has not taken its newest state yet"
        if condition["status"] != "True":
            return (
                "changing",
                f"its Gateway does not take it: {condition.get('reason', '')}"
                f" {condition.get('message', '')}".rstrip(),
            )
    return "ready", ""


STATES: Mapping[str, Callable[[Mapping[str, Any]], tuple[State, str]]] = {
    "Deployment": _deployment_state,
    "HTTPRoute": _route_state,
    "InferenceService": _inference_service_state,
}


def tags_in(manifest: Mapping[str, Any]) -> dict[str, str]:
    return {
        key.replace("/", ":", 1): value
        for key, value in annotations_of(manifest).items()
        if key.startswith("tsx/")
    }


def _containers(pods: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the statuses of all containers, with the names of their pods."""
    for pod in pods:
        for status in (pod.get("status") or {}).get("containerStatuses") or []:
            yield pod["metadata"]["name"], status


def count_restarts(pods: Sequence[Mapping[str, Any]]) -> int:
    return sum(status.get("restartCount", 0) for _, status in _containers(pods))


def waiting_containers(pods: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return the containers that do not run, with the reasons."""
    states = [(pod, status.get("state") or {}) for pod, status in _containers(pods)]
    details_by_pod = [
        (pod, state.get("waiting") or state.get("terminated")) for pod, state in states
    ]
    return [
        (pod, f"{details.get('reason', '')} {details.get('message', '')}".strip())
        for pod, details in details_by_pod
        if details
    ]


KINDS: Mapping[str, ResourceKind] = {f"{KIND}{kind}": KubernetesObject(kind) for kind in TYPES} | {
    f"{KIND}Secret": TokenSecret()
}
