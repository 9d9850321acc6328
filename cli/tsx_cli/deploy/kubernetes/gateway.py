"""The HTTPRoute of a deployment, whose weights divide the requests between the current version and
a canary. Pure functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ANNOTATION = "tsx/canary"  # how far a canary is
CANARY = "-canary"  # after the name of the deployment
WHOLE = 1000  # of the weights: tenths of a percent
Manifest = dict[str, Any]


def canary_of(name: str) -> str:
    return f"{name}{CANARY}"


def backends(name: str, port: int, percent: float) -> list[Manifest]:
    if not percent:
        return [{"name": name, "port": port}]
    share = round(percent * WHOLE / 100)
    return [
        {"name": name, "port": port, "weight": WHOLE - share},
        {"name": canary_of(name), "port": port, "weight": share},
    ]


def canary_percent(route: Mapping[str, Any], name: str) -> float:
    """The share of the requests that a route sends to the canary."""
    found = [
        each for rule in route["spec"].get("rules") or [] for each in rule.get("backendRefs") or []
    ]
    weights = {each["name"]: each.get("weight", 1) for each in found}
    return 100 * float(weights.get(canary_of(name), 0)) / (sum(weights.values()) or 1)


def weighted(route: Mapping[str, Any], name: str, port: int, percent: float) -> Manifest:
    """An existing route with other weights, as it can be applied: the annotation of the canary has
    another owner.
    """
    metadata, body = route["metadata"], route["spec"]
    kept = {key: metadata[key] for key in ("name", "namespace", "labels") if key in metadata}
    kept["annotations"] = {
        key: value
        for key, value in (metadata.get("annotations") or {}).items()
        if key != ANNOTATION
    }
    first, *others = body["rules"]
    rules = [{**first, "backendRefs": backends(name, port, percent)}, *others]
    return {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "HTTPRoute",
        "metadata": kept,
        "spec": {**body, "rules": rules},
    }
