"""A deployment on Kubernetes, or KServe, as manifests. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tsx_cli.common.failure import UsageError
from tsx_cli.deploy.aws.alarms import read_bound
from tsx_cli.deploy.container.resources import DEFAULTS, in_words
from tsx_cli.deploy.engine.resources import Ref
from tsx_cli.deploy.image.recipe import UID
from tsx_cli.deploy.kubernetes.gateway import http_route
from tsx_cli.deploy.kubernetes.keda import scaled_object
from tsx_cli.deploy.kubernetes.security import credentials, network_policy, secret_variables
from tsx_cli.deploy.spec import DeploySpec

HTTP, METRICS, GRPC = 8080, 8082, 7070
NAME, INSTANCE, MANAGED_BY = (
    "app.kubernetes.io/name",
    "app.kubernetes.io/instance",
    "app.kubernetes.io/managed-by",
)
SPREAD = ("topology.kubernetes.io/zone", "kubernetes.io/hostname")
NOTICE = (
    5  # seconds for which a pod that is to stop still takes requests, as balancers learn of it late
)
MARGIN = 5
CPUS = "TSX_CPUS"
NOT_KSERVE = (  # what an InferenceService does not have
    "keda", "token_secret", "gateway", "hostnames", "grpc", "allow_from", "metrics_from", "pull_secret", "monitoring", "monitor_labels",
)  # fmt: skip
Manifest = dict[str, Any]
BEHAVIOR = {  # of an autoscaler: up at once, by as many pods as there are; down when it is certain
    "scaleUp": {
        "stabilizationWindowSeconds": 0,
        "policies": [{"type": "Percent", "value": 100, "periodSeconds": 30}],
    },
    "scaleDown": {"stabilizationWindowSeconds": 300},
}


def manifests(spec: DeploySpec, image: str | Ref, labels: Mapping[str, str]) -> list[Manifest]:
    """In the order in which they are applied. Raises UsageError."""
    own = spec.kubernetes
    _check(spec)
    if own.kserve:
        return [serving_runtime(image), inference_service(spec, labels)]
    made = [_deployment(spec, image, labels), _service(spec, labels)]
    if own.keda is not None:
        made.append(scaled_object(spec, _metadata(spec, labels), BEHAVIOR))
    elif scales(spec):
        made.append(_autoscaler(spec, labels))
    if max(own.replicas, 1) > 1:
        made.append(_budget(spec, labels))
    if own.allow_from or own.metrics_from:
        requests = ["http", *(["grpc"] if serves_grpc(spec) else [])]
        made.append(network_policy(spec, _metadata(spec, labels), selector(spec, labels), requests))
    if own.monitoring is not False:
        made.append(_monitor(spec, labels))
    if own.gateway is not None:
        made.append(http_route(spec, _metadata(spec, labels), HTTP))
    return made


def _check(spec: DeploySpec) -> None:
    own = spec.kubernetes
    if not spec.name[0].isalpha():
        raise UsageError(
            f"name: '{spec.name}' begins with a digit, but the name of a Service must begin with a"
            " letter"
        )
    useless = [key for key in NOT_KSERVE if own.kserve and getattr(own, key)]
    if useless:
        raise UsageError(
            f"kubernetes.{useless[0]} has no effect on an InferenceService, as KServe decides that"
            " itself. Remove it"
        )
    if own.metrics_from and not own.allow_from:
        raise UsageError(
            "kubernetes.metrics_from alone would refuse all requests; also set"
            " kubernetes.allow_from, to where they come from"
        )
    if own.grpc and spec.image is None and "grpc" not in spec.build.extras:
        raise UsageError(
            "kubernetes.grpc: the image that is built does not serve gRPC; add --set"
            " build.extras=grpc"
        )
    if own.hostnames and own.gateway is None:
        raise UsageError(
            "kubernetes.hostnames are those of a route; set kubernetes.gateway to the"
            " NAMESPACE/NAME of its Gateway"
        )
    if spec.canary is None:
        return
    if own.gateway is None:
        instead = (
            "canaryTrafficPercent of an InferenceService"
            if own.kserve
            else "--set kubernetes.gateway=NAMESPACE/NAME"
        )
        raise UsageError(
            "canary: a Gateway has to divide the requests between two versions, and none is named:"
            f" {instead}"
        )
    named = [text for text in spec.canary.alarms if read_bound(text) is None]
    if named:
        raise UsageError(
            f"--alarm: '{named[0]}' is not a bound; a canary on Kubernetes is watched by 5xx>0 and"
            " p95>300ms"
        )


def serves_grpc(spec: DeploySpec) -> bool:
    own = spec.kubernetes.grpc
    return own if own is not None else spec.image is None and "grpc" in spec.build.extras


def scales(spec: DeploySpec) -> bool:
    return spec.kubernetes.keda is not None or spec.kubernetes.most_replicas > max(
        spec.kubernetes.replicas, 1
    )


def _metadata(spec: DeploySpec, labels: Mapping[str, str]) -> Manifest:
    """Labels hold few characters, so what is longer is an annotation."""
    own = {**selector(spec, labels), MANAGED_BY: "tsx"}
    body = {key.replace(":", "/"): value for key, value in labels.items() if value}
    return {
        "name": spec.name,
        "namespace": spec.kubernetes.namespace,
        "labels": own,
        "annotations": body,
    }


def selector(spec: DeploySpec, labels: Mapping[str, str]) -> Manifest:
    """A canary is a second instance of the deployment."""
    return {NAME: labels.get("tsx:name", spec.name), INSTANCE: spec.name}


def _deployment(spec: DeploySpec, image: str | Ref, labels: Mapping[str, str]) -> Manifest:
    own = spec.kubernetes
    pod = {
        "terminationGracePeriodSeconds": own.grace,
        "automountServiceAccountToken": False,
        # each Service would add variables, and those of one named tsx are TSX_SERVICE_HOST and the
        # like
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": UID,
            "runAsGroup": UID,
            "fsGroup": UID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "topologySpreadConstraints": [_spread(selector(spec, labels), over) for over in SPREAD],
        "containers": [_container(spec, image)],
        "volumes": [
            {"name": "tmp", "emptyDir": {"sizeLimit": canonical(own.disk)}},
            {
                "name": "shm",
                "emptyDir": {"medium": "Memory", "sizeLimit": canonical(own.shared_memory)},
            },
        ],
    }
    pod |= _nodes(spec)
    if own.pull_secret is not None:
        pod["imagePullSecrets"] = [{"name": own.pull_secret}]
    metadata = _metadata(spec, labels)
    shown = {
        key: value for key, value in metadata["annotations"].items() if key.startswith("tsx/model")
    }  # others would restart pods
    body: Manifest = {
        "revisionHistoryLimit": spec.keep,
        "progressDeadlineSeconds": own.startup_timeout + 60,
        "selector": {"matchLabels": selector(spec, labels)},
        "strategy": {
            "type": "RollingUpdate",
            "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1},
        },
        "template": {"metadata": {"labels": metadata["labels"], "annotations": shown}, "spec": pod},
    }
    if not scales(spec):
        body = {
            "replicas": own.replicas,
            **body,
        }  # else it is the autoscaler's, and not this file's, to say
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": body}


def _nodes(spec: DeploySpec) -> Manifest:
    own = spec.kubernetes
    domain = own.gpu_resource.partition("/")[0]
    usual = f"{domain}/neuron" if domain == "aws.amazon.com" else f"{domain}/gpu"
    taints = [*([usual] if own.gpus else []), *own.tolerations]
    return {
        **({"nodeSelector": own.node_selector} if own.node_selector else {}),
        **({"tolerations": [toleration(taint) for taint in taints]} if taints else {}),
    }


def _spread(chosen: Manifest, over: str) -> Manifest:
    """A preference: where there is one zone, or too few nodes, pods run all the same."""
    return {
        "maxSkew": 1,
        "topologyKey": over,
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": chosen},
    }


def toleration(taint: str) -> Manifest:
    named, _, effect = taint.partition(":")
    key, equals, value = named.partition("=")
    matched = (
        {"key": key, "operator": "Equal", "value": value}
        if equals
        else {"key": key, "operator": "Exists"}
    )
    return matched | ({"effect": effect} if effect else {})


def _container(spec: DeploySpec, image: str | Ref) -> Manifest:
    return {
        "name": "tsx",
        "image": image,
        "args": ["serve"],
        "env": _environment(spec),
        "ports": [
            {"name": name, "containerPort": port, "protocol": "TCP"}
            for name, (port, _) in _ports(spec).items()
        ],
        "resources": _sizes(spec, limit_cpu=False),
        # Asked where metrics are, as that port answers also while the server drains.
        "startupProbe": _probe(
            "/readyz", period=5, failures=-(-spec.kubernetes.startup_timeout // 5)
        ),
        "readinessProbe": _probe("/readyz", period=5, failures=2),
        "livenessProbe": _probe("/livez", period=10, failures=3),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }


def _sizes(spec: DeploySpec, *, limit_cpu: bool) -> Manifest:
    own = spec.kubernetes
    requests = {"cpu": canonical(own.cpu), "memory": canonical(own.memory)}
    if not own.kserve:
        requests["ephemeral-storage"] = canonical(own.disk)
    limits = {name: size for name, size in requests.items() if limit_cpu or name != "cpu"}
    return {
        "requests": requests,
        "limits": limits | ({own.gpu_resource: str(own.gpus)} if own.gpus else {}),
    }


def _probe(path: str, *, period: int, failures: int) -> Manifest:
    asked = {"path": path, "port": METRICS, "scheme": "HTTP"}
    return {
        "httpGet": asked,
        "periodSeconds": period,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def _environment(spec: DeploySpec) -> list[Manifest]:
    own = spec.kubernetes
    # What it may count on, rounded up: without a limit of its CPU the pod would take all cores of
    # its node for its own.
    field = {"resourceFieldRef": {"resource": "requests.cpu", "divisor": "1"}}
    listed: list[Manifest] = [] if CPUS in spec.env else [{"name": CPUS, "valueFrom": field}]
    defaults: dict[str, object] = {
        "shutdown_delay": min(NOTICE, own.grace // 4),
        "drain_timeout": max(1, own.grace - NOTICE - MARGIN),
        "default_startup_timeout": own.startup_timeout,
    }
    if serves_grpc(spec):
        defaults["grpc_inference_address"] = "0.0.0.0"
    if not own.tokens:
        defaults["disable_token_authorization"] = "true"
    listed += [
        {"name": name, "value": value}
        for name, value in ({DEFAULTS: in_words(defaults)} | spec.env).items()
    ]
    return listed + _from_secrets(secret_variables(spec))


def _from_secrets(secrets: Mapping[str, str]) -> list[Manifest]:
    places = {name: place.partition("/") for name, place in secrets.items()}
    return [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}
        for name, (secret, _, key) in places.items()
    ]


def _ports(spec: DeploySpec) -> dict[str, tuple[int, str]]:
    """By name, with what balancers call the protocol:
    https://kubernetes.io/docs/concepts/services-networking/service/#application-protocol.
    """
    grpc = {"grpc": (GRPC, "kubernetes.io/h2c")} if serves_grpc(spec) else {}
    return {"http": (HTTP, "http"), **grpc, "metrics": (METRICS, "http")}


def _service(spec: DeploySpec, labels: Mapping[str, str]) -> Manifest:
    ports = [
        {"name": name, "port": port, "targetPort": name, "protocol": "TCP", "appProtocol": protocol}
        for name, (port, protocol) in _ports(spec).items()
    ]
    body = {"type": "ClusterIP", "selector": selector(spec, labels), "ports": ports}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(spec, labels),
        "spec": body,
    }


def _autoscaler(spec: DeploySpec, labels: Mapping[str, str]) -> Manifest:
    """By waiting requests, and by the CPU, which needs no adapter and comes last: clusters that
    store version 1 put it there.
    """
    own = spec.kubernetes
    metrics: list[Manifest] = []
    if own.queue_target:
        target = {"type": "AverageValue", "averageValue": canonical(str(own.queue_target))}
        metrics.append(
            {"type": "Pods", "pods": {"metric": {"name": "tsx_requests_waiting"}, "target": target}}
        )
    busy = {"type": "Utilization", "averageUtilization": own.cpu_target}
    metrics.append({"type": "Resource", "resource": {"name": "cpu", "target": busy}})
    body = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": spec.name},
        "minReplicas": max(own.replicas, 1),
        "maxReplicas": own.most_replicas,
        "metrics": metrics,
        "behavior": BEHAVIOR,
    }
    metadata = _metadata(spec, labels)
    metadata["annotations"] |= {
        "validations.keda.sh/hpa-ownership": "false"
    }  # KEDA refuses to take over while this is there
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": metadata,
        "spec": body,
    }


def _budget(spec: DeploySpec, labels: Mapping[str, str]) -> Manifest:
    body = {
        "maxUnavailable": 1,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": selector(spec, labels)},
    }
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": _metadata(spec, labels),
        "spec": body,
    }


def _monitor(spec: DeploySpec, labels: Mapping[str, str]) -> Manifest:
    endpoint: Manifest = {
        "port": "metrics",
        "path": "/metrics",
        "interval": "15s",
        **credentials(spec),
    }
    body = {"selector": {"matchLabels": selector(spec, labels)}, "endpoints": [endpoint]}
    metadata = _metadata(spec, labels)
    metadata["labels"] = spec.kubernetes.monitor_labels | metadata["labels"]
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "ServiceMonitor",
        "metadata": metadata,
        "spec": body,
    }


def serving_runtime(image: str | Ref) -> Manifest:
    """In place of KServe's TorchServe runtime: it is chosen before that one, and takes its layout
    of /mnt/models as well as one archive.
    """
    variables = {
        "TSX_MODEL_DIR": "/mnt/models",
        # KServe's clients ask for a model by the name of its InferenceService
        "TSX_MODEL_NAME": "{{.Name}}",
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
        "readinessProbe": {
            "httpGet": {"path": "/v2/health/ready", "port": HTTP},
            "periodSeconds": 5,
            "timeoutSeconds": 5,
        },
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": UID,
            "allowPrivilegeEscalation": False,
            "privileged": False,
            "capabilities": {"drop": ["ALL"]},
        },
        "resources": {
            "requests": {"cpu": "1", "memory": "2Gi"},
            "limits": {"cpu": "1", "memory": "2Gi"},
        },
    }
    body = {
        "annotations": {
            "prometheus.kserve.io/port": str(HTTP),
            "prometheus.kserve.io/path": "/metrics",
        },
        "supportedModelFormats": [
            {"name": "pytorch", "version": "1", "autoSelect": True, "priority": 3}
        ],
        "protocolVersions": ["v1", "v2"],
        "containers": [container],
    }
    return {
        "apiVersion": "serving.kserve.io/v1alpha1",
        "kind": "ClusterServingRuntime",
        "metadata": {"name": "kserve-tsx"},
        "spec": body,
    }


def inference_service(spec: DeploySpec, labels: Mapping[str, str]) -> Manifest:
    own = spec.kubernetes
    if own.storage is None:
        raise UsageError(
            "kubernetes.storage is not given: where KServe finds the archive, such as"
            " s3://bucket/models/digits or pvc://claim/digits"
        )
    model: Manifest = {
        "modelFormat": {"name": "pytorch", "version": "1"},
        "runtime": "kserve-tsx",
        "protocolVersion": own.protocol,
        "storageUri": own.storage,
        "resources": _sizes(spec, limit_cpu=True),
    }
    variables = {
        "TSX_SERVICE_ENVELOPE": "kserve" if own.protocol == "v1" else "kservev2",
        **spec.env,
    }
    model["env"] = [
        {"name": name, "value": value} for name, value in variables.items()
    ] + _from_secrets(own.secrets)
    predictor: Manifest = {
        "minReplicas": own.replicas,
        "maxReplicas": max(own.most_replicas, own.replicas, 1),
        "timeout": own.grace,
    }
    predictor |= {"model": model, **_nodes(spec)}
    return {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": _metadata(spec, labels),
        "spec": {"predictor": predictor},
    }


def canonical(quantity: str) -> str:
    """As Kubernetes gives it back, so that what is applied and what is found are the same text."""
    for small, large, factor in (
        ("m", "", 1000),
        ("", "k", 1000),
        ("Mi", "Gi", 1024),
        ("Gi", "Ti", 1024),
    ):
        number = quantity.removesuffix(small)
        if quantity.endswith(small) and number.isdigit() and int(number) % factor == 0:
            return canonical(f"{int(number) // factor}{large}")
    return quantity
