"""A deployment on Kubernetes, or KServe, as manifests. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tsx_cli.common.failure import UsageError
from tsx_cli.deploy.image.recipe import UID
from tsx_cli.deploy.spec import DeploySpec

HTTP, METRICS = 8080, 8082
NOTICE = 5  # seconds for which a pod that is to stop still takes requests, as balancers learn of it late
MARGIN = 5
Manifest = dict[str, Any]


def manifests(spec: DeploySpec, image: str, labels: Mapping[str, str]) -> list[Manifest]:
    """In the order in which they are applied. Raises UsageError."""
    own = spec.kubernetes
    if not spec.name[0].isalpha():
        raise UsageError(f"name: '{spec.name}' begins with a digit, but the name of a Service must begin with a letter")
    if own.kserve:
        return [serving_runtime(image), inference_service(spec, labels)]
    made = [_deployment(spec, image, labels), _service(spec, labels)]
    if scales(spec):
        made.append(_autoscaler(spec, labels))
    if max(own.replicas, 1) > 1:
        made.append(_budget(spec, labels))
    if own.monitoring:
        made.append(_monitor(spec, labels))
    return made


def kustomization(spec: DeploySpec, files: list[str]) -> Manifest:
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": spec.kubernetes.namespace,
        "resources": files,
    }


def scales(spec: DeploySpec) -> bool:
    return spec.kubernetes.most_replicas > max(spec.kubernetes.replicas, 1)


def _metadata(spec: DeploySpec, labels: Mapping[str, str]) -> Manifest:
    """Labels hold few characters, so what is longer is an annotation."""
    own = {"app.kubernetes.io/name": spec.name, "app.kubernetes.io/managed-by": "tsx"}
    body = {key.replace(":", "/"): value for key, value in labels.items() if value}
    return {"name": spec.name, "namespace": spec.kubernetes.namespace, "labels": own, "annotations": body}


def _selector(spec: DeploySpec) -> Manifest:
    return {"app.kubernetes.io/name": spec.name}


def _deployment(spec: DeploySpec, image: str, labels: Mapping[str, str]) -> Manifest:
    own = spec.kubernetes
    pod = {
        "terminationGracePeriodSeconds": own.grace,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,  # each Service would add variables, and those of one named tsx are TSX_SERVICE_HOST and the like
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": UID,
            "fsGroup": UID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(spec, image)],
        "volumes": [
            {"name": "tmp", "emptyDir": {}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}},
        ],
    }
    if own.pull_secret is not None:
        pod["imagePullSecrets"] = [{"name": own.pull_secret}]
    metadata = _metadata(spec, labels)
    shown = {key: value for key, value in metadata["annotations"].items() if key.startswith("tsx/model")}  # others would restart pods
    body: Manifest = {
        "revisionHistoryLimit": spec.keep,
        "progressDeadlineSeconds": own.startup_timeout + 60,
        "selector": {"matchLabels": _selector(spec)},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
        "template": {"metadata": {"labels": metadata["labels"], "annotations": shown}, "spec": pod},
    }
    if not scales(spec):
        body = {"replicas": own.replicas, **body}  # else it is the autoscaler's, and not this file's, to say
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": body}


def _container(spec: DeploySpec, image: str) -> Manifest:
    return {
        "name": "tsx",
        "image": image,
        "args": ["serve"],
        "env": _environment(spec),
        "ports": [
            {"name": "http", "containerPort": HTTP, "protocol": "TCP"},
            {"name": "metrics", "containerPort": METRICS, "protocol": "TCP"},
        ],
        "resources": _sizes(spec, limit_cpu=False),
        # Asked where metrics are, as that port answers also while the server drains.
        "startupProbe": _probe("/readyz", period=5, failures=-(-spec.kubernetes.startup_timeout // 5)),
        "readinessProbe": _probe("/readyz", period=5, failures=2),
        "livenessProbe": _probe("/livez", period=10, failures=3),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}, {"name": "shm", "mountPath": "/dev/shm"}],
    }


def _sizes(spec: DeploySpec, *, limit_cpu: bool) -> Manifest:
    own = spec.kubernetes
    requests = {"cpu": canonical(own.cpu), "memory": canonical(own.memory)}
    limits = requests if limit_cpu else {"memory": requests["memory"]}
    return {"requests": requests, "limits": limits | ({"nvidia.com/gpu": str(own.gpus)} if own.gpus else {})}


def _probe(path: str, *, period: int, failures: int) -> Manifest:
    asked = {"path": path, "port": "metrics", "scheme": "HTTP"}
    return {"httpGet": asked, "periodSeconds": period, "timeoutSeconds": 5, "failureThreshold": failures}


def _environment(spec: DeploySpec) -> list[Manifest]:
    own = spec.kubernetes
    variables = {
        "TSX_SHUTDOWN_DELAY": str(min(NOTICE, own.grace // 4)),
        "TSX_DRAIN_TIMEOUT": str(max(1, own.grace - NOTICE - MARGIN)),
    }
    if own.token_secret is None:
        variables["TSX_DISABLE_TOKEN_AUTHORIZATION"] = "true"
    variables |= spec.env
    listed: list[Manifest] = [{"name": name, "value": value} for name, value in variables.items()]
    if own.token_secret is not None:
        for name, key in (("TSX_INFERENCE_TOKEN", "inference"), ("TSX_MANAGEMENT_TOKEN", "management")):
            listed.append({"name": name, "valueFrom": {"secretKeyRef": {"name": own.token_secret, "key": key}}})
    return listed


def _service(spec: DeploySpec, labels: Mapping[str, str]) -> Manifest:
    ports = [{"name": name, "port": port, "targetPort": name, "protocol": "TCP"} for name, port in (("http", HTTP), ("metrics", METRICS))]
    body = {"type": "ClusterIP", "selector": _selector(spec), "ports": ports}
    return {"apiVersion": "v1", "kind": "Service", "metadata": _metadata(spec, labels), "spec": body}


def _autoscaler(spec: DeploySpec, labels: Mapping[str, str]) -> Manifest:
    """By requests that wait: the processor of a model that batches is busy long before it is too busy."""
    own = spec.kubernetes
    metric = {
        "type": "Pods",
        "pods": {"metric": {"name": "tsx_queue_depth"}, "target": {"type": "AverageValue", "averageValue": str(own.queue_target)}},
    }
    body = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": spec.name},
        "minReplicas": max(own.replicas, 1),
        "maxReplicas": own.most_replicas,
        "metrics": [metric],
        "behavior": {"scaleDown": {"stabilizationWindowSeconds": 300}},
    }
    return {"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "metadata": _metadata(spec, labels), "spec": body}


def _budget(spec: DeploySpec, labels: Mapping[str, str]) -> Manifest:
    body = {"maxUnavailable": 1, "selector": {"matchLabels": _selector(spec)}}
    return {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": _metadata(spec, labels), "spec": body}


def _monitor(spec: DeploySpec, labels: Mapping[str, str]) -> Manifest:
    endpoint: Manifest = {"port": "metrics", "path": "/metrics", "interval": "15s"}
    if spec.kubernetes.token_secret is not None:
        endpoint["authorization"] = {"type": "Bearer", "credentials": {"name": spec.kubernetes.token_secret, "key": "management"}}
    body = {"selector": {"matchLabels": _selector(spec)}, "endpoints": [endpoint]}
    return {"apiVersion": "monitoring.coreos.com/v1", "kind": "ServiceMonitor", "metadata": _metadata(spec, labels), "spec": body}


def serving_runtime(image: str) -> Manifest:
    """In place of KServe's TorchServe runtime: it is chosen before that one, and takes its layout of /mnt/models as well as one archive."""
    variables = {
        "TSX_MODEL_DIR": "/mnt/models",
        "TSX_MODEL_NAME": "{{.Name}}",  # KServe's clients ask for a model by the name of its InferenceService
        "TSX_INFERENCE_ADDRESS": f"http://0.0.0.0:{HTTP}",
        "TSX_METRICS_ADDRESS": f"http://0.0.0.0:{HTTP}",  # KServe knows one port
        "TSX_MANAGEMENT_ADDRESS": "http://127.0.0.1:8081",
        "TSX_DISABLE_TOKEN_AUTHORIZATION": "true",
    }
    container = {
        "name": "kserve-container",
        "image": image,
        "args": ["serve"],
        "env": [{"name": name, "value": value} for name, value in variables.items()],
        "ports": [{"containerPort": HTTP, "protocol": "TCP"}],
        "readinessProbe": {"httpGet": {"path": "/v2/health/ready", "port": HTTP}, "periodSeconds": 5, "timeoutSeconds": 5},
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": UID,
            "allowPrivilegeEscalation": False,
            "privileged": False,
            "capabilities": {"drop": ["ALL"]},
        },
        "resources": {"requests": {"cpu": "1", "memory": "2Gi"}, "limits": {"cpu": "1", "memory": "2Gi"}},
    }
    body = {
        "annotations": {"prometheus.kserve.io/port": str(HTTP), "prometheus.kserve.io/path": "/metrics"},
        "supportedModelFormats": [{"name": "pytorch", "version": "1", "autoSelect": True, "priority": 3}],
        "protocolVersions": ["v1", "v2"],
        "containers": [container],
    }
    return {"apiVersion": "serving.kserve.io/v1alpha1", "kind": "ClusterServingRuntime", "metadata": {"name": "kserve-tsx"}, "spec": body}


def inference_service(spec: DeploySpec, labels: Mapping[str, str]) -> Manifest:
    own = spec.kubernetes
    if own.storage is None:
        raise UsageError(
            "kubernetes.storage is not given: where KServe finds the archive, such as s3://bucket/models/digits or pvc://claim/digits"
        )
    model: Manifest = {
        "modelFormat": {"name": "pytorch", "version": "1"},
        "runtime": "kserve-tsx",
        "protocolVersion": own.protocol,
        "storageUri": own.storage,
        "resources": _sizes(spec, limit_cpu=True),
    }
    variables = {"TSX_SERVICE_ENVELOPE": "kserve" if own.protocol == "v1" else "kservev2", **spec.env}
    model["env"] = [{"name": name, "value": value} for name, value in variables.items()]
    predictor = {"minReplicas": own.replicas, "maxReplicas": max(own.most_replicas, own.replicas, 1), "timeout": own.grace, "model": model}
    return {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": _metadata(spec, labels),
        "spec": {"predictor": predictor},
    }


def canonical(quantity: str) -> str:
    """As Kubernetes gives it back, so that what is applied and what is found are the same text."""
    for small, large, factor in (("m", "", 1000), ("Mi", "Gi", 1024)):
        number = quantity.removesuffix(small)
        if number != quantity and number.isdigit() and int(number) % factor == 0:
            return f"{int(number) // factor}{large}"
    return quantity
