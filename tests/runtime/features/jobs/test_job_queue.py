"""The job queue, idempotency keys and precomputed answers on a real server."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.runtime.conftest import RunningServer
from tsx_runtime.features.jobs.storage.store import PRECOMPUTED, AnswerKey, StoredAnswer
from tsx_runtime.wire import header_block

ASYNC_HEADERS = {"prefer": "respond-async"}
Start = Callable[..., AbstractContextManager[RunningServer]]
Until = Callable[[Callable[[], object]], None]
ErrorOf = Callable[[httpx.Response], tuple[str, str]]


@pytest.fixture(scope="module")
def queue_server(start_server: Start) -> Iterator[RunningServer]:
    """Run a server whose model `talker` has a worker and whose model `other` has none."""
    with start_server(max_job_size=150_000) as server:
        server.register("talker.mar", initial_workers=1)
        server.register("other.mar", initial_workers=0)
        yield server


def post_job(server: RunningServer, model: str = "talker", **headers: str) -> str:
    """Send an asynchronous request and return the id of its job."""
    answer = server.ask(path=f"/predictions/{model}", **ASYNC_HEADERS, **headers)
    assert answer.status_code == 202, answer.text
    return str(answer.headers["location"]).removeprefix("/jobs/")


def record_of(server: RunningServer, job: str) -> dict[str, Any]:
    record: dict[str, Any] = server.management.get(f"/jobs/{job}/record").json()
    return record


def page_of_jobs(server: RunningServer, **query: object) -> Any:
    return server.management.get("/jobs", params=query).raise_for_status().json()


def test_jobs_are_listed_by_model_and_state_in_pages(
    queue_server: RunningServer, until: Until
) -> None:
    done_jobs = [post_job(queue_server) for _ in range(3)]
    failed_job = post_job(queue_server, x_do="raise")
    waiting_jobs = [post_job(queue_server, "other") for _ in range(2)]
    until(
        lambda: all(
            record_of(queue_server, job)["state"] == "done" for job in (*done_jobs, failed_job)
        )
    )
    page = page_of_jobs(queue_server, model="other", limit=1)
    assert [job["id"] for job in page["jobs"]] == waiting_jobs[1:]
    assert page["counts"] == {"queued": 2}
    assert page["oldest"] > 0
    page = page_of_jobs(queue_server, model="other", limit=1, next=page["next"])
    assert [job["id"] for job in page["jobs"]] == waiting_jobs[:1]
    assert "next" not in page
    assert [job["id"] for job in page_of_jobs(queue_server, state="failed")["jobs"]] == [failed_job]
    job = page_of_jobs(queue_server, state="done", model="talker")["jobs"][-1]
    fields = ("id", "status", "attempts", "client", "size")
    assert [job[field] for field in fields] == [done_jobs[0], 200, 1, "127.0.0.1", 1]
    for query in (
        "state=lost",
        "limit=0",
        "next=x",
        "next=0",
        f"next={1 << 63}",
        f"next={'9' * 400}",
    ):
        assert queue_server.management.get(f"/jobs?{query}").status_code == 400
    assert page_of_jobs(queue_server, next=(1 << 63) - 1, state="failed")["jobs"] != []
    text = queue_server.metrics.get("/metrics").text
    for name, label, value in (
        ("tsx_jobs", 'state="queued"', "2.0"),
        ("tsx_jobs_finished_total", 'outcome="failed"', "1.0"),
        ("tsx_job_wait_seconds_count", 'model_name="talker"', "4.0"),
    ):
        assert re.search(f"(?m)^{name}{{.*{label}.* {value}$", text), name


def test_secrets_of_a_callback_are_not_shown(start_server: Start) -> None:
    url = "http://127.0.0.1:9/done?token={}&x=1"
    with start_server(
        job_callback_hosts=["127.0.0.1:9"], job_callback_secret="a secret of callbacks"
    ) as server:
        server.register("other.mar", initial_workers=0)
        job = post_job(server, "other", x_tsx_callback_url=url.format("s3cret"))
        (row,) = page_of_jobs(server)["jobs"]
        assert record_of(server, job)["callback"] == row["callback"] == url.format("***")


def test_a_failed_job_can_be_retried_and_a_waiting_one_cannot(
    queue_server: RunningServer, until: Until, error_of: ErrorOf
) -> None:
    failed_job, waiting_job = post_job(queue_server, x_do="raise"), post_job(queue_server, "other")
    until(lambda: record_of(queue_server, failed_job)["state"] == "done")
    assert queue_server.management.post(f"/jobs/{failed_job}/retry").json()["state"] == "queued"

    def ran_again() -> bool:
        record = record_of(queue_server, failed_job)
        return bool(record["attempts"] > 1 and record["state"] == "done")

    until(ran_again)
    refusal = queue_server.management.post(f"/jobs/{waiting_job}/retry")
    assert error_of(refusal)[1].startswith(f"Job {waiting_job} is queued")
    for missing in (
        queue_server.management.post("/jobs/none/retry"),
        queue_server.management.get("/jobs/none/record"),
    ):
        assert missing.status_code == 404
        assert "Job none is not known" in error_of(missing)[1]
    # A cancelled job can also be retried.
    assert queue_server.management.delete(f"/jobs/{waiting_job}").status_code == 200
    assert queue_server.management.post(f"/jobs/{waiting_job}/retry").json()["state"] == "queued"


def test_an_expired_job_is_answered_410_by_every_call(
    queue_server: RunningServer, error_of: ErrorOf
) -> None:
    job = post_job(queue_server, "other")
    assert queue_server.jobs is not None
    store = queue_server.jobs.store
    queue_server.call(lambda: store.cancel(job, -1))
    queue_server.call(store.expire)
    for method in ("GET", "DELETE"):
        answer = queue_server.inference.request(method, f"/jobs/{job}")
        assert (answer.status_code, answer.headers["x-tsx-job-state"]) == (410, "expired")
        kind, message = error_of(answer)
        assert kind == "JobGoneException"
        assert message.startswith(f"Job {job} has expired (job_retention).")


def test_jobs_have_their_own_size_limit(queue_server: RunningServer, error_of: ErrorOf) -> None:
    for size, headers, refusal in (
        (150_000, ASYNC_HEADERS, ""),
        (150_001, ASYNC_HEADERS, "max_job_size, which is 150000 bytes"),
        (150_000, {}, "max_request_size, which is 100000 bytes"),
    ):
        for key in ({}, {"idempotency_key": "larger"}):
            answer = queue_server.ask(b"x" * size, path="/predictions/other", **headers, **key)
            assert answer.status_code == (413 if refusal else 202)
            assert not refusal or refusal in error_of(answer)[1]


def test_each_role_has_its_token(start_server: Start) -> None:
    predict, manage = ({"authorization": f"Bearer {token}"} for token in ("predict", "manage"))
    for listeners in (
        (("inference",), ("management",), ("metrics",)),
        (("inference", "management", "metrics"),),
    ):
        with start_server(
            listeners, inference_token="predict", management_token="manage"
        ) as server:
            server.register("talker.mar", initial_workers=0)
            job = "/jobs/" + post_job(server, **predict)
            for client, method, path, headers in (
                (server.inference, "GET", job, predict),
                (server.management, "GET", job, manage),
                (server.management, "GET", "/jobs", manage),
            ):
                answer = client.request(method, path, headers=headers)
                assert answer.status_code in (200, 202)
            for client, method, path, headers in (
                (server.management, "GET", "/jobs", predict),
                (server.management, "GET", f"{job}/record", predict),
                (server.management, "POST", f"{job}/retry", predict),
                (server.management, "GET", "/jobs", {}),
                (server.inference, "GET", job, {}),
            ):
                answer = client.request(method, path, headers=headers)
                assert answer.json()["type"] == "InvalidKeyException"


def test_jobs_are_limited_per_client(start_server: Start) -> None:
    with start_server(
        max_jobs_per_client=2, trusted_proxies=["127.0.0.1"], max_requests_per_client=1000
    ) as server:
        server.register("talker.mar", initial_workers=0)
        for _ in range(2):
            post_job(server, x_forwarded_for="203.0.113.7")
        refusal = server.ask(**ASYNC_HEADERS, x_forwarded_for="203.0.113.7")
        assert refusal.status_code == 429
        assert int(refusal.headers["retry-after"]) > 0
        assert "max_jobs_per_client" in refusal.json()["message"]
        post_job(server, x_forwarded_for="203.0.113.8")


def test_an_idempotency_key_runs_a_model_once_on_both_http_lanes(
    queue_server: RunningServer,
) -> None:
    first = queue_server.ask(idempotency_key="both")
    replay = queue_server.ask(lane="other", idempotency_key='"both"')
    assert (first.status_code, first.json()["id"]) == (200, first.headers["x-request-id"])
    assert replay.content == first.content
    assert dict(replay.headers) == {
        **first.headers,
        "idempotent-replayed": "true",
        "date": replay.headers["date"],
    }
    responses = [
        queue_server.ask(path="/predictions/none", idempotency_key="none") for _ in range(2)
    ]
    assert [answer.status_code for answer in responses] == [404, 404]
    assert "idempotent-replayed" not in responses[1].headers
    assert "tsx_idempotency_keys_total{" in queue_server.metrics.get("/metrics").text


def test_an_idempotency_key_makes_one_job(queue_server: RunningServer, until: Until) -> None:
    first, replay = (queue_server.ask(idempotency_key="job", **ASYNC_HEADERS) for _ in range(2))
    assert first.content == replay.content
    assert first.headers["location"] == replay.headers["location"]
    assert "idempotent-replayed" not in first.headers
    # A synchronous request with the same key is a different request, so it is refused.
    assert queue_server.ask(idempotency_key="job").status_code == 422
    until(lambda: queue_server.inference.get(first.headers["location"]).status_code == 200)


def test_a_precomputed_answer_is_served_for_its_model_and_key(
    queue_server: RunningServer, error_of: ErrorOf
) -> None:
    async def store() -> None:
        assert queue_server.jobs is not None
        headers = header_block([(b"content-type", b"text/csv")])
        for key, seconds in (("a/7.png", 60), ("old", -60)):
            answer = StoredAnswer(200, headers, b"1,2", expires=time.time() + seconds)
            await queue_server.jobs.store.put_answer(AnswerKey(PRECOMPUTED, "talker", key), answer)

    queue_server.call(store)
    for path in ("a/7.png", "a%2F7.png"):
        answer = queue_server.inference.get(f"/predictions/talker/precomputed/{path}")
        assert (answer.status_code, answer.text) == (200, "1,2")
        assert answer.headers["content-type"] == "text/csv"
        assert answer.headers["cache-control"]
    for path in ("talker/precomputed/old", "talker/precomputed/none", "other/precomputed/a/7.png"):
        answer = queue_server.inference.get(f"/predictions/{path}")
        assert answer.status_code == 404
        assert "is stored under" in error_of(answer)[1]
    assert queue_server.inference.post("/predictions/talker/precomputed/a/7.png").status_code == 405
    paths = queue_server.inference.get("/openapi.json").json()["paths"]
    assert "/predictions/{model}/precomputed/{key}" in paths
    paths = queue_server.management.get("/openapi.json").json()["paths"]
    assert {"/jobs", "/jobs/{id}", "/jobs/{id}/record", "/jobs/{id}/retry"} <= set(paths)


def test_the_playground_can_submit_a_job(queue_server: RunningServer) -> None:
    url = "/ui/api/predict/talker"
    answer = queue_server.management.post(url, headers=ASYNC_HEADERS, content=b"x")
    assert answer.status_code == 202
    assert queue_server.management.get(answer.headers["location"]).status_code in (200, 202)
    navigation = ASYNC_HEADERS | {"sec-fetch-mode": "navigate"}
    assert queue_server.management.post(url, headers=navigation, content=b"x").status_code == 403


def test_a_server_without_a_store_refuses_keys_and_jobs(
    start_server: Start, error_of: ErrorOf
) -> None:
    with start_server(jobs_store="off") as server:
        server.register("talker.mar", initial_workers=0)
        refusal = server.ask(idempotency_key="a")
        assert refusal.status_code == 400
        assert "jobs_store" in error_of(refusal)[1]
        for path in ("/jobs", "/jobs/a", "/jobs/a/record"):
            missing = server.management.get(path)
            assert missing.status_code == 404
            assert "jobs_store is off" in error_of(missing)[1]


def test_listing_jobs_does_not_create_a_store(start_server: Start) -> None:
    with start_server() as server:
        server.register("talker.mar", initial_workers=0)
        assert page_of_jobs(server) == {"jobs": [], "counts": {}}
        assert server.metrics.get("/metrics").status_code == 200
        assert server.inference.get("/predictions/talker/precomputed/a").status_code == 404
        assert not (Path(server.settings.state_dir) / "jobs.sqlite").exists()
