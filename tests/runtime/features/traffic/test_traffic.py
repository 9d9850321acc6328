"""Version routing on a real server: weights, sticky requests, rules and labels."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.kit.management import describe, put_model
from tests.runtime.conftest import RunningServer, make_settings, running_server
from tests.support.models import STATEFUL, make_model
from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.scheduling.job import Job, ObservedAnswer, ObservedJob
from tsx_runtime.settings.traffic_policy import NOTHING, Traffic, parse_traffic

VERSION = "x-tsx-model-version"


@pytest.fixture(scope="module")
def module_server(processes: None, store: Path) -> Iterator[RunningServer]:
    config = (
        "sequenceBatching: true\nsequenceMaxIdleMSec: 60000\n"
        "maxNumSequence: 100\nmaxSequenceJobQueueSize: 10\n"
    )
    make_model(store / "adder.mar", STATEFUL, config=config)
    make_model(store / "adder2.mar", STATEFUL, config=config, name="adder", version="2.0")
    with running_server(make_settings(store)) as server:
        for file in ("talker.mar", "talker2.mar"):
            # With batches of 8, no single request is sent ahead to a busy worker; it waits in the queue.
            server.register(file, initial_workers=1, batch_size=8)
        yield server


@pytest.fixture
def split_server(module_server: RunningServer) -> Iterator[RunningServer]:
    """Run two versions of `talker`; 1.0 is the default, and there is no traffic policy."""
    yield module_server
    arrange(module_server, NOTHING)
    module_server.call(lambda: module_server.registry.set_default("talker", "1.0"))


def arrange(
    server: RunningServer, traffic: Traffic | dict[str, Any], model: str = "talker"
) -> None:
    """Set the traffic policy of a model."""
    policy = traffic if isinstance(traffic, Traffic) else parse_traffic(traffic)
    server.call(lambda: server.registry.set_traffic(model, policy))


def traffic_url(path: str = "traffic", model: str = "talker") -> str:
    return f"/models/{model}/{path}"


def table_of(server: RunningServer) -> dict[str, Any]:
    """Return the rows of the traffic table by version."""
    rows = server.management.get(traffic_url()).json()["table"]
    return {row["version"]: row for row in rows}


@contextlib.contextmanager
def busy_worker(
    server: RunningServer, number: str, lane: str, gate: Path, until: Any
) -> Iterator[None]:
    """Keep a version's worker busy with one request, which succeeds in the end."""
    with ThreadPoolExecutor(1) as pool:
        path = f"/predictions/talker/{number}"
        request = pool.submit(server.ask, path=path, lane=lane, x_do="wait", x_file=str(gate))
        workers = server.registry.find("talker", number).workers
        until(lambda: any(worker.channel and worker.channel.batches for worker in workers))
        try:
            yield
        finally:
            gate.touch()
        assert request.result().text == "waited"


@pytest.fixture(params=["fast", "other"])
def lane(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def begin_request(server: RunningServer, lane: str) -> socket.socket:
    """Send a request over a socket that the test can close."""
    url = server.inference.base_url
    sock = socket.create_connection((url.host, url.port), 60)
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
    assert answer.headers.get(VERSION, version) == version
    return version


def test_new_weights_apply_to_the_next_request_of_a_connection(
    split_server: RunningServer, lane: str
) -> None:
    answer = split_server.ask(lane=lane)
    assert (version_of(answer), VERSION in answer.headers) == ("1.0", False)
    for weights, number in (
        ({"2.0": 1}, "2.0"),
        ({"1.0": 1}, "1.0"),
        ({"1.0": 0, "2.0": 0}, "1.0"),
        ({"9.9": 50}, "1.0"),
    ):
        arrange(split_server, {"weights": weights})
        answer = split_server.ask(lane=lane)
        assert version_of(answer) == answer.headers[VERSION] == number
    arrange(split_server, NOTHING)
    assert VERSION not in split_server.ask(lane=lane).headers


def test_both_lanes_route_a_sticky_request_to_the_same_version(split_server: RunningServer) -> None:
    users = [f"user-{number}" for number in range(6)]
    by_key: list[dict[str, str]] = []
    for sticky in ("header:X-User", "cookie:user", "field:user"):
        arrange(split_server, {"weights": {"1.0": 50, "2.0": 50}, "sticky": sticky})
        versions = {
            user: {
                version_of(
                    split_server.ask(
                        b'{"user": "%b"}' % user.encode(),
                        lane=lane,
                        x_user=user,
                        cookie=f"a=1; user={user}",
                    )
                )
                for lane in ("fast", "other", "fast")
            }
            for user in users
        }
        by_key.append({user: version for user, (version,) in versions.items()})
    assert by_key[0] == by_key[1] == by_key[2]
    assert {*by_key[0].values()} == {"1.0", "2.0"}
    # Bodies this large are not parsed for the sticky key, so the weights decide.
    body = b'{"user": "a", "rest": "%b"}' % (b"x" * (70 << 10))
    versions = {version_of(split_server.ask(body, lane=lane)) for lane in ("fast", "other") * 20}
    assert versions == {"1.0", "2.0"}


def test_an_explicit_version_or_label_overrides_the_weights(
    split_server: RunningServer, lane: str
) -> None:
    arrange(split_server, {"weights": {"1.0": 1}, "labels": {"canary": "2.0", "stable": "1.0"}})
    for name, number in (("2.0", "2.0"), ("canary", "2.0"), ("stable", "1.0")):
        for path in (
            f"/predictions/talker/{name}",
            f"/predictions/talker/{name}/v1/more",
            f"/explanations/talker/{name}",
            f"/v1/models/talker/versions/{name}:predict",
            f"/v2/models/talker/versions/{name}/infer",
            f"/talker/{name}/predict",
        ):
            answer = split_server.ask(b"{}" if "/v2/" in path else b"x", path, lane=lane)
            assert f'"version": "{number}"' in answer.text.replace("\\", ""), path
            assert VERSION not in answer.headers


def test_routes_without_a_version_use_the_weights(split_server: RunningServer, lane: str) -> None:
    arrange(split_server, {"weights": {"2.0": 1}})
    for path in (
        "/predictions/talker",
        "/explanations/talker",
        "/v1/models/talker:predict",
        # Like TorchServe, use the default if the version in a KServe route is missing.
        "/v1/models/talker/versions/9:predict",
        "/v2/models/talker/infer",
        "/invocations?model_name=talker",
        "/invocations",
        "/models/talker/invoke",
        "/talker/predict",
    ):
        answer = split_server.ask(b"{}" if "/v2/" in path else b"x", path, lane=lane)
        assert (answer.status_code, answer.headers[VERSION]) == (200, "2.0"), path


def test_the_management_api_accepts_labels_as_versions(
    split_server: RunningServer, error_of: Any
) -> None:
    arrange(split_server, {"labels": {"canary": "2.0", "next": "3.0"}})
    model = describe(split_server, "talker/canary", customized="true")
    assert (model["modelVersion"], model["customizedMetadata"]) == ("2.0", {"labels": 10})
    assert split_server.inference.get("/v2/models/talker/versions/canary/ready").status_code == 200
    assert split_server.inference.get("/v2/models/talker/versions/canary").json()["versions"] == [
        "2.0"
    ]
    put_model(split_server, "talker/canary", job_queue_size=77)
    assert split_server.registry.find("talker", "2.0").plan.job_queue_size == 77
    assert put_model(split_server, "talker/canary/set-default").status_code == 200
    assert describe(split_server)["modelVersion"] == "2.0"
    for answer in (
        split_server.management.get("/models/talker/next"),
        split_server.ask(path="/predictions/talker/next"),
    ):
        kind, message = error_of(answer)
        assert kind == "ModelVersionNotFoundException"
        assert message.startswith("Model version: 3.0 does not exist for model: talker")
        assert "the label next" in message


@pytest.mark.usefixtures("processes")
def test_only_ready_versions_get_requests(split_server: RunningServer, lane: str) -> None:
    rules = [{"header": "X-Beta", "equals": "1", "to": "2.0"}]
    arrange(split_server, {"weights": {"1.0": 1, "2.0": 99}, "rules": rules})
    errors = table_of(split_server)["2.0"]["errors"]
    requests = table_of(split_server)["2.0"]["requests"]
    split_server.call(lambda: split_server.registry.scale("talker", "2.0", 0))
    assert split_server.call(lambda: split_server.registry.shares("talker")) == {"1.0": 1.0}
    assert {version_of(split_server.ask(lane=lane, x_beta="1")) for _ in range(10)} == {"1.0"}
    # A refusal counts as a request and as an error.
    assert split_server.ask(path="/predictions/talker/2.0", lane=lane).status_code == 503
    row = table_of(split_server)["2.0"]
    assert (row["requests"], row["errors"]) == (requests + 1, errors + 1)
    split_server.call(lambda: split_server.registry.scale("talker", "2.0", 1))
    assert split_server.call(lambda: split_server.registry.shares("talker")) == {
        "1.0": 0.01,
        "2.0": 0.99,
    }
    assert version_of(split_server.ask(lane=lane, x_beta="1")) == "2.0"


def test_rollback_undoes_changes_one_by_one(split_server: RunningServer) -> None:
    registry, management = split_server.registry, split_server.management

    def undo() -> tuple[dict[str, tuple[Any, Any]], int]:
        answer = management.post(traffic_url("rollback")).json()
        assert answer["undone"].startswith("20")
        changes = {
            change["what"]: (change.get("before"), change.get("after"))
            for change in answer["changes"]
        }
        return changes, answer["undoable"]

    undoable_count = management.get(traffic_url()).json()["undoable"]
    arrange(split_server, {"weights": {"1.0": 1}, "labels": {"stable": "1.0"}})
    arrange(split_server, {"weights": {"2.0": 1}})
    # Setting the same policy again changes nothing.
    arrange(split_server, {"weights": {"2.0": 1}})
    split_server.call(lambda: registry.set_default("talker", "2.0"))
    assert undo() == ({"default": ("2.0", "1.0")}, undoable_count + 2)
    assert undo() == (
        {"weights.2.0": (1, None), "weights.1.0": (None, 1), "labels.stable": (None, "1.0")},
        undoable_count + 1,
    )
    assert version_of(split_server.ask()) == "1.0"
    split_server.call(
        lambda: registry.set_traffic("talker", Traffic(weights={"2.0": 5}), undoable=False)
    )
    preview = management.post(traffic_url("rollback?dry_run=true")).json()
    assert (preview["traffic"], preview["undoable"]) == ({}, undoable_count + 1)
    assert registry.traffic("talker").weights == {"2.0": 5}
    assert undo() == ({"weights.2.0": (5, None)}, undoable_count)
    assert registry.traffic("talker") == NOTHING


def test_an_unknown_version_gets_a_weight_only_with_force(
    split_server: RunningServer, error_of: Any
) -> None:
    management, policy = split_server.management, {"weights": {"1.0": 90, "2.0": 10}}
    management.put(traffic_url(), json=policy).raise_for_status()
    calls: list[tuple[str, str, dict[str, Any]]] = [
        ("PATCH", "traffic", {"weights": {"3.0": 10}}),
        ("PUT", "traffic", {"weights": {"3.0": 10}}),
        ("PATCH", "traffic", {"weights": {"3.0": 0}}),
        ("PATCH", "traffic", {"rules": [{"header": "X-Beta", "equals": "1", "to": "3.0"}]}),
        ("PATCH", "traffic", {"shadow": {"to": "3.0", "share": 10}}),
        ("PUT", "shadow", {"to": "3.0", "share": 10}),
        ("PUT", "labels/canary", {"version": "3.0"}),
    ]
    for method, path, change in calls:
        kind, text = error_of(management.request(method, traffic_url(path), json=change))
        assert kind == "BadRequestException"
        assert text.startswith("Model talker has no version or label 3.0; it has 1.0, 2.0.")
        assert "force=true (--force)" in text
        assert management.get(traffic_url()).json()["traffic"] == policy
    for method, path, change in calls:
        url = traffic_url(f"{path}?force=true")
        management.request(method, url, json=change).raise_for_status()
    # A change is not refused for a version that was already missing.
    management.patch(traffic_url(), json={"sticky": "header:X-User"}).raise_for_status()
    policy = {"labels": {"canary": "2.0"}, "weights": {"canary": 1}}
    management.put(traffic_url(), json=policy).raise_for_status()
    # The weight of a label would be lost with the label.
    assert (
        "no version or label canary;"
        in error_of(management.delete(traffic_url("labels/canary")))[1]
    )
    misspelt_response = management.patch(traffic_url(), json={"weights": {"canry": 1}})
    assert "did you mean 'canary'?" in error_of(misspelt_response)[1]


def test_a_dry_run_shows_the_changes(split_server: RunningServer) -> None:
    change = {"weights": {"2.0": 25, "1.0": 75}, "sticky": "header:X-User"}
    preview = split_server.management.patch(traffic_url("traffic?dry_run=true"), json=change).json()
    assert split_server.registry.traffic("talker") == NOTHING
    result = split_server.management.patch(traffic_url(), json=change).json()
    for answer in (preview, result):
        assert answer["changes"] == [
            {"what": "weights.2.0", "after": 25},
            {"what": "weights.1.0", "after": 75},
            {"what": "sticky", "after": "header:X-User"},
        ]
        assert [(row["version"], row["share_before"], row["share"]) for row in answer["table"]] == [
            ("1.0", 1.0, 0.75),
            ("2.0", 0.0, 0.25),
        ]
    assert result["undoable"] == preview["undoable"] + 1
    policy = split_server.management.get(traffic_url()).json()
    assert "changes" not in policy
    assert "share_before" not in policy["table"][0]


def test_streams_and_failures_name_their_version(split_server: RunningServer, lane: str) -> None:
    arrange(split_server, {"weights": {"2.0": 1}})
    cases = (("stream", 200, "abc"), ("raise", 500, ""), ("headers", 200, "a,b"))
    for action, status, text in cases:
        answer = split_server.ask(lane=lane, x_do=action)
        assert (answer.status_code, answer.headers[VERSION]) == (status, "2.0")
        assert text in answer.text
        assert answer.headers.get("x-own") == ("1" if action == "headers" else None)


def test_each_version_applies_its_own_client_timeout(
    split_server: RunningServer, lane: str, tmp_path: Path, error_of: Any, until: Any
) -> None:
    arrange(split_server, {"weights": {"2.0": 1}})
    try:
        with busy_worker(split_server, "2.0", lane, tmp_path / "go", until):
            put_model(split_server, "talker/2.0", client_timeout=100)
            kind, text = error_of(split_server.ask(lane=lane))
        assert kind == "ServiceUnavailableException"
        assert "before its deadline" in text
    finally:
        put_model(split_server, "talker/2.0", client_timeout=0)


@pytest.mark.parametrize("is_observed", [False, True])
def test_a_client_that_leaves_frees_its_place_in_the_versions_queue(
    split_server: RunningServer, lane: str, is_observed: bool, tmp_path: Path, until: Any
) -> None:
    notes = Notes()
    arrange(split_server, {"weights": {"2.0": 1}})
    version = split_server.registry.find("talker", "2.0")
    if is_observed:
        split_server.call(lambda: split_server.registry.traffic_manager.observe("talker", notes))
    try:
        with busy_worker(split_server, "2.0", lane, tmp_path / "go", until):
            with begin_request(split_server, lane):
                until(lambda: version.pending == 1)
            until(lambda: version.pending == 0)
            assert is_observed == (("refusal", "ClientLeft") in notes.seen)
    finally:
        split_server.call(
            lambda: is_observed and split_server.registry.traffic_manager.unobserve("talker", notes)
        )


def test_a_body_in_pieces_is_routed_by_its_head(split_server: RunningServer) -> None:
    rules = [{"header": "X-Beta", "equals": "1", "to": "2.0"}]
    arrange(split_server, {"weights": {"1.0": 1}, "rules": rules})
    url = split_server.inference.base_url
    with socket.create_connection((url.host, url.port), 60) as sock:
        sock.sendall(
            b"POST /predictions/talker HTTP/1.1\r\nHost: localhost\r\nX-Beta: 1\r\n"
            b"Connection: close\r\nContent-Length: 2\r\n\r\na"
        )
        # Once this request is answered, the server has also read the first piece.
        version_of(split_server.ask())
        sock.sendall(b"b")
        reply_bytes = b"".join(iter(lambda: sock.recv(65536), b""))
    assert b"x-tsx-model-version: 2.0\r\n" in reply_bytes


def test_a_refusal_names_its_version(
    split_server: RunningServer, lane: str, tmp_path: Path, until: Any
) -> None:
    arrange(split_server, {"weights": {"2.0": 1}})
    put_model(split_server, "talker/2.0", job_queue_size=1)
    try:
        with (
            ThreadPoolExecutor(1) as pool,
            busy_worker(split_server, "2.0", lane, tmp_path / "go", until),
        ):
            waiting_request = pool.submit(split_server.ask, lane=lane)
            until(lambda: split_server.registry.find("talker", "2.0").pending == 1)
            refusal = split_server.ask(lane=lane)
        assert waiting_request.result().status_code == 200
    finally:
        put_model(split_server, "talker/2.0", job_queue_size=100)
    assert (refusal.status_code, refusal.headers.get_list(VERSION)) == (503, ["2.0"])
    assert VERSION not in split_server.ask(path="/predictions/nobody", lane=lane).headers


class Notes:
    """An observer that records what it observes."""

    def __init__(self) -> None:
        self.seen: list[tuple[object, object]] = []

    def should_observe(self, draw: float) -> bool:
        assert 0 <= draw < 1
        return True

    def wrap_job(self, job: Job, version: ModelVersion) -> Job:
        self.seen.append(("to", version.version))
        return ObservedJob(job, self._note, 1 << 20)

    def _note(self, observed_answer: ObservedAnswer) -> None:
        failure = ("refusal", type(observed_answer.error).__name__)
        self.seen.append(
            (observed_answer.status, observed_answer.body)
            if observed_answer.error is None
            else failure
        )


@pytest.mark.usefixtures("processes")
def test_a_sequence_stays_with_its_version_when_weights_change(
    module_server: RunningServer, lane: str
) -> None:
    server = module_server

    def add(number: bytes, **headers: str) -> tuple[int, str, str]:
        answer = server.ask(number, "/predictions/adder", lane=lane, **headers)
        id = answer.headers["ts_request_sequence_id"]
        return answer.json()["total"], answer.headers[VERSION], id

    for file in ("adder.mar", "adder2.mar"):
        server.register(file, initial_workers=1)
    try:
        arrange(server, {"weights": {"1.0": 1}}, "adder")
        running_total, version, id = add(b"1")
        assert (running_total, version) == (1, "1.0")
        arrange(server, {"weights": {"2.0": 1}}, "adder")
        next_response = server.inference.post(
            "/predictions/adder", content=b"2", headers={"ts_request_sequence_id": id}
        )
        assert (next_response.json()["total"], next_response.headers[VERSION]) == (3, "1.0")
        assert add(b"7")[:2] == (7, "2.0")
    finally:
        server.call(lambda: server.registry.unregister("adder", "2.0"))
        server.call(lambda: server.registry.unregister("adder"))
    # Unregistering a model removes its policy.
    assert server.registry.traffic("adder") == NOTHING


def test_the_management_api_sets_changes_and_shows_traffic(split_server: RunningServer) -> None:
    management = split_server.management
    policy = {
        "weights": {"1.0": 75, "canary": 25, "3.0": 100},
        "sticky": "header:X-User",
        "rules": [{"header": "X-Beta", "equals": "1", "to": "canary"}],
        "labels": {"canary": "2.0", "stable": "1.0"},
    }
    response = management.put(traffic_url("traffic?force=true"), json=policy)
    report = response.json()
    assert (response.status_code, report["traffic"]) == (200, policy)
    assert management.get(traffic_url()).json()["traffic"] == policy
    assert (report["model"], report["default"]) == ("talker", "1.0")
    table = {row.pop("version"): row for row in report["table"]}
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
    assert table["2.0"] == table["2.0"] | {"labels": ["canary"], "ready": True, "share": 0.25}
    change = {"weights": {"canary": None, "3.0": None}, "sticky": None}
    assert management.patch(traffic_url(), json=change).json()["traffic"] == {
        "weights": {"1.0": 75},
        "rules": policy["rules"],
        "labels": policy["labels"],
    }
    assert management.post(traffic_url("rollback")).json()["traffic"] == policy
    report = management.put(traffic_url("labels/next?force=true"), json={"version": "3.0"}).json()
    assert report["traffic"]["labels"]["next"] == "3.0"
    labels = {"stable": "1.0", "next": "3.0"}
    report = management.delete(traffic_url("labels/canary?force=true")).json()
    assert report["traffic"]["labels"] == labels
    assert management.delete(traffic_url()).json()["traffic"] == {"labels": labels}


@pytest.mark.parametrize(
    ("method", "path", "body", "expected"),
    [
        ("PUT", "traffic", b'{"weigths": {}}', "did you mean 'weights'?"),
        ("PUT", "traffic", b"", "has no body. It takes a JSON object such as"),
        ("PUT", "traffic", b"[]", "must be a JSON object such as"),
        ("PUT", "traffic", b"{", "is not JSON"),
        ("PATCH", "traffic", b'{"weights": {"1.0": -5}}', "weights.1.0: Input should be greater"),
        (
            "PUT",
            "traffic",
            b'{"labels": {"2.0": "1.0"}}',
            "'2.0' cannot be a label of model talker",
        ),
        ("PUT", "labels/all", b'{"version": "1.0"}', "labels.all: 'all' cannot be a label"),
        ("PUT", "labels/a", b'{"versio": "1.0"}', "A label needs a version:"),
    ],
)
def test_an_invalid_policy_is_refused(
    split_server: RunningServer, error_of: Any, method: str, path: str, body: bytes, expected: str
) -> None:
    kind, message = error_of(
        split_server.management.request(method, traffic_url(path), content=body)
    )
    assert kind == "BadRequestException"
    assert expected in message
    assert split_server.registry.traffic("talker") == NOTHING


def test_traffic_of_a_missing_model_or_label_is_not_found(
    split_server: RunningServer, error_of: Any
) -> None:
    for method, path in (
        ("GET", "traffic"),
        ("PUT", "traffic"),
        ("DELETE", "traffic"),
        ("DELETE", "labels/a"),
        ("POST", "rollback"),
    ):
        answer = split_server.management.request(method, traffic_url(path, "nobody"), content=b"{}")
        assert error_of(answer) == ("ModelNotFoundException", "Model not found: nobody")
    kind, message = error_of(split_server.management.delete(traffic_url("labels/none")))
    assert (kind, message) == ("ModelVersionNotFoundException", "Model talker has no label none.")
