"""`tsx deploy --target kubernetes` with a double of kubectl."""

from __future__ import annotations

import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.cli.deploy.kubernetes.conftest import KSERVE, Deploy, container_of
from tests.support.platforms.kubectl import Cluster
from tsx_cli.deploy.engine import engine
from tsx_cli.deploy.image.programs import advice, last_output

KEDA = "--set=kubernetes.keda.prometheus=http://prometheus:9090"


def test_a_deployment_is_applied_rolled_out_and_then_unchanged(
    deploy: Deploy, cluster: Cluster
) -> None:
    cluster.polls = 3
    kinds = [
        "Secret",
        "Deployment",
        "Service",
        "HorizontalPodAutoscaler",
        "PodDisruptionBudget",
        "ServiceMonitor",
    ]
    assert deploy.plan(code=2) == dict.fromkeys(kinds, "create")
    out = deploy.apply()
    assert "digits/1.0" in out
    assert {kind for kind, _ in cluster.objects} == {*kinds, "ReplicaSet"}
    assert all("--server-side" in call for call in cluster.calls if call[0] == "apply")
    deploy.plan(code=0)


def test_a_change_is_shown_rolled_out_and_rolled_back(deploy: Deploy, cluster: Cluster) -> None:
    deploy.apply()
    assert deploy.plan("--set=env.A=b", code=2)["Deployment"] == "update"
    deploy.apply("--set=env.A=b")
    assert deploy.versions == [(1, False), (2, True)]
    deploy("rollback", "--yes")
    assert "A" not in {variable["name"] for variable in container_of(cluster)["env"]}
    history = [(version["id"], version["is_current"]) for version in deploy.read_json("history")]
    assert history == [("digits-2", False), ("digits-1", True)]
    assert deploy.read_json("status")["revision"] == "3"


def test_objects_that_are_no_longer_specified_are_removed(deploy: Deploy, cluster: Cluster) -> None:
    deploy.apply()
    arguments = "--set=kubernetes.monitoring=false --set=kubernetes.most_replicas=2"
    changes = deploy.plan(arguments, code=2)
    assert {id for id, action in changes.items() if action == "delete"} == {
        "ServiceMonitor0",
        "HorizontalPodAutoscaler0",
    }
    deploy.apply(arguments)
    assert cluster.objects["Deployment", "digits"]["spec"]["replicas"] == 2


def test_an_autoscaler_takes_over_without_removing_pods(deploy: Deploy, cluster: Cluster) -> None:
    def replicas() -> int:
        return int(cluster.objects["Deployment", "digits"]["spec"]["replicas"])

    fixed = "--set=kubernetes.replicas=3"
    deploy.apply(fixed, "--set=kubernetes.most_replicas=3")
    # After the first run, only the autoscaler owns the number.
    for value in ("a", "b"):
        deploy.apply("--set=kubernetes.replicas=2", f"--set=env.A={value}")
        assert replicas() == 3
    assert sum("tsx-replicas" in call for call in cluster.calls) == 1
    deploy.apply(fixed, "--set=kubernetes.most_replicas=2")
    assert replicas() == 3


def test_keda_replaces_an_autoscaler_and_manages_its_own(deploy: Deploy, cluster: Cluster) -> None:
    deploy.apply("--set=kubernetes.replicas=3 --set=kubernetes.most_replicas=9")
    autoscaler = cluster.objects["HorizontalPodAutoscaler", "digits"]
    # Without the annotation, KEDA refuses a ScaledObject for a Deployment with an autoscaler.
    assert autoscaler["metadata"]["annotations"]["validations.keda.sh/hpa-ownership"] == "false"
    deploy.apply(KEDA)
    assert ("HorizontalPodAutoscaler", "digits") not in cluster.objects
    scaled = cluster.objects["ScaledObject", "digits"]
    cluster.objects["HorizontalPodAutoscaler", "keda-hpa-digits"] = {
        "metadata": {
            "name": "keda-hpa-digits",
            "ownerReferences": [{"kind": "ScaledObject", "name": "digits"}],
            "labels": dict(scaled["metadata"]["labels"]),
        },
        "spec": {"minReplicas": 2, "maxReplicas": 8},
    }
    deploy.plan(KEDA, code=0)
    assert deploy.read_json("status")["scales"] == ["2 to 8"]
    condition = {"type": "Ready", "status": "False", "message": "no Prometheus"}
    scaled["status"] = {"conditions": [condition]}
    (status,) = deploy.read_json("status")["scales"]
    assert status == "2 to 8, but KEDA cannot scale it: no Prometheus"


def test_a_failed_rollout_has_a_reason_and_a_later_one_succeeds(
    deploy: Deploy, cluster: Cluster
) -> None:
    deploy.apply()
    cluster.failure = "ImagePullBackOff"
    state = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
    labels = {"app.kubernetes.io/name": "digits", "app.kubernetes.io/instance": "digits"}
    cluster.objects["Pod", "digits-1"] = {
        "metadata": {"name": "digits-1", "labels": labels}, "status": {"containerStatuses": [{"state": state}]}
    }  # fmt: skip
    deploy.apply("--set=env.A=b", code=1)
    assert "did not become ready in time" in deploy.err
    assert "ImagePullBackOff no such image" in deploy.err
    # The last lines of the log are shown.
    assert "[pod/digits-1/tsx] loading" in deploy.err
    # The Deployment is not recreated, since its old pods still answer.
    assert deploy.plan("--set=env.A=c", code=2)["Deployment"] == "update"
    cluster.failure = ""
    del cluster.objects["Pod", "digits-1"]
    deploy.apply("--set=env.A=c")


def test_an_unreachable_cluster_is_reported_without_kubectls_log() -> None:
    log = 'E1121 22:12:23.389374   22390 memcache.go:265] "Unhandled Error" err="refused"\n'
    error = "The connection to the server localhost:8080 was refused - did you specify the right host or port?"
    assert last_output(subprocess.CompletedProcess([], 1, "", log * 3 + error)) == error
    assert "--set kubernetes.context=NAME" in advice(error)


def test_destroy_removes_everything(deploy: Deploy, cluster: Cluster) -> None:
    deploy.apply()
    deploy("destroy", "--yes")
    assert cluster.objects == {}
    deploy("destroy", "--yes", code=1)
    assert "there is no deployment 'digits'" in deploy.err


def test_unsupported_kinds_are_omitted_or_refused_if_requested(
    deploy: Deploy, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = {"InferenceService", "ClusterServingRuntime"}
    options = {
        "ScaledObject": KEDA,
        "ServiceMonitor": "--set=kubernetes.monitoring=true",
        "HTTPRoute": "--set=kubernetes.gateway=web/public",
    }
    Cluster(monkeypatch, unknown=frozenset(kinds | options.keys()))
    for kind, arguments in options.items():
        deploy.apply(arguments, code=1)
        assert f"has no {kind}." in deploy.err
    assert "no ServiceMonitor is created" in deploy.apply()
    deploy.plan(code=0)
    deploy("destroy", "--yes")


def test_a_foreign_deployment_is_not_changed(deploy: Deploy, cluster: Cluster) -> None:
    metadata: dict[str, Any] = {"name": "digits", "generation": 1, "labels": {}, "annotations": {}}
    cluster.objects["Deployment", "digits"] = {"metadata": metadata, "spec": {}}
    deploy.apply(code=1)
    assert "tsx deploy did not make it" in deploy.err


def test_a_model_is_invoked_through_port_forwarding(
    deploy: Deploy, cluster: Cluster, tmp_path: Path
) -> None:
    deploy.apply()
    (tmp_path / "in.json").write_text("{}")
    cluster.forwarded = "error: unable to forward port because pod is not running"
    deploy("invoke", "in.json", code=1)
    assert "error: unable to forward port" in deploy.err


def test_kserve_serves_an_archive_from_a_given_storage(deploy: Deploy, cluster: Cluster) -> None:
    kinds = ("ClusterServingRuntime", "InferenceService")
    assert deploy.plan(KSERVE, code=2) == dict.fromkeys(kinds, "create")
    deploy.apply(KSERVE)
    deploy.plan(KSERVE, code=0)


@pytest.mark.parametrize(
    ("service_status", "reason", "seconds"),
    [
        ({"conditions": [{"type": "Ready", "status": "False", "message": "no nodes"}]}, "no progress for 130 s (no nodes)", 130),
        ({"observedGeneration": 0}, "130 s (has not been observed yet)", 130),
        (
            {"modelStatus": {"transitionStatus": "BlockedByFailedLoad", "lastFailureInfo": {"message": "no such key"}}},
            "(BlockedByFailedLoad): no such key", 0,
        ),
    ],
)  # fmt: skip
def test_an_unready_inference_service_is_reported_within_its_deadline(
    deploy: Deploy,
    cluster: Cluster,
    monkeypatch: pytest.MonkeyPatch,
    service_status: dict[str, Any],
    reason: str,
    seconds: float,
) -> None:
    cluster.service_status, time = service_status, [0.0]

    def sleep(duration: float) -> None:
        time[0] += 10

    monkeypatch.setattr(
        "tsx_cli.deploy.target.Engine",
        partial(engine.Engine, sleep=sleep, clock=lambda: time[0] - 0.1),
    )
    deploy.apply(KSERVE, "--set=kubernetes.startup_timeout=60s", code=1)
    assert reason in deploy.err
    assert time[0] == pytest.approx(seconds, abs=10)


def test_errors_without_kubectl_or_a_repository_have_remedies(
    deploy: Deploy, cluster: Cluster, tmp_path: Path
) -> None:
    deploy("digits.mar", "--no-check --yes --set=build.wheel=absent.whl", code=2)
    assert "neither image nor repository is given" in deploy.err
    (tmp_path / "kubectl").unlink()
    deploy.apply(code=1)
    assert "kubectl is not installed" in deploy.err


def test_a_failed_rollout_is_applied_again(
    deploy: Deploy, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    deploy.apply()
    cluster.failure = "ImagePullBackOff"
    deploy.apply("--set=env.A=b", code=1)
    roll_out = cluster._roll_out

    def succeed(deployment: dict[str, Any]) -> None:
        # Kubernetes reports the failure until the pod template changes.
        cluster.failure = ""
        roll_out(deployment)

    monkeypatch.setattr(cluster, "_roll_out", succeed)
    deploy.apply("--set=env.A=c")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("--create-role", "SageMaker and Lambda have that"),
        ("--canary=10%", "--set kubernetes.gateway=NAMESPACE/NAME"),
        ("--canary=10% --set=kubernetes.kserve=true", "canaryTrafficPercent"),
        (
            "--canary=10% --alarm=theirs --set=kubernetes.gateway=web",
            "'theirs' is not a bound",
        ),
        ("--set=kubernetes.hostnames=a.example.com", "set kubernetes.gateway to"),
        ("--set=kubernetes.metrics_from=monitoring", "also set kubernetes.allow_from"),
        ("--set=kubernetes.gateway=Web/", "kubernetes.gateway: String should match"),
        (
            "--set=kubernetes.kserve=true --set=kubernetes.token_secret=a",
            "kubernetes.token_secret has no effect",
        ),
        (
            "--set=kubernetes.kserve=true --set=kubernetes.allow_from=shop",
            "kubernetes.allow_from has no effect",
        ),
    ],
)
def test_options_that_the_target_lacks_are_refused(
    deploy: Deploy, cluster: Cluster, arguments: str, reason: str
) -> None:
    deploy.apply(arguments, code=2)
    assert reason in deploy.err
