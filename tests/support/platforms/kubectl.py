"""A double of kubectl over a cluster in memory, which rolls pods out as a test says."""

from __future__ import annotations

import base64
import copy
import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tsx_cli.deploy.image.programs import Program

REVISION = "deployment.kubernetes.io/revision"
PLURALS = {
    "deployments": "Deployment",
    "secrets": "Secret",
    "services": "Service",
    "horizontalpodautoscalers": "HorizontalPodAutoscaler",
    "scaledobjects": "ScaledObject",
    "poddisruptionbudgets": "PodDisruptionBudget",
    "networkpolicies": "NetworkPolicy",
    "servicemonitors": "ServiceMonitor",
    "clusterservingruntimes": "ClusterServingRuntime",
    "inferenceservices": "InferenceService",
    "httproutes": "HTTPRoute",
    "replicasets": "ReplicaSet",
    "pods": "Pod",
}


class Cluster:
    """A cluster whose rollouts are complete after `polls` polls.

    If `failure` is set, rollouts of the Deployment `failing`, or of all if it is empty, fail.
    `forwarded` is the output of `kubectl port-forward`. The containers of canaries have restarted
    `restarts` times. One pod of the Deployment `scaling` is not ready.
    """

    def __init__(self, patch: pytest.MonkeyPatch, *, unknown: frozenset[str] = frozenset()) -> None:
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.owners: dict[
            tuple[str, str], dict[str, set[tuple[str, ...]]]
        ] = {}  # the applied fields of each manager
        self.calls: list[list[str]] = []
        self.applied: list[dict[str, Any]] = []  # whole manifests of the manager of deployments
        self.unknown = unknown
        self.polls, self.polls_left, self.failure, self.failing = 0, 0, "", ""
        self.forwarded, self.restarts, self.scaling = "", 0, ""
        # KServe's status of an InferenceService.
        self.service_status: dict[str, Any] = {"conditions": [{"type": "Ready", "status": "True"}]}
        # The status of routes at the Gateway and its reason; it is empty before the first status.
        self.route_status: tuple[str, str] = ("True", "")
        patch.setattr(
            Program,
            "run_unchecked",
            lambda program, *arguments, **more: self.run(list(arguments), more.get("stdin") or ""),
        )
        patch.setattr(Program, "lines", lambda program, *arguments: self.stream(list(arguments)))

    def run(self, arguments: list[str], stdin: str) -> subprocess.CompletedProcess[str]:
        while arguments[0] in ("--context",):
            arguments = arguments[2:]
        self.calls.append(arguments)
        try:
            out, code, err = str(getattr(self, f"_{arguments[0]}")(arguments[1:], stdin)), 0, ""
        except LookupError as error:
            out, code, err = "", 1, str(error.args[0])
        return subprocess.CompletedProcess(["kubectl", *arguments], code, out, err)

    def secret(self, name: str, key: str) -> str:
        return base64.b64decode(self.objects["Secret", name]["data"][key]).decode()

    def stream(self, arguments: list[str]) -> Iterator[str]:
        self.calls.append(arguments)
        yield self.forwarded if arguments[0] == "port-forward" else "[pod/digits-1/tsx] loading"

    def _kind(self, resource_type: str) -> str:
        kind = PLURALS[resource_type.partition(".")[0]]
        if kind in self.unknown:
            raise LookupError(f'error: the server doesn\'t have a resource type "{resource_type}"')
        return kind

    def _get(self, arguments: list[str], stdin: str) -> str:
        kind = self._kind(arguments[0])
        for (item_kind, _), item in self.objects.items():
            if item_kind in ("Deployment", "HTTPRoute", "InferenceService"):
                getattr(self, f"_get_on_{item_kind.lower()}")(item)
        if "--selector" in arguments:
            required_labels = dict(
                pair.split("=") for pair in arguments[arguments.index("--selector") + 1].split(",")
            ).items()
            items = [item for key, item in self.objects.items() if key[0] == kind] + (
                self._pods() if kind == "Pod" else []
            )
            return json.dumps(
                {
                    "items": [
                        item
                        for item in items
                        if required_labels <= item["metadata"]["labels"].items()
                    ]
                }
            )
        item = self.objects.get((kind, arguments[1]))
        return "" if item is None else json.dumps(item)

    def _pods(self) -> list[dict[str, Any]]:
        """Make the pods of all Deployments."""
        pods = []
        for (kind, name), item in self.objects.items():
            for number in range(item["spec"]["replicas"] if kind == "Deployment" else 0):
                metadata: dict[str, Any] = {
                    "name": f"{name}-pod-{number}",
                    "labels": item["spec"]["template"]["metadata"]["labels"],
                }
                status = {
                    "restartCount": self.restarts if name.endswith("-canary") else 0,
                    "state": {"running": {}},
                }
                pods.append({"metadata": metadata, "status": {"containerStatuses": [status]}})
        return pods

    def _get_on_httproute(self, route: dict[str, Any]) -> None:
        status, reason = self.route_status
        if status:
            condition = {
                "observedGeneration": route["metadata"]["generation"],
                "status": status,
                "reason": reason,
            }
            route["status"] = {
                "parents": [
                    {
                        "conditions": [
                            {"type": resource_type, **condition}
                            for resource_type in ("Accepted", "ResolvedRefs")
                        ]
                    }
                ]
            }

    def _get_on_inferenceservice(self, service: dict[str, Any]) -> None:
        service["status"] = {
            "observedGeneration": service["metadata"]["generation"],
            **self.service_status,
        }

    def _get_on_deployment(self, deployment: dict[str, Any]) -> None:
        replicas = deployment["spec"].get("replicas", 1)
        status = {
            "observedGeneration": deployment["metadata"]["generation"],
            "replicas": replicas,
            "updatedReplicas": replicas,
        }
        if self.failure and self.failing in ("", deployment["metadata"]["name"]):
            failed = {
                "type": "Progressing",
                "status": "False",
                "reason": "ProgressDeadlineExceeded",
                "message": "has timed out",
            }
            deployment["status"] = {**status, "availableReplicas": 0, "conditions": [failed]}
            return
        self.polls_left = max(0, self.polls_left - 1)
        ready = replicas - (self.polls_left > 0 or self.scaling == deployment["metadata"]["name"])
        deployment["status"] = {**status, "availableReplicas": ready, "readyReplicas": ready}

    def _apply(self, arguments: list[str], stdin: str) -> str:
        """Apply a manifest by the rules of server-side apply.

        A field that a manager no longer applies is removed, unless another manager applies it too.
        """
        manifest, manager = json.loads(stdin), arguments[arguments.index("--field-manager") + 1]
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        self.applied += [manifest] if manager == "tsx" else []
        previous = self.objects.get((kind, name))
        if (
            kind == "Deployment"
            and previous
            and previous["spec"]["selector"]
            != manifest["spec"].get("selector", previous["spec"]["selector"])
        ):
            raise LookupError(
                f'The Deployment "{name}" is invalid: spec.selector: Invalid value: field is immutable'
            )
        # The cluster adds the address.
        new_object: dict[str, Any] = {"metadata": {}, "spec": {"clusterIP": "10.0.0.1"}}
        merged = copy.deepcopy(previous) if previous else new_object
        owners, applied_fields = self.owners.setdefault((kind, name), {}), dict(_fields(manifest))
        for fields in owners.values():
            fields.difference_update(
                {
                    field
                    for field in fields
                    if field in applied_fields and _at(merged, field) != applied_fields[field]
                }
            )
        foreign_fields = set[tuple[str, ...]]().union(
            *(fields for owner, fields in owners.items() if owner != manager)
        )
        for field in owners.get(manager, set()) - set(applied_fields) - foreign_fields:
            _at(merged, field[:-1]).pop(field[-1], None)
        for field, value in applied_fields.items():
            parent = merged
            for key in field[:-1]:
                parent = parent.setdefault(key, {})
            parent[field[-1]] = value
        owners[manager] = set(applied_fields)
        generation = previous["metadata"]["generation"] if previous else 0
        merged["metadata"]["generation"] = generation + (
            previous is None or previous["spec"] != merged["spec"]
        )
        merged["metadata"].setdefault("creationTimestamp", "2026-11-21T20:00:00Z")
        merged["metadata"]["managedFields"] = [
            {
                "manager": owner,
                "fieldsV1": {
                    "f:spec": {f"f:{field[1]}": {} for field in fields if field[0] == "spec"}
                },
            }
            for owner, fields in owners.items()
        ]
        self.objects[kind, name] = merged
        if kind == "Deployment":
            merged["spec"].setdefault("replicas", 1)
            annotations = merged["metadata"].setdefault("annotations", {})
            annotations.setdefault(REVISION, "0")
            if previous is None or previous["spec"]["template"] != merged["spec"]["template"]:
                self._roll_out(merged)
        return ""

    def _create(self, arguments: list[str], stdin: str) -> str:
        manifest = json.loads(stdin)
        key = (manifest["kind"], manifest["metadata"]["name"])
        self.applied.append(manifest)
        if key in self.objects:
            raise LookupError(
                f'Error from server (AlreadyExists): {key[0].lower()}s "{key[1]}" already exists'
            )
        self.objects[key] = manifest
        return ""

    def _roll_out(self, deployment: dict[str, Any]) -> None:
        self.polls_left = self.polls
        template, name = deployment["spec"]["template"], deployment["metadata"]["name"]
        number = str(int(deployment["metadata"]["annotations"][REVISION]) + 1)
        deployment["metadata"]["annotations"][REVISION] = number
        sets = [item for (kind, _), item in self.objects.items() if kind == "ReplicaSet"]
        existing = next((item for item in sets if item["spec"]["template"] == template), None)
        if existing is not None:
            existing["metadata"]["annotations"][REVISION] = number
            return
        labels = template["metadata"]["labels"]
        metadata = {
            "name": f"{name}-{number}",
            "labels": labels,
            "annotations": {**deployment["metadata"]["annotations"], REVISION: number},
        }
        replica_set = {
            "metadata": metadata | {"creationTimestamp": f"2026-11-21T20:00:0{number}Z"},
            "spec": {"template": copy.deepcopy(template)},
        }
        self.objects["ReplicaSet", metadata["name"]] = replica_set

    def _rollout(self, arguments: list[str], stdin: str) -> str:
        deployment = self.objects["Deployment", arguments[1].partition("/")[2]]
        number = arguments[2].partition("=")[2]
        sets = [item for (kind, _), item in self.objects.items() if kind == "ReplicaSet"]
        replica_set = next(
            item for item in sets if item["metadata"]["annotations"][REVISION] == number
        )
        deployment["spec"]["template"] = copy.deepcopy(replica_set["spec"]["template"])
        annotation = {REVISION: deployment["metadata"]["annotations"][REVISION]}
        # `kubectl rollout undo` does the same.
        deployment["metadata"]["annotations"] |= {
            **replica_set["metadata"]["annotations"],
            **annotation,
        }
        self._roll_out(deployment)
        return "rolled back"

    def _delete(self, arguments: list[str], stdin: str) -> str:
        kind = self._kind(arguments[0])
        self.objects.pop((kind, arguments[1]), None)
        self.owners.pop((kind, arguments[1]), None)
        if kind == "Deployment":
            owned = [
                key
                for key in self.objects
                if key[0] in ("ReplicaSet", "Pod") and key[1].rpartition("-")[0] == arguments[1]
            ]
            self.objects = {key: item for key, item in self.objects.items() if key not in owned}
        return ""

    def _logs(self, arguments: list[str], stdin: str) -> str:
        return "[pod/digits-1/tsx] RuntimeError: no weights\n"


def _fields(
    manifest: dict[str, Any], parents: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the path and the value of each field; a list is one field."""
    for key, value in manifest.items():
        if isinstance(value, dict) and value:
            yield from _fields(value, (*parents, key))
        else:
            yield (*parents, key), value


def _at(document: dict[str, Any], field: tuple[str, ...]) -> Any:
    for key in field:
        document = document.get(key, {})
    return document
