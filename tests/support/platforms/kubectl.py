"""kubectl's place: what it is asked by its documented words, over a cluster in memory that rolls
pods out as a test says.
"""

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
    """`looks` is how often a rollout is looked at before it is over; `failure` what the pods of
    `failing`, or of all, wait for, for ever.

    `forwarded` is what `kubectl port-forward` prints, `restarts` how often the containers of
    canaries have restarted, `scaling` the Deployment one of whose pods is not ready.
    """

    def __init__(self, patch: pytest.MonkeyPatch, *, unknown: frozenset[str] = frozenset()) -> None:
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.owners: dict[
            tuple[str, str], dict[str, set[tuple[str, ...]]]
        ] = {}  # manager -> fields that it has applied
        self.calls: list[list[str]] = []
        self.applied: list[dict[str, Any]] = []  # in full, by the manager of deployments
        self.unknown = unknown
        self.looks, self.left, self.failure, self.failing = 0, 0, "", ""
        self.forwarded, self.restarts, self.scaling = "", 0, ""
        self.served: dict[str, Any] = {
            "conditions": [{"type": "Ready", "status": "True"}]
        }  # what KServe says of an InferenceService
        # What a Gateway says of routes; an empty status: nothing yet.
        self.taken: tuple[str, str] = ("True", "")
        patch.setattr(
            Program,
            "try_",
            lambda program, *words, **more: self.run(list(words), more.get("stdin") or ""),
        )
        patch.setattr(Program, "lines", lambda program, *words: self.stream(list(words)))

    def run(self, words: list[str], stdin: str) -> subprocess.CompletedProcess[str]:
        while words[0] in ("--context",):
            words = words[2:]
        self.calls.append(words)
        try:
            out, code, err = str(getattr(self, f"_{words[0]}")(words[1:], stdin)), 0, ""
        except LookupError as error:
            out, code, err = "", 1, str(error.args[0])
        return subprocess.CompletedProcess(["kubectl", *words], code, out, err)

    def secret(self, name: str, key: str) -> str:
        return base64.b64decode(self.objects["Secret", name]["data"][key]).decode()

    def stream(self, words: list[str]) -> Iterator[str]:
        self.calls.append(words)
        yield self.forwarded if words[0] == "port-forward" else "[pod/digits-1/tsx] loading"

    def _kind(self, type_: str) -> str:
        kind = PLURALS[type_.partition(".")[0]]
        if kind in self.unknown:
            raise LookupError(f'error: the server doesn\'t have a resource type "{type_}"')
        return kind

    def _get(self, words: list[str], stdin: str) -> str:
        kind = self._kind(words[0])
        for (other, _), each in self.objects.items():
            if other in ("Deployment", "HTTPRoute", "InferenceService"):
                getattr(self, f"_get_on_{other.lower()}")(each)
        if "--selector" in words:
            wanted = dict(
                pair.split("=") for pair in words[words.index("--selector") + 1].split(",")
            ).items()
            found = [each for (other, _), each in self.objects.items() if other == kind] + (
                self._pods() if kind == "Pod" else []
            )
            return json.dumps(
                {"items": [each for each in found if wanted <= each["metadata"]["labels"].items()]}
            )
        found_one = self.objects.get((kind, words[1]))
        return "" if found_one is None else json.dumps(found_one)

    def _pods(self) -> list[dict[str, Any]]:
        """Of all Deployments, as many as they have."""
        pods = []
        for (kind, name), each in self.objects.items():
            for number in range(each["spec"]["replicas"] if kind == "Deployment" else 0):
                metadata: dict[str, Any] = {
                    "name": f"{name}-pod-{number}",
                    "labels": each["spec"]["template"]["metadata"]["labels"],
                }
                status = {
                    "restartCount": self.restarts if name.endswith("-canary") else 0,
                    "state": {"running": {}},
                }
                pods.append({"metadata": metadata, "status": {"containerStatuses": [status]}})
        return pods

    def _get_on_httproute(self, route: dict[str, Any]) -> None:
        status, reason = self.taken
        if status:
            same = {
                "observedGeneration": route["metadata"]["generation"],
                "status": status,
                "reason": reason,
            }
            route["status"] = {
                "parents": [
                    {
                        "conditions": [
                            {"type": type_, **same} for type_ in ("Accepted", "ResolvedRefs")
                        ]
                    }
                ]
            }

    def _get_on_inferenceservice(self, service: dict[str, Any]) -> None:
        service["status"] = {"observedGeneration": service["metadata"]["generation"], **self.served}

    def _get_on_deployment(self, deployment: dict[str, Any]) -> None:
        wanted = deployment["spec"].get("replicas", 1)
        status = {
            "observedGeneration": deployment["metadata"]["generation"],
            "replicas": wanted,
            "updatedReplicas": wanted,
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
        self.left = max(0, self.left - 1)
        ready = wanted - (self.left > 0 or self.scaling == deployment["metadata"]["name"])
        deployment["status"] = {**status, "availableReplicas": ready, "readyReplicas": ready}

    def _apply(self, words: list[str], stdin: str) -> str:
        """By the rules of server-side apply: what a manager applies no more goes, unless another
        one has applied it too.
        """
        said, manager = json.loads(stdin), words[words.index("--field-manager") + 1]
        kind, name = said["kind"], said["metadata"]["name"]
        self.applied += [said] if manager == "tsx" else []
        before = self.objects.get((kind, name))
        if (
            kind == "Deployment"
            and before
            and before["spec"]["selector"]
            != said["spec"].get("selector", before["spec"]["selector"])
        ):
            raise LookupError(
                f'The Deployment "{name}" is invalid: spec.selector: Invalid value: field is immutable'
            )
        made: dict[str, Any] = (
            copy.deepcopy(before) if before else {"metadata": {}, "spec": {"clusterIP": "10.0.0.1"}}
        )  # what a platform adds
        owners, now = self.owners.setdefault((kind, name), {}), dict(_fields(said))
        for other in owners.values():
            other.difference_update(
                {field for field in other if field in now and _at(made, field) != now[field]}
            )
        others = set[tuple[str, ...]]().union(
            *(fields for owner, fields in owners.items() if owner != manager)
        )
        for field in owners.get(manager, set()) - set(now) - others:
            _at(made, field[:-1]).pop(field[-1], None)
        for field, value in now.items():
            place = made
            for key in field[:-1]:
                place = place.setdefault(key, {})
            place[field[-1]] = value
        owners[manager] = set(now)
        generation = before["metadata"]["generation"] if before else 0
        made["metadata"]["generation"] = generation + (
            before is None or before["spec"] != made["spec"]
        )
        made["metadata"].setdefault("creationTimestamp", "2026-11-21T20:00:00Z")
        made["metadata"]["managedFields"] = [
            {
                "manager": owner,
                "fieldsV1": {
                    "f:spec": {f"f:{field[1]}": {} for field in fields if field[0] == "spec"}
                },
            }
            for owner, fields in owners.items()
        ]
        self.objects[kind, name] = made
        if kind == "Deployment":
            made["spec"].setdefault("replicas", 1)
            annotations = made["metadata"].setdefault("annotations", {})
            annotations.setdefault(REVISION, "0")
            if before is None or before["spec"]["template"] != made["spec"]["template"]:
                self._roll_out(made)
        return ""

    def _create(self, words: list[str], stdin: str) -> str:
        said = json.loads(stdin)
        key = (said["kind"], said["metadata"]["name"])
        self.applied.append(said)
        if key in self.objects:
            raise LookupError(
                f'Error from server (AlreadyExists): {key[0].lower()}s "{key[1]}" already exists'
            )
        self.objects[key] = said
        return ""

    def _roll_out(self, deployment: dict[str, Any]) -> None:
        self.left = self.looks
        template, name = deployment["spec"]["template"], deployment["metadata"]["name"]
        number = str(int(deployment["metadata"]["annotations"][REVISION]) + 1)
        deployment["metadata"]["annotations"][REVISION] = number
        sets = [each for (kind, _), each in self.objects.items() if kind == "ReplicaSet"]
        same = next((each for each in sets if each["spec"]["template"] == template), None)
        if same is not None:
            same["metadata"]["annotations"][REVISION] = number
            return
        labels = template["metadata"]["labels"]
        metadata = {
            "name": f"{name}-{number}",
            "labels": labels,
            "annotations": {**deployment["metadata"]["annotations"], REVISION: number},
        }
        made = {
            "metadata": metadata | {"creationTimestamp": f"2026-11-21T20:00:0{number}Z"},
            "spec": {"template": copy.deepcopy(template)},
        }
        self.objects["ReplicaSet", metadata["name"]] = made

    def _rollout(self, words: list[str], stdin: str) -> str:
        deployment = self.objects["Deployment", words[1].partition("/")[2]]
        number = words[2].partition("=")[2]
        sets = [each for (kind, _), each in self.objects.items() if kind == "ReplicaSet"]
        found = next(each for each in sets if each["metadata"]["annotations"][REVISION] == number)
        deployment["spec"]["template"] = copy.deepcopy(found["spec"]["template"])
        own = {REVISION: deployment["metadata"]["annotations"][REVISION]}
        # As `kubectl rollout undo` does.
        deployment["metadata"]["annotations"] |= {**found["metadata"]["annotations"], **own}
        self._roll_out(deployment)
        return "rolled back"

    def _delete(self, words: list[str], stdin: str) -> str:
        kind = self._kind(words[0])
        self.objects.pop((kind, words[1]), None)
        self.owners.pop((kind, words[1]), None)
        if kind == "Deployment":
            own = [
                key
                for key in self.objects
                if key[0] in ("ReplicaSet", "Pod") and key[1].rpartition("-")[0] == words[1]
            ]
            self.objects = {key: each for key, each in self.objects.items() if key not in own}
        return ""

    def _logs(self, words: list[str], stdin: str) -> str:
        return "[pod/digits-1/tsx] RuntimeError: no weights\n"


def _fields(
    said: dict[str, Any], above: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Lists are one field each."""
    for key, value in said.items():
        if isinstance(value, dict) and value:
            yield from _fields(value, (*above, key))
        else:
            yield (*above, key), value


def _at(made: dict[str, Any], field: tuple[str, ...]) -> Any:
    for key in field:
        made = made.get(key, {})
    return made
