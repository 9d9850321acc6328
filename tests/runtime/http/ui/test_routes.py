"""The web page as HTTP: files that hold no secret, calls that ask for the token, predictions by way
of the management address.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import urljoin

import pytest

from tests.support.models import make_model
from tsx_runtime.api.management import samples
from tsx_runtime.core.telemetry.error_log import ErrorLog
from tsx_runtime.core.workers.worker import Worker
from tsx_runtime.http.ui.routes import FOLDER, files
from tsx_runtime.http.ui.state import log_of
from tsx_runtime.settings.schema import Settings

SECRET = "management-secret"
BEARER = {"authorization": f"Bearer {SECRET}"}
CALLS = ["state", "server", "store", "errors/talker", "log", "log/talker", "metrics/talker"]
CALLS += ["samples/talker/1.0", "samples/talker/1.0/a.png"]
SEEING = """
class Seeing:
    input_kind = "image"

    def initialize(self, context):
        pass

    def handle(self, data, context):
        return ["seen"] * len(data)
"""
PAGING = """
from ts.handler_utils.utils import send_intermediate_predict_response


def handle(data, context):
    if data is None:
        return None
    context.set_response_content_type(0, "text/html")
    for name in ("Set-Cookie", "Clear-Site-Data", "Strict-Transport-Security", "Content-Security-Policy", "X-Content-Type-Options"):
        context.set_response_header(0, name, "*")
    context.set_response_header(0, "Cross-Origin-Resource-Policy", "cross-origin")
    context.set_response_header(0, "X-Own", "1")
    if context.get_request_header(0, "x-piecewise") == "True":
        send_intermediate_predict_response(["<html>"], {0: context.get_request_id(0)}, "", 200, context)
    return ["<script>alert(1)</script>"]
"""


@pytest.fixture(scope="module")
def locked(start_server: Callable[..., AbstractContextManager[Any]]) -> Iterator[Any]:
    with start_server(management_token=SECRET, inference_token="other") as server:
        server.register("talker.mar", initial_workers=1)
        yield server


def test_the_page_is_open_and_everything_that_tells_something_is_not(locked: Any) -> None:
    assert locked.management.get("/ui/").status_code == 200
    for name in files():
        assert locked.management.get(f"/ui/{name}").status_code == 200
    for call in CALLS:
        answer = locked.management.get(f"/ui/api/{call}")
        assert (answer.status_code, answer.json()["type"]) == (400, "InvalidKeyException"), call
    assert (
        locked.management.post("/ui/api/predict/talker", content=b"x").json()["type"]
        == "InvalidKeyException"
    )
    assert locked.management.get("/ui/api/state", headers=BEARER).status_code == 200


def test_every_call_of_the_page_is_behind_the_guard(locked: Any) -> None:
    """Also one that is added later: whatever is below /ui/api says nothing without a token."""
    for method in ("GET", "POST", "PUT", "DELETE"):
        assert locked.management.request(method, "/ui/api/state").status_code in (400, 405)


@pytest.mark.parametrize("header", ["host", "origin"])
def test_no_page_of_another_site_gets_anything(server: Any, header: str) -> None:
    foreign = {header: "evil.example" if header == "host" else "http://evil.example"}
    for path in ("/ui/", "/ui/app.js", "/ui/api/state"):
        assert server.management.get(path, headers=foreign).status_code == 403
    assert (
        server.management.post("/ui/api/predict/talker", content=b"x", headers=foreign).status_code
        == 403
    )


def test_the_page_is_at_one_address_from_which_its_parts_are_found(server: Any) -> None:
    moved = server.management.get("/ui")
    assert (moved.status_code, moved.headers["location"]) == (308, "ui/")
    assert urljoin("http://proxy/prefix/ui", moved.headers["location"]) == "http://proxy/prefix/ui/"
    assert server.management.get("/ui/").headers["content-type"] == "text/html; charset=utf-8"
    assert server.management.head("/ui/").status_code == 200
    assert server.inference.get("/ui/").status_code == 404


def test_its_files_are_sent_packed_to_those_that_can_read_them(server: Any) -> None:
    sizes = []
    for name, file in files().items():
        plain = server.management.get(f"/ui/{name}", headers={"accept-encoding": "identity"})
        packed = server.management.get(f"/ui/{name}", headers={"accept-encoding": "gzip, br"})
        assert plain.content == packed.content == file.body
        assert ("content-encoding" in plain.headers, packed.headers["content-encoding"]) == (
            False,
            "gzip",
        )
        assert plain.headers["vary"] == packed.headers["vary"] == "accept-encoding"
        sizes.append(int(packed.headers["content-length"]))
    assert sum(sizes) < 84_000


@pytest.mark.parametrize(
    "name",
    [
        "nothing.js",
        "..%2fwire.py",
        "%2e%2e/wire.py",
        "..%5cwire.py",
        "app.js%00",
        "__pycache__",
        "http",
    ],
)
def test_nothing_but_its_files_is_served(server: Any, name: str) -> None:
    assert server.management.get(f"/ui/{name}").status_code == 404


def test_the_policy_allows_this_server_and_nothing_else(server: Any) -> None:
    headers = server.management.get("/ui/").headers
    policy = dict(
        part.strip().partition(" ")[::2] for part in headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == "'none'"
    assert {policy[name] for name in ("script-src", "style-src", "connect-src")} == {"'self'"}
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert headers["x-content-type-options"] == "nosniff"
    assert (
        server.management.get("/ui/app.js").headers["content-security-policy"]
        == headers["content-security-policy"]
    )


class _Inline(HTMLParser):
    found: list[str]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = dict(attrs)
        if (
            tag == "style"
            or (tag == "script" and "src" not in names)
            or "style" in names
            or any(name.startswith("on") for name in names)
        ):
            self.found.append(tag)


def test_no_file_needs_what_the_policy_forbids_nor_another_host() -> None:
    reader = _Inline()
    reader.found = []
    reader.feed((FOLDER / "index.html").read_text())
    assert reader.found == []
    for path in FOLDER.iterdir():
        text = path.read_text().replace(
            "http://www.w3.org/", ""
        )  # names of SVG, which nobody fetches
        text = re.sub(r'<a href="https://[^"]*"', "", text)  # only a click follows a link
        assert re.findall(r"https?://(?!localhost\b)[^\s\"'`$]*", text) == [], path.name
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text
        ), path.name


def test_the_state_tells_models_versions_and_workers(server: Any) -> None:
    reported = server.management.get("/ui/api/state").json()
    assert {"start", "version", "now", "modelApi", "inference"} <= set(reported["server"])
    (model,) = [model for model in reported["models"] if model["name"] == "talker"]
    assert model["default"] == "1.0"
    first, second = model["versions"]
    assert (first["version"], first["state"], second["version"], second["state"]) == (
        "1.0",
        "ready",
        "2.0",
        "idle",
    )
    (worker,) = first["workers"]
    assert worker["state"] == "READY"
    assert worker["device"] == "cpu"
    assert worker["memory"] > 1_000_000
    assert first["limits"] == {
        "batch_size": 1,
        "max_batch_delay": 100,
        "job_queue_size": 100,
        "response_timeout": 120,
        "client_timeout": 0,
    }


def test_versions_are_reported_in_their_own_order_with_the_labels_of_the_model(empty: Any) -> None:
    for version in ("10.0", "9.0"):
        empty.write_mar(f"grown{version}.mar", name="grown", version=version, handler=SEEING)
        empty.register(f"grown{version}.mar", initial_workers=0)
    assert (
        empty.management.put("/models/grown/labels/canary", json={"version": "10.0"}).status_code
        == 200
    )
    (model,) = empty.management.get("/ui/api/state").json()["models"]
    assert [version["version"] for version in model["versions"]] == ["9.0", "10.0"]
    assert model["labels"] == {"canary": "10.0"}


def test_the_memory_of_workers_is_not_read_on_the_event_loop(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, threads = Worker.memory, []
    monkeypatch.setattr(
        Worker, "memory", lambda worker: threads.append(threading.get_ident()) or read(worker)
    )
    assert server.management.get("/ui/api/state").status_code == 200
    assert threads
    assert server.call(threading.get_ident) not in threads


def test_points_are_reported_once(own_server: Any, empty: Any) -> None:
    empty.register("talker.mar", initial_workers=1)
    for _ in range(2):
        empty.call(empty.series.sample)
    assert empty.inference.post("/predictions/talker").status_code == 200
    empty.call(empty.series.sample)
    reported = empty.management.get("/ui/api/state").json()
    points = reported["models"][0]["versions"][0]["points"]
    assert points[-1][0] == reported["newest"]
    assert points[-1][1] > 0
    assert points[-1][7] == 0  # batches of one have no places to fill
    assert len(points[-1][8]) == 6
    assert empty.management.put("/models/talker", params={"batch_size": 4}).status_code == 200
    assert empty.inference.post("/predictions/talker").status_code == 200
    empty.call(empty.series.sample)
    batched = empty.management.get("/ui/api/state", params={"since": reported["newest"]}).json()
    (point,) = batched["models"][0]["versions"][0]["points"]
    assert point[7] == pytest.approx(4 * point[1], rel=0.01)
    reported = batched
    assert (
        empty.management.get("/ui/api/state", params={"since": reported["newest"]}).json()[
            "models"
        ][0]["versions"][0]["points"]
        == []
    )


def test_the_handler_says_what_it_takes(empty: Any) -> None:
    empty.write_mar("seeing.mar", handler=SEEING)
    empty.register("seeing.mar", initial_workers=1)
    empty.register("talker.mar", initial_workers=1)
    reported = {
        model["name"]: model["versions"][0]["input"]
        for model in empty.management.get("/ui/api/state").json()["models"]
    }
    assert reported == {"seeing": "image", "talker": None}


def test_a_prediction_by_the_management_address_is_the_one_of_the_inference_address(
    server: Any,
) -> None:
    body, headers = b'{"a": 1}', {"content-type": "application/json", "X-Mine": "yes"}
    for suffix in ("", "/1.0"):
        here, there = (
            client.post(f"{prefix}/talker{suffix}", content=body, headers=headers)
            for client, prefix in (
                (server.management, "/ui/api/predict"),
                (server.inference, "/predictions"),
            )
        )
        assert here.status_code == there.status_code == 200
        mine, theirs = here.json(), there.json()
        assert mine["row"] == theirs["row"]
        assert mine["headers"]["X-Mine"] == "yes"
        assert mine["headers"].keys() == theirs["headers"].keys()
    assert server.management.post("/ui/api/predict/nothing").status_code == 404
    assert (
        server.management.post("/ui/api/predict/talker", headers={"x-do": "raise"}).status_code
        == 500
    )
    assert (
        server.management.post("/ui/api/predict/talker", headers={"x-do": "stream"}).text == "abc"
    )


def test_no_handler_sees_the_management_token(locked: Any) -> None:
    answer = locked.management.post(
        "/ui/api/predict/talker", content=b"x", headers={**BEARER, "Cookie": "a=b", "X-Mine": "yes"}
    )
    assert answer.status_code == 200
    assert SECRET not in answer.text
    names = {name.lower() for name in answer.json()["headers"]}
    assert not names & {"authorization", "cookie"}
    assert "X-Mine" in answer.json()["headers"]


def test_no_credential_of_the_page_reaches_a_handler(
    start_server: Callable[..., AbstractContextManager[Any]],
) -> None:
    names = ["authorization", "proxy-authorization", "cookie"]
    with start_server(pass_headers=names) as server:
        server.register("talker.mar", initial_workers=1)
        sent = dict.fromkeys((*names, "X-Mine"), "a=b")
        seen = server.management.post("/ui/api/predict/talker", content=b"x", headers=sent).json()[
            "headers"
        ]
        assert {name for name in seen if name.lower() in {*names, "x-mine"}} == {"X-Mine"}


@pytest.mark.parametrize("piecewise", [False, True])
def test_what_a_handler_answers_is_no_page_of_the_management_address(
    empty: Any, piecewise: bool
) -> None:
    empty.write_mar("paging.mar", handler=PAGING)
    empty.register("paging.mar", initial_workers=1)
    answer = empty.management.post(
        "/ui/api/predict/paging", headers={"x-piecewise": str(piecewise)}
    )
    assert answer.status_code == 200
    assert answer.text.endswith("<script>alert(1)</script>")
    reported = answer.headers
    assert reported["x-own"] == "1"
    assert reported.get_list("content-security-policy") == ["sandbox; default-src 'none'"]
    assert reported.get_list("x-content-type-options") == ["nosniff"]
    assert reported.get_list("cross-origin-resource-policy") == ["same-origin"]
    assert not reported.keys() & {"set-cookie", "clear-site-data", "strict-transport-security"}


def test_only_a_script_of_this_server_gets_predictions_by_the_management_address(
    server: Any,
) -> None:
    path = "/ui/api/predict/talker"
    for method in ("GET", "HEAD", "PATCH", "DELETE", "OPTIONS"):
        answer = server.management.request(method, path)
        assert (answer.status_code, answer.headers["content-type"]) == (405, "application/json"), (
            method
        )
        assert answer.headers["allow"] == "POST, PUT"
    for foreign in ({"sec-fetch-mode": "navigate"}, {"sec-fetch-site": "cross-site"}):
        refused = server.management.post(path, content=b"x", headers=foreign)
        assert (refused.status_code, refused.json()["type"]) == (403, "ForeignOriginException")
    own = {"sec-fetch-mode": "cors", "sec-fetch-site": "same-origin"}
    for method in ("POST", "PUT"):
        assert server.management.request(method, path, content=b"x", headers=own).status_code == 200


def test_the_access_log_tells_which_model_the_playground_asked(
    start_server: Callable[..., AbstractContextManager[Any]],
    until: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        start_server(access_log=True, log_format="text") as server,
        caplog.at_level(logging.INFO, "ACCESS_LOG"),
    ):
        server.register("talker.mar", initial_workers=1)
        assert server.management.post("/ui/api/predict/talker", content=b"x").status_code == 200
        until(lambda: "/ui/api/predict/talker" in caplog.text)
    line = next(line for line in caplog.text.splitlines() if "/ui/api/predict/talker" in line)
    assert '"POST /ui/api/predict/talker HTTP/1.1" 200' in line
    assert line.endswith(" talker 1.0")


def test_too_large_a_body_is_refused_as_elsewhere(server: Any) -> None:
    assert (
        server.management.post("/ui/api/predict/talker", content=b"x" * 200_000).status_code == 413
    )


def test_errors_of_handlers_are_reported_with_their_traceback(empty: Any, until: Any) -> None:
    empty.register("talker.mar", initial_workers=1)
    assert empty.management.get("/ui/api/errors/talker").json() == []
    asked = [
        empty.inference.post("/predictions/talker", headers={"x-do": "raise"}) for _ in range(3)
    ]
    assert {answer.status_code for answer in asked} == {500}
    until(
        lambda: (
            sum(error["times"] for error in empty.management.get("/ui/api/errors/talker").json())
            == 3
        )
    )
    (error,) = empty.management.get("/ui/api/errors/talker").json()
    assert error["version"] == "1.0"
    assert error["traceback"].rstrip().endswith("RuntimeError: no such image")
    assert error["request_ids"] == [answer.headers["x-request-id"] for answer in asked]
    assert error["kind_times"] == 3
    assert empty.inference.post("/predictions/talker", headers={"x-do": "exit"}).status_code == 500
    until(lambda: len(empty.management.get("/ui/api/errors/talker").json()) == 2)
    newest = empty.management.get("/ui/api/errors/talker").json()[0]
    assert "ended: exit code 7" in newest["message"]


def test_what_handlers_print_is_reported_with_the_worker_that_did(empty: Any, until: Any) -> None:
    empty.write_mar(
        "printing.mar",
        handler="def handle(data, context):\n    print('got', data)\n    return data and ['x'] * len(data)\n",
    )
    empty.register("printing.mar", initial_workers=1)
    assert empty.inference.post("/predictions/printing", content=b"abc").status_code == 200
    until(lambda: "abc" in empty.management.get("/ui/api/log/printing").text)
    reported = empty.management.get("/ui/api/log/printing").json()
    (worker,) = empty.management.get("/models/printing").json()[0]["workers"]
    assert {(line["worker"], line["stream"], line["version"]) for line in reported} == {
        (worker["id"], "stdout", "1.0")
    }


def test_the_log_of_all_models_is_their_newest_lines() -> None:
    versions = []
    for name, start in (("old", 0), ("one", 1000), ("two", 1000)):
        log = ErrorLog()
        for number in range(400):
            log.add_line(start + number, "9000", "stdout", f"{name} {number}")
        versions.append(
            SimpleNamespace(name=name, version="1.0", stats=SimpleNamespace(error_log=log))
        )
    lines = log_of(cast(Any, versions))
    assert [line["at"] for line in lines] == [1150 + place // 2 for place in range(500)]
    assert {line["model"] for line in lines} == {"one", "two"}


def test_the_server_tells_its_memory_and_its_settings_without_secrets(locked: Any) -> None:
    reported = locked.management.get("/ui/api/server", headers=BEARER).json()
    assert 1_000_000 < reported["memory"] < reported["total"]
    assert 0 < reported["free"] <= reported["total"]
    settings = {setting["name"]: setting for setting in reported["settings"]}
    assert settings["management_token"] | {"about": ""} == {
        "name": "management_token",
        "value": "(hidden)",
        "set": True,
        "about": "",
    }
    assert settings["job_queue_size"] == {
        "name": "job_queue_size",
        "value": 100,
        "set": False,
        "about": Settings.model_fields["job_queue_size"].description,
    }
    assert SECRET not in json.dumps(reported)


def test_a_model_that_does_not_load_says_why(empty: Any, until: Any) -> None:
    empty.management.post(
        "/models", params={"url": "broken.mar", "initial_workers": 1, "synchronous": "false"}
    )
    until(lambda: empty.management.get("/ui/api/errors/broken").json())
    error = empty.management.get("/ui/api/errors/broken").json()[0]
    assert "no_such_module_anywhere" in error["message"] + error["traceback"]
    until(
        lambda: (
            empty.management.get("/ui/api/state").json()["models"][0]["versions"][0]["state"]
            == "failed"
        )
    )


def test_metrics_of_one_model_are_values_with_labels(server: Any) -> None:
    server.inference.post("/predictions/talker")
    reported = server.management.get("/ui/api/metrics/talker").json()
    (requests,) = [
        each
        for each in reported
        if each["name"] == "ts_inference_requests_total"
        and each["labels"] == {"model_version": "1.0"}
    ]
    assert requests["value"] >= 1
    assert not [each for each in reported if each["name"].endswith("_bucket")]
    assert server.management.get("/ui/api/metrics/nothing").status_code == 404


def test_samples_are_files_of_the_archive_and_no_others(empty: Any, store: Path) -> None:
    place = make_model(
        store / "sampled", "def handle(data, context):\n    return data and ['x'] * len(data)\n"
    )
    (place / "samples").mkdir(exist_ok=True)
    (place / "samples" / "a.png").write_bytes(b"picture")
    (place / "samples" / "page.html").write_text("<script>alert(1)</script>")
    if not (place / "samples" / "out.txt").is_symlink():
        (place / "samples" / "out.txt").symlink_to("/etc/hostname")
    empty.register("sampled", initial_workers=0)
    reported = empty.management.get("/ui/api/samples/sampled/1.0").json()
    assert [(each["name"], each["type"]) for each in reported] == [
        ("a.png", "image/png"),
        ("page.html", "text/html"),
    ]
    assert empty.management.get("/ui/api/samples/sampled/1.0/a.png").content == b"picture"
    page = empty.management.get("/ui/api/samples/sampled/1.0/page.html")
    assert page.headers["content-type"] == "application/octet-stream"
    for name in ("out.txt", "..%2fhandler.py", "nothing"):
        assert empty.management.get(f"/ui/api/samples/sampled/1.0/{name}").status_code == 404


def test_samples_that_go_while_they_are_looked_at_are_none(
    empty: Any, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = make_model(
        store / "going", "def handle(data, context):\n    return data and ['x'] * len(data)\n"
    )
    (place / "samples").mkdir(exist_ok=True)
    sample = place / "samples" / "a.png"
    sample.write_bytes(b"picture")
    empty.register("going", initial_workers=0)
    find, is_file = samples.samples_of, Path.is_file

    def found_and_gone(version: Any) -> Any:
        found = find(version)
        sample.unlink()
        return found

    with monkeypatch.context() as patch:
        patch.setattr(samples, "samples_of", found_and_gone)
        assert empty.management.get("/ui/api/samples/going/1.0/a.png").status_code == 404
        sample.write_bytes(b"picture")
        assert empty.management.get("/ui/api/samples/going/1.0").json()[0]["size"] == 7
        sample.write_bytes(b"picture")
        patch.setattr(samples, "samples_of", find)
        patch.setattr(
            Path,
            "is_file",
            lambda path: is_file(path) and (path.name != sample.name or path.unlink() is None),
        )
        answer = empty.management.get("/ui/api/samples/going/1.0")
        assert (answer.status_code, answer.json()) == (200, [])


def test_the_store_tells_what_could_be_registered(server: Any, store: Path) -> None:
    reported = server.management.get("/ui/api/store").json()
    assert {"talker.mar", "other.mar", "broken.mar"} <= set(reported)
    assert not [name for name in reported if "/" in name]


def test_the_page_is_no_part_of_the_documented_interface(server: Any) -> None:
    document = json.loads(server.management.get("/openapi.json").content)
    assert not [path for path in document["paths"] if path.startswith("/ui")]
