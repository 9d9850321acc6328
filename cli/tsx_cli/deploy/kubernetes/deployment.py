"""The state of a deployment on a Kubernetes cluster, and its health."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from tsx_cli.common.client import Response
from tsx_cli.common.failure import CliError
from tsx_cli.deploy.container.deployment import predict
from tsx_cli.deploy.engine.facts import Facts, tags_of
from tsx_cli.deploy.engine.kind import CloudError
from tsx_cli.deploy.engine.platform import DeployedVersion
from tsx_cli.deploy.engine.resources import Resource
from tsx_cli.deploy.kubernetes.kinds import KIND, REVISION, TYPES, Cluster, selector, waiting
from tsx_cli.deploy.kubernetes.resources import manifests
from tsx_cli.deploy.spec import DeploySpec

OWN = ("Deployment", "InferenceService", "Service", "HorizontalPodAutoscaler", "PodDisruptionBudget", "NetworkPolicy", "ServiceMonitor")
_FORWARDED = re.compile(r"Forwarding from 127\.0\.0\.1:(\d+)")


class KubernetesTarget:
    def wanted(self, spec: DeploySpec, facts: Facts) -> list[Resource]:
        tags = tags_of(spec, facts)
        made = []
        for manifest in manifests(spec, str(facts.image), tags):
            kind = manifest["kind"]
            own = {} if kind == "ClusterServingRuntime" else tags  # which every deployment of the cluster shares
            made.append(Resource(kind, f"{KIND}{kind}", manifest["metadata"]["name"], manifest, ("Image",), own))
        return made

    def belongings(self, cloud: Cluster, name: str, *, purge: bool = False) -> list[Resource]:
        found = []
        for kind in OWN:
            labelled = [(each, each["metadata"].get("labels") or {}) for each in cloud.listed(TYPES[kind], name)]
            there = [each for each, labels in labelled if labels.get("app.kubernetes.io/managed-by") == "tsx"]
            found += [Resource(f"{kind}{n}", f"{KIND}{kind}", each["metadata"]["name"], {}) for n, each in enumerate(there)]
        return found

    def obsolete(self, cloud: Cluster, spec: DeploySpec, wanted: Sequence[Resource]) -> list[Resource]:
        """What was asked for once and is not any more. Earlier versions of its pods Kubernetes itself keeps and removes."""
        asked_for = {(each.kind, each.name) for each in wanted}
        return [each for each in self.belongings(cloud, spec.name) if (each.kind, each.name) not in asked_for]

    def versions(self, cloud: Cluster, name: str) -> list[DeployedVersion]:
        deployment = cloud.get(TYPES["Deployment"], name, doing=f"looking for the Deployment {name}")
        if deployment is None:
            return []
        now = _annotations(deployment).get(REVISION)
        sets = sorted(cloud.listed("replicasets.v1.apps", name), key=lambda each: int(_annotations(each).get(REVISION, 0)))
        return [
            DeployedVersion(
                int(_annotations(each)[REVISION]),
                each["metadata"]["name"],
                datetime.fromisoformat(each["metadata"]["creationTimestamp"].replace("Z", "+00:00")),
                _tags(each),
                _annotations(each)[REVISION] == now,
            )
            for each in sets
            if REVISION in _annotations(each)
        ]

    def going_back(self, cloud: Cluster, name: str, version: DeployedVersion) -> list[Resource]:
        properties = {"ReplicaSet": version.id, "Revision": version.number}
        return [Resource("Revision", f"{KIND}Revision", name, properties)]

    def promoting(self, cloud: Cluster, name: str) -> list[Resource]:
        raise CliError("a Deployment has no canary: its pods are replaced one by one as new ones become ready")

    def status(self, cloud: Cluster, name: str) -> dict[str, Any] | None:
        deployment = cloud.get(TYPES["Deployment"], name, doing=f"looking for the Deployment {name}")
        if deployment is None:
            return self._served(cloud, name)
        status, annotations = deployment.get("status") or {}, _annotations(deployment)
        scaler = cloud.listed(TYPES["HorizontalPodAutoscaler"], name)
        pods = cloud.listed("pods", name)
        inside = [each for pod in pods for each in (pod.get("status") or {}).get("containerStatuses") or []]
        return {
            "name": name,
            "target": "kubernetes",
            "namespace": cloud.namespace,
            "model": annotations.get("tsx/model"),
            "image": deployment["spec"]["template"]["spec"]["containers"][0]["image"],
            "revision": annotations.get(REVISION),
            "pods": f"{status.get('readyReplicas', 0)} of {deployment['spec'].get('replicas', 1)} ready",
            "scales": [f"{each['spec'].get('minReplicas', 1)} to {each['spec']['maxReplicas']}" for each in scaler],
            "waiting": [f"{pod}: {reason}" for pod, reason in waiting(pods)],
            "restarts": sum(each.get("restartCount", 0) for each in inside),
        }

    def _served(self, cloud: Cluster, name: str) -> dict[str, Any] | None:
        """By KServe."""
        found = next(iter(cloud.listed(TYPES["InferenceService"], name)), None)
        if found is None:
            return None
        status = found.get("status") or {}
        conditions = {each["type"]: each["status"] for each in status.get("conditions") or []}
        shown = {"name": name, "target": "kubernetes", "namespace": cloud.namespace, "model": _annotations(found).get("tsx/model")}
        return shown | {
            "storage": found["spec"]["predictor"]["model"].get("storageUri"),
            "address": status.get("url"),
            "conditions": conditions,
        }

    def invoke(self, cloud: Cluster, name: str, body: bytes, content_type: str, accept: str | None) -> Response:
        """Through the connection that kubectl has to the cluster."""
        there = cloud.get(TYPES["Deployment"], name, doing=f"looking for the Deployment {name}")
        if there is None:
            raise CloudError(
                f"there is no Deployment {name} in {cloud.region}; `tsx deploy status` shows the address of an InferenceService"
            )
        model = _annotations(there).get("tsx/model", name).partition("/")[0]
        lines = cloud.program.lines("port-forward", "--namespace", cloud.namespace, f"service/{name}", ":8080")
        with contextlib.closing(lines):
            first = next(lines, "kubectl port-forward printed nothing")
            port = _FORWARDED.match(first)
            if port is None:
                raise CloudError(f"{name} cannot be reached: {first}")
            return predict(f"http://127.0.0.1:{port[1]}", model, body, content_type, accept)

    def logs(self, cloud: Cluster, name: str, *, lines: int | None, since: str | None, follow: bool) -> Iterator[str]:
        """Of all its pods, each line with its pod's name."""
        words = ["--namespace", cloud.namespace, "--selector", selector(name), "--prefix", "--max-log-requests", "50"]
        words += ["--tail", str(-1 if lines is None else lines), *(["--since", since] if since else []), *(["--follow"] if follow else [])]
        return cloud.program.lines("logs", *words)


def _annotations(found: Mapping[str, Any]) -> dict[str, str]:
    return dict(found["metadata"].get("annotations") or {})


def _tags(found: Mapping[str, Any]) -> dict[str, str]:
    template = (found["spec"].get("template") or {}).get("metadata", {}).get("annotations") or {}
    return {key.replace("/", ":", 1): value for key, value in template.items() if key.startswith("tsx/")}
