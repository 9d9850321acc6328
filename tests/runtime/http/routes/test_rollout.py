"""Rollouts before a real server with real workers and clients that never stop asking."""

from __future__ import annotations

import contextlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.runtime.conftest import RunningServer, make_settings, running_server
from tests.support.models import make_model
from tsx_runtime.core.models.plan import RegisterOrder
from tsx_runtime.settings.traffic_policy import NOTHING

GOOD = "def handle(data, context):\n    return data and ['good'] * len(data)\n"
BAD = "def handle(data, context):\n    if data:\n        raise RuntimeError('a wrong file of weights')\n"
QUICK = {
    "bake": 0.3,
    "min_requests": 20,
    "patience": 1000,
}  # a busy machine takes its time for so many requests


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("rollouts")
    for number, handler in (("1.0", GOOD), ("2.0", GOOD), ("3.0", BAD)):
        make_model(directory / f"m{number[0]}.mar", handler, name="m", version=number)
    return directory


@pytest.fixture(scope="module")
def started(processes: None, models: Path) -> Iterator[RunningServer]:
    with running_server(make_settings(models)) as running:
        for number in range(1, 4):
            running.register(f"m{number}.mar", initial_workers=1)
        yield running


@pytest.fixture
def served(started: RunningServer) -> Iterator[RunningServer]:
    """1.0 answers everything."""
    yield started
    with contextlib.suppress(Exception):
        started.call(lambda: started.registry.rollouts.stop("m", back=False))
    started.call(lambda: started.registry.set_traffic("m", NOTHING))
    started.call(lambda: started.registry.set_default("m", "1.0"))


@contextlib.contextmanager
def asked(server: RunningServer, clients: int = 2) -> Iterator[Counter[int]]:
    """Clients ask one request after the other; the answers by status."""
    seen: Counter[int] = Counter()
    stop = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=server.addresses["inference"], timeout=60) as client:
            while not stop.wait(0.003):  # a load, and not all that the machine can do
                seen[client.post("/predictions/m", content=b"x").status_code] += 1

    threads = [threading.Thread(target=ask) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield seen
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def begin(server: RunningServer, version: str = "2.0", **plan: Any) -> dict[str, Any]:
    answer = server.management.post("/models/m/rollout", json={"version": version, **QUICK, **plan})
    assert answer.status_code == 200, answer.text
    reported: dict[str, Any] = answer.json()
    return reported


def shown(server: RunningServer) -> dict[str, Any]:
    reported: dict[str, Any] = server.management.get("/models/m/rollout").json()
    return reported


def test_a_good_version_takes_over_step_by_step_and_no_request_is_lost(
    served: RunningServer, until: Callable[..., None]
) -> None:
    with asked(served) as seen:
        begin(served, steps=[20, 100])
        until(lambda: shown(served)["status"] != "running")
    reported = shown(served)
    assert (reported["status"], reported["step"]) == ("finished", 2)
    assert [(entry["event"], entry["share"]) for entry in reported["log"]][-3:] == [
        ("start", 20),
        ("advance", 20),
        ("finished", 100),
    ]
    assert reported["log"][-2]["new"]["requests"] >= 20
    assert set(seen) == {200}
    described = served.management.get("/models/m/traffic").json()
    assert described["default"] == "2.0"
    assert not described["traffic"].get("weights")


def test_one_call_undoes_a_finished_rollout(
    served: RunningServer, until: Callable[..., None]
) -> None:
    with asked(served):
        begin(served, steps=[50, 100])
        until(lambda: shown(served)["status"] == "finished")
    assert served.management.post("/models/m/rollback").json()["default"] == "1.0"


def test_one_call_undoes_the_whole_of_a_rollout_also_where_labels_were_set_meanwhile(
    served: RunningServer, until: Callable[..., None]
) -> None:
    label = "/models/m/labels/next"
    begin(served, steps=[50, 100], bake=60)
    served.management.put(label, json={"version": "2.0"}).raise_for_status()
    undone = served.management.post("/models/m/rollback").json()
    assert (undone["default"], undone["traffic"]) == ("1.0", {"labels": {"next": "2.0"}})
    assert shown(served)["status"] == "stopped"
    with asked(served):
        begin(served, steps=[50, 100])
        served.management.put(label, json={"version": "1.0"}).raise_for_status()
        until(lambda: shown(served)["status"] == "finished")
    undone = served.management.post("/models/m/rollback").json()
    assert (undone["default"], undone["traffic"]) == ("1.0", {"labels": {"next": "1.0"}})


def test_a_version_that_fails_goes_back_at_once(
    served: RunningServer, until: Callable[..., None]
) -> None:
    with asked(served) as seen:
        begin(served, "3.0", steps=[50, 100], bake=10, max_error_rate=0.01)
        until(lambda: shown(served)["status"] != "running")
    reported = shown(served)
    assert reported["status"] == "went back"
    assert "requests of version 3.0 failed" in reported["reason"]
    assert served.management.get("/models/m/traffic").json()["traffic"].get("weights", {}) == {}
    assert served.inference.post("/predictions/m", content=b"x").text == "good"
    assert seen[200] > 0


@pytest.mark.usefixtures("processes")
def test_a_version_that_is_unregistered_meanwhile_goes_back(
    served: RunningServer, until: Callable[..., None]
) -> None:
    served.write_mar("m5.mar", handler=GOOD, name="m", version="5.0")
    served.register("m5.mar", initial_workers=1)
    begin(served, "5.0", bake=2)
    until(lambda: shown(served)["seconds"] > 0)  # it was looked at
    assert served.management.delete("/models/m/5.0").status_code == 200
    until(lambda: shown(served)["status"] == "went back")
    assert "it was unregistered" in shown(served)["reason"]


def test_weights_that_are_set_by_hand_end_it(served: RunningServer) -> None:
    begin(served, bake=60)
    served.management.put("/models/m/traffic", json={"weights": {"1.0": 1}})
    reported = shown(served)
    assert (reported["status"], reported["reason"]) == (
        "stopped",
        "the weights of the model were changed by hand",
    )


@pytest.mark.usefixtures("processes")
def test_a_version_that_another_number_takes_the_place_of_ends_it(served: RunningServer) -> None:
    for number in ("6.0", "7.0"):
        served.write_mar(f"m{number[0]}.mar", handler=GOOD, name="m", version=number)
    served.register("m6.mar", initial_workers=1)
    served.call(lambda: served.registry.set_default("m", "6.0"))
    begin(served, "1.0", steps=[25, 100], bake=60)
    served.register("m7.mar", replaces=True)
    reported = shown(served)
    assert (reported["status"], reported["log"][-1]["event"]) == ("stopped", "stopped")
    assert (
        reported["log"][-1]["reason"]
        == reported["reason"]
        == "version 6.0 was replaced by version 7.0, which has its share now"
    )
    assert served.management.get("/models/m/traffic").json()["traffic"]["weights"] == {
        "7.0": 75,
        "1.0": 25,
    }
    served.call(lambda: served.registry.set_traffic("m", NOTHING))
    served.call(lambda: served.registry.set_default("m", "1.0"))
    assert served.management.delete("/models/m/7.0").status_code == 200


def test_labels_that_are_set_meanwhile_stay_when_it_goes_back(served: RunningServer) -> None:
    begin(served, bake=60)
    served.management.put("/models/m/labels/next", json={"version": "2.0"})
    assert shown(served)["status"] == "running"
    assert served.management.delete("/models/m/rollout").json()["status"] == "went back"
    assert served.management.get("/models/m/traffic").json()["traffic"] == {
        "labels": {"next": "2.0"}
    }


@pytest.mark.parametrize(
    ("back", "status", "weights"),
    [("true", "went back", {}), ("false", "stopped", {"1.0": 95, "2.0": 5})],
)
def test_it_can_be_ended_by_hand(
    served: RunningServer, back: str, status: str, weights: dict[str, float]
) -> None:
    begin(served, steps=[5], bake=60)
    assert served.management.delete(f"/models/m/rollout?back={back}").json()["status"] == status
    assert (
        served.management.get("/models/m/traffic").json()["traffic"].get("weights", {}) == weights
    )
    assert served.management.delete("/models/m/rollout").status_code == 409


def test_only_one_is_under_way_and_a_plan_must_mean_something(served: RunningServer) -> None:
    begin(served, bake=60)
    for plan, status, words in (
        ({"version": "2.0"}, 409, "has a rollout of version 2.0 under way"),
        ({"version": "9.0"}, 404, "9.0 does not exist"),
        ({"version": "2.0", "steps": [5, 1]}, 400, "percentages that grow"),
        (
            {"version": "2.0", "stepz": [5]},
            400,
            "Parameter stepz is not known; did you mean 'steps'?",
        ),
        (
            {"version": "2.0", "zzz": [5]},
            400,
            "Parameter zzz is not known; there are version, steps, bake,",
        ),
        ({}, 400, "version"),
    ):
        answer = served.management.post("/models/m/rollout", json=plan)
        assert answer.status_code == status, answer.text
        assert words in answer.json()["message"]


def test_a_shadow_ends_before_its_rollout_begins(served: RunningServer) -> None:
    served.management.put("/models/m/shadow", json={"to": "2.0", "share": 5}).raise_for_status()
    answer = served.management.post("/models/m/rollout", json={"version": "2.0", **QUICK})
    assert answer.status_code == 409
    assert "Version 2.0 of model m is its shadow" in answer.json()["message"]
    assert answer.json()["message"].endswith(
        'End it first: PATCH /models/m/traffic with {"shadow": null}, or `tsx models shadow m --off`'
    )
    served.management.patch("/models/m/traffic", json={"shadow": None}).raise_for_status()
    begin(served, bake=60)


@pytest.mark.usefixtures("processes")
def test_a_version_without_workers_is_refused_with_the_call_that_adds_one(
    served: RunningServer,
) -> None:
    served.write_mar("m8.mar", handler=GOOD, name="m", version="8.0")
    served.register("m8.mar", initial_workers=0)
    answer = served.management.post("/models/m/rollout", json={"version": "8.0", **QUICK})
    assert answer.status_code == 409
    text = (
        "Version 8.0 of model m cannot answer requests: it has no workers. Start a worker first: "
    )
    assert (
        answer.json()["message"]
        == f"{text}PUT /models/m/8.0?min_worker=1, or `tsx models scale m 1 --version 8.0`"
    )
    assert served.management.get("/models/m/traffic").json()["traffic"] == {}
    served.management.put("/models/m/8.0?min_worker=1&synchronous=true").raise_for_status()
    begin(served, "8.0", bake=60)
    served.management.delete("/models/m/rollout").raise_for_status()
    assert served.management.delete("/models/m/8.0").status_code == 200


def test_a_version_that_has_everything_already_cannot_take_over(served: RunningServer) -> None:
    for version, weights in (
        ("1.0", {}),
        ("2.0", {"1.0": 0, "2.0": 5}),
    ):  # where it is not the default one, either
        served.management.put("/models/m/traffic", json={"weights": weights}).raise_for_status()
        answer = served.management.post("/models/m/rollout", json={"version": version})
        assert answer.status_code == 400
        assert f"Version {version} of model m already gets all requests" in answer.json()["message"]


def test_it_goes_back_although_a_label_has_come_to_be_a_version(
    served: RunningServer, until: Callable[..., None]
) -> None:
    served.management.put("/models/m/labels/6.0", json={"version": "2.0"})
    served.write_mar("m6.mar", handler=GOOD, name="m", version="6.0")
    served.register("m6.mar", initial_workers=0)
    with asked(served):
        begin(served, "3.0", steps=[50, 100], bake=10)
        until(lambda: shown(served)["status"] != "running")
    assert shown(served)["status"] == "went back"
    assert served.management.delete("/models/m/6.0").status_code == 200


def test_a_version_that_fails_every_request_does_not_finish_at_one_step(
    served: RunningServer, until: Callable[..., None]
) -> None:
    with asked(served):
        until(lambda: served.registry.find("m", "1.0").stats.requests > 100)
        begin(served, "3.0", steps=[100], bake=10)
        until(lambda: shown(served)["status"] != "running")
    assert shown(served)["status"] == "went back"


def test_no_shadow_copies_to_a_version_that_is_measured(served: RunningServer) -> None:
    begin(served, bake=60)
    answer = served.management.put("/models/m/shadow", json={"to": "2.0", "share": 10})
    assert answer.status_code == 409
    assert "has a rollout in progress, which copies to version" in answer.json()["message"]


@pytest.mark.usefixtures("processes")
def test_a_server_with_a_rollout_and_other_versions_ends_as_it_should(
    models: Path, tmp_path: Path, until: Callable[..., None]
) -> None:
    settings = make_settings(models, state_dir=tmp_path / "state")
    with running_server(settings) as server:
        for file in ("m1.mar", "m2.mar", "m3.mar"):
            server.register(file, initial_workers=1)
        server.call(lambda: server.registry.set_default("m", "2.0"))
        begin(server, "3.0", bake=2)
        until(lambda: shown(server)["seconds"] > 0)
    assert (
        json.loads((tmp_path / "state" / "models" / "m.json").read_text())["rollout"]["status"]
        == "running"
    )


def register(server: RunningServer, *files: str) -> None:
    """As a start of the server does."""
    for file in files:
        server.call(
            lambda file=file: server.registry.register(RegisterOrder(url=file, initial_workers=1))
        )


@pytest.fixture
def interrupted(models: Path, tmp_path: Path) -> Iterator[RunningServer]:
    """A server was stopped at the first step of a rollout, and the next one has only the old
    version as yet.
    """
    settings = make_settings(models, state_dir=tmp_path / "state")
    with running_server(settings) as first:
        register(first, "m1.mar", "m2.mar")
        begin(first, steps=[30, 100], bake=600)
    with running_server(settings) as second:
        register(second, "m1.mar")
        yield second


@pytest.mark.usefixtures("processes")
def test_after_a_restart_it_says_what_it_waits_for(interrupted: RunningServer) -> None:
    reported = shown(interrupted)
    assert (reported["status"], reported["reason"]) == (
        "running",
        "after a restart it waits until version 2.0 is registered",
    )
    again = interrupted.management.post("/models/m/rollout", json={"version": "1.0"})
    assert "has a rollout of version 2.0 under way" in again.json()["message"]
    shadow = interrupted.management.put("/models/m/shadow", json={"to": "2.0", "share": 10})
    assert (
        shadow.status_code,
        "has a rollout in progress, which copies to version" in shadow.text,
    ) == (409, True)
    interrupted.management.put("/models/m/labels/next", json={"version": "2.0"}).raise_for_status()
    register(interrupted, "m2.mar")
    reported = shown(interrupted)
    assert (reported["status"], reported["reason"]) == ("running", "the server was started again")
    assert interrupted.management.delete("/models/m/rollout").json()["status"] == "went back"
    assert interrupted.management.get("/models/m/traffic").json()["traffic"] == {
        "labels": {"next": "2.0"}
    }


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("back", "status", "weights"),
    [("true", "went back", {}), ("false", "stopped", {"1.0": 70, "2.0": 30})],
)
def test_one_that_waits_can_be_ended(
    interrupted: RunningServer, back: str, status: str, weights: dict[str, float]
) -> None:
    reported = interrupted.management.delete(f"/models/m/rollout?back={back}").json()
    assert (reported["status"], [entry["event"] for entry in reported["log"]]) == (
        status,
        ["start", status],
    )
    assert interrupted.management.delete("/models/m/rollout").status_code == 409
    register(interrupted, "m2.mar")
    assert shown(interrupted)["status"] == status
    assert (
        interrupted.management.get("/models/m/traffic").json()["traffic"].get("weights", {})
        == weights
    )


@pytest.mark.usefixtures("processes")
def test_weights_that_are_set_while_it_waits_end_it(interrupted: RunningServer) -> None:
    interrupted.management.delete("/models/m/traffic").raise_for_status()
    reported = shown(interrupted)
    assert (reported["status"], reported["reason"]) == (
        "stopped",
        "the weights of the model were changed by hand",
    )
    register(interrupted, "m2.mar")
    assert interrupted.management.get("/models/m/traffic").json()["traffic"] == {}


@pytest.mark.usefixtures("processes")
def test_traffic_of_a_configuration_that_was_changed_meanwhile_ends_it(
    models: Path, tmp_path: Path
) -> None:
    settings = make_settings(models, state_dir=tmp_path / "state")
    with running_server(settings) as first:
        register(first, "m1.mar", "m2.mar")
        begin(first, steps=[30, 100], bake=600)
    wanted = {"weights": {"1.0": 1}}
    with running_server(
        make_settings(models, state_dir=tmp_path / "state", models={"m": {"traffic": wanted}})
    ) as second:
        register(second, "m1.mar", "m2.mar")
        assert shown(second)["status"] == "stopped"
        assert second.management.get("/models/m/traffic").json()["traffic"] == wanted


@pytest.mark.usefixtures("processes")
def test_it_goes_on_where_it_was_after_a_restart(
    models: Path, tmp_path: Path, until: Callable[..., None]
) -> None:
    settings = make_settings(models, state_dir=tmp_path / "state")

    def load(server: RunningServer) -> None:
        for file in ("m1.mar", "m2.mar"):
            server.call(
                lambda file=file: server.registry.register(
                    RegisterOrder(url=file, initial_workers=1)
                )
            )

    with running_server(settings) as first:
        load(first)
        with asked(first):
            begin(first, steps=[30, 60, 100], bake=0.5)
            until(lambda: shown(first)["step"] == 2)
            first.call(
                lambda: setattr(first.registry, "stopping", True)
            )  # as a stop does before models go
    with running_server(settings) as second:
        load(second)
        reported = shown(second)
        assert reported["status"] == "running"
        assert reported["step"] >= 2
        shares = {
            row["version"]: row["share"]
            for row in second.management.get("/models/m/traffic").json()["table"]
        }
        assert shares["2.0"] == pytest.approx(reported["share"] / 100)
        with asked(second) as seen:
            until(lambda: shown(second)["status"] == "finished")
    assert set(seen) == {200}
    lines = [
        json.loads(line)
        for line in (tmp_path / "state" / "rollouts" / "m.jsonl").read_text().splitlines()
    ]
    events = [line["event"] for line in lines]
    assert events[0] == "start"
    assert "resume" in events
    assert events[-1] == "finished"
