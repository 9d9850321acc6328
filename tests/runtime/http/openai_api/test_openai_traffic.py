"""Models, versions, splits, shadows and recordings of OpenAI's API."""

from __future__ import annotations

import json
from pathlib import Path

import openai
import pytest

from tests.runtime.http.openai_api.conftest import TOKEN, said
from tests.support.logs import lines_of
from tests.support.models import make_model
from tests.support.openai_models import COUNTER
from tsx_cli.requests.replay_run import target_of
from tsx_runtime.core.shadowing.comparison import compare
from tsx_runtime.plugins import ComparedAnswer
from tsx_runtime.recordings import read
from tsx_runtime.settings.traffic_policy import Compare, Traffic

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("processes")]


def test_models_are_listed_for_both_kinds_of_clients(served, client):
    assert [model.id for model in client.models.list()] == ["counter", "writer"]
    assert served.inference.get("/v1/models", headers={"authorization": f"Bearer {TOKEN}"}).json()[
        "models"
    ] == ["counter", "writer"]
    assert client.models.retrieve("writer:2.0").id == "writer:2.0"
    for unknown in ("nobody", "writer:9", "writer/ada"):
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve(unknown)


def test_a_name_may_have_a_version_a_label_and_an_adapter(served, client):
    served.call(
        lambda: served.registry.set_traffic(
            "writer", Traffic(weights={"2.0": 1.0}, labels={"stable": "1.0"})
        )
    )
    try:
        for name, version in (
            ("writer", "2.0"),
            ("writer:1.0", None),
            ("writer:stable/loud", None),
        ):
            answer = client.chat.completions.with_raw_response.create(
                model=name, messages=said("hi")
            )
            assert answer.headers.get("x-tsx-model-version") == version  # of a split alone
            assert answer.parse().choices[0].message.content == ("HI" if "/" in name else "hi")
    finally:
        served.call(lambda: served.registry.set_traffic("writer", Traffic()))


def test_a_split_has_streams_and_names_their_version(served):
    body = json.dumps({"model": "writer", "messages": said("hi"), "stream": True}).encode()
    served.call(
        lambda: served.registry.set_traffic("writer", Traffic(weights={"1.0": 1.0, "2.0": 1.0}))
    )
    try:
        for lane in ("fast", "other"):
            versions = set()
            while len(versions) < 2:
                answer = served.ask(
                    body, "/v1/chat/completions", lane=lane, authorization=f"Bearer {TOKEN}"
                )
                assert answer.text.endswith("data: [DONE]\n\n")
                versions.add(answer.headers["x-tsx-model-version"])
    finally:
        served.call(lambda: served.registry.set_traffic("writer", Traffic()))


def test_a_shadow_gets_copies_and_agrees(served, until):
    manage, head = served.management, {"authorization": f"Bearer {TOKEN}"}
    assert manage.put("/models/writer/shadow", json={"to": "2.0", "share": 100}).status_code == 200
    try:
        for stream in (False, True):
            body = json.dumps(
                {"model": "writer", "messages": said("hi"), "stream": stream}
            ).encode()
            for lane in ("fast", "other"):
                assert (
                    served.ask(body, "/v1/chat/completions", lane=lane, **head).status_code == 200
                )
        until(
            lambda: (
                manage.get("/models/writer/shadow").json()["requests"]
                == {"copied": 4, "under_way": 0, "shed": {}}
            )
        )
        report = manage.get("/models/writer/shadow").json()
        assert (report["agreed"], report["examples"]) == (4, [])
    finally:
        manage.delete("/models/writer/shadow")


def test_what_was_recorded_is_sent_again_with_its_path_and_its_adapter(served, client):
    manage, head = served.management, {"authorization": f"Bearer {TOKEN}"}
    manage.put(
        "/models/writer/record",
        json={"share": "100%", "max_size": "1MB", "max_age": "1d", "answers": True},
    )
    list(client.chat.completions.create(model="writer/loud", messages=said("hi"), stream=True))
    client.completions.create(model="writer", prompt="say ho")
    report = manage.get("/models/writer/record").json()
    manage.delete("/models/writer/record")
    for entry in read(Path(report["directory"])):
        again = served.ask(
            entry.body, target_of(entry._replace(model="writer"), None, None), **head
        )
        one, other = (
            ComparedAnswer(200, dict(entry.answer_headers), entry.answer),
            ComparedAnswer(200, dict(again.headers), again.content),
        )
        assert compare(Compare(), entry.body, one, other).difference is None
        assert ("HI" in again.text or '"I"' in again.text) == (b"loud" in entry.body)


def test_the_access_log_has_the_model_that_the_body_names(client, until):
    ask = client.chat.completions.with_raw_response.create
    with lines_of("ACCESS_LOG") as lines:
        ids = [
            ask(model=name, messages=said("hi")).headers["x-request-id"]
            for name in ("writer:2.0", "writer")
        ]
        until(lambda: any(ids[1] in line for line in lines))
    found = {
        line["request_id"]: (line["model"], line["version"])
        for line in map(json.loads, lines)
        if line["request_id"] in ids
    }
    assert [found[id] for id in ids] == [("writer", "2.0"), ("writer", "1.0")]


def test_requests_for_later_and_under_a_key_have_the_model_in_the_body_too(server, store):
    make_model(store / "counted.mar", COUNTER)
    server.register("counted.mar", initial_workers=1)
    try:
        body = b'{"model": "counted:1.0", "input": "ab"}'
        headers = {"content-type": "application/json"}
        later = server.ask(body, "/v1/embeddings", prefer="respond-async, wait=20", **headers)
        twice = [
            server.ask(body, "/v1/embeddings", idempotency_key="k", **headers) for _ in range(2)
        ]
        assert {answer.json()["data"][0]["embedding"][0] for answer in (later, *twice)} == {1.0}
        alone = server.ask(b'{"input": "ab"}', "/v1/embeddings", **headers)
        assert (alone.status_code, "Models here: counted, talker." in alone.text) == (400, True)
    finally:
        server.call(lambda: server.registry.unregister("counted"))


def test_torchserves_form_of_the_paths(served):
    address = f"{served.addresses['inference']}/predictions/writer"
    with openai.OpenAI(
        base_url=f"{address}//v1", api_key=TOKEN
    ) as client:  # whichever version the traffic says
        assert (
            client.chat.completions.create(model="writer/loud", messages=said("hi"))
            .choices[0]
            .message.content
            == "HI"
        )
    with openai.OpenAI(base_url=f"{address}/1.0/v1", api_key=TOKEN) as client:
        assert (
            client.chat.completions.create(model="any", messages=said("hi"))
            .choices[0]
            .message.content
            == "hi"
        )
        with pytest.raises(openai.BadRequestError, match="made_up"):
            client.completions.create(model="any", prompt="x", extra_body={"made_up": 1})
