"""Jobs over HTTP: acceptance, answers, cancellation and callbacks."""

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
from typing import Any, ClassVar

import httpx
import pytest

from tests.runtime.conftest import RunningServer
from tsx_runtime.features.jobs.executor import RequestExecutor
from tsx_runtime.features.jobs.storage.store import JobRecord

pytestmark = pytest.mark.slow
CALLBACK_SECRET = "a secret of callbacks"
VARIABLE = {"date", "server", "x-request-id", "x-tsx-job-state"}


class Receiver(BaseHTTPRequestHandler):
    """A receiver of callbacks that refuses the first one."""

    received: ClassVar[list[tuple[Any, bytes]]] = []
    arrived = threading.Semaphore(0)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.received.append((self.headers, body))
        self.send_response(500 if len(self.received) == 1 else 200)
        self.send_header("content-length", "0")
        self.end_headers()
        self.arrived.release()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def receiver() -> Iterator[str]:
    """Start a callback receiver and return its host and port."""
    with HTTPServer(("127.0.0.1", 0), Receiver) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Any], receiver: str) -> Iterator[RunningServer]:
    with start_server(
        job_callback_hosts=[receiver], job_callback_secret=CALLBACK_SECRET, max_queued_jobs=20
    ) as server:
        server.register("talker.mar", initial_workers=1)
        yield server


def post_job(
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
    while True:
        answer = server.inference.get(accepted.headers["location"])
        if answer.headers["x-tsx-job-state"] not in ("queued", "running"):
            return answer
        assert answer.status_code == 202
        assert time.monotonic() < deadline
        time.sleep(0.005)


def fixed_headers(answer: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in answer.headers.items() if name not in VARIABLE}


def test_an_accepted_job_has_a_location(server):
    accepted = post_job(server)
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
def test_a_job_answer_equals_the_synchronous_answer(server, path, headers):
    job = answer_of(server, post_job(server, b"some bytes", path, **headers))
    direct_response = server.ask(b"some bytes", path, **headers)
    assert (job.status_code, job.content) == (direct_response.status_code, direct_response.content)
    assert fixed_headers(job) == fixed_headers(direct_response)


def test_a_jobs_handler_gets_the_original_request(server):
    request_headers = {"X_Own": "1", "authorization": "Bearer abc"}
    answer = answer_of(
        server, post_job(server, path="/predictions/talker/1.0/some/path", **request_headers)
    )
    headers = answer.json()["headers"]
    assert (headers["url_path"], headers["X-Own"]) == ("some/path", "1")
    assert "authorization" not in {name.lower() for name in headers}


def test_a_streamed_job_answer_is_joined(server):
    answer = answer_of(server, post_job(server, x_do="stream"))
    assert (answer.status_code, answer.content) == (200, b"abc")
    assert answer.headers["content-length"] == "3"


def test_a_manipulated_stored_answer_cannot_break_the_framing(server):
    accepted = post_job(server, x_do="bytes")
    answer_of(server, accepted)
    block = b"X-Own: 1\r\nContent-Length: 0\r\nTransfer-Encoding: chunked\r\nX-A: b\nX-C: d\r\nX D: e\r\n: f\r\n"
    file = server.registry.state.directory / "jobs.sqlite"
    with contextlib.closing(sqlite3.connect(file)) as connection, connection:
        name = accepted.headers["location"].rpartition("/")[2]
        connection.execute(
            "UPDATE tsx_answers SET headers = ?, status = 99999 WHERE name = ?", (block, name)
        )
    answer = server.inference.get(accepted.headers["location"])
    assert (answer.status_code, answer.content, answer.headers["x-own"]) == (500, b"x", "1")
    assert answer.headers.get_list("content-length") == ["1"]
    assert not {"transfer-encoding", "x-a", "x-c", "x d"} & {*answer.headers}


@pytest.mark.parametrize("deadline", [float("nan"), float("inf")])
def test_a_job_with_an_unrepresentable_deadline_is_refused(deadline):
    async def unread(id: str) -> None:
        raise AssertionError(id)

    executor = RequestExecutor(None, 1, unread)
    job = JobRecord(
        1, "a", "running", "m", "", 0, "", "r", 0, 1, None, 0.0, 0.0, None, None, deadline, ""
    )
    assert asyncio.run(executor.answer(job)).status == 503


def test_a_client_may_wait_briefly_for_its_job(server, tmp_path):
    quick_job = post_job(server, prefer="respond-async, wait=60", x_do="bytes")
    assert (quick_job.status_code, quick_job.content) == (200, b"x")
    assert quick_job.headers["preference-applied"] == "wait=60"
    assert server.inference.get(quick_job.headers["location"]).content == b"x"
    held_job = post_job(
        server, prefer="respond-async, wait=1", x_do="wait", x_file=str(tmp_path / "go")
    )
    assert (held_job.status_code, held_job.headers["preference-applied"]) == (
        202,
        "respond-async, wait=1",
    )
    assert server.inference.get(held_job.headers["location"]).json()["ahead"] == 0
    (tmp_path / "go").touch()
    assert answer_of(server, held_job).content == b"waited"


def test_synchronous_requests_precede_jobs(server, tmp_path, until):
    held_jobs = [
        post_job(server, x_do="wait", x_file=str(tmp_path / name)) for name in ("first", "second")
    ]
    version = server.registry.find("talker")
    until(lambda: version.in_flight == 1)  # the second job waits in the store
    with ThreadPoolExecutor() as threads:
        synchronous_request = threads.submit(server.ask, x_do="bytes")
        until(lambda: version.in_flight == 2)
        (tmp_path / "first").touch()
        assert synchronous_request.result(60).content == b"x"
    assert server.inference.get(held_jobs[1].headers["location"]).status_code == 202
    (tmp_path / "second").touch()
    assert [answer_of(server, job).content for job in held_jobs] == [b"waited", b"waited"]


def test_a_queued_job_can_be_cancelled(server, tmp_path):
    held_job = post_job(server, x_do="wait", x_file=str(tmp_path / "go"))
    queued_jobs = [post_job(server, x_do="bytes") for _ in range(3)]
    location = queued_jobs[2].headers["location"]
    assert server.inference.get(location).json()["state"] == "queued"
    cancelled = server.inference.delete(location)
    assert (cancelled.status_code, cancelled.json()["state"]) == (200, "cancelled")
    assert server.inference.delete(location).status_code == 200
    (tmp_path / "go").touch()
    assert [answer_of(server, job).status_code for job in (held_job, *queued_jobs)] == [
        200,
        200,
        200,
        410,
    ]


def test_the_answer_of_a_cancelled_running_job_is_dropped(server, tmp_path, until):
    held_job = post_job(server, x_do="wait", x_file=str(tmp_path / "go"))
    location = held_job.headers["location"]
    until(lambda: server.inference.get(location).json()["state"] == "running")
    assert server.inference.delete(location).json()["state"] == "cancelled"
    (tmp_path / "go").touch()
    assert answer_of(server, post_job(server)).status_code == 200
    assert server.inference.get(location).status_code == 410


def test_job_errors_have_their_own_statuses(server, error_of, tmp_path):
    unknown = post_job(server, path="/predictions/nothing")
    assert unknown.status_code == 404
    assert error_of(unknown)[0] == "ModelNotFoundException"
    unknown_job = server.inference.get("/jobs/0123")
    assert unknown_job.status_code == 404
    assert error_of(unknown_job)[0] == "JobNotFoundException"
    finished_job = post_job(server, prefer="respond-async, wait=60")
    assert server.inference.delete(finished_job.headers["location"]).status_code == 409
    assert (
        server.inference.post(finished_job.headers["location"]).headers["allow"]
        == "DELETE, GET, HEAD"
    )
    assert post_job(server, b"x" * 100_001).status_code == 413
    held_jobs = [post_job(server, x_do="wait", x_file=str(tmp_path / "go"))]
    while (last := post_job(server)).status_code == 202:
        held_jobs.append(last)
    assert last.status_code == 503
    assert "max_queued_jobs" in error_of(last)[1]
    assert last.headers["retry-after"] == "5"
    (tmp_path / "go").touch()
    assert {answer_of(server, job).status_code for job in held_jobs} == {200}


def test_a_job_whose_model_was_unregistered_is_answered_404(server, error_of, tmp_path):
    server.register("other.mar", initial_workers=0)
    accepted = post_job(server, path="/predictions/other")
    assert server.inference.get(accepted.headers["location"]).json()["state"] == "queued"
    server.call(lambda: server.registry.unregister("other"))
    answer = answer_of(server, accepted)
    assert answer.status_code == 404
    assert error_of(answer)[0] == "ModelNotFoundException"


def test_a_job_that_does_not_start_in_time_is_refused(server, tmp_path):
    held_job = post_job(server, x_do="wait", x_file=str(tmp_path / "go"))
    late_job = post_job(server, x_tsx_timeout_ms="1")
    (tmp_path / "go").touch()
    assert answer_of(server, late_job).status_code == 503
    answer_of(server, held_job)


def test_a_callback_is_signed_and_retried_until_received(server, receiver):
    accepted = post_job(server, x_do="bytes", x_tsx_callback_url=f"http://{receiver}/done?x=1")
    assert all(Receiver.arrived.acquire(timeout=60) for _ in range(2))
    assert [body for _, body in Receiver.received] == [b"x", b"x"]
    headers, body = Receiver.received[-1]
    id = accepted.json()["id"]
    assert (headers["x-tsx-job"], headers["x-tsx-status"]) == (id, "200")
    assert headers["x-request-id"] == accepted.headers["x-request-id"]
    seconds, signature = (
        field.partition("=")[2] for field in headers["x-tsx-signature"].split(",")
    )
    signed = f"{seconds}.{id}.200.".encode() + body
    assert signature == hmac.new(CALLBACK_SECRET.encode(), signed, hashlib.sha256).hexdigest()


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
def test_a_callback_to_a_disallowed_host_is_refused(server, url):
    assert post_job(server, x_tsx_callback_url=url).status_code == 400


def test_jobs_need_tokens_and_without_a_store_the_client_waits(start_server):
    with start_server(inference_token="secret") as token_server:
        assert token_server.inference.get("/jobs/x").status_code == 400
        token = {"authorization": "Bearer secret"}
        assert token_server.inference.get("/jobs/x", headers=token).status_code == 404
    with start_server(jobs_store="off") as server_without_store:
        server_without_store.register("talker.mar", initial_workers=1)
        assert post_job(server_without_store, x_do="bytes").content == b"x"
        assert server_without_store.inference.get("/jobs/x").status_code == 404
