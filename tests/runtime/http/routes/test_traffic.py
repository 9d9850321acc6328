"""Who answers: weights, sticky requests, rules and labels before a real server, on both lanes, with
real workers.
"""

from __future__ import annotations

import json
import socket
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.runtime.conftest import RunningServer, make_settings, running_server
from tests.support.models import STATEFUL, make_model
from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.scheduling.job import Job, ObservedAnswer, ObservedJob
from tsx_runtime.errors import TsxError
from tsx_runtime.settings.traffic_policy import NOTHING, Traffic, parse_traffic

TOLD = "x-tsx-model-version"
SEQUENCES = "sequenceBatching: true\nsequenceMaxIdleMSec: 60000\nmaxNumSequence: 100\nmaxSequenceJobQueueSize: 10\n"


@pytest.fixture(scope="module")
def served(processes: None, store: Path) -> Iterator[RunningServer]:
    make_model(store / "adder.mar", STATEFUL, config=SEQUENCES)
    make_model(store / "adder2.mar", STATEFUL, config=SEQUENCES, name="adder", version="2.0")
    with running_server(make_settings(store)) as running:
        for file in ("talker.mar", "talker2.mar"):
            running.register(
                file, initial_workers=1, batch_size=8
            )  # nothing is sent ahead: what waits is in the queue
        yield running


@pytest.fixture
def routed(served: RunningServer) -> Iterator[RunningServer]:
    """1.0 is the default of `talker`, 2.0 is there as well, and nothing is said of its traffic."""
    yield served
    arrange(served, NOTHING)
    served.call(lambda: served.registry.set_default("talker", "1.0"))


def arrange(
    server: RunningServer, traffic: Traffic | dict[str, Any], model: str = "talker"
) -> None:
    said = traffic if isinstance(traffic, Traffic) else parse_traffic(traffic)
    server.call(lambda: server.registry.set_traffic(model, said))


@pytest.fixture(params=["fast", "other"])
def lane(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def is_busy(server: RunningServer, number: str) -> bool:
    return any(
        worker.channel is not None and worker.channel.batches
        for worker in server.registry.find("talker", number).workers
    )


def begin_request(server: RunningServer, lane: str) -> socket.socket:
    """One that its test can give up."""
    parts = urlsplit(str(server.inference.base_url))
    sock = socket.create_connection((parts.hostname or "", parts.port or 0), 60)
    framing = (
        b"Content-Length: 1\r\n\r\nx"
        if lane == "fast"
        else b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n"
    )
    sock.sendall(b"POST /predictions/talker HTTP/1.1\r\nHost: localhost\r\n" + framing)
    return sock


def version_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    version = str(answer.json()["version"])
    assert answer.headers.get(TOLD, version) == version
    return version


def test_without_traffic_the_default_version_answers_and_nothing_is_reported(
    routed: RunningServer, lane: str
) -> None:
    answer = routed.ask(lane=lane)
    assert version_of(answer) == "1.0"
    assert TOLD not in answer.headers


def test_weights_count_from_the_next_request_on_the_same_connection(
    routed: RunningServer, lane: str
) -> None:
    assert version_of(routed.ask(lane=lane)) == "1.0"
    for weights, number in (
        ({"2.0": 1}, "2.0"),
        ({"1.0": 1}, "1.0"),
        ({"1.0": 0, "2.0": 0}, "1.0"),
        ({"9.9": 50}, "1.0"),
    ):
        arrange(routed, {"weights": weights})
        answer = routed.ask(lane=lane)
        assert version_of(answer) == number
        assert answer.headers[TOLD] == number
    arrange(routed, NOTHING)
    assert TOLD not in routed.ask(lane=lane).headers


def test_both_lanes_send_a_sticky_request_to_the_same_version(routed: RunningServer) -> None:
    arrange(routed, {"weights": {"1.0": 50, "2.0": 50}, "sticky": "header:X-User"})
    users = [f"user-{number}" for number in range(12)]
    chosen = {
        user: {version_of(routed.ask(lane=lane, x_user=user)) for lane in ("fast", "other", "fast")}
        for user in users
    }
    assert all(len(versions) == 1 for versions in chosen.values())
    assert {version for versions in chosen.values() for version in versions} == {"1.0", "2.0"}


def test_cookies_and_fields_make_requests_stick_as_well(routed: RunningServer, lane: str) -> None:
    arrange(routed, {"weights": {"1.0": 50, "2.0": 50}, "sticky": "cookie:user"})
    by_cookie = {
        user: {version_of(routed.ask(lane=lane, cookie=f"a=1; user={user}")) for _ in range(3)}
        for user in "abcdefgh"
    }
    arrange(routed, {"weights": {"1.0": 50, "2.0": 50}, "sticky": "field:user"})
    by_field = {
        user: {
            version_of(routed.ask(b'{"user": "%b"}' % user.encode(), lane=lane)) for _ in range(3)
        }
        for user in "abcdefgh"
    }
    assert by_cookie == by_field
    assert all(len(versions) == 1 for versions in by_cookie.values())
    counted = Counter(
        version_of(routed.ask(b'{"user": "a", "rest": "%b"}' % (b"x" * (70 << 10)), lane=lane))
        for _ in range(40)
    )
    assert len(counted) == 2  # too large to be looked into: by weight


def test_who_names_a_version_or_a_label_gets_it_whatever_the_weights(
    routed: RunningServer, lane: str
) -> None:
    arrange(routed, {"weights": {"1.0": 1}, "labels": {"canary": "2.0", "stable": "1.0"}})
    for word, number in (("2.0", "2.0"), ("canary", "2.0"), ("stable", "1.0")):
        for path in (
            f"/predictions/talker/{word}",
            f"/predictions/talker/{word}/v1/more",
            f"/explanations/talker/{word}",
            f"/v1/models/talker/versions/{word}:predict",
            f"/v2/models/talker/versions/{word}/infer",
            f"/talker/{word}/predict",
        ):
            answer = routed.ask(b"{}" if "/v2/" in path else b"x", path, lane=lane)
            assert word in path
            reported = answer.json()
            assert (
                reported["version"]
                if "version" in reported
                else json.loads(reported["outputs"][0]["data"][0])["version"]
            ) == number
            assert TOLD not in answer.headers


def test_all_routes_that_name_no_version_go_by_weight(routed: RunningServer, lane: str) -> None:
    arrange(routed, {"weights": {"2.0": 1}})
    for path in (
        "/predictions/talker",
        "/explanations/talker",
        "/v1/models/talker:predict",
        # KServe's routes take the default for a version that is not there, as TorchServe's
        "/v1/models/talker/versions/9:predict",
        "/v2/models/talker/infer",
        "/invocations?model_name=talker",
        "/invocations",
        "/models/talker/invoke",
        "/talker/predict",
    ):
        answer = routed.ask(b"{}" if "/v2/" in path else b"x", path, lane=lane)
        assert (answer.status_code, answer.headers[TOLD]) == (200, "2.0"), path


def test_labels_stand_for_versions_in_the_management_api(
    routed: RunningServer, error_of: Any
) -> None:
    arrange(routed, {"labels": {"canary": "2.0", "next": "3.0"}})
    (reported,) = routed.management.get("/models/talker/canary?customized=true").json()
    assert (reported["modelVersion"], reported["customizedMetadata"]) == ("2.0", {"labels": 10})
    assert routed.inference.get("/v2/models/talker/versions/canary/ready").status_code == 200
    assert routed.inference.get("/v2/models/talker/versions/canary").json()["versions"] == ["2.0"]
    routed.management.put("/models/talker/canary?job_queue_size=77")
    assert routed.registry.find("talker", "2.0").plan.job_queue_size == 77
    assert routed.management.put("/models/talker/canary/set-default").status_code == 200
    assert routed.management.get("/models/talker").json()[0]["modelVersion"] == "2.0"
    missing = "Model version: 3.0 does not exist for model: talker, and the label next means it"
    assert error_of(routed.management.get("/models/talker/next")) == (
        "ModelVersionNotFoundException",
        missing,
    )
    assert error_of(routed.inference.post("/predictions/talker/next", content=b"x")) == (
        "ModelVersionNotFoundException",
        missing,
    )


def test_a_label_is_no_version_and_a_reserved_word_is_no_label(routed: RunningServer) -> None:
    with pytest.raises(
        TsxError, match=r"'2\.0' cannot be a label of model talker: it is one of its versions"
    ):
        arrange(routed, {"labels": {"2.0": "1.0"}})
    with pytest.raises(TsxError, match="Model not found: other"):
        arrange(routed, {}, "other")
    with pytest.raises(ValueError, match="'all' cannot be a label"):
        arrange(routed, {"labels": {"all": "1.0"}})


@pytest.mark.usefixtures("processes")
def test_a_version_gets_requests_only_while_it_is_ready(routed: RunningServer, lane: str) -> None:
    arrange(
        routed,
        {
            "weights": {"1.0": 1, "2.0": 99},
            "rules": [{"header": "X-Beta", "equals": "1", "to": "2.0"}],
        },
    )
    routed.call(lambda: routed.registry.scale("talker", "2.0", 0))
    assert routed.call(lambda: routed.registry.shares("talker")) == {"1.0": 1.0}
    assert {version_of(routed.ask(lane=lane, x_beta="1")) for _ in range(10)} == {"1.0"}
    routed.call(lambda: routed.registry.scale("talker", "2.0", 1))
    assert routed.call(lambda: routed.registry.shares("talker")) == {"1.0": 0.01, "2.0": 0.99}
    assert version_of(routed.ask(lane=lane, x_beta="1")) == "2.0"


def test_rollback_undoes_one_change_after_the_other_and_says_what_it_undid(
    routed: RunningServer, lane: str
) -> None:
    registry, management = routed.registry, routed.management

    def undo() -> tuple[dict[str, tuple[Any, Any]], int]:
        answer = management.post("/models/talker/rollback").json()
        assert answer["undone"].startswith("20")
        changes = {
            each["what"]: (each.get("before"), each.get("after")) for each in answer["changes"]
        }
        return changes, answer["undoable"]

    known = management.get("/models/talker/traffic").json()["undoable"]
    arrange(routed, {"weights": {"1.0": 1}, "labels": {"stable": "1.0"}})
    arrange(routed, {"weights": {"2.0": 1}})
    arrange(routed, {"weights": {"2.0": 1}})  # changes nothing
    routed.call(lambda: registry.set_default("talker", "2.0"))
    assert undo() == ({"default": ("2.0", "1.0")}, known + 2)
    assert undo() == (
        {"weights.2.0": (1, None), "weights.1.0": (None, 1), "labels.stable": (None, "1.0")},
        known + 1,
    )
    assert version_of(routed.ask(lane=lane)) == "1.0"
    routed.call(lambda: registry.set_traffic("talker", Traffic(weights={"2.0": 5}), undoable=False))
    looked = management.post("/models/talker/rollback?dry_run=true").json()
    assert (looked["traffic"], looked["undoable"], registry.traffic("talker").weights) == (
        {},
        known + 1,
        {"2.0": 5},
    )
    assert undo() == ({"weights.2.0": (5, None)}, known)
    assert registry.traffic("talker") == NOTHING


def test_a_version_that_nobody_knows_takes_no_share_unless_it_is_forced(
    routed: RunningServer, error_of: Any
) -> None:
    management, said = routed.management, {"weights": {"1.0": 90, "2.0": 10}}
    management.put("/models/talker/traffic", json=said).raise_for_status()
    calls: list[tuple[str, str, dict[str, Any]]] = [
        ("PATCH", "traffic", {"weights": {"3.0": 10}}),
        ("PUT", "traffic", {"weights": {"3.0": 10}}),
        ("PATCH", "traffic", {"weights": {"3.0": 0}}),
        ("PATCH", "traffic", {"rules": [{"header": "X-Beta", "equals": "1", "to": "3.0"}]}),
        ("PATCH", "traffic", {"shadow": {"to": "3.0", "share": 10}}),
        ("PUT", "shadow", {"to": "3.0", "share": 10}),
        ("PUT", "labels/canary", {"version": "3.0"}),
    ]
    for method, place, change in calls:
        kind, text = error_of(management.request(method, f"/models/talker/{place}", json=change))
        assert kind == "BadRequestException"
        assert text.startswith(
            "Model talker has no version or label 3.0; it has 1.0, 2.0. Register it first, or set force=true (--force)"
        )
        assert management.get("/models/talker/traffic").json()["traffic"] == said
    for method, place, change in calls:
        management.request(
            method, f"/models/talker/{place}?force=true", json=change
        ).raise_for_status()
    management.patch(
        "/models/talker/traffic", json={"sticky": "header:X-User"}
    ).raise_for_status()  # what is missing already is no reason
    management.put(
        "/models/talker/traffic", json={"labels": {"canary": "2.0"}, "weights": {"canary": 1}}
    ).raise_for_status()
    unlabelled = error_of(
        management.delete("/models/talker/labels/canary")
    )  # its share would go with it
    assert unlabelled[1].startswith("Model talker has no version or label canary;")
    assert (
        "did you mean 'canary'?"
        in error_of(management.patch("/models/talker/traffic", json={"weights": {"canry": 1}}))[1]
    )


def test_what_would_change_is_shown_before_and_after(routed: RunningServer) -> None:
    management, change = (
        routed.management,
        {"weights": {"2.0": 25, "1.0": 75}, "sticky": "header:X-User"},
    )
    looked = management.patch("/models/talker/traffic?dry_run=true", json=change).json()
    assert routed.registry.traffic("talker") == NOTHING
    done = management.patch("/models/talker/traffic", json=change).json()
    assert (
        done["changes"]
        == looked["changes"]
        == [
            {"what": f"weights.{number}", "after": weight}
            for number, weight in (("2.0", 25), ("1.0", 75))
        ]
        + [{"what": "sticky", "after": "header:X-User"}]
    )
    for answer in (looked, done):
        assert [(row["version"], row["share_before"], row["share"]) for row in answer["table"]] == [
            ("1.0", 1.0, 0.75),
            ("2.0", 0.0, 0.25),
        ]
    assert done["undoable"] == looked["undoable"] + 1
    shown = management.get("/models/talker/traffic").json()
    assert "changes" not in shown
    assert "share_before" not in shown["table"][0]


def test_streams_and_failures_tell_their_version_too(routed: RunningServer, lane: str) -> None:
    arrange(routed, {"weights": {"2.0": 1}})
    stream = routed.ask(lane=lane, x_do="stream")
    assert (stream.text, stream.headers[TOLD]) == ("abc", "2.0")
    failed = routed.ask(lane=lane, x_do="raise")
    assert (failed.status_code, failed.headers[TOLD]) == (500, "2.0")
    own = routed.ask(lane=lane, x_do="headers")
    assert (own.text, own.headers["x-own"], own.headers[TOLD]) == ("a,b", "1", "2.0")


def test_each_version_keeps_its_own_client_timeout(
    routed: RunningServer, lane: str, tmp_path: Path, error_of: Any, until: Any
) -> None:
    arrange(routed, {"weights": {"2.0": 1}})
    try:
        with ThreadPoolExecutor(1) as pool:
            busy = pool.submit(
                routed.ask,
                path="/predictions/talker/2.0",
                lane=lane,
                x_do="wait",
                x_file=str(tmp_path / "go"),
            )
            until(lambda: is_busy(routed, "2.0"))
            routed.call(lambda: routed.registry.change("talker", "2.0", {"client_timeout": 100}))
            kind, text = error_of(routed.ask(lane=lane))
            (tmp_path / "go").touch()
            assert busy.result().text == "waited"
        assert kind == "ServiceUnavailableException"
        assert "before its deadline" in text
    finally:
        routed.call(lambda: routed.registry.change("talker", "2.0", {"client_timeout": 0}))


def test_a_client_that_leaves_gives_up_its_place_with_the_version_that_has_it(
    routed: RunningServer, lane: str, tmp_path: Path, until: Any
) -> None:
    arrange(routed, {"weights": {"2.0": 1}})
    version = routed.registry.find("talker", "2.0")
    with ThreadPoolExecutor(1) as pool:
        busy = pool.submit(routed.ask, lane=lane, x_do="wait", x_file=str(tmp_path / "go"))
        until(lambda: is_busy(routed, "2.0"))
        with begin_request(routed, lane):
            until(lambda: version.pending == 1)
        until(lambda: version.pending == 0)
        (tmp_path / "go").touch()
        assert busy.result().text == "waited"


def test_a_body_that_comes_in_pieces_goes_where_its_head_says(routed: RunningServer) -> None:
    arrange(
        routed, {"weights": {"1.0": 1}, "rules": [{"header": "X-Beta", "equals": "1", "to": "2.0"}]}
    )
    parts = urlsplit(str(routed.inference.base_url))
    with socket.create_connection((parts.hostname or "", parts.port or 0), 60) as sock:
        sock.sendall(
            b"POST /predictions/talker HTTP/1.1\r\nHost: localhost\r\nX-Beta: 1\r\nConnection: close\r\nContent-Length: 2\r\n\r\na"
        )
        version_of(routed.ask())  # by now the first piece was read
        sock.sendall(b"b")
        received = b""
        while part := sock.recv(65536):
            received += part
    assert b"x-tsx-model-version: 2.0\r\n" in received


def test_who_is_refused_is_notified_by_which_version(
    routed: RunningServer, lane: str, tmp_path: Path, until: Any
) -> None:
    arrange(routed, {"weights": {"2.0": 1}})
    routed.call(lambda: routed.registry.change("talker", "2.0", {"job_queue_size": 1}))
    try:
        with ThreadPoolExecutor(2) as pool:
            waits = {"x_do": "wait", "x_file": str(tmp_path / "go")}
            busy = [pool.submit(routed.ask, lane=lane, **waits)]
            until(lambda: is_busy(routed, "2.0"))
            busy.append(pool.submit(routed.ask, lane=lane, **waits))
            until(lambda: routed.registry.find("talker", "2.0").pending == 1)
            refused = routed.ask(lane=lane)
            (tmp_path / "go").touch()
            assert [answer.result().status_code for answer in busy] == [200, 200]
    finally:
        routed.call(lambda: routed.registry.change("talker", "2.0", {"job_queue_size": 100}))
    assert (refused.status_code, refused.headers.get_list(TOLD)) == (503, ["2.0"])
    assert TOLD not in routed.ask(path="/predictions/nobody", lane=lane).headers


class Notes:
    """An observer that writes down what it sees."""

    def __init__(self) -> None:
        self.seen: list[tuple[object, object]] = []

    def wants(self, draw: float) -> bool:
        assert 0 <= draw < 1
        return True

    def watch(self, job: Job, version: ModelVersion) -> Job:
        self.seen.append(("to", version.version))
        return ObservedJob(job, self._note, 1 << 20)

    def _note(self, seen: ObservedAnswer) -> None:
        failure = ("refusal", type(seen.error).__name__)
        self.seen.append((seen.status, seen.body) if seen.error is None else failure)


@pytest.mark.usefixtures("processes")
def test_an_observer_sees_requests_and_their_answers(
    routed: RunningServer, lane: str, tmp_path: Path, until: Any
) -> None:
    notes, others = Notes(), Notes()
    for observer in (notes, others):
        routed.call(lambda observer=observer: routed.registry.observe("talker", observer))
    answer = routed.ask(lane=lane)
    assert (version_of(answer), answer.headers[TOLD]) == ("1.0", "1.0")
    assert routed.ask(lane=lane, x_do="stream").text == "abc"
    routed.ask(lane=lane, x_do="exit")
    routed.ask(path="/predictions/talker/1.0", lane=lane)  # who names a version is not watched
    to = ("to", "1.0")
    row = (200, answer.content)
    seen = [to, row, to, (200, b"abc"), to, ("refusal", "WorkerDied")]
    assert notes.seen == others.seen == seen
    for observer in (notes, others):
        routed.call(lambda observer=observer: routed.registry.unobserve("talker", observer))
    assert TOLD not in routed.ask(lane=lane).headers
    assert notes.seen == others.seen == seen


def test_a_watched_request_whose_client_leaves_gives_up_its_place(
    routed: RunningServer, lane: str, tmp_path: Path, until: Any
) -> None:
    notes = Notes()
    routed.call(lambda: routed.registry.observe("talker", notes))
    try:
        version = routed.registry.find("talker", "1.0")
        with ThreadPoolExecutor(1) as pool:
            busy = pool.submit(routed.ask, lane=lane, x_do="wait", x_file=str(tmp_path / "go"))
            until(lambda: is_busy(routed, "1.0"))
            with begin_request(routed, lane):
                until(lambda: version.pending == 1)
            until(lambda: version.pending == 0)
            assert ("refusal", "ClientLeft") in notes.seen
            (tmp_path / "go").touch()
            assert busy.result().text == "waited"
    finally:
        routed.call(lambda: routed.registry.unobserve("talker", notes))


def counted(answer: httpx.Response) -> tuple[int, str]:
    return answer.json()["total"], answer.headers[TOLD]


@pytest.mark.usefixtures("processes")
def test_a_sequence_stays_with_its_version_when_weights_move(
    served: RunningServer, lane: str
) -> None:
    for file in ("adder.mar", "adder2.mar"):
        served.register(file, initial_workers=1)
    try:
        arrange(served, {"weights": {"1.0": 1}}, "adder")
        first = served.ask(b"1", "/predictions/adder", lane=lane)
        id = first.headers["ts_request_sequence_id"]
        assert counted(first) == (1, "1.0")
        arrange(served, {"weights": {"2.0": 1}}, "adder")
        goes_on = served.inference.post(
            "/predictions/adder", content=b"2", headers={"ts_request_sequence_id": id}
        )
        assert counted(goes_on) == (3, "1.0")
        assert counted(served.ask(b"7", "/predictions/adder", lane=lane)) == (7, "2.0")
    finally:
        served.call(lambda: served.registry.unregister("adder", "2.0"))
        served.call(lambda: served.registry.unregister("adder"))
    assert served.registry.traffic("adder") == NOTHING  # what was said of a model goes with it


def test_traffic_is_set_changed_and_shown_by_the_management_api(routed: RunningServer) -> None:
    management = routed.management
    said = {
        "weights": {"1.0": 75, "canary": 25, "3.0": 100},
        "sticky": "header:X-User",
        "rules": [{"header": "X-Beta", "equals": "1", "to": "canary"}],
        "labels": {"canary": "2.0", "stable": "1.0"},
    }
    reported = management.put("/models/talker/traffic?force=true", json=said)
    assert (reported.status_code, reported.json()["traffic"]) == (200, said)
    assert management.get("/models/talker/traffic").json()["traffic"] == said
    assert (reported.json()["model"], reported.json()["default"]) == ("talker", "1.0")
    table = {share.pop("version"): share for share in reported.json()["table"]}
    assert list(table) == ["1.0", "2.0", "3.0"]
    assert table["3.0"] == {
        "labels": [],
        "registered": False,
        "ready": False,
        "share": 0.0,
        "share_before": 0.0,
        "requests": 0,
        "errors": 0,
    }
    assert (table["2.0"]["labels"], table["2.0"]["ready"], table["2.0"]["share"]) == (
        ["canary"],
        True,
        0.25,
    )
    changed = management.patch(
        "/models/talker/traffic", json={"weights": {"canary": None, "3.0": None}, "sticky": None}
    ).json()
    assert changed["traffic"] == {
        "weights": {"1.0": 75},
        "rules": said["rules"],
        "labels": said["labels"],
    }
    assert management.post("/models/talker/rollback").json()["traffic"] == said
    assert (
        management.put("/models/talker/labels/next?force=true", json={"version": "3.0"}).json()[
            "traffic"
        ]["labels"]["next"]
        == "3.0"
    )
    assert management.delete("/models/talker/labels/canary?force=true").json()["traffic"][
        "labels"
    ] == {"stable": "1.0", "next": "3.0"}
    assert management.delete("/models/talker/traffic").json()["traffic"] == {
        "labels": {"stable": "1.0", "next": "3.0"}
    }
    assert management.get("/models/talker/1.0").json()[0]["modelVersion"] == "1.0"


def test_requests_and_errors_are_counted_by_version(routed: RunningServer) -> None:
    def counted() -> dict[str, tuple[int, int]]:
        table = routed.management.get("/models/talker/traffic").json()["table"]
        return {share["version"]: (share["requests"], share["errors"]) for share in table}

    before = counted()
    arrange(routed, {"weights": {"2.0": 1}})
    for word in ("", "raise", ""):
        routed.ask(x_do=word)
    assert counted() == {"1.0": before["1.0"], "2.0": (before["2.0"][0] + 3, before["2.0"][1] + 1)}


@pytest.mark.usefixtures("processes")
def test_a_version_that_refuses_what_comes_has_no_more_errors_than_requests(
    routed: RunningServer,
) -> None:
    def counted() -> dict[str, int]:
        rows = routed.management.get("/models/talker/traffic").json()["table"]
        return next(
            {"requests": row["requests"], "errors": row["errors"]}
            for row in rows
            if row["version"] == "2.0"
        )

    before = counted()
    routed.call(lambda: routed.registry.scale("talker", "2.0", 0))
    try:
        assert routed.inference.post("/predictions/talker/2.0", content=b"x").status_code == 503
    finally:
        routed.call(lambda: routed.registry.scale("talker", "2.0", 1))
    assert counted() == {name: count + 1 for name, count in before.items()}


@pytest.mark.parametrize(
    ("method", "path", "body", "kind", "words"),
    [
        (
            "PUT",
            "/models/talker/traffic",
            b'{"weigths": {}}',
            "BadRequestException",
            "traffic has no 'weigths'; did you mean 'weights'?",
        ),
        (
            "PUT",
            "/models/talker/traffic",
            b"",
            "BadRequestException",
            "The request has no body. It takes a JSON object such as",
        ),
        (
            "PUT",
            "/models/talker/traffic",
            b"[]",
            "BadRequestException",
            "The request's body must be a JSON object such as",
        ),
        (
            "PUT",
            "/models/talker/traffic",
            b"{",
            "BadRequestException",
            "The request's body is not JSON",
        ),
        (
            "PATCH",
            "/models/talker/traffic",
            b'{"weights": {"1.0": -5}}',
            "BadRequestException",
            "weights.1.0: Input should be greater",
        ),
        (
            "PUT",
            "/models/talker/traffic",
            b'{"labels": {"2.0": "1.0"}}',
            "BadRequestException",
            "'2.0' cannot be a label of model talker",
        ),
        (
            "PUT",
            "/models/talker/labels/all",
            b'{"version": "1.0"}',
            "BadRequestException",
            "labels.all: 'all' cannot be a label",
        ),
        (
            "PUT",
            "/models/talker/labels/a",
            b'{"versio": "1.0"}',
            "BadRequestException",
            "A label needs a version:",
        ),
        (
            "DELETE",
            "/models/talker/labels/none",
            b"",
            "ModelVersionNotFoundException",
            "Model talker has no label none.",
        ),
        ("GET", "/models/nobody/traffic", b"", "ModelNotFoundException", "Model not found: nobody"),
        (
            "PUT",
            "/models/nobody/traffic",
            b"{}",
            "ModelNotFoundException",
            "Model not found: nobody",
        ),
        (
            "DELETE",
            "/models/nobody/traffic",
            b"",
            "ModelNotFoundException",
            "Model not found: nobody",
        ),
        (
            "DELETE",
            "/models/nobody/labels/a",
            b"",
            "ModelNotFoundException",
            "Model not found: nobody",
        ),
        (
            "POST",
            "/models/nobody/rollback",
            b"",
            "ModelNotFoundException",
            "Model not found: nobody",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_words(
    routed: RunningServer, error_of: Any, method: str, path: str, body: bytes, kind: str, words: str
) -> None:
    reported = error_of(routed.management.request(method, path, content=body))
    assert reported[0] == kind
    assert reported[1].startswith(words)
    assert routed.registry.traffic("talker") == NOTHING
