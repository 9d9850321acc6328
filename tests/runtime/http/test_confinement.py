"""Answers of models on a management address must not run in a browser as its pages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.runtime.conftest import RunningServer
from tests.support.models import make_model, make_war
from tsx_runtime.features.jobs.storage.store import PRECOMPUTED, AnswerKey, StoredAnswer
from tsx_runtime.wire import header_block

pytestmark = pytest.mark.slow
Start = Callable[..., AbstractContextManager[RunningServer]]
PAGE = """
from ts.handler_utils.utils import send_intermediate_predict_response


def handle(data, context):
    if data is None:
        return None
    for idx in range(len(data)):
        context.set_response_content_type(idx, "text/html")
        context.set_response_header(idx, "Set-Cookie", "a=b; Path=/")
        context.set_response_header(idx, "Clear-Site-Data", "*")
        if context.get_request_header(idx, "x-do") == "stream":
            send_intermediate_predict_response(["<html>"], {idx: context.get_request_id(idx)}, "", 200, context)
    return ["<script>alert(1)</script>"] * len(data)
"""


def is_confined(answer: httpx.Response) -> bool:
    """Return whether an answer is confined; fail if it is only partly confined."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/html"
    confining_headers = answer.headers.keys() & {
        "content-security-policy",
        "x-content-type-options",
        "cross-origin-resource-policy",
    }
    unsafe_headers = answer.headers.keys() & {"set-cookie", "clear-site-data"}
    assert (len(confining_headers), len(unsafe_headers)) in ((3, 0), (0, 2)), answer.headers
    return not unsafe_headers


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("confinement")
    make_model(directory / "page.mar", PAGE)
    make_war(directory / "flow.war", "models: {m1: {url: page.mar}}\ndag: {m1: []}", None)
    return directory


@contextmanager
def serve(start_server: Start, models: Path, *listeners: Any) -> Iterator[RunningServer]:
    """Serve a model, a workflow that uses it, and a precomputed answer."""
    with start_server(
        listeners, model_store=models, workflow_store=models, cache_dir=models / "cache"
    ) as server:
        server.register("page.mar", initial_workers=1)
        server.management.post("/workflows", params={"url": "flow.war"}).raise_for_status()
        headers = header_block(
            [(b"content-type", b"text/html"), (b"set-cookie", b"a=b"), (b"clear-site-data", b"*")]
        )
        answer = StoredAnswer(200, headers, b"<html>", expires=time.time() + 600)
        key = AnswerKey(PRECOMPUTED, "page", "a")
        server.call(lambda: server.jobs.store.put_answer(key, answer))
        yield server


@pytest.fixture(scope="module")
def shared_server(start_server: Start, models: Path) -> Iterator[RunningServer]:
    with serve(start_server, models, ("inference", "management", "metrics")) as server:
        yield server


@pytest.fixture(scope="module")
def separate_server(start_server: Start, models: Path) -> Iterator[RunningServer]:
    with serve(start_server, models, ("inference",), ("management", "metrics")) as server:
        yield server


@pytest.mark.parametrize(
    ("path", "lane", "headers"),
    [
        ("/predictions/page", "fast", {}),
        ("/predictions/page", "asgi", {}),
        ("/predictions/page", "fast", {"x_do": "stream"}),
        ("/predictions/page", "asgi", {"x_do": "stream"}),
        ("/explanations/page", "fast", {}),
        ("/wfpredict/flow", "fast", {}),
        ("/predictions/page", "fast", {"prefer": "respond-async, wait=60"}),
        ("/predictions/page", "fast", {"idempotency_key": "k-1"}),
    ],
)
def test_answers_are_confined_only_on_the_management_address(
    shared_server, separate_server, path, lane, headers
):
    assert is_confined(shared_server.ask(path=path, lane=lane, **headers))
    assert not is_confined(separate_server.ask(path=path, lane=lane, **headers))


@pytest.mark.parametrize("action", ["", "stream"])
def test_a_playground_answer_is_confined(separate_server, action):
    answer = separate_server.management.post("/ui/api/predict/page", headers={"x-do": action})
    assert is_confined(answer)
    assert answer.text.endswith("<script>alert(1)</script>")


def test_a_precomputed_answer_is_confined_like_others(shared_server, separate_server):
    assert is_confined(shared_server.inference.get("/predictions/page/precomputed/a"))
    assert not is_confined(separate_server.inference.get("/predictions/page/precomputed/a"))


def test_job_answers_are_confined_only_on_the_management_address(separate_server, until):
    job = separate_server.ask(path="/predictions/page", prefer="respond-async").headers["location"]
    until(lambda: separate_server.inference.get(job).status_code == 200)
    assert not is_confined(separate_server.inference.get(job))
    assert is_confined(separate_server.management.get(job))
