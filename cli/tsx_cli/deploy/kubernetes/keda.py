"""KEDA's ScaledObject: the pods of a deployment scaled by queries to Prometheus, down to none.

Pure functions.
"""

from __future__ import annotations

from typing import Any

from tsx_cli.deploy.spec import DeploySpec

POLL = 15  # seconds between two looks at the queries, as long as between two scrapes of the pods
FALLBACK = {"failureThreshold": 3, "replicas": 1, "behavior": "currentReplicasIfHigher"}


def scaled_object(
    spec: DeploySpec, metadata: dict[str, Any], behavior: dict[str, Any]
) -> dict[str, Any]:
    """Waiting requests and the rate of requests, each divided by its target for one pod; the larger
    number of pods counts.

    If the minimum is 0, the rate starts the first pod, so it has to be counted in front of the
    pods.
    """
    own, keda = spec.kubernetes, spec.kubernetes.keda
    assert keda is not None
    series = f'{{namespace="{own.namespace}",service="{spec.name}"}}'
    queries: list[tuple[str, str, float]] = []
    if own.queue_target:
        queries.append(("queue", f"sum(tsx_requests_waiting{series})", own.queue_target))
    if keda.rate_target is not None:
        queries.append(
            (
                "rate",
                keda.rate_query or f"sum(rate(tsx_requests_total{series}[1m]))",
                keda.rate_target,
            )
        )
    body: dict[str, Any] = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": spec.name},
        "pollingInterval": POLL,
        "cooldownPeriod": keda.cooldown,
        "minReplicaCount": own.replicas,
        "maxReplicaCount": own.most_replicas,
        "advanced": {"horizontalPodAutoscalerConfig": {"behavior": behavior}},
        "triggers": [
            _trigger(name, keda.prometheus, query, target) for name, query, target in queries
        ],
    }
    if own.replicas == 0:
        # If the rate is unknown, one pod runs. With at least one pod, an autoscaler keeps their
        # number while it cannot read a metric.
        body |= {"initialCooldownPeriod": keda.cooldown, "fallback": FALLBACK}
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": metadata,
        "spec": body,
    }


def _trigger(name: str, prometheus: str, query: str, target: float) -> dict[str, Any]:
    asked = {
        "serverAddress": prometheus,
        "query": query,
        "threshold": f"{target:g}",
        "activationThreshold": "0",
    }
    return {"type": "prometheus", "name": name, "metricType": "AverageValue", "metadata": asked}
