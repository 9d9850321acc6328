"""The HTTPRoute of a deployment, whose weights divide the requests; pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ANNOTATION = "tsx/canary"  # the state of a canary
CANARY_SUFFIX = "-canary"  # suffix of the names of a canary's objects
TOTAL_WEIGHT = 1000  # Weights are tenths of a percent.
Manifest = dict[str, Any]


def annotations_of(manifest: Mapping[str, Any]) -> dict[str, str]:
    return dict(manifest["metadata"].get("annotations") or {})


def canary_of(name: str) -> str:
    return f"{name}{CANARY_SUFFIX}"


def backends(name: str, port: int, percent: float) -> list[Manifest]:
    if not percent:
        return [{"name": name, "port": port}]
    canary_weight = round(percent * TOTAL_WEIGHT / 100)
    return [
        {"name": name, "port": port, "weight": TOTAL_WEIGHT - canary_weight},
        {"name": canary_of(name), "port": port, "weight": canary_weight},
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

    The canary's annotation is left out, because another field manager owns it.
    """
    metadata, body = route["metadata"], route["spec"]
    new_metadata = {
        key: metadata[key] for key in ("name", "namespace", "labels") if key in metadata
    }
    new_metadata["annotations"] = {
        key: value for key, value in annotations_of(route).items() if key != ANNOTATION
    }
    main_rule, *other_rules = body["rules"]
    rules = [{**main_rule, "backendRefs": backends(name, port, percent)}, *other_rules]
    return {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "HTTPRoute",
        "metadata": new_metadata,
        "spec": {**body, "rules": rules},
    }
