"""Rollouts before a real server with real workers, under requests that do not stop."""

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
from tsx_runtime.settings.traffic_policy import NOTHING

Until = Callable[[Callable[[], object]], None]
GOOD = "def handle(data, context):\n    return data and ['good'] * len(data)\n"
BAD = "def handle(data, context):\n    if data:\n        raise RuntimeError('wrong weights')\n"
# A busy machine takes its time for the requests that a step needs.
QUICK = {"bake": 0.3, "min_requests": 20, "patience": 1000}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("rollouts")
    for number, handler in (("1.0", GOOD), ("2.0", GOOD), ("3.0", BAD)):
        make_model(directory / f"m{number[0]}.mar", handler, name="m", version=number)
    return directory


@pytest.fixture(scope="module")
def module_server(processes: None, models: Path) -> Iterator[RunningServer]:
    with running_server(make_settings(models)) as running:
        for number in range(1, 4):
            running.register(f"m{number}.mar", initial_workers=1)
        yield running


@pytest.fixture
def served(module_server: RunningServer) -> Iterator[RunningServer]:
    """Run a server with versions 1.0 to 3.0, of which 1.0 answers everything."""
    server = module_server
    yield server
    with contextlib.suppress(Exception):
        server.call(lambda: server.registry.rollouts.stop("m", back=False))
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
    order = {"version": version, **QUICK, **plan}
    return server.management.post("/models/m/rollout", json=order)


def start_rollout(server: RunningServer, version: str = "2.0", **plan: Any) -> None:
    answer = post_rollout(server, version, **plan)
    assert answer.status_code == 200, answer.text


def rollout(server: RunningServer) -> dict[str, Any]:
    report: dict[str, Any] = server.management.get("/models/m/rollout").json()
    return report


def traffic(server: RunningServer) -> dict[str, Any]:
    policy: dict[str, Any] = server.management.get("/models/m/traffic").json()["traffic"]
    return policy


def test_a_good_version_takes_over_step_by_step_and_no_request_is_lost(
    served: RunningServer, until: Until
) -> None:
    with steady_requests(served) as statuses:
        start_rollout(served, steps=[20, 100])
        until(lambda: rollout(served)["status"] != "running")
    report = rollout(served)
    assert (report["status"], report["step"]) == ("finished", 2)
    assert [(entry["event"], entry["share"]) for entry in report["log"]][-3:] == [
        ("start", 20),
        ("advance", 20),
        ("finished", 100),
    ]
    assert report["log"][-2]["new"]["requests"] >= 20
    assert set(statuses) == {200}
    assert served.management.get("/models/m/traffic").json()["default"] == "2.0"
    assert not traffic(served).get("weights")


def test_one_call_undoes_a_rollout_and_leaves_labels_that_were_set_meanwhile(
    served: RunningServer, until: Until
) -> None:
    label = "/models/m/labels/next"
    start_rollout(served, steps=[50, 100], bake=60)
    served.management.put(label, json={"version": "2.0"}).raise_for_status()
    undone = served.management.post("/models/m/rollback").json()
    assert (undone["default"], undone["traffic"]) == ("1.0", {"labels": {"next": "2.0"}})
    assert rollout(served)["status"] == "stopped"
    with steady_requests(served):
        start_rollout(served, steps=[50, 100])
        served.management.put(label, json={"version": "1.0"}).raise_for_status()
        until(lambda: rollout(served)["status"] == "finished")
    undone = served.management.post("/models/m/rollback").json()
    assert (undone["default"], undone["traffic"]) == ("1.0", {"labels": {"next": "1.0"}})


def test_a_version_that_fails_goes_back_at_once(served: RunningServer, until: Until) -> None:
    with steady_requests(served) as statuses:
        start_rollout(served, "3.0", steps=[50, 100], bake=10, max_error_rate=0.01)
        until(lambda: rollout(served)["status"] != "running")
    report = rollout(served)
    assert report["status"] == "went back"
    assert "requests of version 3.0 failed" in report["reason"]
    assert traffic(served).get("weights", {}) == {}
    assert served.inference.post("/predictions/m", content=b"x").text == "good"
    assert statuses[200] > 0


@pytest.mark.usefixtures("processes")
def test_a_version_that_is_unregistered_meanwhile_goes_back(
    served: RunningServer, until: Until
) -> None:
    served.write_mar("m5.mar", handler=GOOD, name="m", version="5.0")
    register(served, "m5.mar")
    start_rollout(served, "5.0", bake=2)
    # The rollout has measured the version once.
    until(lambda: rollout(served)["seconds"] > 0)
    assert served.management.delete("/models/m/5.0").status_code == 200
    until(lambda: rollout(served)["status"] == "went back")
    assert "it was unregistered" in rollout(served)["reason"]


def test_weights_that_are_set_by_hand_end_a_rollout(served: RunningServer) -> None:
    start_rollout(served, bake=60)
    served.management.put("/models/m/traffic", json={"weights": {"1.0": 1}})
    report = rollout(served)
    assert report["status"] == "stopped"
    assert report["reason"] == "the weights of the model were changed by hand"


@pytest.mark.usefixtures("processes")
def test_a_replacement_of_a_version_that_takes_part_ends_a_rollout(served: RunningServer) -> None:
    for number in ("6.0", "7.0"):
        served.write_mar(f"m{number[0]}.mar", handler=GOOD, name="m", version=number)
    register(served, "m6.mar")
    served.call(lambda: served.registry.set_default("m", "6.0"))
    start_rollout(served, "1.0", steps=[25, 100], bake=60)
    served.register("m7.mar", replaces=True)
    report = rollout(served)
    assert (report["status"], report["log"][-1]["event"]) == ("stopped", "stopped")
    assert report["reason"] == report["log"][-1]["reason"]
    assert "version 6.0 was replaced by version 7.0" in report["reason"]
    assert traffic(served)["weights"] == {"7.0": 75, "1.0": 25}
    served.call(lambda: served.registry.set_traffic("m", NOTHING))
    served.call(lambda: served.registry.set_default("m", "1.0"))
    assert served.management.delete("/models/m/7.0").status_code == 200


@pytest.mark.parametrize(
    ("back", "status", "weights"),
    [("true", "went back", {}), ("false", "stopped", {"1.0": 95, "2.0": 5})],
)
def test_a_rollout_can_be_ended_by_hand(
    served: RunningServer, back: str, status: str, weights: dict[str, float]
) -> None:
    start_rollout(served, steps=[5], bake=60)
    assert served.management.delete(f"/models/m/rollout?back={back}").json()["status"] == status
    assert traffic(served).get("weights", {}) == weights
    assert served.management.delete("/models/m/rollout").status_code == 409


def test_only_one_is_under_way_and_a_plan_must_mean_something(served: RunningServer) -> None:
    start_rollout(served, bake=60)
    for plan, status, expected in (
        ({"version": "2.0"}, 409, "has a rollout of version 2.0 under way"),
        ({"version": "9.0"}, 404, "9.0 does not exist"),
        ({"version": "2.0", "steps": [5, 1]}, 400, "percentages that grow"),
        ({"version": "2.0", "stepz": [5]}, 400, "stepz is not known; did you mean 'steps'?"),
        ({"version": "2.0", "zzz": [5]}, 400, "zzz is not known; there are version, steps,"),
        ({}, 400, "version"),
    ):
        answer = served.management.post("/models/m/rollout", json=plan)
        assert answer.status_code == status, answer.text
        assert expected in answer.json()["message"]


def test_a_version_is_a_shadow_or_has_a_rollout_but_not_both(served: RunningServer) -> None:
    shadow = {"to": "2.0", "share": 5}
    served.management.put("/models/m/shadow", json=shadow).raise_for_status()
    answer = post_rollout(served)
    assert answer.status_code == 409
    assert "Version 2.0 of model m is its shadow" in answer.json()["message"]
    assert answer.json()["message"].endswith("`tsx models shadow m --off`")
    served.management.patch("/models/m/traffic", json={"shadow": None}).raise_for_status()
    start_rollout(served, bake=60)
    answer = served.management.put("/models/m/shadow", json=shadow)
    assert answer.status_code == 409
    assert "has a rollout in progress" in answer.json()["message"]


@pytest.mark.usefixtures("processes")
def test_a_version_without_workers_is_refused_with_the_call_that_adds_one(
    served: RunningServer,
) -> None:
    served.write_mar("m8.mar", handler=GOOD, name="m", version="8.0")
    served.register("m8.mar", initial_workers=0)
    answer = post_rollout(served, "8.0")
    assert answer.status_code == 409
    assert "it has no workers" in answer.json()["message"]
    assert answer.json()["message"].endswith(
        "PUT /models/m/8.0?min_worker=1, or `tsx models scale m 1 --version 8.0`"
    )
    assert traffic(served) == {}
    put_model(served, "m/8.0", min_worker=1, synchronous="true").raise_for_status()
    start_rollout(served, "8.0", bake=60)
    served.management.delete("/models/m/rollout").raise_for_status()
    assert served.management.delete("/models/m/8.0").status_code == 200


def test_a_version_that_has_everything_already_cannot_take_over(served: RunningServer) -> None:
    # The second one is not the default version.
    for version, weights in (("1.0", {}), ("2.0", {"1.0": 0, "2.0": 5})):
        served.management.put("/models/m/traffic", json={"weights": weights}).raise_for_status()
        answer = post_rollout(served, version)
        assert answer.status_code == 400
        assert f"Version {version} of model m already gets all" in answer.json()["message"]


def test_a_rollout_goes_back_although_a_label_has_become_a_version(
    served: RunningServer, until: Until
) -> None:
    served.management.put("/models/m/labels/6.0", json={"version": "2.0"})
    served.write_mar("m6.mar", handler=GOOD, name="m", version="6.0")
    served.register("m6.mar", initial_workers=0)
    with steady_requests(served):
        start_rollout(served, "3.0", steps=[50, 100], bake=10)
        until(lambda: rollout(served)["status"] != "running")
    assert rollout(served)["status"] == "went back"
    assert served.management.delete("/models/m/6.0").status_code == 200


def test_a_version_that_fails_every_request_does_not_finish_at_one_step(
    served: RunningServer, until: Until
) -> None:
    with steady_requests(served):
        until(lambda: served.registry.find("m", "1.0").stats.requests > 100)
        start_rollout(served, "3.0", steps=[100], bake=10)
        until(lambda: rollout(served)["status"] != "running")
    assert rollout(served)["status"] == "went back"


@pytest.mark.usefixtures("processes")
def test_a_server_with_a_rollout_and_other_versions_ends_as_it_should(
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
    """Register models as the start of a server does."""
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
def interrupted(interrupted_state: Path, models: Path, tmp_path: Path) -> Iterator[RunningServer]:
    """Run a server that follows the interrupted one and has only the old version yet."""
    shutil.copytree(interrupted_state, tmp_path / "state")
    with running_server(make_settings(models, state_dir=tmp_path / "state")) as server:
        register(server, "m1.mar")
        yield server


@pytest.mark.usefixtures("processes")
def test_a_rollout_reports_what_it_waits_for_after_a_restart(interrupted: RunningServer) -> None:
    report = rollout(interrupted)
    assert report["status"] == "running"
    assert report["reason"] == "after a restart it waits until version 2.0 is registered"
    again = post_rollout(interrupted, "1.0")
    assert "has a rollout of version 2.0 under way" in again.json()["message"]
    shadow = interrupted.management.put("/models/m/shadow", json={"to": "2.0", "share": 10})
    assert shadow.status_code == 409
    assert "has a rollout in progress" in shadow.json()["message"]
    interrupted.management.put("/models/m/labels/next", json={"version": "2.0"}).raise_for_status()
    register(interrupted, "m2.mar")
    report = rollout(interrupted)
    assert (report["status"], report["reason"]) == ("running", "the server was started again")
    assert interrupted.management.delete("/models/m/rollout").json()["status"] == "went back"
    assert traffic(interrupted) == {"labels": {"next": "2.0"}}


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("back", "status", "weights"),
    [("true", "went back", {}), ("false", "stopped", {"1.0": 70, "2.0": 30})],
)
def test_a_waiting_rollout_can_be_ended(
    interrupted: RunningServer, back: str, status: str, weights: dict[str, float]
) -> None:
    report = interrupted.management.delete(f"/models/m/rollout?back={back}").json()
    assert report["status"] == status
    assert [entry["event"] for entry in report["log"]] == ["start", status]
    assert interrupted.management.delete("/models/m/rollout").status_code == 409
    register(interrupted, "m2.mar")
    assert rollout(interrupted)["status"] == status
    assert traffic(interrupted).get("weights", {}) == weights


@pytest.mark.usefixtures("processes")
def test_weights_that_are_set_end_a_waiting_rollout(interrupted: RunningServer) -> None:
    interrupted.management.delete("/models/m/traffic").raise_for_status()
    report = rollout(interrupted)
    assert report["status"] == "stopped"
    assert report["reason"] == "the weights of the model were changed by hand"
    register(interrupted, "m2.mar")
    assert traffic(interrupted) == {}


@pytest.mark.usefixtures("processes")
def test_a_policy_of_the_configuration_that_was_changed_ends_a_rollout(
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
            # A stop does the same before its models go.
            first.call(lambda: setattr(first.registry, "stopping", True))
    with running_server(settings) as second:
        register(second, "m1.mar", "m2.mar")
        report = rollout(second)
        assert report["status"] == "running"
        assert report["step"] >= 2
        rows = second.management.get("/models/m/traffic").json()["table"]
        shares = {row["version"]: row["share"] for row in rows}
        assert shares["2.0"] == pytest.approx(report["share"] / 100)
        with steady_requests(second) as statuses:
            until(lambda: rollout(second)["status"] == "finished")
    assert set(statuses) == {200}
    lines = (tmp_path / "rollouts" / "m.jsonl").read_text().splitlines()
    events = [json.loads(line)["event"] for line in lines]
    assert (events[0], events[-1]) == ("start", "finished")
    assert "resume" in events
