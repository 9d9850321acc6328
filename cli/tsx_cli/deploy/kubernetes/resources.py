"""The manifests of a deployment on Kubernetes or KServe; pure functions.

They are the shapes of manifests.yaml, filled with values from the specification.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tsx_cli.common.failure import UsageError
from tsx_cli.deploy.aws.alarms import parse_bound
from tsx_cli.deploy.container.resources import DEFAULTS_VARIABLE, defaults_text
from tsx_cli.deploy.engine.resources import Ref
from tsx_cli.deploy.engine.shapes import fill, read_shapes
from tsx_cli.deploy.image.recipe import UID
from tsx_cli.deploy.kubernetes.gateway import backends
from tsx_cli.deploy.kubernetes.security import is_token_free, secret_variables
from tsx_cli.deploy.spec import DeploySpec

SHAPES = Path(__file__).with_name("manifests.yaml")
HTTP, METRICS, GRPC = 8080, 8082, 7070
NAME = "app.kubernetes.io/name"
INSTANCE = "app.kubernetes.io/instance"
MANAGED_BY = "app.kubernetes.io/managed-by"
# Seconds in which a stopping pod still takes requests, because load balancers notice late.
NOTICE_S = 5
MARGIN_S = 5  # time between the end of draining and the end of the grace period
CPUS = "TSX_CPUS"
KSERVE_IGNORED_KEYS = (  # keys without effect on an InferenceService
    "keda", "token_secret", "gateway", "hostnames", "grpc", "allow_from", "metrics_from", "pull_secret", "monitoring", "monitor_labels",
)  # fmt: skip
Manifest = dict[str, Any]


def manifests(spec: DeploySpec, image: str | Ref, labels: Mapping[str, str]) -> list[Manifest]:
    """Return the manifests in the order in which they are applied.

    Raises:
        UsageError: The specification is inconsistent.
    """
    settings = spec.kubernetes
    _check(spec)
    conditions = {
        "ClusterServingRuntime": settings.kserve,
        "InferenceService": settings.kserve,
        "Deployment": not settings.kserve,
        "Service": not settings.kserve,
        "ScaledObject": settings.keda,
        "HorizontalPodAutoscaler": not settings.kserve
        and settings.keda is None
        and is_autoscaled(spec),
        "PodDisruptionBudget": not settings.kserve and settings.replicas > 1,
        "NetworkPolicy": settings.allow_from or settings.metrics_from,
        "ServiceMonitor": not settings.kserve and settings.monitoring is not False,
        "HTTPRoute": settings.gateway,
    }
    kinds, values = read_shapes(SHAPES), _values(spec, image, labels)
    return [fill(kinds[kind], values) for kind, is_wanted in conditions.items() if is_wanted]


def _check(spec: DeploySpec) -> None:
    settings = spec.kubernetes
    if not spec.name[0].isalpha():
        raise UsageError(
            f"name: '{spec.name}' begins with a digit, but the name of a Service must begin with a"
            " letter"
        )
    ignored_keys = [
        key for key in KSERVE_IGNORED_KEYS if settings.kserve and getattr(settings, key)
    ]
    if ignored_keys:
        raise UsageError(
            f"kubernetes.{ignored_keys[0]} has no effect on an InferenceService, as KServe decides"
            " that itself. Remove it"
        )
    if settings.metrics_from and not settings.allow_from:
        raise UsageError(
            "kubernetes.metrics_from alone would refuse all requests; also set"
            " kubernetes.allow_from, to where they come from"
        )
    if settings.grpc and spec.image is None and "grpc" not in spec.build.extras:
        raise UsageError(
            "kubernetes.grpc: the image that is built does not serve gRPC; add --set"
            " build.extras=grpc"
        )
    if settings.kserve and settings.storage is None and spec.canary is None:
        raise UsageError(
            "kubernetes.storage is not given: where KServe finds the archive, such as"
            " s3://bucket/models/digits or pvc://claim/digits"
        )
    if settings.hostnames and settings.gateway is None:
        raise UsageError(
            "kubernetes.hostnames are those of a route; set kubernetes.gateway to the"
            " NAMESPACE/NAME of its Gateway"
        )
    if spec.canary is None:
        return
    if settings.gateway is None:
        advice = (
            "canaryTrafficPercent of an InferenceService"
            if settings.kserve
            else "--set kubernetes.gateway=NAMESPACE/NAME"
        )
        raise UsageError(
            "canary: a Gateway has to divide the requests between two versions, and none is named:"
            f" {advice}"
        )
    alarm_names = [text for text in spec.canary.alarms if parse_bound(text) is None]
    if alarm_names:
        raise UsageError(
            f"--alarm: '{alarm_names[0]}' is not a bound; a canary on Kubernetes is watched by"
            " 5xx>0 and p95>300ms"
        )


def has_grpc_port(spec: DeploySpec) -> bool:
    configured = spec.kubernetes.grpc
    return (
        configured if configured is not None else spec.image is None and "grpc" in spec.build.extras
    )


def is_autoscaled(spec: DeploySpec) -> bool:
    return spec.kubernetes.keda is not None or spec.kubernetes.most_replicas > max(
        spec.kubernetes.replicas, 1
    )


def _values(spec: DeploySpec, image: str | Ref, labels: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of the shapes.

    The labels of a canary mark it as a second instance of the deployment.
    """
    settings = spec.kubernetes
    selector = {NAME: labels.get("tsx:name", spec.name), INSTANCE: spec.name}
    object_labels = {**selector, MANAGED_BY: "tsx"}
    # Labels allow few characters, so longer values are annotations.
    annotations = {key.replace(":", "/"): value for key, value in labels.items() if value}
    # Pods get only these annotations, because a change of any annotation restarts them.
    pod_annotations = {
        key: value for key, value in annotations.items() if key.startswith("tsx/model")
    }
    namespace, _, gateway = str(settings.gateway).rpartition("/")
    kinds = read_shapes(SHAPES)
    queue = {"queue_target": canonical(str(settings.queue_target))}
    return {
        "name": spec.name,
        "namespace": settings.namespace,
        "labels": object_labels,
        "annotations": annotations,
        "selector": selector,
        "image": image,
        "uid": UID,
        "environment": _pod_environment(spec),
        "resources": _pod_resources(spec),
        "grace": settings.grace,
        "keep": spec.keep,
        "replicas": None if is_autoscaled(spec) else settings.replicas,
        "progress_deadline": settings.startup_timeout + 60,
        "pod_annotations": pod_annotations,
        "start_failures": -(-settings.startup_timeout // 5),
        "disk": canonical(settings.disk),
        "shared_memory": canonical(settings.shared_memory),
        "pull_secrets": settings.pull_secret and [{"name": settings.pull_secret}],
        **_ports(spec),
        **_nodes(spec),
        # KEDA refuses to take over an autoscaler with this annotation.
        "autoscaler_annotations": {**annotations, "validations.keda.sh/hpa-ownership": "false"},
        "min_replicas": max(settings.replicas, 1),
        "max_replicas": settings.most_replicas,
        "queue_metric": fill(kinds["queue metric"], queue) if settings.queue_target else None,
        "cpu_target": settings.cpu_target,
        **_keda(spec),
        "ingress": [
            *_ingress(settings.allow_from, ["http", *(["grpc"] if has_grpc_port(spec) else [])]),
            *_ingress(settings.metrics_from, ["metrics"]),
        ],
        "monitor_labels": settings.monitor_labels | object_labels,
        "authorization": _authorization(spec),
        "gateway": gateway,
        "gateway_namespace": namespace or settings.namespace,
        "hostnames": list(settings.hostnames) or None,
        "backends": backends(spec.name, HTTP, 0),
        "fewest": settings.replicas,
        "most_served": max(settings.most_replicas, settings.replicas, 1),
        "protocol": settings.protocol,
        "storage": settings.storage,
    }


def _keda(spec: DeploySpec) -> dict[str, Any]:
    settings, keda = spec.kubernetes, spec.kubernetes.keda
    if keda is None:
        return {}
    series = f'{{namespace="{settings.namespace}",service="{spec.name}"}}'
    rate = keda.rate_query or f"sum(rate(tsx_requests_total{series}[1m]))"
    queries = (
        ("queue", f"sum(tsx_requests_waiting{series})", settings.queue_target),
        ("rate", rate, keda.rate_target),
    )
    names = ("trigger", "query", "threshold", "prometheus")
    triggers = [
        fill(
            read_shapes(SHAPES)["trigger"],
            dict(zip(names, (name, query, f"{target:g}", keda.prometheus), strict=True)),
        )
        for name, query, target in queries
        if target
    ]
    # While a metric cannot be read, one or more pods keep their number without a fallback.
    fallback = {"failureThreshold": 3, "replicas": 1, "behavior": "currentReplicasIfHigher"}
    return {
        "cooldown": keda.cooldown,
        "triggers": triggers,
        "initial_cooldown": None if settings.replicas else keda.cooldown,
        "fallback": None if settings.replicas else fallback,
    }


def _nodes(spec: DeploySpec) -> Manifest:
    settings = spec.kubernetes
    domain = settings.gpu_resource.partition("/")[0]
    default_taint = f"{domain}/{'neuron' if domain == 'aws.amazon.com' else 'gpu'}"
    taints = [*([default_taint] if settings.gpus else []), *settings.tolerations]
    return {
        "node_selector": settings.node_selector or None,
        "tolerations": [toleration(taint) for taint in taints] or None,
    }


def toleration(taint: str) -> Manifest:
    key_and_value, _, effect = taint.partition(":")
    key, equals, value = key_and_value.partition("=")
    toleration = (
        {"key": key, "operator": "Equal", "value": value}
        if equals
        else {"key": key, "operator": "Exists"}
    )
    return toleration | ({"effect": effect} if effect else {})


def _pod_resources(spec: DeploySpec) -> Manifest:
    """Return the resources of a pod; the CPU has a limit only with KServe."""
    settings = spec.kubernetes
    requests = {"cpu": canonical(settings.cpu), "memory": canonical(settings.memory)}
    if not settings.kserve:
        requests["ephemeral-storage"] = canonical(settings.disk)
    limits = {name: size for name, size in requests.items() if settings.kserve or name != "cpu"}
    return {
        "requests": requests,
        "limits": limits | ({settings.gpu_resource: str(settings.gpus)} if settings.gpus else {}),
    }


def _pod_environment(spec: DeploySpec) -> list[Manifest]:
    settings = spec.kubernetes
    if settings.kserve:
        envelope = "kserve" if settings.protocol == "v1" else "kservev2"
        return _variables({"TSX_SERVICE_ENVELOPE": envelope, **spec.env}, settings.secrets)
    # The requested CPUs, rounded up. Without this variable, the server would use all cores of the
    # node, because the pod has no limit.
    field = {"resourceFieldRef": {"resource": "requests.cpu", "divisor": "1"}}
    defaults: dict[str, object] = {
        "shutdown_delay": min(NOTICE_S, settings.grace // 4),
        "drain_timeout": max(1, settings.grace - NOTICE_S - MARGIN_S),
        "default_startup_timeout": settings.startup_timeout,
    }
    if has_grpc_port(spec):
        defaults["grpc_inference_address"] = "0.0.0.0"
    if not settings.tokens:
        defaults["disable_token_authorization"] = "true"
    return [
        *([] if CPUS in spec.env else [{"name": CPUS, "valueFrom": field}]),
        *_variables(
            {DEFAULTS_VARIABLE: defaults_text(defaults)} | spec.env, secret_variables(spec)
        ),
    ]


def _variables(values: Mapping[str, str], secrets: Mapping[str, str]) -> list[Manifest]:
    """Return environment variables; `secrets` maps names to SECRET/KEY."""
    return [{"name": name, "value": value} for name, value in values.items()] + [
        {"name": name, "valueFrom": {"secretKeyRef": secret_key(reference)}}
        for name, reference in secrets.items()
    ]


def secret_key(reference: str) -> dict[str, str]:
    secret, _, key = reference.partition("/")
    return {"name": secret, "key": key}


def _authorization(spec: DeploySpec) -> Manifest | None:
    """Return the authorization with which Prometheus reads metrics, if it needs one."""
    reference = secret_variables(spec).get("TSX_MANAGEMENT_TOKEN")
    if reference is None or is_token_free(spec):
        return None
    return {"type": "Bearer", "credentials": secret_key(reference)}


def _ports(spec: DeploySpec) -> dict[str, Any]:
    """Return the ports, with the names of their protocols for balancers.

    https://kubernetes.io/docs/concepts/services-networking/service/#application-protocol
    """
    grpc = [("grpc", GRPC, "kubernetes.io/h2c")] if has_grpc_port(spec) else []
    ports = [("http", HTTP, "http"), *grpc, ("metrics", METRICS, "http")]
    return {
        "container_ports": [
            {"name": name, "containerPort": port, "protocol": "TCP"} for name, port, _ in ports
        ],
        "service_ports": [
            {"name": name, "port": port, "targetPort": name, "protocol": "TCP", "appProtocol": kind}
            for name, port, kind in ports
        ],
    }


def _ingress(namespaces: Sequence[str], ports: Sequence[str]) -> list[Manifest]:
    peers = [
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}
        for name in namespaces
    ]
    allowed_ports = [{"protocol": "TCP", "port": port} for port in ports]
    return [{"from": peers, "ports": allowed_ports}] if peers else []


def canonical(quantity: str) -> str:
    """Return a quantity in the form that Kubernetes reports, so that plans can compare it."""
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
