"""`tsx deploy --target ray` on a real cluster of one node: each test goes on where the one before
has left it.
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

from tests.support.models import make_model
from tsx_cli.deploy.commands import locations
from tsx_cli.deploy.engine import engine
from tsx_cli.deploy.ray.running import RunningApplication
from tsx_cli.main import main

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("processes")]


@serve.deployment(ray_actor_options={"num_cpus": 0})
class Theirs:
    async def __call__(self, request: Any) -> str:
        return "theirs"


class OnRay:
    """The command with what all calls say, and the requests of a client."""

    def __init__(self, cluster: Cluster, port: int, place: Path) -> None:
        self.where = ("--name", "digits", "--target", "ray", "--address", cluster.address)
        self.port, self.place, self.capsys = port, place, None
        self.err = ""

    def __call__(self, verb: str, *words: str, code: int = 0) -> str:
        done = main(["deploy", verb, *self.where, *words])
        assert self.capsys is not None
        out, self.err = self.capsys.readouterr()
        assert done == code, out + self.err
        return out

    def deploy(self, answer: str, *words: str, verb: str = "apply", code: int = 0) -> str:
        own = (
            *more(port=self.port, ingress_replicas=1, surge=100),
            "--no-check",
            *(("--yes",) if verb == "apply" else ()),
        )
        return self(verb, str(self.archive("digits", answer)), *own, *words, code=code)

    def archive(self, name: str, answer: str) -> Path:
        """Of a model that gives that answer."""
        path = self.place / answer / f"{name}.mar"
        path.parent.mkdir(exist_ok=True)
        return (
            path
            if path.exists()
            else make_model(
                path, f"def handle(data, context):\n    return data and ['{answer}'] * len(data)\n"
            )
        )

    def plan(self, answer: str, *words: str, code: int) -> dict[str, str]:
        changes = json.loads(self.deploy(answer, "--json", *words, verb="plan", code=code))[
            "changes"
        ]
        return {change["id"]: change["action"] for change in changes}

    def shown(self, verb: str) -> Any:
        return json.loads(self(verb, "--json"))

    def post(self) -> httpx.Response:
        return httpx.post(
            f"http://127.0.0.1:{self.port}/digits/predictions/digits", content=b"x", timeout=60
        )

    @contextmanager
    def asked(self) -> Iterator[list[httpx.Response]]:
        """By a client that sends one request after the other."""
        answers: list[httpx.Response] = []
        stop = threading.Event()

        def ask() -> None:
            while not stop.is_set():
                answers.append(self.post())

        client = threading.Thread(target=ask)
        client.start()
        try:
            yield answers
        finally:
            stop.set()
            client.join()

    def replicas(self) -> set[str]:
        application = self.application()
        return (
            set()
            if application is None
            else {str(each["actor_id"]) for each in application.replicas}
        )

    def application(self) -> RunningApplication | None:
        found: RunningApplication | None = self.cluster().application("digits")
        return found

    def cluster(self) -> Any:
        return locations.named(
            None, {"name": "digits", "target": "ray", "ray": {"address": self.where[-1]}}
        ).cloud


def more(**own: Any) -> tuple[str, ...]:
    """Keys of the section `ray`."""
    return tuple(word for key, value in own.items() for word in (f"--set=ray.{key}={value}",))


@pytest.fixture(scope="module")
def on_ray(
    processes: None,
    tmp_path_factory: pytest.TempPathFactory,
    free_ports: Callable[[int], list[int]],
) -> Iterator[OnRay]:
    place = tmp_path_factory.mktemp("ray")
    (port,) = free_ports(1)
    own = {
        "TSX_WORKER_PRELOAD": "false",
        "TSX_CACHE_DIR": str(place / "cache"),
        "RAY_SERVE_SLOW_STARTUP_WARNING_S": "1",
    }
    own["RAY_SERVE_SLOW_STARTUP_WARNING_PERIOD_S"] = "1"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**own, "RAY_USAGE_STATS_ENABLED": "0"}.items():
            patch.setenv(name, value)
        patch.chdir(place)
        cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 4,
                "object_store_memory": 80 << 20,
                "include_dashboard": False,
            },
        )
        try:
            yield OnRay(cluster, port, place)
        finally:
            ray.shutdown()
            cluster.shutdown()


@pytest.fixture
def deploy(
    on_ray: OnRay, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> OnRay:
    monkeypatch.chdir(on_ray.place)
    on_ray.capsys = capsys
    return on_ray


def test_a_deployment_is_planned_made_and_then_as_it_should_be(deploy: OnRay) -> None:
    deploy("status", code=1)
    assert "there is no deployment 'digits'" in deploy.err
    assert deploy.plan("a", code=2) == {
        "Archive0": "create",
        "Version": "create",
        "Application": "create",
    }
    deploy.deploy("a")
    replicas = deploy.replicas()
    assert deploy.plan("a", code=0) == {
        "Archive0": "same",
        "Version": "same",
        "Application": "same",
    }
    deploy.deploy("a")
    assert deploy.replicas() == replicas
    shown = deploy.shown("status")
    assert (shown["status"], shown["model"], shown["replicas"]) == (
        "RUNNING",
        "digits/1.0",
        "1 of 1 running",
    )
    assert shown["address"] == [f"http://127.0.0.1:{deploy.port}/digits"]
    Path("body").write_text("x")
    assert deploy("invoke", "body") == "a"
    assert "is ready on cpu" in deploy("logs")


def test_a_canary_keeps_its_share_until_it_is_promoted_without_a_lost_request(
    deploy: OnRay,
) -> None:
    canary, stable = ("--canary=50%",), deploy.replicas()
    deploy.deploy("b", *canary)
    assert deploy.replicas() == stable  # its share is changed in place
    assert {deploy.post().text for _ in range(40)} == {"a", "b"}
    assert set(deploy.plan("b", *canary, code=0).values()) == {"same"}
    assert deploy.shown("status")["canary"][0]["percent"] == 50
    assert [each["percent"] for each in deploy.shown("history")] == [0, 50]
    with deploy.asked() as answers:
        deploy("promote", "--yes")
    assert {answer.status_code for answer in answers} == {200}
    assert Counter(deploy.post().text for _ in range(10)) == {"b": 10}
    assert list(serve.status().applications) == ["digits"]
    deploy("promote", "--yes", code=1)
    assert "digits has no canary" in deploy.err


def test_a_rollback_returns_to_an_earlier_version_without_a_lost_request(deploy: OnRay) -> None:
    with deploy.asked() as answers:
        deploy("rollback", "--yes")
    assert {answer.status_code for answer in answers} == {200}
    assert deploy.post().text == "a"
    assert [each["is_current"] for each in deploy.shown("history")] == [True, False]


def test_applications_of_others_are_neither_taken_over_nor_in_the_way(deploy: OnRay) -> None:
    serve.run(Theirs.bind(), name="theirs", route_prefix="/theirs")
    deploy.deploy("a", "--name", "theirs", "--set=ray.route_prefix=/other", code=1)
    assert (
        "tsx deploy did not make it"
        in deploy.err
    )
    deploy.deploy("a", "--set=ray.route_prefix=/theirs", code=2)
    assert (
        "choose another ray.route_prefix"
        in deploy.err
    )


def test_what_a_cluster_has_no_use_for_is_refused(deploy: OnRay) -> None:
    deploy.deploy("a", "--image", "own/ray:1", code=2)
    assert "--emit ray writes one into a RayService" in deploy.err
    deploy.deploy("a", "--canary=10%", "--alarm=5xx>0", code=2)
    assert "keeps its share until" in deploy.err


def test_nothing_of_a_deployment_is_left_and_all_of_others(deploy: OnRay) -> None:
    deploy("destroy", "--yes", "--purge")
    deploy("destroy", "--yes", "--purge", code=1)
    assert list(serve.status().applications) == ["theirs"]
    assert deploy.cluster().records() == {}
    holder = ray.get_actor("tsx-archives", namespace="tsx")
    archives = [
        hashlib.sha256(archive.read_bytes()).hexdigest()
        for archive in deploy.place.glob("*/digits.mar")
    ]
    assert ray.get([holder.pieces.remote(each) for each in archives]) == [[]] * 2


def test_what_no_node_has_room_for_is_said_in_the_words_of_ray(
    deploy: OnRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    def clock() -> float:
        """Time is up when Ray Serve has said why."""
        application = deploy.application()
        return 1e6 if application is not None and "to be scheduled" in application.message else 0.0

    monkeypatch.setattr(locations, "Engine", partial(engine.Engine, clock=clock))
    big = ("--set=ray.num_cpus=100",)
    assert "a replica reserves (100 CPU)" in deploy.deploy(
        "a", *big, verb="plan", code=2
    )
    deploy.deploy("a", *big, code=1)
    assert "have taken more than 1s to be scheduled" in deploy.err
    assert deploy.shown("status")["status"] == "DEPLOYING"
