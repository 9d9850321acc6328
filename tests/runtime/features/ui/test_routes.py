"""The files of the web page, and the calls that it makes to the management address."""

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
from typing import Any
from urllib.parse import urljoin

import httpx
import pytest

from tests.support.models import make_model
from tsx_runtime.api.management import samples
from tsx_runtime.core.telemetry.error_log import ErrorLog
from tsx_runtime.core.workers.worker import Worker
from tsx_runtime.features.ui.routes import FOLDER, files
from tsx_runtime.features.ui.state import recent_lines
from tsx_runtime.settings.schema import Settings

MANAGEMENT_TOKEN = "management-secret"
CREDENTIALS = ["authorization", "proxy-authorization", "cookie"]
BEARER = {"authorization": f"Bearer {MANAGEMENT_TOKEN}"}
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


def read(server: Any, call: str) -> Any:
    return server.management.get(f"/ui/api/{call}").json()


def predict(server: Any, **form_parts: Any) -> httpx.Response:
    """Send a playground request."""
    return server.management.post("/ui/api/predict/talker", **form_parts)


@pytest.fixture(scope="module")
def token_server(start_server: Callable[..., AbstractContextManager[Any]]) -> Iterator[Any]:
    """Start a server with tokens whose handlers may see the credentials of requests."""
    with start_server(
        management_token=MANAGEMENT_TOKEN, inference_token="other", pass_headers=CREDENTIALS
    ) as server:
        server.register("talker.mar", initial_workers=1)
        yield server


def test_the_page_needs_no_token_but_its_calls_do(token_server):
    assert token_server.management.get("/ui/").status_code == 200
    assert token_server.management.get("/ui/app.js").status_code == 200
    for call in CALLS:
        answer = token_server.management.get(f"/ui/api/{call}")
        assert (answer.status_code, answer.json()["type"]) == (400, "InvalidKeyException"), call
    assert predict(token_server, content=b"x").json()["type"] == "InvalidKeyException"
    assert token_server.management.get("/ui/api/state", headers=BEARER).status_code == 200


@pytest.mark.parametrize("header", ["host", "origin"])
def test_calls_of_pages_from_other_origins_are_refused(server, header):
    foreign_headers = {header: "evil.example" if header == "host" else "http://evil.example"}
    for path in ("/ui/", "/ui/app.js", "/ui/api/state"):
        assert server.management.get(path, headers=foreign_headers).status_code == 403
    assert predict(server, content=b"x", headers=foreign_headers).status_code == 403


def test_the_page_has_one_address_and_relative_links(server):
    redirect = server.management.get("/ui")
    assert (redirect.status_code, redirect.headers["location"]) == (308, "ui/")
    assert (
        urljoin("http://proxy/prefix/ui", redirect.headers["location"]) == "http://proxy/prefix/ui/"
    )
    assert server.management.get("/ui/").headers["content-type"] == "text/html; charset=utf-8"
    assert server.management.head("/ui/").status_code == 200
    assert server.inference.get("/ui/").status_code == 404


def test_page_files_are_compressed_if_the_client_accepts_it(server):
    sizes = []
    for name, file in files().items():
        compressed_response = server.management.get(
            f"/ui/{name}", headers={"accept-encoding": "gzip, br"}
        )
        assert compressed_response.content == file.body
        assert compressed_response.headers["content-encoding"] == "gzip"
        sizes.append(int(compressed_response.headers["content-length"]))
    plain_response = server.management.get(f"/ui/{name}", headers={"accept-encoding": "identity"})
    assert plain_response.content == file.body
    assert "content-encoding" not in plain_response.headers
    assert (
        plain_response.headers["vary"] == compressed_response.headers["vary"] == "accept-encoding"
    )
    assert sum(sizes) < 103_000


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
def test_only_the_files_of_the_page_are_served(server, name):
    assert server.management.get(f"/ui/{name}").status_code == 404


def test_the_content_security_policy_allows_only_this_server(server):
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


class InlineCode(HTMLParser):
    """A parser that collects the tags with inline styles or scripts."""

    tags: list[str]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = dict(attrs)
        if (
            tag == "style"
            or (tag == "script" and "src" not in names)
            or "style" in names
            or any(name.startswith("on") for name in names)
        ):
            self.tags.append(tag)


def test_page_files_comply_with_the_policy_and_use_no_other_host():
    reader = InlineCode()
    reader.tags = []
    reader.feed((FOLDER / "index.html").read_text())
    assert reader.tags == []
    for path in FOLDER.iterdir():
        # Namespace names of SVG are not fetched, and links are followed only on a click.
        text = path.read_text().replace("http://www.w3.org/", "")
        text = re.sub(r'<a href="https://[^"]*"', "", text)
        assert re.findall(r"https?://(?!localhost\b)[^\s\"'`$]*", text) == [], path.name
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text
        ), path.name


def test_the_state_lists_models_versions_and_workers(server):
    report = read(server, "state")
    assert {"start", "version", "now", "modelApi", "inference"} <= set(report["server"])
    (model,) = [model for model in report["models"] if model["name"] == "talker"]
    assert model["default"] == "1.0"
    first, second = model["versions"]
    assert (first["version"], first["state"]) == ("1.0", "ready")
    assert (second["version"], second["state"]) == ("2.0", "idle")
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


def test_versions_are_sorted_and_models_have_their_labels(empty):
    for version in ("10.0", "9.0"):
        empty.write_mar(f"grown{version}.mar", name="grown", version=version, handler=SEEING)
        empty.register(f"grown{version}.mar", initial_workers=0)
    label = empty.management.put("/models/grown/labels/canary", json={"version": "10.0"})
    label.raise_for_status()
    (model,) = read(empty, "state")["models"]
    assert [version["version"] for version in model["versions"]] == ["9.0", "10.0"]
    assert model["labels"] == {"canary": "10.0"}


def test_the_memory_of_workers_is_not_read_on_the_event_loop(server, monkeypatch):
    read, threads = Worker.memory, []
    monkeypatch.setattr(
        Worker, "memory", lambda worker: threads.append(threading.get_ident()) or read(worker)
    )
    assert server.management.get("/ui/api/state").status_code == 200
    assert threads
    assert server.call(threading.get_ident) not in threads


def test_chart_points_are_reported_once(empty):
    empty.register("talker.mar", initial_workers=1)
    for _ in range(2):
        empty.call(empty.series.sample)
    assert empty.inference.post("/predictions/talker").status_code == 200
    empty.call(empty.series.sample)
    report = read(empty, "state")
    points = report["models"][0]["versions"][0]["points"]
    assert points[-1][0] == report["newest"]
    assert points[-1][1] > 0
    assert len(points[-1][8]) == 6
    later_state = empty.management.get("/ui/api/state", params={"since": report["newest"]}).json()
    assert later_state["models"][0]["versions"][0]["points"] == []


def test_a_handler_declares_its_input_type(empty):
    empty.write_mar("seeing.mar", handler=SEEING)
    empty.register("seeing.mar", initial_workers=1)
    empty.register("talker.mar", initial_workers=1)
    report = {
        model["name"]: model["versions"][0]["input"] for model in read(empty, "state")["models"]
    }
    assert report == {"seeing": "image", "talker": None}


def test_playground_predictions_equal_those_of_the_inference_address(server):
    body, headers = b'{"a": 1}', {"content-type": "application/json", "X-Mine": "yes"}
    for suffix in ("", "/1.0"):
        page_response, direct_response = (
            client.post(f"{prefix}/talker{suffix}", content=body, headers=headers)
            for client, prefix in (
                (server.management, "/ui/api/predict"),
                (server.inference, "/predictions"),
            )
        )
        assert page_response.status_code == direct_response.status_code == 200
        assert page_response.json()["row"] == direct_response.json()["row"]
        assert page_response.json()["headers"]["X-Mine"] == "yes"
        assert page_response.json()["headers"].keys() == direct_response.json()["headers"].keys()
    assert server.management.post("/ui/api/predict/nothing").status_code == 404
    assert predict(server, content=bytes(200_000)).status_code == 413
    assert predict(server, headers={"x-do": "raise"}).status_code == 500
    assert predict(server, headers={"x-do": "stream"}).text == "abc"


def test_the_page_asks_for_explanations(server):
    page_response = server.management.post("/ui/api/explain/talker/1.0", content=b"x")
    assert page_response.json()["headers"]["explain"] == "True"
    assert predict(server).json()["headers"]["explain"] == "False"
    assert server.management.get("/ui/api/explain/talker").status_code == 405


def test_credentials_of_the_page_do_not_reach_handlers(token_server):
    request_headers = dict.fromkeys((*CREDENTIALS, "X-Mine"), "a=b") | BEARER
    answer = predict(token_server, content=b"x", headers=request_headers)
    assert answer.status_code == 200
    assert MANAGEMENT_TOKEN not in answer.text
    received_headers = answer.json()["headers"]
    assert {name for name in received_headers if name.lower() in {*CREDENTIALS, "x-mine"}} == {
        "X-Mine"
    }


def test_only_scripts_of_this_server_can_use_the_playground(server):
    path = "/ui/api/predict/talker"
    for method in ("GET", "HEAD", "PATCH", "DELETE", "OPTIONS"):
        answer = server.management.request(method, path)
        assert (answer.status_code, answer.headers["content-type"]) == (405, "application/json"), (
            method
        )
        assert answer.headers["allow"] == "POST, PUT"
    for foreign_headers in ({"sec-fetch-mode": "navigate"}, {"sec-fetch-site": "cross-site"}):
        refusal = server.management.post(path, content=b"x", headers=foreign_headers)
        assert (refusal.status_code, refusal.json()["type"]) == (403, "ForeignOriginException")
    script = {"sec-fetch-mode": "cors", "sec-fetch-site": "same-origin"}
    for method in ("POST", "PUT"):
        answer = server.management.request(method, path, content=b"x", headers=script)
        assert answer.status_code == 200


def access_lines(caplog):
    messages = [record.getMessage() for record in caplog.records if record.name == "ACCESS_LOG"]
    return [message for message in messages if "/ui/api/predict/talker" in message]


def test_the_access_log_names_the_model_of_a_playground_request(start_server, until, caplog):
    with (
        start_server(access_log=True, log_format="text") as server,
        caplog.at_level(logging.INFO, "ACCESS_LOG"),
    ):
        server.register("talker.mar", initial_workers=1)
        assert predict(server, content=b"x").status_code == 200
        until(lambda: access_lines(caplog))
    (line,) = access_lines(caplog)
    assert '"POST /ui/api/predict/talker HTTP/1.1" 200' in line
    assert line.endswith(" talker 1.0")


def test_handler_errors_are_reported_with_their_traceback(empty, until):
    empty.register("talker.mar", initial_workers=1)
    assert read(empty, "errors/talker") == []
    request_ids = [
        empty.inference.post("/predictions/talker", headers={"x-do": "raise"}) for _ in range(3)
    ]
    assert {answer.status_code for answer in request_ids} == {500}
    until(lambda: sum(error["times"] for error in read(empty, "errors/talker")) == 3)
    (error,) = read(empty, "errors/talker")
    assert error["version"] == "1.0"
    assert error["traceback"].rstrip().endswith("RuntimeError: no such image")
    assert error["request_ids"] == [answer.headers["x-request-id"] for answer in request_ids]
    assert error["kind_times"] == 3
    assert empty.inference.post("/predictions/talker", headers={"x-do": "exit"}).status_code == 500
    until(lambda: len(read(empty, "errors/talker")) == 2)
    newest_error = read(empty, "errors/talker")[0]
    assert "ended: exit code 7" in newest_error["message"]


def test_handler_output_is_reported_with_its_worker(empty, until):
    empty.write_mar(
        "printing.mar",
        handler="def handle(data, context):\n    print('got', data)\n    return data and ['x'] * len(data)\n",
    )
    empty.register("printing.mar", initial_workers=1)
    assert empty.inference.post("/predictions/printing", content=b"abc").status_code == 200
    until(lambda: "abc" in empty.management.get("/ui/api/log/printing").text)
    report = read(empty, "log/printing")
    (worker,) = empty.management.get("/models/printing").json()[0]["workers"]
    assert {(line["worker"], line["stream"], line["version"]) for line in report} == {
        (worker["id"], "stdout", "1.0")
    }


def test_the_common_log_has_the_newest_lines_of_all_models():
    versions = []
    for name, start in (("old", 0), ("one", 1000), ("two", 1000)):
        log = ErrorLog()
        for number in range(400):
            log.add_line(start + number, "9000", "stdout", f"{name} {number}")
        versions.append(
            SimpleNamespace(name=name, version="1.0", stats=SimpleNamespace(error_log=log))
        )
    lines = recent_lines(versions)
    assert [line["at"] for line in lines] == [1150 + index // 2 for index in range(500)]
    assert {line["model"] for line in lines} == {"one", "two"}


def test_the_server_reports_memory_and_settings_without_secrets(token_server):
    report = token_server.management.get("/ui/api/server", headers=BEARER).json()
    assert 1_000_000 < report["memory"] < report["total"]
    assert 0 < report["free"] <= report["total"]
    settings = {setting["name"]: setting for setting in report["settings"]}
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
    assert MANAGEMENT_TOKEN not in json.dumps(report)


def test_a_failed_model_reports_its_load_error(empty, until):
    empty.management.post(
        "/models", params={"url": "broken.mar", "initial_workers": 1, "synchronous": "false"}
    )
    until(lambda: read(empty, "errors/broken"))
    error = read(empty, "errors/broken")[0]
    assert "no_such_module_anywhere" in error["message"] + error["traceback"]
    until(lambda: read(empty, "state")["models"][0]["versions"][0]["state"] == "failed")


def test_the_metrics_of_a_model_are_values_with_labels(server):
    server.inference.post("/predictions/talker")
    report = read(server, "metrics/talker")
    (requests,) = [
        metric
        for metric in report
        if metric["name"] == "ts_inference_requests_total"
        and metric["labels"] == {"model_version": "1.0"}
    ]
    assert requests["value"] >= 1
    assert not [metric for metric in report if metric["name"].endswith("_bucket")]
    assert server.management.get("/ui/api/metrics/nothing").status_code == 404


def test_samples_are_only_files_of_the_archive(empty, store):
    folder = make_model(store / "sampled", SEEING) / "samples"
    folder.mkdir()
    (folder / "a.png").write_bytes(b"picture")
    (folder / "page.html").write_text("<script>alert(1)</script>")
    (folder / "out.txt").symlink_to("/etc/hostname")
    empty.register("sampled", initial_workers=0)
    report = read(empty, "samples/sampled/1.0")
    assert [(sample["name"], sample["type"]) for sample in report] == [
        ("a.png", "image/png"),
        ("page.html", "text/html"),
    ]
    assert empty.management.get("/ui/api/samples/sampled/1.0/a.png").content == b"picture"
    page = empty.management.get("/ui/api/samples/sampled/1.0/page.html")
    assert page.headers["content-type"] == "application/octet-stream"
    for name in ("out.txt", "..%2fhandler.py", "nothing"):
        assert empty.management.get(f"/ui/api/samples/sampled/1.0/{name}").status_code == 404


def test_samples_that_vanish_while_being_read_are_omitted(empty, store, monkeypatch):
    sample = make_model(store / "going", SEEING) / "samples" / "a.png"
    sample.parent.mkdir()
    sample.write_bytes(b"picture")
    empty.register("going", initial_workers=0)
    find, is_file = samples.samples_of, Path.is_file

    def find_and_remove(version: Any) -> Any:
        samples_of = find(version)
        sample.unlink()
        return samples_of

    with monkeypatch.context() as patch:
        patch.setattr(samples, "samples_of", find_and_remove)
        assert empty.management.get("/ui/api/samples/going/1.0/a.png").status_code == 404
        sample.write_bytes(b"picture")
        assert read(empty, "samples/going/1.0")[0]["size"] == 7
        sample.write_bytes(b"picture")
        patch.setattr(samples, "samples_of", find)
        patch.setattr(
            Path,
            "is_file",
            lambda path: is_file(path) and (path.name != sample.name or path.unlink() is None),
        )
        answer = empty.management.get("/ui/api/samples/going/1.0")
        assert (answer.status_code, answer.json()) == (200, [])


def test_the_store_lists_registrable_archives(server, store):
    report = read(server, "store")
    assert {"talker.mar", "other.mar", "broken.mar"} <= set(report)
    assert not [name for name in report if "/" in name]


def test_the_api_document_omits_the_web_page(server):
    document = json.loads(server.management.get("/openapi.json").content)
    assert not [path for path in document["paths"] if path.startswith("/ui")]
