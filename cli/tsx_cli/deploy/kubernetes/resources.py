"""A deployment on Kubernetes, or KServe, as manifests. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tsx_cli.common.failure import UsageError
from tsx_cli.deploy.container.resources import DEFAULTS, in_words
from tsx_cli.deploy.image.recipe import UID
from tsx_cli.deploy.spec import DeploySpec

HTTP, METRICS = 8080, 8082
NOTICE = 5  # seconds for which a pod that is to stop still takes requests, as balancers learn of it late
MARGIN = 5
CPUS = "REQUESTED_CPUS"
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
    if own.allow_from or own.metrics_from:
        made.append(_network_policy(spec, labels))
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
            "runAsGroup": UID,
            "fsGroup": UID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "topologySpreadConstraints": [_spread(spec, over) for over in ("topology.kubernetes.io/zone", "kubernetes.io/hostname")],
        "containers": [_container(spec, image)],
        "volumes": [
            {"name": "tmp", "emptyDir": {"sizeLimit": canonical(own.disk)}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": canonical(own.shared_memory)}},
        ],
    }
    pod |= _nodes(spec)
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


def _nodes(spec: DeploySpec) -> Manifest:
    own = spec.kubernetes
    taints = [*([f"{own.gpu_resource.partition('/')[0]}/gpu"] if own.gpus else []), *own.tolerations]
    return {
        **({"nodeSelector": own.node_selector} if own.node_selector else {}),
        **({"tolerations": [_toleration(taint) for taint in taints]} if taints else {}),
    }


def _spread(spec: DeploySpec, over: str) -> Manifest:
    """A preference: where there is one zone, or too few nodes, pods run all the same."""
    return {"maxSkew": 1, "topologyKey": over, "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": {"matchLabels": _selector(spec)}}


def _toleration(taint: str) -> Manifest:
    named, _, effect = taint.partition(":")
    key, equals, value = named.partition("=")
    matched = {"key": key, "operator": "Equal", "value": value} if equals else {"key": key, "operator": "Exists"}
    return matched | ({"effect": effect} if effect else {})


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
    if not own.kserve:
        requests["ephemeral-storage"] = canonical(own.disk)
    limits = {name: size for name, size in requests.items() if limit_cpu or name != "cpu"}
    return {"requests": requests, "limits": limits | ({own.gpu_resource: str(own.gpus)} if own.gpus else {})}


def _probe(path: str, *, period: int, failures: int) -> Manifest:
    asked = {"path": path, "port": "metrics", "scheme": "HTTP"}
    return {"httpGet": asked, "periodSeconds": period, "timeoutSeconds": 5, "failureThreshold": failures}


def _environment(spec: DeploySpec) -> list[Manifest]:
    own = spec.kubernetes
    # What it may count on, rounded up: without a limit of its CPU the pod would take all cores of its node for its own.
    listed: list[Manifest] = [{"name": CPUS, "valueFrom": {"resourceFieldRef": {"resource": "requests.cpu", "divisor": "1"}}}]
    defaults = {
        "cpus": f"$({CPUS})",
        "shutdown_delay": min(NOTICE, own.grace // 4),
        "drain_timeout": max(1, own.grace - NOTICE - MARGIN),
    }
    if own.token_secret is None:
        defaults["disable_token_authorization"] = "true"
    listed += [{"name": name, "value": value} for name, value in ({DEFAULTS: in_words(defaults)} | spec.env).items()]
    secrets = dict(own.secrets)
    if own.token_secret is not None:
        secrets |= {"TSX_INFERENCE_TOKEN": f"{own.token_secret}/inference", "TSX_MANAGEMENT_TOKEN": f"{own.token_secret}/management"}
    return listed + _from_secrets(secrets)


def _from_secrets(secrets: Mapping[str, str]) -> list[Manifest]:
    places = {name: place.partition("/") for name, place in secrets.items()}
    return [{"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}} for name, (secret, _, key) in places.items()]


def _service(spec: DeploySpec, labels: Mapping[str, str]) -> Manifest:
    ports = [
        {"name": name, "port": port, "targetPort": name, "protocol": "TCP", "appProtocol": "http"}
        for name, port in (("http", HTTP), ("metrics", METRICS))
    ]
    body = {"type": "ClusterIP", "selector": _selector(spec), "ports": ports}
    return {"apiVersion": "v1", "kind": "Service", "metadata": _metadata(spec, labels), "spec": body}


def _autoscaler(spec: DeploySpec, labels: Mapping[str, str]) -> Manifest:
    """By requests that wait, which come before a processor that is busy; and by the processor, which needs no adapter."""
    own = spec.kubernetes
    metrics: list[Manifest] = [
        {"type": "Resource", "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": own.cpu_target}}}
    ]
    if own.queue_target:
        target = {"type": "AverageValue", "averageValue": str(own.queue_target)}
        metrics.append({"type": "Pods", "pods": {"metric": {"name": "tsx_queue_depth"}, "target": target}})
    doubled = {"type": "Percent", "value": 100, "periodSeconds": 30}
    body = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": spec.name},
        "minReplicas": max(own.replicas, 1),
        "maxReplicas": own.most_replicas,
        "metrics": metrics,
        "behavior": {"scaleUp": {"stabilizationWindowSeconds": 0, "policies": [doubled]}, "scaleDown": {"stabilizationWindowSeconds": 300}},
    }
    return {"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "metadata": _metadata(spec, labels), "spec": body}


def _budget(spec: DeploySpec, labels: Mapping[str, str]) -> Manifest:
    body = {"maxUnavailable": 1, "unhealthyPodEvictionPolicy": "AlwaysAllow", "selector": {"matchLabels": _selector(spec)}}
    return {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": _metadata(spec, labels), "spec": body}


def _network_policy(spec: DeploySpec, labels: Mapping[str, str]) -> Manifest:
    """Probes come from the node, which no policy keeps out."""
    own = spec.kubernetes
    ingress = [_ingress(names, port) for names, port in ((own.allow_from, "http"), (own.metrics_from, "metrics")) if names]
    body = {"podSelector": {"matchLabels": _selector(spec)}, "policyTypes": ["Ingress"], "ingress": ingress}
    return {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": _metadata(spec, labels), "spec": body}


def _ingress(namespaces: Sequence[str], port: str) -> Manifest:
    peers = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}} for name in namespaces]
    return {"from": peers, "ports": [{"protocol": "TCP", "port": port}]}


def _monitor(spec: DeploySpec, labels: Mapping[str, str]) -> Manifest:
    endpoint: Manifest = {"port": "metrics", "path": "/metrics", "interval": "15s"}
    if spec.kubernetes.token_secret is not None:
        endpoint["authorization"] = {"type": "Bearer", "credentials": {"name": spec.kubernetes.token_secret, "key": "management"}}
    body = {"selector": {"matchLabels": _selector(spec)}, "endpoints": [endpoint]}
    metadata = _metadata(spec, labels)
    metadata["labels"] = spec.kubernetes.monitor_labels | metadata["labels"]
    return {"apiVersion": "monitoring.coreos.com/v1", "kind": "ServiceMonitor", "metadata": metadata, "spec": body}


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
    model["env"] = [{"name": name, "value": value} for name, value in variables.items()] + _from_secrets(own.secrets)
    predictor: Manifest = {"minReplicas": own.replicas, "maxReplicas": max(own.most_replicas, own.replicas, 1), "timeout": own.grace}
    predictor |= {"model": model, **_nodes(spec)}
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
