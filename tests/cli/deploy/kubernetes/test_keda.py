"""ScaledObjects have the fields that KEDA reads, and are refused if nothing could wake the pods."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from tests.cli.deploy.kubernetes.conftest import check
from tests.support.deploying import a_spec
from tsx_cli.deploy.kubernetes.resources import Manifest, manifests

PROMETHEUS = "http://prometheus.monitoring:9090"


def objects(**kubernetes: Any) -> dict[str, Manifest]:
    spec = a_spec("kubernetes", kubernetes=kubernetes)
    built = manifests(spec, "image", {"tsx:name": "digits"})
    return {manifest["kind"]: manifest for manifest in built}


@pytest.mark.parametrize(
    "kubernetes",
    [
        {},
        {"keda": {"rate_target": "2.5"}, "queue_target": 0, "most_replicas": 2},
        {
            "keda": {
                "rate_target": 20,
                "rate_query": "sum(rate(x[1m]))",
                "cooldown": "10m",
            },
            "replicas": 0,
        },
    ],
)
def test_a_scaled_object_replaces_the_autoscaler(kubernetes: dict[str, Any]) -> None:
    keda = {"prometheus": PROMETHEUS, **kubernetes.get("keda", {})}
    built = objects(**{**kubernetes, "keda": keda})
    assert "HorizontalPodAutoscaler" not in built
    # KEDA manages the number of replicas.
    assert "replicas" not in built["Deployment"]["spec"]
    for manifest in built.values():
        check(manifest)


def test_pods_are_scaled_by_waiting_and_by_arriving_requests() -> None:
    keda = {"prometheus": PROMETHEUS, "rate_target": 20}
    spec = objects(namespace="models", keda=keda)["ScaledObject"]["spec"]
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (2, 8)
    assert "fallback" not in spec
    triggers = [trigger["metadata"] for trigger in spec["triggers"]]
    assert [(trigger["query"], trigger["threshold"]) for trigger in triggers] == [
        ('sum(tsx_requests_waiting{namespace="models",service="digits"})', "4"),
        ('sum(rate(tsx_requests_total{namespace="models",service="digits"}[1m]))', "20"),
    ]


def test_idle_pods_end_and_the_gateway_wakes_the_first_one() -> None:
    keda = {
        "prometheus": PROMETHEUS,
        "rate_target": 20,
        "rate_query": "sum(rate(gateway_requests[1m]))",
        "cooldown": "10m",
    }
    spec = objects(replicas=0, most_replicas=1, keda=keda)["ScaledObject"]["spec"]
    assert spec["minReplicaCount"] == 0
    assert spec["cooldownPeriod"] == spec["initialCooldownPeriod"] == 600
    # The fallback keeps one pod, since requests may arrive while Prometheus is unavailable.
    assert spec["fallback"]["replicas"] == 1
    assert spec["triggers"][-1]["metadata"]["query"] == "sum(rate(gateway_requests[1m]))"


@pytest.mark.parametrize(
    ("kubernetes", "reason"),
    [
        (
            {"replicas": 0, "keda": {"prometheus": PROMETHEUS, "rate_target": 20}},
            "are not there count no requests",
        ),
        ({"replicas": 0}, "keeps at least one pod"),
        ({"queue_target": 0, "keda": {"prometheus": PROMETHEUS}}, "nothing to scale by"),
        (
            {"replicas": 9, "keda": {"prometheus": PROMETHEUS}},
            "replicas is 9, and most_replicas is 8",
        ),
        ({"keda": {"rate_target": 20}}, "prometheus"),
        ({"keda": {"prometheus": "prometheus:9090"}}, "prometheus"),
    ],
)
def test_settings_that_prevent_scaling_are_refused(kubernetes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        objects(**kubernetes)
