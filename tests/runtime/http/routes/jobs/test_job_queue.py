"""The queue of jobs as its operator sees it, idempotency keys and precomputed answers, on a real
server.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tsx_runtime.jobs.store import PRECOMPUTED, AnswerKey, StoredAnswer
from tsx_runtime.wire import header_block

LATER = {"prefer": "respond-async"}
Start = Callable[..., AbstractContextManager[Any]]


@pytest.fixture(scope="module")
def queueing(start_server: Start) -> Iterator[Any]:
    with start_server(max_kept_answer=1000, max_job_size=150_000) as server:
        server.register("talker.mar", initial_workers=1)
        server.register("other.mar", initial_workers=0)
        yield server


def later(server: Any, model: str = "talker", **headers: str) -> str:
    """The id of a new job."""
    answer = server.ask(path=f"/predictions/{model}", **LATER, **headers)
    assert answer.status_code == 202, answer.text
    return str(answer.headers["location"]).removeprefix("/jobs/")


def record(server: Any, job: str) -> dict[str, Any]:
    found: dict[str, Any] = server.management.get(f"/jobs/{job}/record").json()
    return found


def test_jobs_are_listed_by_model_and_state_page_by_page(
    queueing: Any, until: Callable[[Callable[[], object]], None]
) -> None:
    done = [later(queueing) for _ in range(3)]
    failed = later(queueing, x_do="raise")
    waiting = [later(queueing, "other") for _ in range(2)]
    until(lambda: all(record(queueing, job)["state"] == "done" for job in (*done, failed)))
    page = queueing.management.get("/jobs", params={"model": "other", "limit": 1}).json()
    assert [job["id"] for job in page["jobs"]] == waiting[:0:-1]
    assert page["counts"] == {"queued": 2}
    assert page["oldest"] > 0
    page = queueing.management.get(
        "/jobs", params={"model": "other", "limit": 1, "next": page["next"]}
    ).json()
    assert [job["id"] for job in page["jobs"]] == waiting[:1]
    assert "next" not in page
    assert [job["id"] for job in queueing.management.get("/jobs?state=failed").json()["jobs"]] == [
        failed
    ]
    shown = queueing.management.get("/jobs?state=done&model=talker").json()["jobs"][-1]
    assert (
        shown.items()
        >= {"id": done[0], "status": 200, "attempts": 1, "client": "127.0.0.1", "size": 1}.items()
    )
    for wrong in (
        "state=lost",
        "limit=0",
        "next=x",
        "next=0",
        f"next={1 << 63}",
        f"next={'9' * 400}",
    ):
        assert queueing.management.get(f"/jobs?{wrong}").status_code == 400
    assert queueing.management.get(f"/jobs?next={(1 << 63) - 1}&state=failed").json()["jobs"] != []
    lines = queueing.metrics.get("/metrics").text.splitlines()
    for name, label, value in (
        ("tsx_jobs", 'state="queued"', "2.0"),
        ("tsx_jobs_finished_total", 'outcome="failed"', "1.0"),
        ("tsx_job_wait_seconds_count", 'model_name="talker"', "4.0"),
    ):
        assert any(
            line.startswith(f"{name}{{") and label in line and line.endswith(f" {value}")
            for line in lines
        ), name


def test_secrets_of_a_callback_are_not_shown(start_server: Start) -> None:
    with start_server(
        job_callback_hosts=["127.0.0.1:9"], job_callback_secret="a secret of callbacks"
    ) as server:
        server.register("other.mar", initial_workers=0)
        job = later(
            server, "other", **{"x-tsx-callback-url": "http://127.0.0.1:9/done?token=s3cret&x=1"}
        )
        shown = "http://127.0.0.1:9/done?token=***&x=1"
        assert record(server, job)["callback"] == shown
        assert [each["callback"] for each in server.management.get("/jobs").json()["jobs"]] == [
            shown
        ]


def test_a_job_that_failed_runs_again_and_one_that_waits_does_not(
    queueing: Any,
    until: Callable[[Callable[[], object]], None],
    error_of: Callable[[httpx.Response], tuple[str, str]],
) -> None:
    failed, waiting = later(queueing, x_do="raise"), later(queueing, "other")
    until(lambda: record(queueing, failed)["state"] == "done")
    assert queueing.management.post(f"/jobs/{failed}/retry").json()["state"] == "queued"
    until(
        lambda: (
            record(queueing, failed)["attempts"] > 1 and record(queueing, failed)["state"] == "done"
        )
    )
    assert error_of(queueing.management.post(f"/jobs/{waiting}/retry"))[1].startswith(
        f"Job {waiting} is queued"
    )
    for missing in (
        queueing.management.post("/jobs/none/retry"),
        queueing.management.get("/jobs/none/record"),
    ):
        assert missing.status_code == 404
        assert "Job none is not known" in error_of(missing)[1]
    assert queueing.management.delete(f"/jobs/{waiting}").status_code == 200
    assert (
        queueing.management.post(f"/jobs/{waiting}/retry").json()["state"] == "queued"
    )  # cancelled by mistake


def test_a_job_that_has_expired_is_gone_for_every_call(
    queueing: Any, error_of: Callable[[httpx.Response], tuple[str, str]]
) -> None:
    job = later(queueing, "other")
    queueing.call(lambda: queueing.jobs.store.cancel(job, -1))
    queueing.call(queueing.jobs.store.expire)
    for method in ("GET", "DELETE"):
        gone = queueing.inference.request(method, f"/jobs/{job}")
        assert (gone.status_code, gone.headers["x-tsx-job-state"]) == (410, "expired")
        assert error_of(gone) == (
            "JobGoneException",
            f"Job {job} has expired (job_retention). Send the request again for an answer.",
        )


def test_a_job_may_be_larger_than_other_requests(
    queueing: Any, error_of: Callable[[httpx.Response], tuple[str, str]]
) -> None:
    sizes = (
        (150_000, LATER, ""),
        (150_001, LATER, "max_job_size, which is 150000 bytes"),
        (150_000, {}, "max_request_size, which is 100000 bytes"),
    )
    for key in ({}, {"idempotency_key": "larger"}):
        for size, headers, refusal in sizes:
            answer = queueing.ask(b"x" * size, path="/predictions/other", **headers, **key)
            assert answer.status_code == (413 if refusal else 202)
            assert not refusal or refusal in error_of(answer)[1]


def test_each_role_has_its_token(
    start_server: Start, until: Callable[[Callable[[], object]], None]
) -> None:
    tokens = {"inference_token": "predict", "management_token": "manage"}
    held = {name: {"authorization": f"Bearer {name}"} for name in tokens.values()}
    for listeners in (
        (("inference",), ("management",), ("metrics",)),
        (("inference", "management", "metrics"),),
    ):
        with start_server(listeners, **tokens) as server:
            server.register("talker.mar", initial_workers=1)
            answer = server.inference.post(
                "/predictions/talker", headers=LATER | held["predict"], content=b"x"
            )
            job = answer.headers["location"]
            assert server.inference.get(job, headers=held["predict"]).status_code in (200, 202)
            assert server.management.get(job, headers=held["manage"]).status_code in (200, 202)
            assert server.management.get("/jobs", headers=held["manage"]).status_code == 200
            for method, path in (
                ("GET", "/jobs"),
                ("GET", f"{job}/record"),
                ("POST", f"{job}/retry"),
            ):
                assert (
                    server.management.request(method, path, headers=held["predict"]).json()["type"]
                    == "InvalidKeyException"
                )
                assert (
                    server.management.request(method, path).json()["type"] == "InvalidKeyException"
                )
            assert server.inference.get(job).json()["type"] == "InvalidKeyException"


def test_one_client_has_a_bound_of_its_own(start_server: Start) -> None:
    with start_server(
        max_jobs_per_client=2, trusted_proxies=["127.0.0.1"], max_requests_per_client=1000
    ) as server:
        server.register("talker.mar", initial_workers=0)
        for _ in range(2):
            later(server, x_forwarded_for="203.0.113.7")
        refused = server.ask(**LATER, x_forwarded_for="203.0.113.7")
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) > 0
        assert "max_jobs_per_client" in refused.json()["message"]
        later(server, x_forwarded_for="203.0.113.8")


def test_a_key_runs_a_model_once_on_both_lanes(queueing: Any) -> None:
    first = queueing.ask(idempotency_key="both")
    again = queueing.ask(lane="other", idempotency_key='"both"')
    assert (first.status_code, first.json()["id"]) == (200, first.headers["x-request-id"])
    assert again.content == first.content
    assert dict(again.headers) == {
        **first.headers,
        "idempotent-replayed": "true",
        "date": again.headers["date"],
    }
    assert queueing.ask(b"y", idempotency_key="both").status_code == 422
    assert (
        queueing.ask(path="/v1/models/talker:predict", idempotency_key="both").json()["id"]
        != first.json()["id"]
    )
    stream = [queueing.ask(idempotency_key="stream", x_do="stream") for _ in range(2)]
    assert [answer.text for answer in stream] == ["abc", "abc"]
    large = [
        queueing.ask(b"x" * 2000, idempotency_key="large", x_do="bytes").status_code
        for _ in range(2)
    ]
    assert large == [200, 409]
    unknown = [queueing.ask(path="/predictions/none", idempotency_key="none") for _ in range(2)]
    assert [answer.status_code for answer in unknown] == [404, 404]
    assert "idempotent-replayed" not in unknown[1].headers
    counted = queueing.metrics.get("/metrics").text
    assert "tsx_idempotency_keys_total{hostname=" in counted


def test_a_key_makes_one_job(queueing: Any, until: Callable[[Callable[[], object]], None]) -> None:
    accepted = [queueing.ask(idempotency_key="job", **headers) for headers in (LATER, LATER)]
    assert accepted[0].content == accepted[1].content
    assert accepted[0].headers["location"] == accepted[1].headers["location"]
    assert "idempotent-replayed" not in accepted[0].headers
    assert (
        queueing.ask(idempotency_key="job").status_code == 422
    )  # to wait for it is another request
    job = accepted[0].headers["location"]
    until(lambda: queueing.inference.get(job).status_code == 200)


def test_a_precomputed_answer_is_the_predictions_own(
    queueing: Any, error_of: Callable[[httpx.Response], tuple[str, str]]
) -> None:
    async def store() -> None:
        headers = header_block([(b"content-type", b"text/csv")])
        for key, expires in (("a/7.png", time.time() + 60), ("old", time.time() - 60)):
            await queueing.jobs.store.put_answer(
                AnswerKey(PRECOMPUTED, "talker", key),
                StoredAnswer(200, headers, b"1,2", expires=expires),
            )

    queueing.call(store)
    for path in ("a/7.png", "a%2F7.png"):
        answer = queueing.inference.get(f"/predictions/talker/precomputed/{path}")
        assert (answer.status_code, answer.headers["content-type"], answer.text) == (
            200,
            "text/csv",
            "1,2",
        )
        assert answer.headers["cache-control"]
    for path in ("talker/precomputed/old", "talker/precomputed/none", "other/precomputed/a/7.png"):
        answer = queueing.inference.get(f"/predictions/{path}")
        assert answer.status_code == 404
        assert "is stored under" in error_of(answer)[1]
    assert queueing.inference.post("/predictions/talker/precomputed/a/7.png").status_code == 405
    described = queueing.inference.get("/openapi.json").json()["paths"]
    assert "/predictions/{model}/precomputed/{key}" in described
    assert {"/jobs", "/jobs/{id}", "/jobs/{id}/record", "/jobs/{id}/retry"} <= set(
        queueing.management.get("/openapi.json").json()["paths"]
    )


def test_the_playground_sends_a_request_for_later(queueing: Any) -> None:
    answer = queueing.management.post("/ui/api/predict/talker", headers=LATER, content=b"x")
    assert answer.status_code == 202
    assert queueing.management.get(answer.headers["location"]).status_code in (200, 202)
    refused = queueing.management.post(
        "/ui/api/predict/talker", headers=LATER | {"sec-fetch-mode": "navigate"}, content=b"x"
    )
    assert refused.status_code == 403


def test_a_server_without_a_store_refuses_keys(
    start_server: Start, error_of: Callable[[httpx.Response], tuple[str, str]]
) -> None:
    with start_server(jobs_store="off") as server:
        server.register("talker.mar", initial_workers=1)
        refused = server.ask(idempotency_key="a")
        assert refused.status_code == 400
        assert "jobs_store" in error_of(refused)[1]
        for path in ("/jobs", "/jobs/a", "/jobs/a/record"):
            missing = server.management.get(path)
            assert missing.status_code == 404
            assert "jobs_store is off" in error_of(missing)[1]


def test_looking_at_jobs_makes_no_store(start_server: Start) -> None:
    with start_server() as server:
        server.register("talker.mar", initial_workers=0)
        assert server.management.get("/jobs").json() == {"jobs": [], "counts": {}}
        assert server.metrics.get("/metrics").status_code == 200
        assert server.inference.get("/predictions/talker/precomputed/a").status_code == 404
        assert not (Path(server.settings.state_dir) / "jobs.sqlite").exists()
