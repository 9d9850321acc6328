"""Refused requests of OpenAI's API, and streams that break off."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from tests.runtime.features.openai.http.conftest import TOKEN, WEATHER, client_of, messages

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("processes")]


INVALID_REQUESTS: list[tuple[dict[str, Any], str]] = [
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
    (
        {
            "response_format": {"type": "json_object"},
            "extra_body": {"structured_outputs": {"regex": "a"}},
        },
        "structured_outputs",
    ),
    ({"extra_body": {"made_up": 1}}, "made_up"),
]


@pytest.mark.parametrize(
    ("parameters", "expected"), INVALID_REQUESTS, ids=[expected for _, expected in INVALID_REQUESTS]
)
def test_an_invalid_request_is_a_400_with_the_reason(chat, parameters, expected):
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
def test_hostile_bodies_are_refused_in_openais_format(openai_server, chat, lane):
    headers = {"authorization": f"Bearer {TOKEN}", "content_type": "application/json"}
    for body in HOSTILE:
        if b'"model"' not in body:
            body = body.replace(b"{", b'{"model": "writer", ', 1)
        answer = openai_server.ask(body, "/v1/chat/completions", lane=lane, **headers)
        error = answer.json()["error"]
        assert 400 <= answer.status_code < 500, (body, answer.text)
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
    assert chat("ok").choices[0].message.content == "ok"


def test_a_missing_model_is_404_with_a_suggestion(chat):
    for name, expected in (
        ("wrtier", "did you mean 'writer'.*counter, writer"),
        ("writer:9", "version"),
        ("writer/ada", "It has loud"),
    ):
        with pytest.raises(openai.NotFoundError, match=expected) as exc_info:
            chat(model=name)
        assert (exc_info.value.code, exc_info.value.param) == ("model_not_found", "model")


def test_clients_retry_a_busy_model_after_retry_after(openai_server):
    requests: list[httpx.Request] = []
    http = httpx.Client(event_hooks={"request": [requests.append]})
    with (
        client_of(openai_server, max_retries=1, http_client=http) as retrying_client,
        pytest.raises(openai.InternalServerError) as exc_info,
    ):
        retrying_client.chat.completions.create(model="writer", messages=messages("full"))
    assert (exc_info.value.status_code, exc_info.value.type) == (503, "server_error")
    assert exc_info.value.response.headers["retry-after"] == "1"
    assert len(requests) == 2


def test_a_model_without_text_or_vectors_gives_a_clear_error(client, chat):
    with pytest.raises(openai.BadRequestError, match="embeddings"):
        chat(model="counter")
    with pytest.raises(openai.NotFoundError, match="chat/completions"):
        client.embeddings.create(model="writer", input="x")


@pytest.mark.parametrize("lane", ["fast", "other"])
@pytest.mark.parametrize(("reply", "cause"), [("exit!", "worker"), ("break!", "engine broke")])
def test_a_broken_stream_ends_with_an_error_event(openai_server, reply, cause, lane):
    body = json.dumps({"model": "writer", "messages": messages(reply), "stream": True}).encode()
    # Reading a truncated body would raise an error.
    answer = openai_server.ask(
        body, "/v1/chat/completions", lane=lane, authorization=f"Bearer {TOKEN}"
    )
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
def test_both_lanes_give_the_same_embeddings_answer(openai_server, body, status, expected):
    kind = "x-www-form-urlencoded" if b"=" in body else "json"
    headers = {"authorization": f"Bearer {TOKEN}", "content_type": f"application/{kind}"}
    fast_answer, asgi_answer = (
        openai_server.ask(body, "/v1/embeddings", lane=lane, **headers)
        for lane in ("fast", "other")
    )
    assert fast_answer.status_code == asgi_answer.status_code == status
    assert fast_answer.json() == asgi_answer.json()
    assert expected in fast_answer.text
    assert ("error" in fast_answer.json()) == (status >= 400)


def test_other_methods_and_addresses_are_refused_with_a_hint(openai_server):
    headers = {"authorization": f"Bearer {TOKEN}"}
    answer = openai_server.inference.get("/v1/embeddings", headers=headers)
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert answer.json()["error"]["type"] == "invalid_request_error"
    answer = openai_server.management.post("/v1/embeddings", json={}, headers=headers)
    assert answer.status_code == 404
    assert "inference address" in answer.json()["error"]["message"]
    answer = openai_server.inference.post("/v1/audio/transcriptions", json={}, headers=headers)
    assert answer.status_code == 400
