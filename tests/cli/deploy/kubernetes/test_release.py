"""`tsx deploy --canary` on Kubernetes, over a double of kubectl: what a Gateway's weights, the pods
and their metrics become.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.deploy.kubernetes.conftest import Deploy, answering, check
from tests.support.platforms.kubectl import PLURALS, Cluster
from tsx_cli.deploy.commands import locations
from tsx_cli.deploy.engine import engine
from tsx_cli.deploy.engine.resources import Resource
from tsx_cli.deploy.image.programs import Program
from tsx_cli.deploy.kubernetes import kinds, release
from tsx_cli.main import main

GATEWAY = (
    "--set=kubernetes.gateway=web/public",
    "--set=kubernetes.hostnames=digits.example.com",
)
CANARY = (*GATEWAY, "--canary=10%", "--bake=10m", "--alarm=5xx>0", "--alarm=p95>300ms")
NEW = ("--set=env.A=b",)


class Watched:
    """The clock, the metrics of the canary's pods, and the order of what is done to the cluster.

    At each wait `at` may do something, once, from that second on.
    """

    def __init__(self, cluster: Cluster, patch: pytest.MonkeyPatch) -> None:
        self.cluster, self.time, self.begin = (
            cluster,
            datetime(2026, 11, 21, tzinfo=timezone.utc),
            None,
        )
        self.errors, self.slow = 0, 0
        self.at: dict[float, Any] = {}
        self.seconds = 0.0
        self.steps: list[str] = []
        patch.setattr(release, "now", lambda: self.time)
        patch.setattr(
            locations,
            "Engine",
            partial(engine.Engine, sleep=self.sleep, clock=lambda: self.seconds),
        )
        self._run = cluster.run
        patch.setattr(cluster, "run", self.run)

    def sleep(self, seconds: float) -> None:
        self.time += timedelta(seconds=10)
        self.seconds += 10
        for due in [due for due in self.at if due <= self.seconds]:
            self.at.pop(due)()

    def run(self, words: list[str], stdin: str) -> Any:
        before = self.weights()
        done = self._run(words, stdin)
        verb, said = words[0], json.loads(stdin or "{}")
        if verb == "delete" and words[1].startswith("deployments"):
            self.steps.append(f"delete {words[2]}")
            route = self.cluster.objects.get(("HTTPRoute", "digits"))
            if route is not None:
                conditions = route["status"]["parents"][0]["conditions"]
                assert all(
                    each["observedGeneration"] == route["metadata"]["generation"]
                    for each in conditions
                )
                assert self.weights() == {"digits": 1}
        if verb == "apply" and said["kind"] == "Deployment" and "template" in said["spec"]:
            self.steps.append(f"apply {said['metadata']['name']}")
        if self.weights() not in ({}, before):
            self.steps.append(
                f"route {' '.join(f'{name}={weight}' for name, weight in self.weights().items())}"
            )
        return done

    def weights(self) -> dict[str, int]:
        route = self.cluster.objects.get(("HTTPRoute", "digits"), {"spec": {"rules": []}})
        return {
            each["name"]: each.get("weight", 1)
            for rule in route["spec"]["rules"]
            for each in rule["backendRefs"]
        }

    def metrics(self) -> str:
        counts = {"0.25": 100, "0.5": 100 + self.slow, "+Inf": 100 + self.slow}
        rows = [f'tsx_errors_total{{model_name="digits"}} {self.errors}']
        rows += [
            f'tsx_request_seconds_bucket{{model_name="digits",le="{le}"}} {count}'
            for le, count in counts.items()
        ]
        return "\n".join(rows)


@pytest.fixture
def watched(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    """With a server in the place of the pods' metrics, which wants the token of the Secret."""
    watched = Watched(cluster, monkeypatch)

    def answer(request: BaseHTTPRequestHandler) -> tuple[int, bytes]:
        token = f"Bearer {cluster.secret('digits-tokens', 'management')}"
        is_known = request.headers["Authorization"] == token
        return (200, watched.metrics().encode()) if is_known else (401, b"{}")

    with answering(cluster, answer):
        yield watched


@pytest.fixture
def kubectl() -> str:
    """The real one, before `deploy` puts the double's name on the PATH."""
    return shutil.which("kubectl") or ""


def variables(cluster: Cluster, name: str = "digits") -> dict[str, str]:
    found = cluster.objects["Deployment", name]["spec"]["template"]["spec"]["containers"][0]["env"]
    return {each["name"]: each.get("value", "") for each in found}


BEGUN = ["apply digits-canary", "route digits=900 digits-canary=100"]


def test_a_canary_that_holds_moves_on_while_each_request_has_a_ready_pod(
    deploy: Deploy, cluster: Cluster, watched: Watched
) -> None:
    deploy.apply(*CANARY)  # the first version has nothing beside it
    assert watched.steps == ["apply digits", "route digits=1"]
    before = set(cluster.objects)
    watched.steps.clear()
    shown = deploy(
        "plan",
        "digits.mar",
        "--no-check",
        "--image",
        "registry.example.com/digits:1",
        *CANARY,
        *NEW,
        code=2,
    )
    assert "how: percent=10.0, bake=600, alarms=5xx>0 and p95>300ms" in shown
    deploy.apply(*CANARY, *NEW)
    assert watched.steps == [*BEGUN, "apply digits", "route digits=1", "delete digits-canary"]
    assert watched.seconds >= 600
    assert variables(cluster)["A"] == "b"
    assert {key for key in set(cluster.objects) - before if key[0] != "ReplicaSet"} == set()
    assert set(deploy.plan(*CANARY, *NEW, code=0).values()) == {"same"}
    forwarded = [call for call in cluster.calls if call[0] == "port-forward"]
    assert forwarded[0][3:] == ["pod/digits-canary-pod-0", ":8082"]
    assert 40 < len(forwarded) < 70  # not at each look
    assert ("Deployment", "digits-canary") in {
        (each["kind"], each["metadata"]["name"]) for each in cluster.applied
    }
    for manifest in cluster.applied:
        manifest["spec" if "spec" in manifest else "data"].pop(
            "clusterIP", None
        )  # what the double adds to all
        check(manifest)


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ({"errors": 1}, "the alarm 5xx>0 went off (1 in a minute)"),
        ({"slow": 50}, "the alarm p95>300ms went off (488 ms)"),
        ({"restarts": 2}, "the alarm restarts>0 went off (2 of its containers)"),
    ],
)
def test_an_alarm_takes_the_share_back_before_the_pods_go(
    deploy: Deploy, cluster: Cluster, watched: Watched, what: dict[str, int], why: str
) -> None:
    deploy.apply(*CANARY)
    watched.steps.clear()
    for name, value in what.items():
        watched.at[120] = partial(setattr, cluster if name == "restarts" else watched, name, value)
    deploy.apply(*CANARY, *NEW, code=1)
    assert f"the stable version of digits has all requests again: {why}" in deploy.err
    assert "The end of its log:\n[pod/digits-1/tsx] RuntimeError: no weights" in deploy.err
    assert watched.steps == [*BEGUN, "route digits=1", "delete digits-canary"]
    assert "A" not in variables(cluster)
    assert {name for _, name in cluster.objects if "canary" in name} == set()
    watched.errors = watched.slow = cluster.restarts = 0
    deploy.apply(*CANARY, *NEW)
    assert variables(cluster)["A"] == "b"


def test_a_canary_whose_pods_do_not_start_never_gets_a_request(
    deploy: Deploy, cluster: Cluster, watched: Watched
) -> None:
    deploy.apply(*CANARY)
    watched.steps.clear()
    cluster.failure, cluster.failing = "ImagePullBackOff", "digits-canary"
    deploy.apply(*CANARY, *NEW, code=1)
    assert (
        "digits has all requests again: the canary's replicas failed: its new pods did not become ready in time"
        in deploy.err
    )
    assert watched.steps == ["apply digits-canary", "delete digits-canary"]


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("second", [10, 20, 300])
def test_an_interrupted_canary_is_continued_by_the_same_command(
    deploy: Deploy, cluster: Cluster, watched: Watched, second: int
) -> None:
    deploy.apply(*CANARY)
    watched.steps.clear()
    watched.at[second] = interrupt
    deploy.apply(*CANARY, *NEW, code=130)
    assert "A canary that has begun keeps its share of the requests" in deploy.err
    deploy.apply(*CANARY, *NEW)
    assert watched.steps == [*BEGUN, "apply digits", "route digits=1", "delete digits-canary"]
    assert 600 <= watched.seconds < 700


def test_failures_while_nobody_watched_count_when_somebody_does(
    deploy: Deploy, cluster: Cluster, watched: Watched
) -> None:
    deploy.apply(*CANARY)
    watched.at[300] = interrupt
    deploy.apply(*CANARY, *NEW, code=130)
    watched.time += timedelta(hours=1)
    watched.errors = 70
    deploy.apply(*CANARY, *NEW, code=1)
    assert "the alarm 5xx>0 went off" in deploy.err


def test_a_canary_that_cannot_be_watched_waits_and_then_goes_back(
    deploy: Deploy, cluster: Cluster, watched: Watched
) -> None:
    deploy.apply(*CANARY)
    reached, broken = cluster.forwarded, "error: unable to forward port"
    watched.at = {
        500: partial(setattr, cluster, "forwarded", broken),
        780: partial(setattr, cluster, "forwarded", reached),
    }
    deploy.apply(*CANARY, *NEW)
    assert watched.seconds >= 780
    watched.seconds, cluster.forwarded = 0, broken
    deploy.apply(*CANARY, "--set=env.A=c", code=1)
    assert (
        "digits has all requests again: the canary's metrics cannot be read: digits-canary-pod-0 cannot be reached"
        in deploy.err
    )
    assert 300 < watched.seconds < 400
    assert variables(cluster)["A"] == "b"


def test_a_canary_whose_share_no_gateway_takes_goes_back(
    deploy: Deploy, cluster: Cluster, watched: Watched
) -> None:
    deploy.apply(*CANARY)
    watched.at = {
        5: partial(setattr, cluster, "taken", ("False", "BackendNotFound")), 500: partial(setattr, cluster, "taken", ("True", ""))
    }  # fmt: skip
    deploy.apply(*CANARY, *NEW, code=1)
    assert (
        "digits has all requests again: the route: its Gateway does not take it: BackendNotFound"
        in deploy.err
    )
    assert 500 <= watched.seconds < 600
    assert watched.weights() == {"digits": 1}


def test_a_canary_with_another_share_has_as_many_pods_as_it_needs(
    deploy: Deploy, cluster: Cluster, watched: Watched
) -> None:
    fixed = ("--set=kubernetes.replicas=10", "--set=kubernetes.most_replicas=10")
    deploy.apply(*CANARY, *fixed)
    watched.at[300] = interrupt
    deploy.apply(*CANARY, *fixed, *NEW, code=130)
    assert cluster.objects["Deployment", "digits-canary"]["spec"]["replicas"] == 1
    watched.at[600] = interrupt
    deploy.apply(*CANARY, "--canary=30%", *fixed, *NEW, code=130)
    assert cluster.objects["Deployment", "digits-canary"]["spec"]["replicas"] == 3
    assert watched.weights() == {"digits": 700, "digits-canary": 300}


def test_a_canary_whose_pods_are_gone_goes_back_at_once_though_nothing_can_read_their_metrics(
    deploy: Deploy, cluster: Cluster, watched: Watched
) -> None:
    deploy.apply(*CANARY)

    def gone() -> None:
        cluster.forwarded, cluster.scaling = "error: unable to forward port", "digits-canary"

    watched.at[120] = gone
    deploy.apply(*CANARY, *NEW, code=1)
    assert (
        "digits has all requests again: the canary's replicas are not ready any more" in deploy.err
    )
    assert watched.seconds < 200


def test_a_canary_is_watched_while_the_stable_deployment_scales(
    deploy: Deploy, cluster: Cluster, watched: Watched
) -> None:
    deploy.apply(*CANARY)
    watched.at = {
        120: partial(setattr, cluster, "scaling", "digits"),
        200: partial(setattr, watched, "errors", 1),
    }
    deploy.apply(*CANARY, *NEW, code=1)
    assert "the alarm 5xx>0 went off" in deploy.err
    assert watched.seconds < 300


def rolled_out(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, then: Callable[[], None]) -> None:
    """Calls `then`, once, when the pods of the stable Deployment are to be replaced."""
    roll_out, calls = cluster._roll_out, iter([then])

    def both(deployment: dict[str, Any]) -> None:
        if deployment["metadata"]["name"] == "digits":
            next(calls, lambda: None)()
        roll_out(deployment)

    monkeypatch.setattr(cluster, "_roll_out", both)


def test_a_canary_follows_a_rollout_that_has_failed(
    deploy: Deploy, cluster: Cluster, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    deploy.apply(*GATEWAY)
    cluster.failure, cluster.failing = "ImagePullBackOff", "digits"
    deploy.apply(*GATEWAY, *NEW, code=1)
    watched.steps.clear()
    rolled_out(cluster, monkeypatch, partial(setattr, cluster, "failure", ""))
    deploy.apply(*CANARY, "--set=env.A=c")
    assert watched.steps == [*BEGUN, "apply digits", "route digits=1", "delete digits-canary"]
    assert variables(cluster)["A"] == "c"


def test_rollback_while_all_pods_get_the_version_of_the_canary_brings_the_previous_one_back(
    deploy: Deploy, cluster: Cluster, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    deploy.apply(*CANARY)
    rolled_out(cluster, monkeypatch, lambda: watched.at.update({0: interrupt}))
    deploy.apply(*CANARY, *NEW, code=130)
    assert variables(cluster)["A"] == "b"
    watched.steps.clear()
    deploy("rollback", "--yes")
    assert "A" not in variables(cluster)
    assert watched.steps == ["route digits=1", "delete digits-canary"]


def begun(deploy: Deploy, watched: Watched) -> None:
    deploy.apply(*CANARY)
    watched.at[300] = interrupt
    deploy.apply(*CANARY, *NEW, code=130)
    watched.steps.clear()


def test_promote_sends_all_requests_to_the_canary_now(
    deploy: Deploy, cluster: Cluster, watched: Watched
) -> None:
    deploy("promote", "--yes", code=1)
    begun(deploy, watched)
    assert json.loads(deploy("status", "--json"))["canary"][0] == {
        "model": "digits/1.0", "percent": 10, "since": "2026-11-21T00:00:20+00:00"
    }  # fmt: skip
    deploy("promote", "--yes")
    assert watched.steps == ["apply digits", "route digits=1", "delete digits-canary"]
    template = cluster.objects["Deployment", "digits"]["spec"]["template"]
    assert "digits-canary" not in json.dumps(template)
    assert "replicas" not in [
        field[1] for field in cluster.owners["Deployment", "digits"]["tsx"] if field[0] == "spec"
    ]
    assert set(deploy.plan(*CANARY, *NEW, code=0).values()) == {"same"}
    deploy("promote", "--yes", code=1)
    assert "digits has no canary" in deploy.err


def test_keda_does_not_scale_a_canary_and_goes_on_scaling_what_is_promoted(
    deploy: Deploy, cluster: Cluster, watched: Watched
) -> None:
    keda = ("--set=kubernetes.keda.prometheus=http://prometheus:9090",)
    deploy.apply(*CANARY, *keda)
    cluster.objects["Deployment", "digits"]["spec"]["replicas"] = 0  # KEDA found no requests
    watched.at[300] = interrupt
    deploy.apply(*CANARY, *keda, *NEW, code=130)
    assert cluster.objects["Deployment", "digits-canary"]["spec"]["replicas"] == 1
    assert [name for kind, name in cluster.objects if kind == "ScaledObject"] == ["digits"]
    deploy("promote", "--yes")
    assert "replicas" not in [
        field[1] for field in cluster.owners["Deployment", "digits"]["tsx"] if field[0] == "spec"
    ]


def test_rollback_ends_a_canary(deploy: Deploy, cluster: Cluster, watched: Watched) -> None:
    begun(deploy, watched)
    assert [(each["id"], each["percent"]) for each in json.loads(deploy("history", "--json"))] == [
        ("digits-1", 0),
        ("digits-canary", 10),
    ]
    deploy("rollback", "--version=2", "--yes", code=1)
    assert "version 2 of digits is its canary" in deploy.err
    deploy("rollback", "--yes")
    assert watched.steps == ["route digits=1", "delete digits-canary"]
    assert "A" not in variables(cluster)


def test_a_rollback_does_not_bring_back_a_canary_that_is_over(
    deploy: Deploy, cluster: Cluster, watched: Watched
) -> None:
    deploy.apply(*CANARY)
    deploy.apply(*CANARY, *NEW)
    deploy("rollback", "--yes")
    assert "A" not in variables(cluster)
    assert json.loads(deploy("status", "--json"))["canary"] == []


def test_a_run_without_a_canary_ends_one_that_is_under_way(
    deploy: Deploy, cluster: Cluster, watched: Watched
) -> None:
    begun(deploy, watched)
    assert deploy.plan(*GATEWAY, *NEW, code=2)["Deployment"] == "update"
    deploy.apply(*GATEWAY, *NEW)
    assert watched.steps == ["apply digits", "route digits=1", "delete digits-canary"]


def test_a_canary_that_was_deleted_by_hand_gets_no_requests_from_the_next_run(
    deploy: Deploy, cluster: Cluster, watched: Watched
) -> None:
    begun(deploy, watched)
    del cluster.objects["Deployment", "digits-canary"]
    deploy.apply(*GATEWAY)
    assert watched.weights() == {"digits": 1}
    assert {
        name for kind, name in cluster.objects if "canary" in name and kind != "ReplicaSet"
    } == set()


def test_a_plan_that_is_older_than_the_end_of_a_canary_changes_nothing(
    deploy: Deploy, cluster: Cluster, watched: Watched
) -> None:
    begun(deploy, watched)
    manifest = dict(cluster.objects["HTTPRoute", "digits"])
    deploy("rollback", "--yes")
    there = kinds.Cluster(Program("kubectl"), "default")
    release.WeightedRoute().create(
        there,
        Resource("HTTPRoute", "Kubernetes::HTTPRoute", "digits", {**manifest, "kind": "HTTPRoute"}),
    )
    assert watched.weights() == {"digits": 1}
    watched.steps.clear()
    stable = release.Release()
    found = stable.observe(there, "digits")
    assert found is not None
    stable.update(
        there,
        Resource("Deployment", "Kubernetes::Deployment", "digits", {"Canary": release.NONE}),
        found,
        set(),
    )
    assert watched.steps == []


def test_what_does_not_change_the_pods_needs_no_canary(
    deploy: Deploy, cluster: Cluster, watched: Watched
) -> None:
    deploy.apply(*CANARY)
    watched.steps.clear()
    deploy.apply(*CANARY, "--set=kubernetes.replicas=3", "--set=kubernetes.most_replicas=3")
    assert watched.steps == ["apply digits"]


def test_destroy_takes_a_canary_along(deploy: Deploy, cluster: Cluster, watched: Watched) -> None:
    begun(deploy, watched)
    watched.at.clear()
    deploy("destroy", "--yes")
    assert cluster.objects == {}


def test_a_gateway_that_refuses_the_route_is_reported_in_its_words(
    deploy: Deploy, cluster: Cluster, watched: Watched
) -> None:
    cluster.taken = ("False", "NotAllowedByListeners")
    deploy.apply(*GATEWAY, code=1)
    assert (
        "no progress for 310 s (its Gateway does not take it: NotAllowedByListeners)" in deploy.err
    )
    watched.at[watched.seconds + 50] = lambda: setattr(cluster, "taken", ("True", ""))
    deploy.apply(*GATEWAY)


def test_a_deployment_without_the_label_of_instances_is_updated_first(
    deploy: Deploy, cluster: Cluster, watched: Watched
) -> None:
    deploy.apply(*GATEWAY)
    deployment = cluster.objects["Deployment", "digits"]["spec"]
    for labels in (
        deployment["selector"]["matchLabels"],
        deployment["template"]["metadata"]["labels"],
    ):
        del labels["app.kubernetes.io/instance"]
    deploy.apply(*CANARY, *NEW, code=1)
    assert "have no label app.kubernetes.io/instance" in deploy.err
    deploy.apply(*GATEWAY, *NEW)  # which keeps the selector, as the cluster would refuse another
    assert deployment["selector"] != cluster.objects["Service", "digits"]["spec"]["selector"]
    first = cluster.objects["ReplicaSet", "digits-1"]["spec"]["template"]["metadata"]["labels"]
    del first["app.kubernetes.io/instance"]
    deploy("rollback", "--yes", code=1)
    assert (
        "version 1 of digits was made by an earlier tsx, and the Service would not find its pods"
        in deploy.err
    )
    deploy.apply(*CANARY)
    assert "A" not in variables(cluster)


def test_an_object_of_somebody_else_is_not_taken_for_the_canary(
    deploy: Deploy, cluster: Cluster, watched: Watched
) -> None:
    deploy.apply(*CANARY)
    cluster.objects["Service", "digits-canary"] = {
        "metadata": {"name": "digits-canary", "labels": {}},
        "spec": {},
    }
    deploy.apply(*CANARY, *NEW, code=1)
    assert "Service digits-canary already exists, and it is not the canary of digits" in deploy.err


@pytest.mark.parametrize("is_lost", [False, True], ids=["before", "after"])
def test_a_call_that_fails_is_made_again_by_the_next_run(
    deploy: Deploy,
    cluster: Cluster,
    watched: Watched,
    monkeypatch: pytest.MonkeyPatch,
    is_lost: bool,
) -> None:
    """Each call that changes something fails once, before it is carried out or with its answer
    lost.
    """
    run, failed = cluster.run, set[str]()

    def failing(words: list[str], stdin: str) -> Any:
        said = json.loads(stdin or "{}")
        what = f"{words[:3]} {said.get('kind')} {said.get('metadata', {}).get('name')} {watched.weights()}"
        if words[0] not in ("apply", "create", "delete") or what in failed:
            return run(words, stdin)
        failed.add(what)
        if is_lost:
            run(words, stdin)
        return subprocess.CompletedProcess(["kubectl"], 1, "", "broken off")

    monkeypatch.setattr(cluster, "run", failing)
    for words in (CANARY, (*CANARY, *NEW)):
        command = [
            "deploy",
            "apply",
            "digits.mar",
            "--no-check",
            "--yes",
            "--image",
            "a/b@sha256:1",
            "--name",
            "digits",
        ]
        for _ in range(60):
            if main([*command, "--target", "kubernetes", *words]) == 0:
                break
            assert "broken off" in deploy.capsys.readouterr().err
    assert len(failed) > 15
    assert variables(cluster)["A"] == "b"
    assert watched.weights() == {"digits": 1}
    assert not [name for _, name in cluster.objects if "canary" in name]


def lived(deploy: Deploy, watched: Watched, directory: Path) -> None:
    """All verbs that ask a cluster for something."""
    begun(deploy, watched)
    (directory / "in.json").write_text("{}")
    deploy("promote", "--yes")
    deploy("logs", "--since=1h")
    deploy("invoke", "in.json", code=1)
    deploy("rollback", "--yes")
    deploy("destroy", "--yes")


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
@pytest.mark.usefixtures("processes")
def test_kubectl_knows_each_word_that_it_is_given(
    kubectl: str, deploy: Deploy, cluster: Cluster, watched: Watched, tmp_path: Path
) -> None:
    lived(deploy, watched, tmp_path)
    forms = {
        (words[0], *(word for word in words if word.startswith("--"))): words
        for words in cluster.calls
    }
    assert {form[0] for form in forms} == {
        "get",
        "apply",
        "create",
        "delete",
        "rollout",
        "logs",
        "port-forward",
    }
    for words in forms.values():
        command = [kubectl, "--server", "http://127.0.0.1:1", *words]
        done = subprocess.run(
            command, input="{}", capture_output=True, text=True, timeout=60, check=False
        )
        assert not re.search("unknown|invalid argument|Usage:", done.stderr), done.stderr


def needed(words: list[str]) -> set[tuple[str, str]]:
    """The resources and verbs that kubectl asks for:
    https://kubernetes.io/docs/reference/access-authn-authz/authorization
    """
    verb, what = words[0], words[1].partition(".")[0]
    if verb == "get":
        return {(what, "list" if "--selector" in words else "get")}
    if verb == "delete":  # which waits until it is gone
        return {(what, each) for each in ("delete", "get", "list", "watch")}
    by_name = {
        "rollout": {("deployments", "get"), ("deployments", "patch"), ("replicasets", "list")},
        "logs": {("pods", "get"), ("pods", "list"), ("pods/log", "get")},
        "port-forward": {
            ("pods", "get"),
            ("pods", "list"),
            ("services", "get"),
            ("pods/portforward", "create"),
        },
    }
    return by_name.get(verb, set())


def test_the_role_of_deployers_allows_each_call(
    deploy: Deploy, cluster: Cluster, watched: Watched, tmp_path: Path
) -> None:
    role = yaml.safe_load(
        (Path(__file__).parents[4] / "infra" / "kubernetes" / "deployer.yaml").read_text()
    )
    check(role)
    allowed = {
        (resource, verb)
        for rule in role["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    lived(deploy, watched, tmp_path)
    plurals = {kind: plural for plural, kind in PLURALS.items()}
    asked = {each for words in cluster.calls for each in needed(words)}
    for manifest in cluster.applied:  # an object that is applied may not be there yet
        verbs = ("create",) if manifest["kind"] == "Secret" else ("create", "patch")
        asked |= {(plurals[manifest["kind"]], verb) for verb in verbs}
    assert asked <= allowed, asked - allowed
    assert len(asked) > 40
