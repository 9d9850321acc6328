"""The tokens of a deployment on Kubernetes and its NetworkPolicy. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tsx_cli.deploy.container.resources import OPEN
from tsx_cli.deploy.spec import DeploySpec

TOKENS = {
    "TSX_INFERENCE_TOKEN": "inference",
    "TSX_MANAGEMENT_TOKEN": "management",
}  # variable -> key of the Secret
Manifest = dict[str, Any]


def token_secret(spec: DeploySpec) -> str | None:
    """The Secret that tokens are read from; None where none are needed, or where `env` and
    `secrets` set them.
    """
    own = spec.kubernetes
    given = {*spec.env, *own.secrets}
    if (
        not own.tokens
        or own.kserve
        or spec.env.get(OPEN, "").lower() == "true"
        or given >= TOKENS.keys()
    ):
        return None
    return own.token_secret or f"{spec.name}-tokens"


def secret_variables(spec: DeploySpec) -> dict[str, str]:
    """Each variable that is read from a Secret, with SECRET/KEY."""
    secret = token_secret(spec)
    tokens = {} if secret is None else {name: f"{secret}/{key}" for name, key in TOKENS.items()}
    return {
        name: place
        for name, place in (tokens | spec.kubernetes.secrets).items()
        if name not in spec.env
    }


def secret_step(spec: DeploySpec) -> str:
    """The command that creates the Secret of files that are applied by hand: tokens do not belong
    in files that are committed.
    """
    secret = token_secret(spec)
    if secret is None or spec.kubernetes.token_secret is not None:
        return ""
    values = " ".join(f'--from-literal={key}="$(openssl rand -hex 32)"' for key in TOKENS.values())
    return (
        f"kubectl create secret generic {secret} --namespace {spec.kubernetes.namespace} {values},"
        " once, then "
    )


def network_policy(
    spec: DeploySpec, metadata: Manifest, selector: Manifest, requests: Sequence[str]
) -> Manifest:
    """`requests` are the ports for requests. Probes come from the node, which no policy refuses."""
    own = spec.kubernetes
    allowed = ((own.allow_from, requests), (own.metrics_from, ["metrics"]))
    ingress = [_ingress(namespaces, ports) for namespaces, ports in allowed if namespaces]
    body = {
        "podSelector": {"matchLabels": selector},
        "policyTypes": ["Ingress"],
        "ingress": ingress,
    }
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata,
        "spec": body,
    }


def _ingress(namespaces: Sequence[str], ports: Sequence[str]) -> Manifest:
    peers = [
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}
        for name in namespaces
    ]
    return {"from": peers, "ports": [{"protocol": "TCP", "port": port} for port in ports]}


def credentials(spec: DeploySpec) -> Mapping[str, Any]:
    """What Prometheus sends to read metrics."""
    place = secret_variables(spec).get("TSX_MANAGEMENT_TOKEN")
    if place is None or spec.env.get(OPEN, "").lower() == "true":
        return {}
    secret, _, key = place.partition("/")
    return {"authorization": {"type": "Bearer", "credentials": {"name": secret, "key": key}}}
