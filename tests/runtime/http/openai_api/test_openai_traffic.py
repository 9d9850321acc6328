"""Models, versions, traffic splits, shadows and recordings with OpenAI's API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.runtime.http.openai_api.conftest import TOKEN, messages
from tests.support.logs import lines_of
from tests.support.models import make_model
from tests.support.openai_models import COUNTER
from tsx_cli.replay.run import target_of
from tsx_runtime.core.comparison.comparison import compare
from tsx_runtime.plugins import ComparedAnswer
from tsx_runtime.recordings import read
from tsx_runtime.settings.traffic_policy import Compare, Traffic

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("processes")]


@contextmanager
def traffic(openai_server: Any, **policy: Any) -> Iterator[None]:
    openai_server.call(lambda: openai_server.registry.set_traffic("writer", Traffic(**policy)))
    try:
        yield
    finally:
        openai_server.call(lambda: openai_server.registry.set_traffic("writer", Traffic()))


def ask_writer(openai_server: Any, lane: str, *, stream: bool) -> httpx.Response:
    body = {"model": "writer", "messages": messages("hi"), "stream": stream}
    path, token = "/v1/chat/completions", f"Bearer {TOKEN}"
    answer = openai_server.ask(json.dumps(body).encode(), path, lane=lane, authorization=token)
    return answer.raise_for_status()


def test_models_are_listed_in_openais_and_kserves_form(openai_server, client):
    assert [model.id for model in client.models.list()] == ["counter", "writer"]
    answer = openai_server.inference.get("/v1/models", headers={"authorization": f"Bearer {TOKEN}"})
    assert answer.json()["models"] == ["counter", "writer"]
    assert client.models.retrieve("writer:2.0").id == "writer:2.0"
    for unknown in ("nobody", "writer:9", "writer/ada"):
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve(unknown)


def test_a_model_name_may_include_version_label_and_adapter(openai_server, client):
    with traffic(openai_server, weights={"2.0": 1.0}, labels={"stable": "1.0"}):
        # Only answers under a traffic split name their version.
        for model, version, text in (
            ("writer", "2.0", "hi"),
            ("writer:1.0", None, "hi"),
            ("writer:stable/loud", None, "HI"),
        ):
            create = client.chat.completions.with_raw_response.create
            answer = create(model=model, messages=messages("hi"))
            assert answer.headers.get("x-tsx-model-version") == version
            assert answer.parse().choices[0].message.content == text


@pytest.mark.parametrize("lane", ["fast", "other"])
def test_streams_of_a_traffic_split_name_their_version(openai_server, lane):
    with traffic(openai_server, weights={"1.0": 1.0, "2.0": 1.0}):
        versions = set()
        while len(versions) < 2:
            answer = ask_writer(openai_server, lane, stream=True)
            assert answer.text.endswith("data: [DONE]\n\n")
            versions.add(answer.headers["x-tsx-model-version"])


def test_a_shadow_gets_copies_that_agree(openai_server, until):
    def report():
        return openai_server.management.get("/models/writer/shadow").json()

    policy = {"to": "2.0", "share": 100}
    openai_server.management.put("/models/writer/shadow", json=policy).raise_for_status()
    try:
        for stream in (False, True):
            for lane in ("fast", "other"):
                ask_writer(openai_server, lane, stream=stream)
        until(lambda: report()["requests"] == {"copied": 4, "under_way": 0, "shed": {}})
        assert (report()["agreed"], report()["examples"]) == (4, [])
    finally:
        openai_server.management.delete("/models/writer/shadow")


def test_a_recorded_request_is_replayed_with_path_and_adapter(openai_server, client):
    url = "/models/writer/record"
    terms = {"share": "100%", "max_size": "1MB", "max_age": "1d", "answers": True}
    openai_server.management.put(url, json=terms)
    list(client.chat.completions.create(model="writer/loud", messages=messages("hi"), stream=True))
    client.completions.create(model="writer", prompt="say ho")
    report = openai_server.management.get(url).json()
    openai_server.management.delete(url)
    for entry in read(Path(report["directory"])):
        target = target_of(entry._replace(model="writer"), None, None)
        replayed = openai_server.ask(entry.body, target, authorization=f"Bearer {TOKEN}")
        first = ComparedAnswer(200, dict(entry.answer_headers), entry.answer)
        second = ComparedAnswer(200, dict(replayed.headers), replayed.content)
        assert compare(Compare(), entry.body, first, second).difference is None
        assert ("HI" in replayed.text or '"I"' in replayed.text) == (b"loud" in entry.body)


def test_the_access_log_has_the_model_of_the_body(client, until):
    create = client.chat.completions.with_raw_response.create
    with lines_of("ACCESS_LOG") as lines:
        ids = [
            create(model=model, messages=messages("hi")).headers["x-request-id"]
            for model in ("writer:2.0", "writer")
        ]
        until(lambda: any(ids[1] in line for line in lines))
    entries = {entry["request_id"]: entry for entry in map(json.loads, lines)}
    assert [(entries[id]["model"], entries[id]["version"]) for id in ids] == [
        ("writer", "2.0"),
        ("writer", "1.0"),
    ]


def test_asynchronous_and_idempotent_requests_name_the_model_in_the_body(server, store):
    make_model(store / "counted.mar", COUNTER)
    server.register("counted.mar", initial_workers=1)

    def embed(body: bytes, **headers: str) -> httpx.Response:
        return server.ask(body, "/v1/embeddings", content_type="application/json", **headers)

    try:
        body = b'{"model": "counted:1.0", "input": "ab"}'
        answers = [embed(body, prefer="respond-async, wait=20")]
        answers += [embed(body, idempotency_key="k") for _ in range(2)]
        assert {answer.json()["data"][0]["embedding"][0] for answer in answers} == {1.0}
        unnamed = embed(b'{"input": "ab"}')
        assert unnamed.status_code == 400
        assert "Models here: counted, talker." in unnamed.text
    finally:
        server.call(lambda: server.registry.unregister("counted"))


def test_paths_in_torchserves_form_are_served(openai_server):
    address = f"{openai_server.addresses['inference']}/predictions/writer"
    # The traffic policy chooses the version of the first path.
    for url, model, text in (
        (f"{address}//v1", "writer/loud", "HI"),
        (f"{address}/1.0/v1", "any", "hi"),
    ):
        with openai.OpenAI(base_url=url, api_key=TOKEN) as client:
            answer = client.chat.completions.create(model=model, messages=messages("hi"))
            assert answer.choices[0].message.content == text
            with pytest.raises(openai.BadRequestError, match="made_up"):
                client.completions.create(model=model, prompt="x", extra_body={"made_up": 1})
