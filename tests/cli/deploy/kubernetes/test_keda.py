"""A ScaledObject has the fields that KEDA reads, and none where nothing could wake the pods
again.
"""

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
    return {each["kind"]: each for each in manifests(spec, "image", {"tsx:name": "digits"})}


@pytest.mark.parametrize(
    "kubernetes",
    [
        {"keda": {"prometheus": PROMETHEUS}},
        {
            "keda": {"prometheus": PROMETHEUS, "rate_target": "2.5"},
            "queue_target": 0,
            "most_replicas": 2,
        },
        {
            "keda": {
                "prometheus": PROMETHEUS,
                "rate_target": 20,
                "rate_query": "sum(rate(x[1m]))",
                "cooldown": "10m",
            },
            "replicas": 0,
        },
    ],
)
def test_a_scaled_object_takes_the_place_of_the_autoscaler(kubernetes: dict[str, Any]) -> None:
    made = objects(**kubernetes)
    assert "HorizontalPodAutoscaler" not in made
    assert "replicas" not in made["Deployment"]["spec"]  # KEDA decides
    for manifest in made.values():
        check(manifest)


def test_pods_are_scaled_by_what_waits_and_by_what_arrives() -> None:
    scaled = objects(namespace="models", keda={"prometheus": PROMETHEUS, "rate_target": 20})[
        "ScaledObject"
    ]["spec"]
    assert (scaled["minReplicaCount"], scaled["maxReplicaCount"], "fallback" in scaled) == (
        2,
        8,
        False,
    )
    assert [
        (each["metadata"]["query"], each["metadata"]["threshold"]) for each in scaled["triggers"]
    ] == [
        ('sum(tsx_requests_waiting{namespace="models",service="digits"})', "4"),
        ('sum(rate(tsx_requests_total{namespace="models",service="digits"}[1m]))', "20"),
    ]


def test_without_requests_all_pods_go_and_what_is_in_front_of_them_wakes_the_first() -> None:
    keda = {
        "prometheus": PROMETHEUS,
        "rate_target": 20,
        "rate_query": "sum(rate(gateway_requests[1m]))",
        "cooldown": "10m",
    }
    scaled = objects(replicas=0, most_replicas=1, keda=keda)["ScaledObject"]["spec"]
    assert (
        scaled["minReplicaCount"],
        scaled["cooldownPeriod"],
        scaled["initialCooldownPeriod"],
    ) == (0, 600, 600)
    assert (
        scaled["fallback"]["replicas"] == 1
    )  # while Prometheus does not answer, requests may arrive
    assert scaled["triggers"][-1]["metadata"]["query"] == "sum(rate(gateway_requests[1m]))"


@pytest.mark.parametrize(
    ("kubernetes", "reason"),
    [
        (
            {"replicas": 0, "keda": {"prometheus": PROMETHEUS, "rate_target": 20}},
            "pods that are not there count no requests",
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
def test_what_could_not_scale_is_refused(kubernetes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        objects(**kubernetes)
