"""Rollouts on a real server with real workers under continuous requests."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.kit.management import put_model
from tests.runtime.conftest import RunningServer, make_settings, running_server
from tests.support.models import make_model
from tsx_runtime.core.comparison.means import MetricCounts
from tsx_runtime.core.comparison.quality import VersionQuality
from tsx_runtime.features.rollouts.feature import RolloutsFeature
from tsx_runtime.settings.traffic_policy import NOTHING

Until = Callable[[Callable[[], object]], None]
GOOD_HANDLER = "def handle(data, context):\n    return data and ['good'] * len(data)\n"
BAD_HANDLER = (
    "def handle(data, context):\n    if data:\n        raise RuntimeError('wrong weights')\n"
)
# A busy machine may need long for the requests of a step.
QUICK_PLAN = {"bake": 0.3, "min_requests": 20, "patience": 1000}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("rollouts")
    for number, handler in (("1.0", GOOD_HANDLER), ("2.0", GOOD_HANDLER), ("3.0", BAD_HANDLER)):
        make_model(directory / f"m{number[0]}.mar", handler, name="m", version=number)
    return directory


@pytest.fixture(scope="module")
def module_server(processes: None, models: Path) -> Iterator[RunningServer]:
    with running_server(make_settings(models)) as server:
        for number in range(1, 4):
            server.register(f"m{number}.mar", initial_workers=1)
        yield server


@pytest.fixture
def rollout_server(module_server: RunningServer) -> Iterator[RunningServer]:
    """Run a server with versions 1.0 to 3.0, of which 1.0 has all traffic."""
    server = module_server
    yield server
    with contextlib.suppress(Exception):
        server.call(lambda: server.registry.feature(RolloutsFeature).rollouts.stop("m", back=False))
    server.call(lambda: server.registry.set_traffic("m", NOTHING))
    server.call(lambda: server.registry.set_default("m", "1.0"))


@contextlib.contextmanager
def steady_requests(server: RunningServer) -> Iterator[Counter[int]]:
    """Let two clients send requests one by one, and count the answers by status."""
    statuses: Counter[int] = Counter()
    stop = threading.Event()

    def send() -> None:
        with httpx.Client(base_url=server.addresses["inference"], timeout=60) as client:
            # The pause keeps the load below all that the machine can do.
            while not stop.wait(0.003):
                statuses[client.post("/predictions/m", content=b"x").status_code] += 1

    with ThreadPoolExecutor(2) as pool:
        clients = [pool.submit(send) for _ in range(2)]
        try:
            yield statuses
        finally:
            stop.set()
        for client in clients:
            client.result()


def post_rollout(server: RunningServer, version: str = "2.0", **plan: Any) -> httpx.Response:
    content = {"version": version, **QUICK_PLAN, **plan}
    return server.management.post("/models/m/rollout", json=content)


def start_rollout(server: RunningServer, version: str = "2.0", **plan: Any) -> None:
    answer = post_rollout(server, version, **plan)
    assert answer.status_code == 200, answer.text


def rollout(server: RunningServer) -> dict[str, Any]:
    report: dict[str, Any] = server.management.get("/models/m/rollout").json()
    return report


def traffic(server: RunningServer) -> dict[str, Any]:
    policy: dict[str, Any] = server.management.get("/models/m/traffic").json()["traffic"]
    return policy


def test_a_good_version_takes_over_stepwise_without_lost_requests(
    rollout_server: RunningServer, until: Until
) -> None:
    with steady_requests(rollout_server) as statuses:
        start_rollout(rollout_server, steps=[20, 100])
        until(lambda: rollout(rollout_server)["status"] != "running")
    report = rollout(rollout_server)
    assert (report["status"], report["step"]) == ("finished", 2)
    assert [(entry["event"], entry["share"]) for entry in report["log"]][-3:] == [
        ("start", 20),
        ("advance", 20),
        ("finished", 100),
    ]
    assert report["log"][-2]["new"]["requests"] >= 20
    assert set(statuses) == {200}
    assert rollout_server.management.get("/models/m/traffic").json()["default"] == "2.0"
    assert not traffic(rollout_server).get("weights")


def test_rollback_undoes_a_rollout_but_keeps_new_labels(
    rollout_server: RunningServer, until: Until
) -> None:
    label = "/models/m/labels/next"
    start_rollout(rollout_server, steps=[50, 100], bake=60)
    rollout_server.management.put(label, json={"version": "2.0"}).raise_for_status()
    undo_response = rollout_server.management.post("/models/m/rollback").json()
    assert (undo_response["default"], undo_response["traffic"]) == (
        "1.0",
        {"labels": {"next": "2.0"}},
    )
    assert rollout(rollout_server)["status"] == "stopped"
    with steady_requests(rollout_server):
        start_rollout(rollout_server, steps=[50, 100])
        rollout_server.management.put(label, json={"version": "1.0"}).raise_for_status()
        until(lambda: rollout(rollout_server)["status"] == "finished")
    undo_response = rollout_server.management.post("/models/m/rollback").json()
    assert (undo_response["default"], undo_response["traffic"]) == (
        "1.0",
        {"labels": {"next": "1.0"}},
    )


def test_a_failing_version_is_rolled_back_at_once(
    rollout_server: RunningServer, until: Until
) -> None:
    with steady_requests(rollout_server) as statuses:
        start_rollout(rollout_server, "3.0", steps=[50, 100], bake=10, max_error_rate=0.01)
        until(lambda: rollout(rollout_server)["status"] != "running")
    report = rollout(rollout_server)
    assert report["status"] == "went back"
    assert "requests of version 3.0 failed" in report["reason"]
    assert traffic(rollout_server).get("weights", {}) == {}
    assert rollout_server.inference.post("/predictions/m", content=b"x").text == "good"
    assert statuses[200] > 0


@pytest.mark.usefixtures("processes")
def test_unregistering_the_new_version_rolls_back(
    rollout_server: RunningServer, until: Until
) -> None:
    rollout_server.write_mar("m5.mar", handler=GOOD_HANDLER, name="m", version="5.0")
    register(rollout_server, "m5.mar")
    start_rollout(rollout_server, "5.0", bake=2)
    # The rollout has measured the version once.
    until(lambda: rollout(rollout_server)["seconds"] > 0)
    assert rollout_server.management.delete("/models/m/5.0").status_code == 200
    until(lambda: rollout(rollout_server)["status"] == "went back")
    assert "it was unregistered" in rollout(rollout_server)["reason"]


def test_setting_weights_manually_ends_a_rollout(rollout_server: RunningServer) -> None:
    start_rollout(rollout_server, bake=60)
    rollout_server.management.put("/models/m/traffic", json={"weights": {"1.0": 1}})
    report = rollout(rollout_server)
    assert report["status"] == "stopped"
    assert report["reason"] == "the weights of the model were changed by hand"


@pytest.mark.usefixtures("processes")
def test_replacing_a_participating_version_ends_a_rollout(rollout_server: RunningServer) -> None:
    for number in ("6.0", "7.0"):
        rollout_server.write_mar(
            f"m{number[0]}.mar", handler=GOOD_HANDLER, name="m", version=number
        )
    register(rollout_server, "m6.mar")
    rollout_server.call(lambda: rollout_server.registry.set_default("m", "6.0"))
    start_rollout(rollout_server, "1.0", steps=[25, 100], bake=60)
    rollout_server.register("m7.mar", replaces=True)
    report = rollout(rollout_server)
    assert (report["status"], report["log"][-1]["event"]) == ("stopped", "stopped")
    assert report["reason"] == report["log"][-1]["reason"]
    assert "version 6.0 was replaced by version 7.0" in report["reason"]
    assert traffic(rollout_server)["weights"] == {"7.0": 75, "1.0": 25}
    rollout_server.call(lambda: rollout_server.registry.set_traffic("m", NOTHING))
    rollout_server.call(lambda: rollout_server.registry.set_default("m", "1.0"))
    assert rollout_server.management.delete("/models/m/7.0").status_code == 200


@pytest.mark.parametrize(
    ("back", "status", "weights"),
    [("true", "went back", {}), ("false", "stopped", {"1.0": 95, "2.0": 5})],
)
def test_a_rollout_can_be_ended_manually(
    rollout_server: RunningServer, back: str, status: str, weights: dict[str, float]
) -> None:
    start_rollout(rollout_server, steps=[5], bake=60)
    assert (
        rollout_server.management.delete(f"/models/m/rollout?back={back}").json()["status"]
        == status
    )
    assert traffic(rollout_server).get("weights", {}) == weights
    assert rollout_server.management.delete("/models/m/rollout").status_code == 409


def test_concurrent_rollouts_and_invalid_plans_are_refused(rollout_server: RunningServer) -> None:
    start_rollout(rollout_server, bake=60)
    for plan, status, expected in (
        ({"version": "2.0"}, 409, "has a rollout of version 2.0 under way"),
        ({"version": "9.0"}, 404, "9.0 does not exist"),
        ({"version": "2.0", "steps": [5, 1]}, 400, "percentages that grow"),
        ({"version": "2.0", "stepz": [5]}, 400, "stepz is not known; did you mean 'steps'?"),
        ({"version": "2.0", "zzz": [5]}, 400, "zzz is not known; there are version, steps,"),
        ({}, 400, "version"),
    ):
        answer = rollout_server.management.post("/models/m/rollout", json=plan)
        assert answer.status_code == status, answer.text
        assert expected in answer.json()["message"]


def test_a_version_cannot_be_a_shadow_and_in_a_rollout(rollout_server: RunningServer) -> None:
    shadow = {"to": "2.0", "share": 5}
    rollout_server.management.put("/models/m/shadow", json=shadow).raise_for_status()
    answer = post_rollout(rollout_server)
    assert answer.status_code == 409
    assert "Version 2.0 of model m is its shadow" in answer.json()["message"]
    assert answer.json()["message"].endswith("`tsx models shadow m --off`")
    rollout_server.management.patch("/models/m/traffic", json={"shadow": None}).raise_for_status()
    start_rollout(rollout_server, bake=60)
    answer = rollout_server.management.put("/models/m/shadow", json=shadow)
    assert answer.status_code == 409
    assert "has a rollout in progress" in answer.json()["message"]


@pytest.mark.usefixtures("processes")
def test_a_version_without_workers_is_refused_with_a_hint(rollout_server: RunningServer) -> None:
    rollout_server.write_mar("m8.mar", handler=GOOD_HANDLER, name="m", version="8.0")
    rollout_server.register("m8.mar", initial_workers=0)
    answer = post_rollout(rollout_server, "8.0")
    assert answer.status_code == 409
    assert "it has no workers" in answer.json()["message"]
    assert answer.json()["message"].endswith(
        "PUT /models/m/8.0?min_worker=1, or `tsx models scale m 1 --version 8.0`"
    )
    assert traffic(rollout_server) == {}
    put_model(rollout_server, "m/8.0", min_worker=1, synchronous="true").raise_for_status()
    start_rollout(rollout_server, "8.0", bake=60)
    rollout_server.management.delete("/models/m/rollout").raise_for_status()
    assert rollout_server.management.delete("/models/m/8.0").status_code == 200


def test_a_version_with_all_traffic_cannot_be_rolled_out(rollout_server: RunningServer) -> None:
    # Version 2.0 is not the default version.
    for version, weights in (("1.0", {}), ("2.0", {"1.0": 0, "2.0": 5})):
        rollout_server.management.put(
            "/models/m/traffic", json={"weights": weights}
        ).raise_for_status()
        answer = post_rollout(rollout_server, version)
        assert answer.status_code == 400
        assert f"Version {version} of model m already gets all" in answer.json()["message"]


def test_a_rollout_rolls_back_even_if_a_label_became_a_version(
    rollout_server: RunningServer, until: Until
) -> None:
    rollout_server.management.put("/models/m/labels/6.0", json={"version": "2.0"})
    rollout_server.write_mar("m6.mar", handler=GOOD_HANDLER, name="m", version="6.0")
    rollout_server.register("m6.mar", initial_workers=0)
    with steady_requests(rollout_server):
        start_rollout(rollout_server, "3.0", steps=[50, 100], bake=10)
        until(lambda: rollout(rollout_server)["status"] != "running")
    assert rollout(rollout_server)["status"] == "went back"
    assert rollout_server.management.delete("/models/m/6.0").status_code == 200


def test_a_single_step_rollout_does_not_finish_with_only_errors(
    rollout_server: RunningServer, until: Until
) -> None:
    with steady_requests(rollout_server):
        until(lambda: rollout_server.registry.find("m", "1.0").stats.requests > 100)
        start_rollout(rollout_server, "3.0", steps=[100], bake=10)
        until(lambda: rollout(rollout_server)["status"] != "running")
    assert rollout(rollout_server)["status"] == "went back"


class KnownQuality:
    """A source of quality whose numbers a test sets; it also notes what was asked."""

    def __init__(self) -> None:
        self.versions: dict[str, VersionQuality] = {}
        self.monitored = True
        self.since: set[float] = set()

    def quality_of(self, model: str, version: str, since: float) -> VersionQuality | None:
        assert model == "m"
        self.since.add(since)
        return self.versions.get(version)

    def is_monitored(self, model: str) -> bool:
        return self.monitored


def know_accuracy(hits: int, count: int, drift: float | None = None) -> VersionQuality:
    return VersionQuality(MetricCounts(count, hits, hits), MetricCounts(), drift, 1)


@pytest.fixture
def quality(rollout_server: RunningServer) -> Iterator[KnownQuality]:
    source = KnownQuality()
    rollout_server.registry.quality_source = source
    yield source
    rollout_server.registry.quality_source = None


def test_a_rollout_with_a_metric_waits_for_feedback_and_then_finishes(
    rollout_server: RunningServer, quality: KnownQuality, until: Until
) -> None:
    with steady_requests(rollout_server):
        start_rollout(rollout_server, steps=[50, 100], metric="accuracy", guards=["drift<0.2"])
        until(lambda: "has not been read yet" in rollout(rollout_server)["reason"])
        quality.versions = {"1.0": know_accuracy(950, 1000), "2.0": know_accuracy(480, 500)}
        until(lambda: "more answers of each version" in rollout(rollout_server)["reason"])
        report = rollout(rollout_server)
        assert report["metric"]["verdict"] == "unclear"
        assert report["metric"]["new"]["value"] == 0.96
        assert report["metric"]["new"]["low"] < 0.96 < report["metric"]["new"]["high"]
        assert report["metric"]["needed"] > 0
        assert report["step"] == 1
        quality.versions = {
            "1.0": know_accuracy(9500, 10_000),
            "2.0": know_accuracy(9600, 10_000, drift=0.1),
        }
        until(lambda: rollout(rollout_server)["status"] != "running")
    report = rollout(rollout_server)
    assert (report["status"], report["metric"]["verdict"]) == ("finished", "kept")
    assert "accuracy 96.0% of version 2.0" in report["reason"]
    assert quality.since == {report["began"]}


def test_a_worse_metric_or_a_drift_rolls_back(
    rollout_server: RunningServer, quality: KnownQuality, until: Until
) -> None:
    quality.versions = {"1.0": know_accuracy(950, 1000), "2.0": know_accuracy(800, 1000)}
    start_rollout(rollout_server, metric="accuracy", bake=2)
    until(lambda: rollout(rollout_server)["status"] == "went back")
    assert rollout(rollout_server)["reason"].startswith("the new version is worse: accuracy 80.0%")
    quality.versions = {"1.0": know_accuracy(0, 0), "2.0": know_accuracy(0, 0, drift=0.4)}
    start_rollout(rollout_server, guards=["drift<0.2"], bake=2)
    until(lambda: rollout(rollout_server)["status"] == "went back")
    assert rollout(rollout_server)["reason"] == "the drift of version 2.0 is 0.4, not below 0.2"


@pytest.mark.usefixtures("processes")
def test_the_answers_of_a_replaced_archive_do_not_count(
    rollout_server: RunningServer, quality: KnownQuality, until: Until
) -> None:
    start_rollout(rollout_server, metric="accuracy", bake=2)
    began = rollout(rollout_server)["began"]
    until(lambda: quality.since == {began})
    rollout_server.register("m2.mar", replaces=True)
    until(lambda: len(quality.since) == 2)
    assert max(quality.since) > began
    assert rollout(rollout_server)["status"] == "running"


def test_a_metric_of_a_model_that_is_not_monitored_is_refused(
    rollout_server: RunningServer, quality: KnownQuality, until: Until
) -> None:
    quality.monitored = False
    for plan in ({"metric": "accuracy"}, {"guards": ["drift<0.2"]}):
        answer = post_rollout(rollout_server, **plan)
        assert answer.status_code == 409
        assert answer.json()["message"].endswith("`tsx models monitor m --share 5%`")
    rollout_server.registry.quality_source = None
    answer = post_rollout(rollout_server, metric="accuracy")
    assert answer.status_code == 409
    assert "is not monitored" in answer.json()["message"]
    assert traffic(rollout_server) == {}
    # The monitoring of a model may also end during a rollout.
    quality.monitored, rollout_server.registry.quality_source = True, quality
    with steady_requests(rollout_server):
        start_rollout(rollout_server, steps=[50, 100], metric="accuracy")
        quality.monitored = False
        until(lambda: "is not monitored" in rollout(rollout_server)["reason"])
    assert rollout(rollout_server)["status"] == "running"


@pytest.mark.usefixtures("processes")
def test_a_server_with_a_running_rollout_stops_cleanly(
    models: Path, tmp_path: Path, until: Until
) -> None:
    with running_server(make_settings(models, state_dir=tmp_path)) as server:
        register(server, "m1.mar", "m2.mar", "m3.mar")
        server.call(lambda: server.registry.set_default("m", "2.0"))
        start_rollout(server, "3.0", bake=2)
        until(lambda: rollout(server)["seconds"] > 0)
    state = json.loads((tmp_path / "models" / "m.json").read_text())
    assert state["rollout"]["status"] == "running"


def register(server: RunningServer, *files: str) -> None:
    """Register models as a server does at its start."""
    for file in files:
        server.register(file, initial_workers=1)


@pytest.fixture(scope="module")
def interrupted_state(
    processes: None, models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Stop a server at the first step of a rollout and return its state directory."""
    state = tmp_path_factory.mktemp("interrupted") / "state"
    with running_server(make_settings(models, state_dir=state)) as server:
        register(server, "m1.mar", "m2.mar")
        start_rollout(server, steps=[30, 100], bake=600)
    return state


@pytest.fixture
def restarted_server(
    interrupted_state: Path, models: Path, tmp_path: Path
) -> Iterator[RunningServer]:
    """Run the successor of the interrupted server; so far it has only the old version."""
    shutil.copytree(interrupted_state, tmp_path / "state")
    with running_server(make_settings(models, state_dir=tmp_path / "state")) as server:
        register(server, "m1.mar")
        yield server


@pytest.mark.usefixtures("processes")
def test_a_restarted_rollout_reports_the_version_it_waits_for(
    restarted_server: RunningServer,
) -> None:
    report = rollout(restarted_server)
    assert report["status"] == "running"
    assert report["reason"] == "after a restart it waits until version 2.0 is registered"
    second_attempt = post_rollout(restarted_server, "1.0")
    assert "has a rollout of version 2.0 under way" in second_attempt.json()["message"]
    shadow = restarted_server.management.put("/models/m/shadow", json={"to": "2.0", "share": 10})
    assert shadow.status_code == 409
    assert "has a rollout in progress" in shadow.json()["message"]
    restarted_server.management.put(
        "/models/m/labels/next", json={"version": "2.0"}
    ).raise_for_status()
    register(restarted_server, "m2.mar")
    report = rollout(restarted_server)
    assert (report["status"], report["reason"]) == ("running", "the server was started again")
    assert restarted_server.management.delete("/models/m/rollout").json()["status"] == "went back"
    assert traffic(restarted_server) == {"labels": {"next": "2.0"}}


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("back", "status", "weights"),
    [("true", "went back", {}), ("false", "stopped", {"1.0": 70, "2.0": 30})],
)
def test_a_waiting_rollout_can_be_ended(
    restarted_server: RunningServer, back: str, status: str, weights: dict[str, float]
) -> None:
    report = restarted_server.management.delete(f"/models/m/rollout?back={back}").json()
    assert report["status"] == status
    assert [entry["event"] for entry in report["log"]] == ["start", status]
    assert restarted_server.management.delete("/models/m/rollout").status_code == 409
    register(restarted_server, "m2.mar")
    assert rollout(restarted_server)["status"] == status
    assert traffic(restarted_server).get("weights", {}) == weights


@pytest.mark.usefixtures("processes")
def test_setting_weights_ends_a_waiting_rollout(restarted_server: RunningServer) -> None:
    restarted_server.management.delete("/models/m/traffic").raise_for_status()
    report = rollout(restarted_server)
    assert report["status"] == "stopped"
    assert report["reason"] == "the weights of the model were changed by hand"
    register(restarted_server, "m2.mar")
    assert traffic(restarted_server) == {}


@pytest.mark.usefixtures("processes")
def test_a_changed_configured_policy_ends_a_rollout(
    interrupted_state: Path, models: Path, tmp_path: Path
) -> None:
    shutil.copytree(interrupted_state, tmp_path / "state")
    policy = {"weights": {"1.0": 1}}
    settings = make_settings(
        models, state_dir=tmp_path / "state", models={"m": {"traffic": policy}}
    )
    with running_server(settings) as server:
        register(server, "m1.mar", "m2.mar")
        assert rollout(server)["status"] == "stopped"
        assert traffic(server) == policy


@pytest.mark.usefixtures("processes")
def test_a_rollout_continues_at_its_step_after_a_restart(
    models: Path, tmp_path: Path, until: Until
) -> None:
    settings = make_settings(models, state_dir=tmp_path)
    with running_server(settings) as first:
        register(first, "m1.mar", "m2.mar")
        with steady_requests(first):
            start_rollout(first, steps=[30, 60, 100], bake=0.5)
            until(lambda: rollout(first)["step"] == 2)
            # A stop does the same before it unloads its models.
            first.call(lambda: setattr(first.registry, "stopping", True))
    with running_server(settings) as second:
        register(second, "m1.mar", "m2.mar")
        report = rollout(second)
        assert report["status"] == "running"
        assert report["step"] >= 2
        rows = second.management.get("/models/m/traffic").json()["table"]
        weights_by_version = {row["version"]: row["share"] for row in rows}
        assert weights_by_version["2.0"] == pytest.approx(report["share"] / 100)
        with steady_requests(second) as statuses:
            until(lambda: rollout(second)["status"] == "finished")
    assert set(statuses) == {200}
    lines = (tmp_path / "rollouts" / "m.jsonl").read_text().splitlines()
    events = [json.loads(line)["event"] for line in lines]
    assert (events[0], events[-1]) == ("start", "finished")
    assert "resume" in events
