"""Asynchronous answers over HTTP: accepted, shown, answered as to a client that waits, cancelled,
sent to callbacks.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from tests.runtime.conftest import RunningServer
from tsx_runtime.http.asgi_lane.stored_requests import RequestExecutor
from tsx_runtime.jobs.store import JobRecord

pytestmark = pytest.mark.slow
SECRET = "a secret of callbacks"
VARIABLE = {"date", "server", "x-request-id", "x-tsx-job-state"}


class Receiver:
    """Takes callbacks; the first ones of each path get the statuses that the test has set."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self.received: list[tuple[dict[str, str], bytes]] = []
        self.arrived = threading.Semaphore(0)
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                status = outer.statuses.pop(0) if outer.statuses else 200
                outer.received.append(
                    ({name.lower(): value for name, value in self.headers.items()}, body)
                )
                self.send_response(status)
                self.send_header("content-length", "0")
                self.end_headers()
                outer.arrived.release()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.server.shutdown()
    receiver.server.server_close()


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Any], receiver: Receiver) -> Iterator[RunningServer]:
    own = {
        "job_callback_hosts": [f"127.0.0.1:{receiver.port}"],
        "job_callback_secret": SECRET,
        "max_queued_jobs": 20,
    }
    with start_server(**own) as running:
        running.register("talker.mar", initial_workers=1)
        yield running


def later(
    server: RunningServer,
    body: bytes = b"x",
    path: str = "/predictions/talker",
    prefer: str = "respond-async",
    **headers: str,
) -> Any:
    return server.ask(body, path, prefer=prefer, **headers)


def answer_of(server: RunningServer, accepted: httpx.Response) -> httpx.Response:
    assert accepted.status_code == 202, accepted.text
    deadline = time.monotonic() + 60
    while (found := server.inference.get(accepted.headers["location"])).headers[
        "x-tsx-job-state"
    ] in ("queued", "running"):
        assert found.status_code == 202
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return found


def shown(response: httpx.Response) -> tuple[int, dict[str, str], bytes]:
    return (
        response.status_code,
        {name: value for name, value in response.headers.items() if name not in VARIABLE},
        response.content,
    )


def test_a_request_for_later_is_accepted_with_its_place(server: RunningServer) -> None:
    accepted = later(server)
    assert accepted.status_code == 202
    body = accepted.json()
    assert accepted.headers["location"] == f"/jobs/{body['id']}"
    assert accepted.headers["preference-applied"] == "respond-async"
    assert int(accepted.headers["retry-after"]) >= 1
    assert len(body["id"]) == 32
    assert (body["model"], body["state"]) == ("talker", "queued")
    assert answer_of(server, accepted).headers["x-request-id"] == accepted.headers["x-request-id"]


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/predictions/talker/1.0", {"x_do": "bytes"}),
        ("/predictions/talker", {"x_do": "status", "x_status": "418"}),
        ("/predictions/talker", {"x_do": "headers"}),
        ("/predictions/talker", {"x_do": "raise"}),
        ("/v2/models/talker/infer", {"x_do": "raise"}),
        ("/v2/models/talker/versions/9/infer", {"x_do": "bytes"}),
    ],
)
def test_the_answer_is_the_one_that_a_waiting_client_gets(
    server: RunningServer, path: str, headers: dict[str, str]
) -> None:
    assert shown(answer_of(server, later(server, b"some bytes", path, **headers))) == shown(
        server.ask(b"some bytes", path, **headers)
    )


def test_a_stream_is_answered_whole(server: RunningServer) -> None:
    found = answer_of(server, later(server, x_do="stream"))
    assert (found.status_code, found.content) == (200, b"abc")
    assert found.headers["content-length"] == "3"


def test_the_handler_gets_the_request_as_it_was_sent(server: RunningServer) -> None:
    seen = answer_of(
        server,
        later(
            server, b"x", "/predictions/talker/1.0/some/path", X_Own="1", authorization="Bearer abc"
        ),
    ).json()
    assert seen["headers"]["url_path"] == "some/path"
    assert seen["headers"]["X-Own"] == "1"
    assert "authorization" not in {name.lower() for name in seen["headers"]}


def test_an_answer_that_another_program_wrote_into_the_store_frames_no_other_answer(
    server: RunningServer,
) -> None:
    accepted = later(server, x_do="bytes")
    answer_of(server, accepted)
    block = b"X-Own: 1\r\nContent-Length: 0\r\nTransfer-Encoding: chunked\r\nX-A: b\nX-C: d\r\nX D: e\r\n: f\r\n"
    with (
        contextlib.closing(
            sqlite3.connect(server.registry.state.directory / "jobs.sqlite")
        ) as connection,
        connection,
    ):
        name = accepted.headers["location"].rpartition("/")[2]
        connection.execute(
            "UPDATE tsx_answers SET headers = ?, status = 99999 WHERE name = ?", (block, name)
        )
    found = server.inference.get(accepted.headers["location"])
    assert (found.status_code, found.content, found.headers["x-own"]) == (500, b"x", "1")
    assert found.headers.get_list("content-length") == ["1"]
    assert not {"transfer-encoding", "x-a", "x-c", "x d"} & {*found.headers}


@pytest.mark.parametrize("deadline", [float("nan"), float("inf")])
def test_a_job_with_a_deadline_that_no_timer_bears_is_refused(deadline: float) -> None:
    async def unread(id: str) -> None:
        raise AssertionError(id)

    executor = RequestExecutor(cast("Any", None), 1, unread)
    job = JobRecord(
        1, "a", "running", "m", "", 0, "", "r", 0, 1, None, 0.0, 0.0, None, None, deadline, ""
    )
    assert asyncio.run(executor.answer(job)).status == 503


def test_a_client_may_wait_for_a_while(server: RunningServer, tmp_path: Path) -> None:
    soon = later(server, prefer="respond-async, wait=60", x_do="bytes")
    assert (soon.status_code, soon.content, soon.headers["preference-applied"]) == (
        200,
        b"x",
        "wait=60",
    )
    assert server.inference.get(soon.headers["location"]).content == b"x"
    held = later(server, prefer="respond-async, wait=1", x_do="wait", x_file=str(tmp_path / "go"))
    assert (held.status_code, held.headers["preference-applied"]) == (202, "respond-async, wait=1")
    assert server.inference.get(held.headers["location"]).json()["ahead"] == 0
    (tmp_path / "go").touch()
    assert answer_of(server, held).content == b"waited"


def test_a_request_whose_client_waits_goes_before_jobs(
    server: RunningServer, tmp_path: Path, until: Any
) -> None:
    held = [later(server, x_do="wait", x_file=str(tmp_path / name)) for name in ("first", "second")]
    version = server.registry.find("talker")
    until(lambda: version.in_flight == 1)  # the second one waits in the store
    with ThreadPoolExecutor() as threads:
        asked = threads.submit(server.ask, x_do="bytes")
        until(lambda: version.in_flight == 2)
        (tmp_path / "first").touch()
        assert asked.result(60).content == b"x"
    assert server.inference.get(held[1].headers["location"]).status_code == 202
    (tmp_path / "second").touch()
    assert [answer_of(server, each).content for each in held] == [b"waited", b"waited"]


def test_a_queued_job_can_be_cancelled(server: RunningServer, tmp_path: Path) -> None:
    held = later(server, x_do="wait", x_file=str(tmp_path / "go"))
    others = [later(server, x_do="bytes") for _ in range(3)]
    progress = server.inference.get(others[2].headers["location"]).json()
    assert progress["state"] == "queued"
    cancelled = server.inference.delete(others[2].headers["location"])
    assert (cancelled.status_code, cancelled.json()["state"]) == (200, "cancelled")
    assert server.inference.delete(others[2].headers["location"]).status_code == 200
    (tmp_path / "go").touch()
    assert [answer_of(server, each).status_code for each in (held, *others)] == [200, 200, 200, 410]


def test_what_runs_can_be_cancelled_and_its_answer_goes_nowhere(
    server: RunningServer, tmp_path: Path, until: Any
) -> None:
    held = later(server, x_do="wait", x_file=str(tmp_path / "go"))
    where = held.headers["location"]
    until(lambda: server.inference.get(where).json()["state"] == "running")
    assert server.inference.delete(where).json()["state"] == "cancelled"
    (tmp_path / "go").touch()
    assert answer_of(server, later(server)).status_code == 200
    assert server.inference.get(where).status_code == 410


def test_errors_say_what_to_do(server: RunningServer, error_of: Any, tmp_path: Path) -> None:
    unknown = later(server, path="/predictions/nothing")
    assert unknown.status_code == 404
    assert error_of(unknown)[0] == "ModelNotFoundException"
    missing = server.inference.get("/jobs/0123")
    assert missing.status_code == 404
    assert error_of(missing)[0] == "JobNotFoundException"
    done = later(server, prefer="respond-async, wait=60")
    assert server.inference.delete(done.headers["location"]).status_code == 409
    assert server.inference.post(done.headers["location"]).headers["allow"] == "DELETE, GET, HEAD"
    assert (
        server.inference.post(
            "/predictions/talker", content=b"x" * 100_001, headers={"prefer": "respond-async"}
        ).status_code
        == 413
    )
    held = [later(server, x_do="wait", x_file=str(tmp_path / "go"))]
    while (last := later(server)).status_code == 202:
        held.append(last)
    assert last.status_code == 503
    assert "max_queued_jobs" in error_of(last)[1]
    assert last.headers["retry-after"] == "5"
    (tmp_path / "go").touch()
    assert {answer_of(server, each).status_code for each in held} == {200}


def test_a_job_of_a_model_that_is_unregistered_before_its_turn_is_answered_so(
    server: RunningServer, error_of: Any, tmp_path: Path
) -> None:
    server.register("other.mar", initial_workers=0)
    accepted = later(server, path="/predictions/other")
    assert server.inference.get(accepted.headers["location"]).json()["state"] == "queued"
    server.call(lambda: server.registry.unregister("other"))
    found = answer_of(server, accepted)
    assert found.status_code == 404
    assert error_of(found)[0] == "ModelNotFoundException"


def test_a_job_that_is_not_started_in_its_time_is_refused(
    server: RunningServer, tmp_path: Path
) -> None:
    held = later(server, x_do="wait", x_file=str(tmp_path / "go"))
    late = later(server, x_tsx_timeout_ms="1")
    (tmp_path / "go").touch()
    assert answer_of(server, late).status_code == 503
    answer_of(server, held)


def test_a_callback_is_signed_and_sent_again_until_it_is_received(
    server: RunningServer, receiver: Receiver
) -> None:
    receiver.statuses = [500]
    accepted = later(
        server, x_do="bytes", x_tsx_callback_url=f"http://127.0.0.1:{receiver.port}/done?x=1"
    )
    assert all(receiver.arrived.acquire(timeout=60) for _ in range(2))
    assert [body for _, body in receiver.received] == [b"x", b"x"]
    headers, body = receiver.received[-1]
    named = accepted.json()["id"]
    assert (headers["x-tsx-job"], headers["x-tsx-status"], headers["x-request-id"]) == (
        named,
        "200",
        accepted.headers["x-request-id"],
    )
    seconds, given = (part.partition("=")[2] for part in headers["x-tsx-signature"].split(","))
    expected = hmac.new(
        SECRET.encode(), f"{seconds}.{named}.200.".encode() + body, hashlib.sha256
    ).hexdigest()
    assert hmac.compare_digest(given, expected)


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254/",
        "http://127.0.0.1:1/",
        "file:///etc/passwd",
        "no url",
        "http://a@127.0.0.1/",
    ],
)
def test_a_callback_elsewhere_is_refused_at_once(server: RunningServer, url: str) -> None:
    assert later(server, x_tsx_callback_url=url).status_code == 400


def test_tokens_guard_jobs_too_and_without_a_store_the_client_waits(
    start_server: Callable[..., Any],
) -> None:
    with start_server(inference_token="secret") as guarded:
        assert guarded.inference.get("/jobs/x").status_code == 400
        assert (
            guarded.inference.get("/jobs/x", headers={"authorization": "Bearer secret"}).status_code
            == 404
        )
    with start_server(jobs_store="off") as without:
        without.register("talker.mar", initial_workers=1)
        assert later(without, x_do="bytes").content == b"x"
        assert without.inference.get("/jobs/x").status_code == 404
