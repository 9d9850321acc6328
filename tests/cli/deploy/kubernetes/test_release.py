"""`tsx deploy --canary` on Kubernetes, with doubles of kubectl and of the pods' metrics."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.deploy.kubernetes.conftest import Deploy, check, container_of, serving_pod
from tests.support.platforms.kubectl import PLURALS, Cluster
from tsx_cli.deploy.engine import engine
from tsx_cli.deploy.engine.resources import Resource
from tsx_cli.deploy.image.programs import Program
from tsx_cli.deploy.kubernetes import kinds, release

GATEWAY = "--set=kubernetes.gateway=web/public --set=kubernetes.hostnames=digits.example.com"
CANARY = f"{GATEWAY} --canary=10% --bake=10m --alarm=5xx>0 --alarm=p95>300ms"
NEW_VERSION = "--set=env.A=b"


class CanaryWorld:
    """The clock, the metrics of the canary's pods, and a log of the changes to the cluster.

    `at` maps seconds to actions. Each action is taken once, at the first wait after its time.
    """

    def __init__(self, cluster: Cluster, patch: pytest.MonkeyPatch) -> None:
        self.cluster, self.time = cluster, datetime(2026, 11, 21, tzinfo=timezone.utc)
        self.errors, self.slow = 0, 0
        self.at: dict[float, Any] = {}
        self.seconds = 0.0
        self.steps: list[str] = []
        patch.setattr(release, "now", lambda: self.time)
        patch.setattr(
            "tsx_cli.deploy.target.Engine",
            partial(engine.Engine, sleep=self.sleep, clock=lambda: self.seconds),
        )
        self._run = cluster.run
        patch.setattr(cluster, "run", self.run)

    def sleep(self, seconds: float) -> None:
        self.time += timedelta(seconds=10)
        self.seconds += 10
        for time_s in [time_s for time_s in self.at if time_s <= self.seconds]:
            self.at.pop(time_s)()

    def run(self, arguments: list[str], stdin: str) -> Any:
        weights_before = self.weights()
        finished = self._run(arguments, stdin)
        verb, manifest = arguments[0], json.loads(stdin or "{}")
        if verb == "delete" and arguments[1].startswith("deployments"):
            self.steps.append(f"delete {arguments[2]}")
            route = self.cluster.objects.get(("HTTPRoute", "digits"))
            if route is not None:
                for condition in route["status"]["parents"][0]["conditions"]:
                    assert condition["observedGeneration"] == route["metadata"]["generation"]
                assert self.weights() == {"digits": 1}
        if verb == "apply" and manifest["kind"] == "Deployment" and "template" in manifest["spec"]:
            self.steps.append(f"apply {manifest['metadata']['name']}")
        if self.weights() not in ({}, weights_before):
            shares = (f"{name}={weight}" for name, weight in self.weights().items())
            self.steps.append(f"route {' '.join(shares)}")
        return finished

    def weights(self) -> dict[str, int]:
        route = self.cluster.objects.get(("HTTPRoute", "digits"), {"spec": {"rules": []}})
        return {
            backend["name"]: backend.get("weight", 1)
            for rule in route["spec"]["rules"]
            for backend in rule["backendRefs"]
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
def world(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[CanaryWorld]:
    """Watch the cluster; its metrics need the token of the Secret."""
    world = CanaryWorld(cluster, monkeypatch)

    def answer(request: BaseHTTPRequestHandler) -> tuple[int, bytes]:
        token = f"Bearer {cluster.secret('digits-tokens', 'management')}"
        is_known = request.headers["Authorization"] == token
        return (200, world.metrics().encode()) if is_known else (401, b"{}")

    with serving_pod(cluster, answer):
        yield world


@pytest.fixture
def kubectl() -> str:
    """Return the path of the real kubectl, before `deploy` puts the double on the PATH."""
    return shutil.which("kubectl") or ""


def variables(cluster: Cluster, name: str = "digits") -> dict[str, str]:
    return {
        variable["name"]: variable.get("value", "")
        for variable in container_of(cluster, name)["env"]
    }


START_STEPS = ["apply digits-canary", "route digits=900 digits-canary=100"]
PROMOTION_STEPS = ["apply digits", "route digits=1", "delete digits-canary"]


def test_a_canary_without_alarms_is_promoted_without_downtime(
    deploy: Deploy, cluster: Cluster, world: CanaryWorld
) -> None:
    # The first version has no canary.
    deploy.apply(CANARY)
    assert world.steps == ["apply digits", "route digits=1"]
    objects_before = set(cluster.objects)
    world.steps.clear()
    output = deploy("plan", *deploy.wish(CANARY, NEW_VERSION), "--no-check", code=2)
    assert "percent=10.0, bake=600, alarms=5xx>0" in output
    deploy.apply(CANARY, NEW_VERSION)
    assert world.steps == [*START_STEPS, *PROMOTION_STEPS]
    assert world.seconds >= 600
    assert variables(cluster)["A"] == "b"
    assert {kind for kind, _ in set(cluster.objects) - objects_before} == {"ReplicaSet"}
    deploy.plan(CANARY, NEW_VERSION, code=0)
    calls = [call for call in cluster.calls if call[0] == "port-forward"]
    assert calls[0][3:] == ["pod/digits-canary-pod-0", ":8082"]
    # Metrics are read less often than the state of the cluster.
    assert 40 < len(calls) < 70
    names = [(manifest["kind"], manifest["metadata"]["name"]) for manifest in cluster.applied]
    assert ("Deployment", "digits-canary") in names
    for manifest in cluster.applied:
        # The double of kubectl adds the address to objects of all kinds.
        manifest["spec" if "spec" in manifest else "data"].pop("clusterIP", None)
        check(manifest)


@pytest.mark.parametrize(
    ("metric", "value", "reason"),
    [
        ("errors", 1, "5xx>0 went off (1 in a minute)"),
        ("slow", 50, "the alarm p95>300ms went off (488 ms)"),
        ("restarts", 2, "restarts>0 went off (2 of"),
    ],
)
def test_an_alarm_removes_the_traffic_before_the_pods(
    deploy: Deploy, cluster: Cluster, world: CanaryWorld, metric: str, value: int, reason: str
) -> None:
    deploy.apply(CANARY)
    world.steps.clear()
    target = cluster if metric == "restarts" else world
    world.at[120] = partial(setattr, target, metric, value)
    deploy.apply(CANARY, NEW_VERSION, code=1)
    assert "the stable version of digits has all requests again" in deploy.err
    assert reason in deploy.err
    assert "[pod/digits-1/tsx] RuntimeError: no weights" in deploy.err
    assert world.steps == [*START_STEPS, *PROMOTION_STEPS[1:]]
    assert "A" not in variables(cluster)
    assert {name for _, name in cluster.objects if "canary" in name} == set()
    setattr(target, metric, 0)
    deploy.apply(CANARY, NEW_VERSION)
    assert variables(cluster)["A"] == "b"


def test_a_canary_with_failing_pods_never_gets_a_request(
    deploy: Deploy, cluster: Cluster, world: CanaryWorld
) -> None:
    deploy.apply(CANARY)
    world.steps.clear()
    cluster.failure, cluster.failing = "ImagePullBackOff", "digits-canary"
    deploy.apply(CANARY, NEW_VERSION, code=1)
    assert "the canary's replicas failed" in deploy.err
    assert world.steps == ["apply digits-canary", "delete digits-canary"]


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("second", [10, 20, 300])
def test_an_interrupted_canary_is_continued_by_the_same_command(
    deploy: Deploy, cluster: Cluster, world: CanaryWorld, second: int
) -> None:
    deploy.apply(CANARY)
    world.steps.clear()
    world.at[second] = interrupt
    deploy.apply(CANARY, NEW_VERSION, code=130)
    assert "keeps its share of the requests" in deploy.err
    deploy.apply(CANARY, NEW_VERSION)
    assert world.steps == [*START_STEPS, *PROMOTION_STEPS]
    assert 600 <= world.seconds < 700


def test_failures_between_two_runs_count_in_the_next_run(
    deploy: Deploy, cluster: Cluster, world: CanaryWorld
) -> None:
    begin_canary(deploy, world)
    world.time += timedelta(hours=1)
    world.errors = 70
    deploy.apply(CANARY, NEW_VERSION, code=1)
    assert "the alarm 5xx>0 went off" in deploy.err


def test_a_canary_without_metrics_is_withdrawn_after_a_wait(
    deploy: Deploy, cluster: Cluster, world: CanaryWorld
) -> None:
    deploy.apply(CANARY)
    reached, broken = cluster.forwarded, "error: unable to forward port"
    world.at = {
        500: partial(setattr, cluster, "forwarded", broken),
        780: partial(setattr, cluster, "forwarded", reached),
    }
    deploy.apply(CANARY, NEW_VERSION)
    assert world.seconds >= 780
    world.seconds, cluster.forwarded = 0, broken
    deploy.apply(CANARY, "--set=env.A=c", code=1)
    assert "the canary's metrics cannot be read" in deploy.err
    assert 300 < world.seconds < 400
    assert variables(cluster)["A"] == "b"


def test_a_canary_whose_route_is_not_accepted_is_withdrawn(
    deploy: Deploy, cluster: Cluster, world: CanaryWorld
) -> None:
    deploy.apply(CANARY)
    world.at = {
        5: partial(setattr, cluster, "route_status", ("False", "BackendNotFound")),
        500: partial(setattr, cluster, "route_status", ("True", "")),
    }
    deploy.apply(CANARY, NEW_VERSION, code=1)
    assert "BackendNotFound" in deploy.err
    assert 500 <= world.seconds < 600
    assert world.weights() == {"digits": 1}


def test_a_canary_with_a_changed_share_gets_more_pods(
    deploy: Deploy, cluster: Cluster, world: CanaryWorld
) -> None:
    fixed = "--set=kubernetes.replicas=10 --set=kubernetes.most_replicas=10"
    deploy.apply(CANARY, fixed)
    for second, share, replicas in ((300, "", 1), (600, "--canary=30%", 3)):
        world.at[second] = interrupt
        deploy.apply(CANARY, share, fixed, NEW_VERSION, code=130)
        assert cluster.objects["Deployment", "digits-canary"]["spec"]["replicas"] == replicas
    assert world.weights() == {"digits": 700, "digits-canary": 300}


def test_a_canary_whose_pods_are_deleted_is_withdrawn_at_once(
    deploy: Deploy, cluster: Cluster, world: CanaryWorld
) -> None:
    deploy.apply(CANARY)

    def remove_pods() -> None:
        cluster.forwarded, cluster.scaling = "error: unable to forward port", "digits-canary"

    world.at[120] = remove_pods
    deploy.apply(CANARY, NEW_VERSION, code=1)
    assert "replicas are not ready any more" in deploy.err
    assert world.seconds < 200


def test_a_canary_is_watched_while_the_stable_deployment_scales(
    deploy: Deploy, cluster: Cluster, world: CanaryWorld
) -> None:
    deploy.apply(CANARY)
    world.at = {
        120: partial(setattr, cluster, "scaling", "digits"),
        200: partial(setattr, world, "errors", 1),
    }
    deploy.apply(CANARY, NEW_VERSION, code=1)
    assert "the alarm 5xx>0 went off" in deploy.err
    assert world.seconds < 300


def on_rollout(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, action: Callable[[], None]
) -> None:
    """Take an action once when the stable Deployment's pods are about to be replaced."""
    roll_out, actions = cluster._roll_out, iter([action])

    def act(deployment: dict[str, Any]) -> None:
        if deployment["metadata"]["name"] == "digits":
            next(actions, lambda: None)()
        roll_out(deployment)

    monkeypatch.setattr(cluster, "_roll_out", act)


def test_a_canary_follows_a_rollout_that_has_failed(
    deploy: Deploy, cluster: Cluster, world: CanaryWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    deploy.apply(GATEWAY)
    cluster.failure, cluster.failing = "ImagePullBackOff", "digits"
    deploy.apply(GATEWAY, NEW_VERSION, code=1)
    world.steps.clear()
    on_rollout(cluster, monkeypatch, partial(setattr, cluster, "failure", ""))
    deploy.apply(CANARY, "--set=env.A=c")
    assert world.steps == [*START_STEPS, *PROMOTION_STEPS]
    assert variables(cluster)["A"] == "c"


def test_a_rollback_during_promotion_restores_the_previous_version(
    deploy: Deploy, cluster: Cluster, world: CanaryWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    deploy.apply(CANARY)
    on_rollout(cluster, monkeypatch, lambda: world.at.update({0: interrupt}))
    deploy.apply(CANARY, NEW_VERSION, code=130)
    assert variables(cluster)["A"] == "b"
    world.steps.clear()
    deploy("rollback", "--yes")
    assert "A" not in variables(cluster)
    assert world.steps == PROMOTION_STEPS[1:]


def begin_canary(deploy: Deploy, world: CanaryWorld) -> None:
    """Interrupt a canary after it has begun."""
    deploy.apply(CANARY)
    world.at[300] = interrupt
    deploy.apply(CANARY, NEW_VERSION, code=130)
    world.steps.clear()


def test_promote_sends_all_requests_to_the_canary_now(
    deploy: Deploy, cluster: Cluster, world: CanaryWorld
) -> None:
    deploy("promote", "--yes", code=1)
    begin_canary(deploy, world)
    (canary,) = deploy.read_json("status")["canary"]
    assert canary == {"model": "digits/1.0", "percent": 10, "since": "2026-11-21T00:00:20+00:00"}
    deploy("promote", "--yes")
    assert world.steps == PROMOTION_STEPS
    template = cluster.objects["Deployment", "digits"]["spec"]["template"]
    assert "digits-canary" not in json.dumps(template)
    assert not owns_replicas(cluster)
    deploy.plan(CANARY, NEW_VERSION, code=0)
    deploy("promote", "--yes", code=1)
    assert "digits has no canary" in deploy.err


def owns_replicas(cluster: Cluster) -> bool:
    """Check whether tsx owns the number of replicas."""
    fields = cluster.owners["Deployment", "digits"]["tsx"]
    return "replicas" in [field[1] for field in fields if field[0] == "spec"]


def test_keda_scales_the_promoted_version_but_not_the_canary(
    deploy: Deploy, cluster: Cluster, world: CanaryWorld
) -> None:
    keda = "--set=kubernetes.keda.prometheus=http://prometheus:9090"
    deploy.apply(CANARY, keda)
    # KEDA has scaled the idle Deployment to zero.
    cluster.objects["Deployment", "digits"]["spec"]["replicas"] = 0
    world.at[300] = interrupt
    deploy.apply(CANARY, keda, NEW_VERSION, code=130)
    assert cluster.objects["Deployment", "digits-canary"]["spec"]["replicas"] == 1
    assert [name for kind, name in cluster.objects if kind == "ScaledObject"] == ["digits"]
    deploy("promote", "--yes")
    assert not owns_replicas(cluster)


def test_rollback_ends_a_canary(deploy: Deploy, cluster: Cluster, world: CanaryWorld) -> None:
    begin_canary(deploy, world)
    shares = [(version["id"], version["percent"]) for version in deploy.read_json("history")]
    assert shares == [("digits-1", 0), ("digits-canary", 10)]
    deploy("rollback", "--version=2", "--yes", code=1)
    assert "version 2 of digits is its canary" in deploy.err
    deploy("rollback", "--yes")
    assert world.steps == PROMOTION_STEPS[1:]
    assert "A" not in variables(cluster)


@pytest.mark.nightly
def test_a_rollback_does_not_restore_a_canary_that_has_ended(
    deploy: Deploy, cluster: Cluster, world: CanaryWorld
) -> None:
    deploy.apply(CANARY)
    deploy.apply(CANARY, NEW_VERSION)
    deploy("rollback", "--yes")
    assert "A" not in variables(cluster)
    assert deploy.read_json("status")["canary"] == []


def test_a_run_without_a_canary_ends_an_earlier_one(
    deploy: Deploy, cluster: Cluster, world: CanaryWorld
) -> None:
    begin_canary(deploy, world)
    assert deploy.plan(GATEWAY, NEW_VERSION, code=2)["Deployment"] == "update"
    deploy.apply(GATEWAY, NEW_VERSION)
    assert world.steps == PROMOTION_STEPS


def test_a_manually_deleted_canary_loses_its_traffic_in_the_next_run(
    deploy: Deploy, cluster: Cluster, world: CanaryWorld
) -> None:
    begin_canary(deploy, world)
    del cluster.objects["Deployment", "digits-canary"]
    deploy.apply(GATEWAY)
    assert world.weights() == {"digits": 1}
    assert {kind for kind, name in cluster.objects if "canary" in name} <= {"ReplicaSet"}


def test_a_plan_made_before_the_end_of_a_canary_changes_nothing(
    deploy: Deploy, cluster: Cluster, world: CanaryWorld
) -> None:
    begin_canary(deploy, world)
    manifest = cluster.objects["HTTPRoute", "digits"] | {"kind": "HTTPRoute"}
    deploy("rollback", "--yes")
    client = kinds.Cluster(Program("kubectl"), "default")
    route = Resource("HTTPRoute", "Kubernetes::HTTPRoute", "digits", manifest)
    release.WeightedRoute().create(client, route)
    assert world.weights() == {"digits": 1}
    world.steps.clear()
    stable = release.Release()
    observed = stable.observe(client, "digits")
    assert observed is not None
    none = {"Canary": release.NO_CANARY}
    desired_resource = Resource("Deployment", "Kubernetes::Deployment", "digits", none)
    stable.update(client, desired_resource, observed, set())
    assert world.steps == []


def test_a_change_without_new_pods_needs_no_canary(
    deploy: Deploy, cluster: Cluster, world: CanaryWorld
) -> None:
    deploy.apply(CANARY)
    world.steps.clear()
    deploy.apply(CANARY, "--set=kubernetes.replicas=3 --set=kubernetes.most_replicas=3")
    assert world.steps == ["apply digits"]


def test_destroy_also_removes_a_canary(
    deploy: Deploy, cluster: Cluster, world: CanaryWorld
) -> None:
    begin_canary(deploy, world)
    world.at.clear()
    deploy("destroy", "--yes")
    assert cluster.objects == {}


def test_a_gateway_that_refuses_the_route_is_reported_with_its_reason(
    deploy: Deploy, cluster: Cluster, world: CanaryWorld
) -> None:
    cluster.route_status = ("False", "NotAllowedByListeners")
    deploy.apply(GATEWAY, code=1)
    assert "310 s (its Gateway does not take it: NotAllowedByListeners)" in deploy.err
    world.at[world.seconds + 50] = partial(setattr, cluster, "route_status", ("True", ""))
    deploy.apply(GATEWAY)


def test_a_deployment_without_the_instance_label_is_updated_first(
    deploy: Deploy, cluster: Cluster, world: CanaryWorld
) -> None:
    deploy.apply(GATEWAY)
    deployment = cluster.objects["Deployment", "digits"]["spec"]
    for labels in (
        deployment["selector"]["matchLabels"],
        deployment["template"]["metadata"]["labels"],
    ):
        del labels["app.kubernetes.io/instance"]
    deploy.apply(CANARY, NEW_VERSION, code=1)
    assert "no label app.kubernetes.io/instance" in deploy.err
    # The selector is kept, since the cluster would refuse a change.
    deploy.apply(GATEWAY, NEW_VERSION)
    assert deployment["selector"] != cluster.objects["Service", "digits"]["spec"]["selector"]
    first = cluster.objects["ReplicaSet", "digits-1"]["spec"]["template"]["metadata"]["labels"]
    del first["app.kubernetes.io/instance"]
    deploy("rollback", "--yes", code=1)
    assert "was made by an earlier tsx" in deploy.err
    deploy.apply(CANARY)
    assert "A" not in variables(cluster)


def test_a_foreign_object_is_not_used_as_the_canary(
    deploy: Deploy, cluster: Cluster, world: CanaryWorld
) -> None:
    deploy.apply(CANARY)
    cluster.objects["Service", "digits-canary"] = {
        "metadata": {"name": "digits-canary", "labels": {}},
        "spec": {},
    }
    deploy.apply(CANARY, NEW_VERSION, code=1)
    assert "it is not the canary of digits" in deploy.err


@pytest.mark.nightly
@pytest.mark.parametrize("is_lost", [False, True], ids=["before", "after"])
def test_a_failed_call_is_repeated_by_the_next_run(
    deploy: Deploy,
    cluster: Cluster,
    world: CanaryWorld,
    monkeypatch: pytest.MonkeyPatch,
    is_lost: bool,
) -> None:
    """Let each changing call fail once, either before or after it is carried out."""
    run, failed = cluster.run, set[str]()

    def fail_once(arguments: list[str], stdin: str) -> Any:
        manifest = json.loads(stdin or "{}")
        name = manifest.get("metadata", {}).get("name")
        call = f"{arguments[:3]} {manifest.get('kind')} {name} {world.weights()}"
        if arguments[0] not in ("apply", "create", "delete") or call in failed:
            return run(arguments, stdin)
        failed.add(call)
        if is_lost:
            run(arguments, stdin)
        return subprocess.CompletedProcess(["kubectl"], 1, "", "broken off")

    monkeypatch.setattr(cluster, "run", fail_once)
    for arguments in (CANARY, f"{CANARY} {NEW_VERSION}"):
        for _ in range(60):
            with suppress(AssertionError):
                deploy.apply(arguments)
                break
            assert "broken off" in deploy.err
    assert len(failed) > 15
    assert variables(cluster)["A"] == "b"
    assert world.weights() == {"digits": 1}
    assert not [name for _, name in cluster.objects if "canary" in name]


def run_all_verbs(deploy: Deploy, world: CanaryWorld, directory: Path) -> None:
    """Run every verb that calls the cluster."""
    begin_canary(deploy, world)
    (directory / "in.json").write_text("{}")
    deploy("promote", "--yes")
    deploy("logs", "--since=1h")
    deploy("invoke", "in.json", code=1)
    deploy("rollback", "--yes")
    deploy("destroy", "--yes")


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
def test_kubectl_accepts_every_call(
    kubectl: str, deploy: Deploy, cluster: Cluster, world: CanaryWorld, tmp_path: Path
) -> None:
    run_all_verbs(deploy, world, tmp_path)
    forms = {
        (
            arguments[0],
            *(argument for argument in arguments if argument.startswith("--")),
        ): arguments
        for arguments in cluster.calls
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
    for arguments in forms.values():
        command = [kubectl, "--server", "http://127.0.0.1:1", *arguments]
        finished = subprocess.run(
            command, input="{}", capture_output=True, text=True, timeout=60, check=False
        )
        assert not re.search("unknown|invalid argument|Usage:", finished.stderr), finished.stderr


def permissions_of(arguments: list[str]) -> set[tuple[str, str]]:
    """Return the resources and verbs that a call of kubectl needs.

    https://kubernetes.io/docs/reference/access-authn-authz/authorization
    """
    command, kind = arguments[0], arguments[1].partition(".")[0]
    if command == "get":
        return {(kind, "list" if "--selector" in arguments else "get")}
    # A deletion waits until the object is gone.
    if command == "delete":
        return {(kind, verb) for verb in ("delete", "get", "list", "watch")}
    permissions = {
        "rollout": {("deployments", "get"), ("deployments", "patch"), ("replicasets", "list")},
        "logs": {("pods", "get"), ("pods", "list"), ("pods/log", "get")},
        "port-forward": {
            ("pods", "get"),
            ("pods", "list"),
            ("services", "get"),
            ("pods/portforward", "create"),
        },
    }
    return permissions.get(command, set())


def test_the_deployer_role_allows_every_call(
    deploy: Deploy, cluster: Cluster, world: CanaryWorld, tmp_path: Path
) -> None:
    file = Path(__file__).parents[4] / "infra" / "kubernetes" / "deployer.yaml"
    role = yaml.safe_load(file.read_text())
    check(role)
    allowed = {
        (resource, verb)
        for rule in role["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    run_all_verbs(deploy, world, tmp_path)
    plurals = {kind: plural for plural, kind in PLURALS.items()}
    required_permissions = {
        permission for arguments in cluster.calls for permission in permissions_of(arguments)
    }
    # An applied object may not exist yet, so it also needs permission to be created.
    for manifest in cluster.applied:
        verbs = ("create",) if manifest["kind"] == "Secret" else ("create", "patch")
        required_permissions |= {(plurals[manifest["kind"]], verb) for verb in verbs}
    assert required_permissions <= allowed, required_permissions - allowed
    assert len(required_permissions) > 40
