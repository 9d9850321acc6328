"""The HTTPRoute of a deployment, whose weights divide the requests; pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ANNOTATION = "tsx/canary"  # the state of a canary
CANARY = "-canary"  # suffix of the deployment's name
TOTAL_WEIGHT = 1000  # weights in tenths of a percent
Manifest = dict[str, Any]


def canary_of(name: str) -> str:
    return f"{name}{CANARY}"


def backends(name: str, port: int, percent: float) -> list[Manifest]:
    if not percent:
        return [{"name": name, "port": port}]
    share = round(percent * TOTAL_WEIGHT / 100)
    return [
        {"name": name, "port": port, "weight": TOTAL_WEIGHT - share},
        {"name": canary_of(name), "port": port, "weight": share},
    ]


def canary_percent(route: Mapping[str, Any], name: str) -> float:
    """Return the percentage of the requests that a route sends to the canary."""
    references = [
        reference
        for rule in route["spec"].get("rules") or []
        for reference in rule.get("backendRefs") or []
    ]
    weights = {reference["name"]: reference.get("weight", 1) for reference in references}
    return 100 * float(weights.get(canary_of(name), 0)) / (sum(weights.values()) or 1)


def with_weights(route: Mapping[str, Any], name: str, port: int, percent: float) -> Manifest:
    """Return an existing route with other weights, ready to be applied.

    It lacks the annotation of the canary, which has another field manager.
    """
    metadata, body = route["metadata"], route["spec"]
    applied = {key: metadata[key] for key in ("name", "namespace", "labels") if key in metadata}
    applied["annotations"] = {
        key: value
        for key, value in (metadata.get("annotations") or {}).items()
        if key != ANNOTATION
    }
    first, *other_rules = body["rules"]
    rules = [{**first, "backendRefs": backends(name, port, percent)}, *other_rules]
    return {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "HTTPRoute",
        "metadata": applied,
        "spec": {**body, "rules": rules},
    }
