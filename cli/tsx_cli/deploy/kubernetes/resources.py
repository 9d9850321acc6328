"""A deployment on Kubernetes, or KServe, as manifests: manifests.yaml with the values of the
specification. Pure functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tsx_cli.common.failure import UsageError
from tsx_cli.deploy.aws.alarms import read_bound
from tsx_cli.deploy.container.resources import DEFAULTS, in_words
from tsx_cli.deploy.engine.resources import Ref
from tsx_cli.deploy.engine.shapes import filled, shapes
from tsx_cli.deploy.image.recipe import UID
from tsx_cli.deploy.kubernetes.gateway import backends
from tsx_cli.deploy.kubernetes.security import is_open, secret_variables
from tsx_cli.deploy.spec import DeploySpec

SHAPES = Path(__file__).with_name("manifests.yaml")
HTTP, METRICS, GRPC = 8080, 8082, 7070
NAME, INSTANCE, MANAGED_BY = (
    "app.kubernetes.io/name",
    "app.kubernetes.io/instance",
    "app.kubernetes.io/managed-by",
)
# seconds for which a pod that is to stop still takes requests, as balancers learn of it late
NOTICE = 5
MARGIN = 5
CPUS = "TSX_CPUS"
NOT_KSERVE = (  # what an InferenceService does not have
    "keda", "token_secret", "gateway", "hostnames", "grpc", "allow_from", "metrics_from", "pull_secret", "monitoring", "monitor_labels",
)  # fmt: skip
Manifest = dict[str, Any]


def manifests(spec: DeploySpec, image: str | Ref, labels: Mapping[str, str]) -> list[Manifest]:
    """In the order in which they are applied. Raises UsageError."""
    own = spec.kubernetes
    _check(spec)
    wanted = {
        "ClusterServingRuntime": own.kserve,
        "InferenceService": own.kserve,
        "Deployment": not own.kserve,
        "Service": not own.kserve,
        "ScaledObject": own.keda,
        "HorizontalPodAutoscaler": not own.kserve and own.keda is None and scales(spec),
        "PodDisruptionBudget": not own.kserve and own.replicas > 1,
        "NetworkPolicy": own.allow_from or own.metrics_from,
        "ServiceMonitor": not own.kserve and own.monitoring is not False,
        "HTTPRoute": own.gateway,
    }
    kinds, values = shapes(SHAPES), _values(spec, image, labels)
    return [filled(kinds[kind], values) for kind, is_wanted in wanted.items() if is_wanted]


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
    if own.kserve and own.storage is None and spec.canary is None:
        raise UsageError(
            "kubernetes.storage is not given: where KServe finds the archive, such as"
            " s3://bucket/models/digits or pvc://claim/digits"
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


def _values(spec: DeploySpec, image: str | Ref, labels: Mapping[str, str]) -> dict[str, Any]:
    """What stands in the shapes. A canary is a second instance of the deployment."""
    own = spec.kubernetes
    chosen = {NAME: labels.get("tsx:name", spec.name), INSTANCE: spec.name}
    marks = {**chosen, MANAGED_BY: "tsx"}
    # Labels hold few characters, so what is longer is an annotation.
    notes = {key.replace(":", "/"): value for key, value in labels.items() if value}
    # Others than these would restart pods.
    shown = {key: value for key, value in notes.items() if key.startswith("tsx/model")}
    namespace, _, gateway = str(own.gateway).rpartition("/")
    kinds = shapes(SHAPES)
    queue = {"queue_target": canonical(str(own.queue_target))}
    return {
        "name": spec.name,
        "namespace": own.namespace,
        "labels": marks,
        "annotations": notes,
        "selector": chosen,
        "image": image,
        "uid": UID,
        "environment": _environment(spec),
        "resources": _sizes(spec),
        "grace": own.grace,
        "keep": spec.keep,
        "replicas": None if scales(spec) else own.replicas,
        "progress_deadline": own.startup_timeout + 60,
        "pod_annotations": shown,
        "start_failures": -(-own.startup_timeout // 5),
        "disk": canonical(own.disk),
        "shared_memory": canonical(own.shared_memory),
        "pull_secrets": own.pull_secret and [{"name": own.pull_secret}],
        **_ports(spec),
        **_nodes(spec),
        # KEDA refuses to take over while this is there.
        "autoscaler_annotations": {**notes, "validations.keda.sh/hpa-ownership": "false"},
        "min_replicas": max(own.replicas, 1),
        "max_replicas": own.most_replicas,
        "queue_metric": filled(kinds["queue metric"], queue) if own.queue_target else None,
        "cpu_target": own.cpu_target,
        **_keda(spec),
        "ingress": [
            *_ingress(own.allow_from, ["http", *(["grpc"] if serves_grpc(spec) else [])]),
            *_ingress(own.metrics_from, ["metrics"]),
        ],
        "monitor_labels": own.monitor_labels | marks,
        "authorization": _authorization(spec),
        "gateway": gateway,
        "gateway_namespace": namespace or own.namespace,
        "hostnames": list(own.hostnames) or None,
        "backends": backends(spec.name, HTTP, 0),
        "fewest": own.replicas,
        "most_served": max(own.most_replicas, own.replicas, 1),
        "protocol": own.protocol,
        "storage": own.storage,
    }


def _keda(spec: DeploySpec) -> dict[str, Any]:
    own, keda = spec.kubernetes, spec.kubernetes.keda
    if keda is None:
        return {}
    series = f'{{namespace="{own.namespace}",service="{spec.name}"}}'
    rate = keda.rate_query or f"sum(rate(tsx_requests_total{series}[1m]))"
    queries = (
        ("queue", f"sum(tsx_requests_waiting{series})", own.queue_target),
        ("rate", rate, keda.rate_target),
    )
    names = ("trigger", "query", "threshold", "prometheus")
    triggers = [
        filled(
            shapes(SHAPES)["trigger"],
            dict(zip(names, (name, query, f"{target:g}", keda.prometheus), strict=True)),
        )
        for name, query, target in queries
        if target
    ]
    # With at least one pod, an autoscaler keeps their number while it cannot read a metric.
    fallback = {"failureThreshold": 3, "replicas": 1, "behavior": "currentReplicasIfHigher"}
    return {
        "cooldown": keda.cooldown,
        "triggers": triggers,
        "initial_cooldown": None if own.replicas else keda.cooldown,
        "fallback": None if own.replicas else fallback,
    }


def _nodes(spec: DeploySpec) -> Manifest:
    own = spec.kubernetes
    domain = own.gpu_resource.partition("/")[0]
    usual = f"{domain}/{'neuron' if domain == 'aws.amazon.com' else 'gpu'}"
    taints = [*([usual] if own.gpus else []), *own.tolerations]
    return {
        "node_selector": own.node_selector or None,
        "tolerations": [toleration(taint) for taint in taints] or None,
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


def _sizes(spec: DeploySpec) -> Manifest:
    """Without a limit of the CPU, except where KServe wants one."""
    own = spec.kubernetes
    requests = {"cpu": canonical(own.cpu), "memory": canonical(own.memory)}
    if not own.kserve:
        requests["ephemeral-storage"] = canonical(own.disk)
    limits = {name: size for name, size in requests.items() if own.kserve or name != "cpu"}
    return {
        "requests": requests,
        "limits": limits | ({own.gpu_resource: str(own.gpus)} if own.gpus else {}),
    }


def _environment(spec: DeploySpec) -> list[Manifest]:
    own = spec.kubernetes
    if own.kserve:
        envelope = "kserve" if own.protocol == "v1" else "kservev2"
        return _variables({"TSX_SERVICE_ENVELOPE": envelope, **spec.env}, own.secrets)
    # What it may count on, rounded up: without a limit of its CPU the pod would take all cores of
    # its node for its own.
    field = {"resourceFieldRef": {"resource": "requests.cpu", "divisor": "1"}}
    defaults: dict[str, object] = {
        "shutdown_delay": min(NOTICE, own.grace // 4),
        "drain_timeout": max(1, own.grace - NOTICE - MARGIN),
        "default_startup_timeout": own.startup_timeout,
    }
    if serves_grpc(spec):
        defaults["grpc_inference_address"] = "0.0.0.0"
    if not own.tokens:
        defaults["disable_token_authorization"] = "true"
    return [
        *([] if CPUS in spec.env else [{"name": CPUS, "valueFrom": field}]),
        *_variables({DEFAULTS: in_words(defaults)} | spec.env, secret_variables(spec)),
    ]


def _variables(values: Mapping[str, str], secrets: Mapping[str, str]) -> list[Manifest]:
    """`secrets`: SECRET/KEY by the variable's name."""
    return [{"name": name, "value": value} for name, value in values.items()] + [
        {"name": name, "valueFrom": {"secretKeyRef": secret_key(place)}}
        for name, place in secrets.items()
    ]


def secret_key(place: str) -> dict[str, str]:
    secret, _, key = place.partition("/")
    return {"name": secret, "key": key}


def _authorization(spec: DeploySpec) -> Manifest | None:
    """What Prometheus sends to read metrics."""
    place = secret_variables(spec).get("TSX_MANAGEMENT_TOKEN")
    if place is None or is_open(spec):
        return None
    return {"type": "Bearer", "credentials": secret_key(place)}


def _ports(spec: DeploySpec) -> dict[str, Any]:
    """With what balancers call the protocol:
    https://kubernetes.io/docs/concepts/services-networking/service/#application-protocol.
    """
    grpc = [("grpc", GRPC, "kubernetes.io/h2c")] if serves_grpc(spec) else []
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
    allowed = [{"protocol": "TCP", "port": port} for port in ports]
    return [{"from": peers, "ports": allowed}] if peers else []


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
