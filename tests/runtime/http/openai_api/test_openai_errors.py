"""Requests of OpenAI's API that are refused, and streams that break off."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from tests.runtime.http.openai_api.conftest import TOKEN, WEATHER, client_of, messages

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("processes")]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "robot"),
    ({"messages": [{"role": "assistant", "content": "x"}]}, "template refuses"),
    (
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
            ]
        },
        "image_url",
    ),
    ({"messages": messages("x" * 3000)}, "Shorten the prompt"),
    ({"max_tokens": 1990}, "11 tokens, and 1990 may follow, but the model's context has 2000"),
    ({"n": 17}, "'n' is 17"),
    ({"n": 0}, "'n' is 0"),
    ({"temperature": "warm"}, "temperature"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"logit_bias": {"1": 101}}, r"'logit_bias.1' is 101"),
    ({"logit_bias": {"one": 1}}, "logit_bias"),
    ({"logit_bias": {str(token): 1 for token in range(301)}}, "at most 300"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ({"extra_body": {"repetition_penalty": 0}}, "repetition_penalty"),
    ({"extra_body": {"min_tokens": 3}}, "min_tokens"),
    ({"extra_body": {"chat_template_kwargs": [1]}}, "chat_template_kwargs"),
    ({"top_logprobs": 2}, "logprobs"),
    ({"stop": ["a"] * 99}, "stop"),
    ({"tools": [{"type": "custom"}]}, "tools"),
    (
        {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}},
        "tool_choice",
    ),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "schema"),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"type": "nonsense"}},
            }
        },
        "nonsense",
    ),
    ({"extra_body": {"made_up": 1}}, "made_up"),
]


@pytest.mark.parametrize(("parameters", "expected"), WRONG, ids=[expected for _, expected in WRONG])
def test_a_request_that_cannot_be_answered_is_a_400_with_the_reason(chat, parameters, expected):
    with pytest.raises(openai.BadRequestError, match=expected) as exc_info:
        chat(**parameters)
    assert exc_info.value.body["type"] == "invalid_request_error"
    assert exc_info.value.body["message"].endswith(".")


HOSTILE = [
    b"",
    b"[]",
    b"[" * 100_000,
    b'{"messages": NaN}',
    b'{"messages": [], "messages": [{}]}',
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"messages": [{"role": "user", "content": "\xff"}]}',
    b'{"messages": [{"role": "user", "content": [null]}]}',
    b'{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "\\"\\\\ud800\\""}}]}]}',
    *(
        b'{"messages": [{"role": "user", "content": "x"}], %b}' % field
        for field in (
            b'"model": 5, "pad": "%b"' % (b"A" * 100_000),
            b'"model": "writer\\u0000"',
            b'"n": 1e999',
            b'"n": 99999999999999999999',
            b'"temperature": NaN',
            b'"seed": 9223372036854775808',
            b'"stop": [null]',
            b'"tool_choice": {"function": {"name": []}}, "tools": [{"type": "function", "function": {"name": "f"}}]',
            b'"response_format": []',
            b'"stream_options": {"x": 1}',
        )
    ),
]


@pytest.mark.parametrize("lane", ["fast", "other"])
def test_hostile_bodies_are_refused_in_openais_shape(served, chat, lane):
    headers = {"authorization": f"Bearer {TOKEN}", "content_type": "application/json"}
    for body in HOSTILE:
        if b'"model"' not in body:
            body = body.replace(b"{", b'{"model": "writer", ', 1)
        answer = served.ask(body, "/v1/chat/completions", lane=lane, **headers)
        error = answer.json()["error"]
        assert 400 <= answer.status_code < 500, (body, answer.text)
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
    assert chat("ok").choices[0].message.content == "ok"


def test_a_missing_model_is_404_and_the_likely_one_is_named(chat):
    for name, expected in (
        ("wrtier", "did you mean 'writer'.*counter, writer"),
        ("writer:9", "version"),
        ("writer/ada", "It has loud"),
    ):
        with pytest.raises(openai.NotFoundError, match=expected) as missing:
            chat(model=name)
        assert (missing.value.code, missing.value.param) == ("model_not_found", "model")


def test_a_busy_model_is_asked_again_when_it_says(served):
    requests: list[httpx.Request] = []
    http = httpx.Client(event_hooks={"request": [requests.append]})
    with (
        client_of(served, max_retries=1, http_client=http) as patient,
        pytest.raises(openai.InternalServerError) as busy,
    ):
        patient.chat.completions.create(model="writer", messages=messages("full"))
    assert (busy.value.status_code, busy.value.type) == (503, "server_error")
    assert busy.value.response.headers["retry-after"] == "1"
    assert len(requests) == 2


def test_a_model_without_text_or_without_vectors_says_so(client, chat):
    with pytest.raises(openai.BadRequestError, match="embeddings"):
        chat(model="counter")
    with pytest.raises(openai.NotFoundError, match="chat/completions"):
        client.embeddings.create(model="writer", input="x")


@pytest.mark.parametrize("lane", ["fast", "other"])
@pytest.mark.parametrize(("reply", "cause"), [("exit!", "worker"), ("break!", "engine broke")])
def test_a_stream_that_breaks_off_ends_with_an_error_event(served, reply, cause, lane):
    body = json.dumps({"model": "writer", "messages": messages(reply), "stream": True}).encode()
    # Reading raises where the body has no end.
    answer = served.ask(body, "/v1/chat/completions", lane=lane, authorization=f"Bearer {TOKEN}")
    assert answer.status_code == 200
    *events, last, end = answer.text.split("\n\n")
    deltas = [json.loads(event[6:])["choices"][0]["delta"] for event in events if event]
    assert "".join(delta["content"] for delta in deltas) == reply[:4]
    assert cause in json.loads(last.removeprefix("data: "))["error"]["message"]
    assert end == ""


def test_the_openai_client_raises_the_error_of_a_stream(chat):
    with pytest.raises(openai.APIError, match="engine broke"):
        list(chat("break!", stream=True))


@pytest.mark.parametrize(
    ("body", "status", "expected"),
    [
        (b'{"model": "counter", "input": ["a"]}', 200, "embedding"),
        (b'{"model": "nobody", "input": ["a"]}', 404, "Models here: counter, writer."),
        (b'{"input": ["a"]}', 400, "Models here: counter, writer."),
        (b'{"model": "counter"}', 400, "input"),
        (b"no", 400, "JSON"),
        (b"model=counter", 400, "Content-Type: application/json"),
    ],
)
def test_the_lanes_answer_embeddings_alike(served, body, status, expected):
    kind = "x-www-form-urlencoded" if b"=" in body else "json"
    headers = {"authorization": f"Bearer {TOKEN}", "content_type": f"application/{kind}"}
    fast, framework = (
        served.ask(body, "/v1/embeddings", lane=lane, **headers) for lane in ("fast", "other")
    )
    assert fast.status_code == framework.status_code == status
    assert fast.json() == framework.json()
    assert expected in fast.text
    assert ("error" in fast.json()) == (status >= 400)


def test_other_methods_and_addresses_say_where_to_go(served):
    headers = {"authorization": f"Bearer {TOKEN}"}
    answer = served.inference.get("/v1/embeddings", headers=headers)
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert answer.json()["error"]["type"] == "invalid_request_error"
    answer = served.management.post("/v1/embeddings", json={}, headers=headers)
    assert answer.status_code == 404
    assert "inference address" in answer.json()["error"]["message"]
    answer = served.inference.post("/v1/audio/transcriptions", json={}, headers=headers)
    assert answer.status_code == 400
