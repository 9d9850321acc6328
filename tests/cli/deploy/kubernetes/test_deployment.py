"""`tsx deploy --target kubernetes`, against a double of kubectl: applied, unchanged, rolled out,
undone, failed, removed.
"""

from __future__ import annotations

import json
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.cli.deploy.kubernetes.conftest import Deploy
from tests.support.platforms.kubectl import Cluster
from tsx_cli.deploy.commands import locations
from tsx_cli.deploy.engine import engine
from tsx_cli.deploy.image.programs import advice, last_output
from tsx_cli.main import main


def test_a_deployment_is_applied_rolled_out_and_then_as_it_should_be(
    deploy: Deploy, cluster: Cluster
) -> None:
    cluster.looks = 3
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
    assert deploy.plan(code=0) == dict.fromkeys(kinds, "same")


def test_a_change_is_shown_rolled_out_and_gone_back_from(deploy: Deploy, cluster: Cluster) -> None:
    deploy.apply()
    assert deploy.plan("--set=env.A=b", code=2)["Deployment"] == "update"
    deploy.apply("--set=env.A=b")
    versions = json.loads(deploy("history", "--json"))
    assert [(each["number"], each["is_current"]) for each in versions] == [(1, False), (2, True)]
    deploy("rollback", "--yes")
    variables = cluster.objects["Deployment", "digits"]["spec"]["template"]["spec"]["containers"][
        0
    ]["env"]
    assert "A" not in {each["name"] for each in variables}
    now = json.loads(deploy("history", "--json"))
    assert [(each["id"], each["is_current"]) for each in now] == [
        ("digits-2", False),
        ("digits-1", True),
    ]
    assert json.loads(deploy("status", "--json"))["revision"] == "3"


def test_what_is_not_asked_for_any_more_goes(deploy: Deploy, cluster: Cluster) -> None:
    deploy.apply()
    words = ("--set=kubernetes.monitoring=false", "--set=kubernetes.most_replicas=2")
    reported = deploy.plan(*words, code=2)
    assert {id: action for id, action in reported.items() if action == "delete"} == {
        "ServiceMonitor0": "delete", "HorizontalPodAutoscaler0": "delete"
    }  # fmt: skip
    deploy.apply(*words)
    assert cluster.objects["Deployment", "digits"]["spec"]["replicas"] == 2


def test_an_autoscaler_takes_over_without_a_loss_of_pods(deploy: Deploy, cluster: Cluster) -> None:
    fixed = ("--set=kubernetes.replicas=3", "--set=kubernetes.most_replicas=3")
    deploy.apply(*fixed)
    for word in ("a", "b"):  # the second time, nobody owns the number any more but the autoscaler
        deploy.apply("--set=kubernetes.replicas=2", f"--set=env.A={word}")
        assert cluster.objects["Deployment", "digits"]["spec"]["replicas"] == 3
    assert sum("tsx-replicas" in call for call in cluster.calls) == 1
    deploy.apply(fixed[0], "--set=kubernetes.most_replicas=2")
    assert cluster.objects["Deployment", "digits"]["spec"]["replicas"] == 3


def test_keda_takes_over_from_an_autoscaler_and_its_own_autoscaler_is_left_to_it(
    deploy: Deploy, cluster: Cluster
) -> None:
    deploy.apply("--set=kubernetes.replicas=3", "--set=kubernetes.most_replicas=9")
    made = cluster.objects["HorizontalPodAutoscaler", "digits"]
    assert (
        made["metadata"]["annotations"]["validations.keda.sh/hpa-ownership"] == "false"
    )  # else KEDA would refuse its ScaledObject
    keda = ("--set=kubernetes.keda.prometheus=http://prometheus:9090",)
    deploy.apply(*keda)
    assert ("HorizontalPodAutoscaler", "digits") not in cluster.objects
    theirs = {
        "name": "keda-hpa-digits",
        "ownerReferences": [{"kind": "ScaledObject", "name": "digits"}],
    }
    labels = dict(
        cluster.objects["ScaledObject", "digits"]["metadata"]["labels"]
    )  # which KEDA copies
    spec = {"minReplicas": 2, "maxReplicas": 8}
    cluster.objects["HorizontalPodAutoscaler", "keda-hpa-digits"] = {
        "metadata": {**theirs, "labels": labels},
        "spec": spec,
    }
    assert set(deploy.plan(*keda, code=0).values()) == {"same"}
    assert json.loads(deploy("status", "--json"))["scales"] == ["2 to 8"]
    condition = {"type": "Ready", "status": "False", "message": "no Prometheus"}
    cluster.objects["ScaledObject", "digits"]["status"] = {"conditions": [condition]}
    assert json.loads(deploy("status", "--json"))["scales"] == [
        "2 to 8, but KEDA cannot scale it: no Prometheus"
    ]


def test_a_rollout_that_fails_says_what_its_pods_wait_for_and_is_mended(
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
    assert "its new pods did not become ready in time" in deploy.err
    assert "digits-1: ImagePullBackOff no such image" in deploy.err
    assert "[pod/digits-1/tsx] loading" in deploy.err  # the end of the log
    assert (
        deploy.plan("--set=env.A=c", code=2)["Deployment"] == "update"
    )  # not made anew: its old pods still answer
    cluster.failure = ""
    del cluster.objects["Pod", "digits-1"]
    deploy.apply("--set=env.A=c")


def test_a_cluster_that_does_not_answer_is_reported_without_what_kubectl_writes_for_itself() -> (
    None
):
    inner = 'E1121 22:12:23.389374   22390 memcache.go:265] "Unhandled Error" err="connection refused"\n'
    said = "The connection to the server localhost:8080 was refused - did you specify the right host or port?"
    assert last_output(subprocess.CompletedProcess([], 1, "", inner * 3 + said)) == said
    assert "lists the available clusters; --set kubernetes.context=NAME chooses another." in advice(
        said
    )


def test_destroy_leaves_nothing(deploy: Deploy, cluster: Cluster) -> None:
    deploy.apply()
    deploy("destroy", "--yes")
    assert cluster.objects == {}
    deploy("destroy", "--yes", code=1)
    assert (
        "there is no deployment 'digits' on the namespace default" in deploy.err
        or "in the namespace default" in deploy.err
    )


def test_what_the_cluster_does_not_know_is_left_out_or_reported_if_it_was_asked_for(
    deploy: Deploy, monkeypatch: pytest.MonkeyPatch
) -> None:
    Cluster(
        monkeypatch,
        unknown=frozenset(
            {
                "ServiceMonitor",
                "InferenceService",
                "ClusterServingRuntime",
                "HTTPRoute",
                "ScaledObject",
            }
        ),
    )
    deploy.apply("--set=kubernetes.keda.prometheus=http://prometheus:9090", code=1)
    assert "has no ScaledObject. KEDA is not installed there; without kubernetes.keda" in deploy.err
    deploy.apply("--set=kubernetes.monitoring=true", code=1)
    assert (
        "has no ServiceMonitor. The Prometheus operator reads it; without the operator, omit it with --set kubernetes.monitoring=false"
        in deploy.err
    )
    deploy.apply("--set=kubernetes.gateway=web/public", code=1)
    assert (
        "has no HTTPRoute. The Gateway API is not installed there; remove kubernetes.gateway"
        in deploy.err
    )
    assert (
        "no ServiceMonitor is created, because the cluster does not have the Prometheus operator"
        in deploy.apply()
    )
    assert set(deploy.plan(code=0).values()) == {"same"}
    deploy("destroy", "--yes")


def test_a_deployment_of_somebody_else_is_left_alone(deploy: Deploy, cluster: Cluster) -> None:
    metadata: dict[str, Any] = {"name": "digits", "generation": 1, "labels": {}, "annotations": {}}
    cluster.objects["Deployment", "digits"] = {"metadata": metadata, "spec": {}}
    deploy.apply(code=1)
    assert "Deployment digits already exists, and tsx deploy did not make it" in deploy.err


def test_a_model_is_asked_through_the_connection_of_kubectl(
    deploy: Deploy, cluster: Cluster, tmp_path: Path
) -> None:
    deploy.apply()
    (tmp_path / "in.json").write_text("{}")
    cluster.forwarded = "error: unable to forward port because pod is not running"
    deploy("invoke", "in.json", code=1)
    assert "digits cannot be reached: error: unable to forward port" in deploy.err


def test_kserve_serves_an_archive_that_lies_elsewhere(deploy: Deploy, cluster: Cluster) -> None:
    words = ("--set=kubernetes.kserve=true", "--set=kubernetes.storage=s3://models/digits")
    assert deploy.plan(*words, code=2) == {
        "ClusterServingRuntime": "create",
        "InferenceService": "create",
    }
    deploy.apply(*words)
    assert set(deploy.plan(*words, code=0).values()) == {"same"}


@pytest.mark.parametrize(
    ("served", "reason", "seconds"),
    [
        ({"conditions": [{"type": "Ready", "status": "False", "message": "no nodes"}]}, "no progress for 130 s (no nodes)", 130),
        ({"observedGeneration": 0}, "no progress for 130 s (has not been observed yet)", 130),
        (
            {"modelStatus": {"transitionStatus": "BlockedByFailedLoad", "lastFailureInfo": {"message": "no such key"}}},
            "its model was not loaded (BlockedByFailedLoad): no such key", 0,
        ),
    ],
)  # fmt: skip
def test_an_inference_service_that_does_not_become_ready_is_reported_within_its_own_deadline(
    deploy: Deploy,
    cluster: Cluster,
    monkeypatch: pytest.MonkeyPatch,
    served: dict[str, Any],
    reason: str,
    seconds: float,
) -> None:
    cluster.served, time = served, [0.0]

    def sleep(duration: float) -> None:
        time[0] += 10

    monkeypatch.setattr(
        locations, "Engine", partial(engine.Engine, sleep=sleep, clock=lambda: time[0] - 0.1)
    )
    words = (
        "--set=kubernetes.kserve=true",
        "--set=kubernetes.storage=s3://models/digits",
        "--set=kubernetes.startup_timeout=60s",
    )
    deploy.apply(*words, code=1)
    assert reason in deploy.err
    assert time[0] == pytest.approx(seconds, abs=10)


def test_without_kubectl_and_without_a_place_for_the_image_the_ways_are_reported(
    deploy: Deploy, cluster: Cluster, tmp_path: Path
) -> None:
    said = [
        "deploy",
        "digits.mar",
        "--name",
        "digits",
        "--target",
        "kubernetes",
        "--no-check",
        "--yes",
        "--set=build.wheel=absent.whl",
    ]
    assert main(said) == 2
    assert "neither image nor repository is given: set --image" in deploy.capsys.readouterr().err
    (tmp_path / "kubectl").unlink()
    deploy.apply(code=1)
    assert (
        "kubectl is not installed; install it, or write the manifests with --emit kubernetes and apply"
        in deploy.err
    )


def test_a_rollout_that_has_failed_is_applied_again(
    deploy: Deploy, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    deploy.apply()
    cluster.failure = "ImagePullBackOff"
    deploy.apply("--set=env.A=b", code=1)
    applied = cluster._roll_out

    def well(deployment: dict[str, Any]) -> None:
        cluster.failure = ""  # Kubernetes tells of the failure until other pods are asked for
        applied(deployment)

    monkeypatch.setattr(cluster, "_roll_out", well)
    deploy.apply("--set=env.A=c")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--create-role"], "SageMaker and Lambda have that, and the target kubernetes does not"),
        (["--canary=10%"], "none is named: --set kubernetes.gateway=NAMESPACE/NAME"),
        (
            ["--canary=10%", "--set=kubernetes.kserve=true"],
            "canaryTrafficPercent of an InferenceService",
        ),
        (
            ["--canary=10%", "--alarm=theirs", "--set=kubernetes.gateway=web"],
            "'theirs' is not a bound",
        ),
        (
            ["--set=kubernetes.hostnames=a.example.com"],
            "set kubernetes.gateway to the NAMESPACE/NAME",
        ),
        (["--set=kubernetes.metrics_from=monitoring"], "also set kubernetes.allow_from"),
        (["--set=kubernetes.gateway=Web/"], "kubernetes.gateway: String should match"),
        (
            ["--set=kubernetes.kserve=true", "--set=kubernetes.token_secret=a"],
            "kubernetes.token_secret has no effect",
        ),
        (
            ["--set=kubernetes.kserve=true", "--set=kubernetes.allow_from=shop"],
            "kubernetes.allow_from has no effect",
        ),
    ],
)
def test_what_the_target_does_not_have_is_refused(
    deploy: Deploy, cluster: Cluster, words: list[str], reason: str
) -> None:
    deploy.apply(*words, code=2)
    assert reason in deploy.err
