"""`tsx deploy --target ray` on a real cluster of one node.

Each test continues with the deployment of the previous test.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from ray import serve
from ray.cluster_utils import Cluster

from tests.support.deploying import actions
from tests.support.models import make_model
from tsx_cli.deploy.commands.spec_file import read_named_spec
from tsx_cli.deploy.engine import engine
from tsx_cli.deploy.ray.running import RunningApplication
from tsx_cli.deploy.targets import find_target
from tsx_cli.main import main

pytestmark = pytest.mark.cluster


@serve.deployment(ray_actor_options={"num_cpus": 0})
class ForeignApplication:
    async def __call__(self, request: Any) -> str:
        return "theirs"


class OnRay:
    """The command with the options that all calls share, and the requests of a client."""

    def __init__(self, cluster: Cluster, port: int, directory: Path) -> None:
        self.options = f"--name digits --target ray --address {cluster.address}"
        self.address, self.port, self.directory = cluster.address, port, directory
        self.capsys: pytest.CaptureFixture[str] | None = None
        self.err = ""

    def __call__(self, *arguments: str, code: int = 0) -> str:
        verb, *options = " ".join(arguments).split()
        status = main(["deploy", verb, *self.options.split(), *options])
        assert self.capsys is not None
        out, self.err = self.capsys.readouterr()
        assert status == code, out + self.err
        return out
        return out

    def deploy(self, answer: str, *arguments: str, verb: str = "apply", code: int = 0) -> str:
        ray = f"--set=ray.port={self.port} --set=ray.ingress_replicas=1 --set=ray.surge=100"
        confirmation = "--yes" if verb == "apply" else ""
        archive = str(self.archive(answer))
        return self(verb, archive, ray, "--no-check", confirmation, *arguments, code=code)

    def archive(self, answer: str) -> Path:
        """Return the archive of a model that gives the answer."""
        path = self.directory / answer / "digits.mar"
        path.parent.mkdir(exist_ok=True)
        handler = f"def handle(data, context):\n    return data and ['{answer}'] * len(data)\n"
        return path if path.exists() else make_model(path, handler)

    def plan(self, answer: str, *arguments: str, code: int) -> dict[str, str]:
        return actions(
            json.loads(self.deploy(answer, "--json", *arguments, verb="plan", code=code))
        )

    def read_json(self, verb: str) -> Any:
        return json.loads(self(verb, "--json"))

    def post(self) -> httpx.Response:
        return httpx.post(
            f"http://127.0.0.1:{self.port}/digits/predictions/digits", content=b"x", timeout=60
        )

    @contextmanager
    def client(self) -> Iterator[list[httpx.Response]]:
        """Send requests one after the other, and collect the responses."""
        answers: list[httpx.Response] = []
        stop = threading.Event()

        def ask() -> None:
            while not stop.is_set():
                answers.append(self.post())

        thread = threading.Thread(target=ask)
        thread.start()
        try:
            yield answers
        finally:
            stop.set()
            thread.join()

    def replicas(self) -> set[str]:
        application = self.application()
        replicas = [] if application is None else application.replicas
        return {str(replica["actor_id"]) for replica in replicas}

    def application(self) -> RunningApplication | None:
        application: RunningApplication | None = self.cluster().application("digits")
        return application

    def cluster(self) -> Any:
        settings = {"name": "digits", "target": "ray", "ray": {"address": self.address}}
        return find_target("ray").locate(read_named_spec(None, settings)).cloud


@pytest.fixture(scope="module")
def on_ray(
    tmp_path_factory: pytest.TempPathFactory,
    free_ports: Callable[[int], list[int]],
) -> Iterator[OnRay]:
    directory = tmp_path_factory.mktemp("ray")
    (port,) = free_ports(1)
    variables = {
        "TSX_WORKER_PRELOAD": "false",
        "TSX_CACHE_DIR": str(directory / "cache"),
        "RAY_SERVE_SLOW_STARTUP_WARNING_S": "1",
        "RAY_SERVE_SLOW_STARTUP_WARNING_PERIOD_S": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        patch.chdir(directory)
        cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 4,
                "object_store_memory": 80 << 20,
                "include_dashboard": False,
            },
        )
        try:
            yield OnRay(cluster, port, directory)
        finally:
            ray.shutdown()
            cluster.shutdown()


@pytest.fixture
def deploy(
    on_ray: OnRay, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> OnRay:
    monkeypatch.chdir(on_ray.directory)
    on_ray.capsys = capsys
    return on_ray


def test_a_deployment_is_planned_created_and_then_unchanged(deploy: OnRay) -> None:
    deploy("status", code=1)
    assert "there is no deployment 'digits'" in deploy.err
    assert deploy.plan("a", code=2) == {
        "Archive0": "create",
        "Version": "create",
        "Application": "create",
    }
    deploy.deploy("a")
    replicas = deploy.replicas()
    deploy.plan("a", code=0)
    deploy.deploy("a")
    assert deploy.replicas() == replicas
    status = deploy.read_json("status")
    assert (status["status"], status["model"]) == ("RUNNING", "digits/1.0")
    assert status["replicas"] == "1 of 1 running"
    assert status["address"] == [f"http://127.0.0.1:{deploy.port}/digits"]
    Path("body").write_text("x")
    assert deploy("invoke", "body") == "a"
    assert "is ready on cpu" in deploy("logs")


def test_a_canary_is_promoted_without_a_lost_request(
    deploy: OnRay,
) -> None:
    stable = deploy.replicas()
    deploy.deploy("b", "--canary=50%")
    # Changing the share keeps the replicas.
    assert deploy.replicas() == stable
    assert {deploy.post().text for _ in range(40)} == {"a", "b"}
    deploy.plan("b", "--canary=50%", code=0)
    assert deploy.read_json("status")["canary"][0]["percent"] == 50
    assert [version["percent"] for version in deploy.read_json("history")] == [0, 50]
    with deploy.client() as answers:
        deploy("promote", "--yes")
    assert {answer.status_code for answer in answers} == {200}
    assert Counter(deploy.post().text for _ in range(10)) == {"b": 10}
    assert list(serve.status().applications) == ["digits"]
    deploy("promote", "--yes", code=1)
    assert "digits has no canary" in deploy.err


def test_a_rollback_returns_to_an_earlier_version_without_a_lost_request(deploy: OnRay) -> None:
    with deploy.client() as answers:
        deploy("rollback", "--yes")
    assert {answer.status_code for answer in answers} == {200}
    assert deploy.post().text == "a"
    history = deploy.read_json("history")
    assert [version["is_current"] for version in history] == [True, False]


def test_foreign_applications_are_not_changed(deploy: OnRay) -> None:
    serve.run(ForeignApplication.bind(), name="theirs", route_prefix="/theirs")
    deploy.deploy("a", "--name", "theirs", "--set=ray.route_prefix=/other", code=1)
    assert "tsx deploy did not make it" in deploy.err
    deploy.deploy("a", "--set=ray.route_prefix=/theirs", code=2)
    assert "choose another ray.route_prefix" in deploy.err


def test_options_without_effect_on_a_cluster_are_refused(deploy: OnRay) -> None:
    deploy.deploy("a", "--image", "own/ray:1", code=2)
    assert "--emit ray writes one into a RayService" in deploy.err
    deploy.deploy("a", "--canary=10%", "--alarm=5xx>0", code=2)
    assert "keeps its share until" in deploy.err


def test_destroy_removes_only_the_deployment(deploy: OnRay) -> None:
    deploy("destroy", "--yes", "--purge")
    deploy("destroy", "--yes", "--purge", code=1)
    assert list(serve.status().applications) == ["theirs"]
    assert deploy.cluster().records() == {}
    holder = ray.get_actor("tsx-archives", namespace="tsx")
    archives = [*deploy.directory.glob("*/digits.mar")]
    assert len(archives) == 2
    for archive in archives:
        sha256 = hashlib.sha256(archive.read_bytes()).hexdigest()
        assert ray.get(holder.pieces.remote(sha256)) == []


def test_a_replica_without_a_fitting_node_is_reported_with_rays_reason(
    deploy: OnRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    def clock() -> float:
        # The timeout expires once Ray Serve has reported a reason.
        application = deploy.application()
        return 1e6 if application is not None and "to be scheduled" in application.message else 0.0

    monkeypatch.setattr("tsx_cli.deploy.target.Engine", partial(engine.Engine, clock=clock))
    big = "--set=ray.num_cpus=100"
    assert "a replica reserves (100 CPU)" in deploy.deploy("a", big, verb="plan", code=2)
    deploy.deploy("a", big, code=1)
    assert "have taken more than 1s to be scheduled" in deploy.err
    assert deploy.read_json("status")["status"] == "DEPLOYING"
