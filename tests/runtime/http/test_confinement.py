"""Answers of models on an address that also manages models: no browser shows them as its pages."""

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
from tsx_runtime.jobs.store import PRECOMPUTED, AnswerKey, StoredAnswer
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
    """Return whether it is; fail for an answer that is confined in part."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/html"
    confining = answer.headers.keys() & {
        "content-security-policy",
        "x-content-type-options",
        "cross-origin-resource-policy",
    }
    unsafe = answer.headers.keys() & {"set-cookie", "clear-site-data"}
    assert (len(confining), len(unsafe)) in ((3, 0), (0, 2)), answer.headers
    return not unsafe


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("confinement")
    make_model(directory / "page.mar", PAGE)
    make_war(directory / "flow.war", "models: {m1: {url: page.mar}}\ndag: {m1: []}", None)
    return directory


@contextmanager
def serve(start_server: Start, models: Path, *listeners: Any) -> Iterator[RunningServer]:
    """Serve a model, a workflow of it, and a precomputed answer."""
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
def together(start_server: Start, models: Path) -> Iterator[RunningServer]:
    with serve(start_server, models, ("inference", "management", "metrics")) as server:
        yield server


@pytest.fixture(scope="module")
def apart(start_server: Start, models: Path) -> Iterator[RunningServer]:
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
def test_an_answer_is_confined_on_the_management_address_alone(
    together, apart, path, lane, headers
):
    assert is_confined(together.ask(path=path, lane=lane, **headers))
    assert not is_confined(apart.ask(path=path, lane=lane, **headers))


@pytest.mark.parametrize("action", ["", "stream"])
def test_an_answer_of_the_playground_is_confined(apart, action):
    answer = apart.management.post("/ui/api/predict/page", headers={"x-do": action})
    assert is_confined(answer)
    assert answer.text.endswith("<script>alert(1)</script>")


def test_a_precomputed_answer_is_confined_like_others(together, apart):
    assert is_confined(together.inference.get("/predictions/page/precomputed/a"))
    assert not is_confined(apart.inference.get("/predictions/page/precomputed/a"))


def test_the_answer_of_a_job_is_confined_on_the_management_address_alone(apart, until):
    job = apart.ask(path="/predictions/page", prefer="respond-async").headers["location"]
    until(lambda: apart.inference.get(job).status_code == 200)
    assert not is_confined(apart.inference.get(job))
    assert is_confined(apart.management.get(job))
