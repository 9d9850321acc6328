"""OpenAI's API on the inference address, driven by its own client and by LangChain's."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.logs import lines_of
from tests.support.models import make_model
from tests.support.openai_models import COUNTER, WRITER
from tsx_runtime.settings.traffic_policy import Traffic

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("processes")]
ASYNC = "minWorkers: 1\nmaxWorkers: 1\nasyncCommunication: true\n"
TOKEN = "sesame"
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


@pytest.fixture(scope="module")
def served(store: Path, start_server: Any) -> Iterator[Any]:
    for version in ("1.0", "2.0"):
        make_model(store / f"writer{version}.mar", WRITER, name="writer", version=version, config=ASYNC)
    make_model(store / "counter.mar", COUNTER)
    with start_server(inference_token=TOKEN, access_log=True, log_format="json") as server:
        server.register("writer1.0.mar", initial_workers=1)
        server.register("writer2.0.mar", initial_workers=1)
        server.register("counter.mar", initial_workers=1)
        yield server


@contextmanager
def client_of(server: Any, **options: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.addresses['inference']}/v1", **{"api_key": TOKEN, "max_retries": 0} | options) as client:
        yield client


@pytest.fixture
def client(served: Any) -> Iterator[openai.OpenAI]:
    with client_of(served) as made:
        yield made


def said(words: str) -> list[Any]:
    return [{"role": "user", "content": f"say {words}"}]


def test_chat(client):
    answer = client.chat.completions.create(model="writer", messages=said("hello"), user="me", frequency_penalty=0)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "hello", "stop")
    assert answer.usage.model_dump(exclude_none=True) == {"prompt_tokens": 15, "completion_tokens": 5, "total_tokens": 20}
    assert (answer.model, answer.object, answer.id[:9]) == ("writer", "chat.completion", "chatcmpl-")


def test_chat_streams(client):
    stream = client.chat.completions.create(model="writer", messages=said("hello"), stream=True, stream_options={"include_usage": True})
    *chunks, last = list(stream)
    assert [chunk.choices[0].delta.content for chunk in chunks] == ["", *"hello", None]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * 6 + ["stop"]
    assert (last.choices, last.usage.total_tokens) == ([], 20)


def test_several_choices_are_drawn_each_with_a_seed_of_its_own(client):
    ask = {"model": "writer", "messages": said("12345678"), "n": 3, "seed": 4, "temperature": 1.0}
    texts = [choice.message.content for choice in client.chat.completions.create(**ask).choices]
    assert len(set(texts)) == 3
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(**ask, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts


def test_stops_limits_and_logprobs(client):
    ask = client.chat.completions.create
    assert ask(model="writer", messages=said("one two"), stop=[" "]).choices[0].message.content == "one"
    cut = ask(model="writer", messages=said("one two"), max_completion_tokens=2).choices[0]
    assert (cut.message.content, cut.finish_reason) == ("on", "length")
    shown = ask(model="writer", messages=said("a"), logprobs=True, top_logprobs=2).choices[0].logprobs.content[0]
    assert (shown.token, shown.logprob, shown.bytes, [each.logprob for each in shown.top_logprobs]) == ("a", -0.5, [97], [-0.5, -9999.0])


def test_parts_of_text_roles_and_json(client):
    ask = client.chat.completions.create
    parts = [
        {"role": "developer", "content": "x"},
        {"role": "user", "content": [{"type": "text", "text": "say "}, {"type": "text", "text": "b"}]},
    ]
    assert ask(model="writer", messages=parts).choices[0].message.content == "b"
    assert ask(model="writer", messages=said("b"), response_format={"type": "json_object"}).choices[0].message.content == '{"a": 1}'
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    assert ask(model="writer", messages=said("b"), response_format=schema).choices[0].message.content == '{"a": 1}'


@pytest.mark.parametrize(
    "words",
    [
        'Hm.<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>',
        '{"name": "weather", "parameters": {"city": "Rome"}}',
    ],
)
def test_tool_calls(client, words):
    ask = {"model": "writer", "messages": said(words), "tools": [WEATHER]}
    choice = client.chat.completions.create(**ask).choices[0]
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, call.function.name, json.loads(call.function.arguments)) == ("tool_calls", "weather", {"city": "Rome"})
    with client.chat.completions.stream(**ask) as stream:
        final = stream.get_final_completion().choices[0]
    assert (final.finish_reason, final.message.content or "") == ("tool_calls", choice.message.content or "")
    assert final.message.tool_calls[0].function.arguments == call.function.arguments
    again = [*said("x"), choice.message, {"role": "tool", "tool_call_id": call.id, "content": "say sunny"}]
    assert client.chat.completions.create(model="writer", messages=again, tools=[WEATHER]).choices[0].message.content == "sunny"


def test_a_forced_tool_binds_the_answer_and_no_tool_leaves_it_free(client):
    tools = [WEATHER, {"type": "function", "function": {"name": "time"}}]
    forced = client.chat.completions.create(model="writer", messages=said("x"), tools=tools, tool_choice="required").choices[0]
    assert (forced.finish_reason, forced.message.tool_calls[0].function.name) == ("tool_calls", "weather")
    free = client.chat.completions.create(model="writer", messages=said("x"), tools=tools, tool_choice="none").choices[0]
    assert (free.finish_reason, free.message.content) == ("stop", "x")


def test_completions(client):
    ask = client.completions.create
    answer = ask(model="writer", prompt=["say ab", [*b"say cd"]], n=2, max_tokens=9, echo=True)
    assert [choice.text for choice in answer.choices] == ["say abab"] * 2 + ["say cdcd"] * 2
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (12, 8)
    assert "".join(chunk.choices[0].text for chunk in ask(model="writer", prompt="say abc", stream=True, echo=True)) == "say abcabc"
    shown = ask(model="writer", prompt="say ab", logprobs=1).choices[0].logprobs
    assert (shown.tokens, shown.text_offset, shown.top_logprobs[0]) == (["a", "b"], [0, 1], {"a": -0.5})
    assert ask(model="writer", prompt="say 12345678901234567890").choices[0].text == "1234567890123456"  # OpenAI's default of 16


def test_responses(client):
    answer = client.responses.create(model="writer", input="say hi", instructions="Be brief.")
    assert (answer.output_text, answer.status, answer.usage.output_tokens) == ("hi", "completed", 2)
    cut = client.responses.create(
        model="writer", input=[{"role": "user", "content": [{"type": "input_text", "text": "say hi"}]}], max_output_tokens=1
    )
    assert (cut.output_text, cut.status, cut.incomplete_details.reason) == ("h", "incomplete", "max_output_tokens")
    with client.responses.stream(model="writer", input="say hi") as stream:
        kinds = [event.type.removeprefix("response.") for event in stream]
        assert stream.get_final_response().output_text == "hi"
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]


def test_embeddings(client):
    made = client.embeddings.create(model="counter", input=["aab", "c"])  # the client asks for base64
    assert [each.embedding for each in made.data] == [[2.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    assert made.usage.prompt_tokens == 4
    raw = client.embeddings.with_raw_response.create(model="counter", input="ab", encoding_format="base64", dimensions=1).http_response
    assert struct.unpack("<1f", base64.b64decode(raw.json()["data"][0]["embedding"])) == (1.0,)
    assert client.embeddings.create(model="counter", input="a", encoding_format="float").data[0].embedding == [1.0, 0.0, 0.0]
    for wrong in ({"dimensions": 4}, {"input": []}, {"input": [1, 2]}):
        with pytest.raises(openai.BadRequestError, match=next(iter(wrong))):
            client.embeddings.create(**{"model": "counter", "input": "a"} | wrong)


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_rerank(served, path):
    ask = {"model": "counter", "query": "b", "documents": ["a", {"text": "bb"}, "b"], "top_n": 2, "return_documents": True}
    answer = served.inference.post(path, json=ask, headers={"authorization": f"Bearer {TOKEN}"})
    assert answer.json()["results"] == [
        {"index": 1, "relevance_score": 0.2, "document": {"text": "bb"}},
        {"index": 2, "relevance_score": 0.1, "document": {"text": "b"}},
    ]
    refused = served.inference.post(path, json={"model": "counter", "documents": ["a"]}, headers={"authorization": f"Bearer {TOKEN}"})
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")


def test_transcriptions(client):
    ask = client.audio.transcriptions.create
    assert ask(model="counter", file=b"hello").text == "hello"
    assert ask(model="counter", file=b"hello", response_format="text") == "hello\n"
    verbose = ask(model="counter", file=b"hello", response_format="verbose_json")
    assert (verbose.text, verbose.duration, verbose.segments[0].end) == ("hello", 1.5, 1.5)
    with pytest.raises(openai.BadRequestError, match="response_format"):
        ask(model="counter", file=b"hello", response_format="srt")
    with pytest.raises(openai.BadRequestError, match="prompt"):
        ask(model="counter", file=b"hello", prompt="x")


def test_the_async_client(served):
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{served.addresses['inference']}/v1", api_key=TOKEN) as client:
            stream = await client.chat.completions.create(model="writer", messages=said("hi"), stream=True)
            whole = client.chat.completions.create(model="writer", messages=said("ho"))
            parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
            return ["".join(parts), (await whole).choices[0].message.content or ""]

    assert asyncio.run(ask()) == ["hi", "ho"]


def test_models_are_listed_for_both_kinds_of_clients(served, client):
    assert [model.id for model in client.models.list()] == ["counter", "writer"]
    assert served.inference.get("/v1/models", headers={"authorization": f"Bearer {TOKEN}"}).json()["models"] == ["counter", "writer"]
    assert client.models.retrieve("writer:2.0").id == "writer:2.0"
    for unknown in ("nobody", "writer:9", "writer/ada"):
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve(unknown)


def test_a_name_may_have_a_version_a_label_and_an_adapter(served, client):
    served.call(lambda: served.registry.set_traffic("writer", Traffic(weights={"2.0": 1.0}, labels={"stable": "1.0"})))
    try:
        for name, version in (("writer", "2.0"), ("writer:1.0", None), ("writer:stable/loud", None)):
            answer = client.chat.completions.with_raw_response.create(model=name, messages=said("hi"))
            assert answer.headers.get("x-tsx-model-version") == version  # of a split alone
            assert answer.parse().choices[0].message.content == ("HI" if "/" in name else "hi")
    finally:
        served.call(lambda: served.registry.set_traffic("writer", Traffic()))


def test_the_access_log_has_the_model_that_the_body_names(client, until):
    ask = client.chat.completions.with_raw_response.create
    with lines_of("ACCESS_LOG") as lines:
        ids = [ask(model=name, messages=said("hi")).headers["x-request-id"] for name in ("writer:2.0", "writer")]
        until(lambda: any(ids[1] in line for line in lines))
    found = {line["request_id"]: (line["model"], line["version"]) for line in map(json.loads, lines) if line["request_id"] in ids}
    assert [found[id] for id in ids] == [("writer", "2.0"), ("writer", "1.0")]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "robot"),
    ({"messages": [{"role": "assistant", "content": "x"}]}, "template refuses"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]}, "image_url"),
    ({"messages": said("x" * 3000)}, "Shorten the prompt"),
    ({"max_tokens": 1990}, "11 tokens, and 1990 may follow, but the model's context has 2000"),
    ({"n": 17}, "'n' is 17"),
    ({"n": 0}, "'n' is 0"),
    ({"temperature": "warm"}, "temperature"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"logit_bias": {"1": 2}}, "logit_bias"),
    ({"presence_penalty": 1.0}, "presence_penalty"),
    ({"top_logprobs": 2}, "logprobs"),
    ({"stop": ["a"] * 99}, "stop"),
    ({"tools": [{"type": "custom"}]}, "tools"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nonsense"}}}}, "nonsense"),
    ({"extra_body": {"made_up": 1}}, "made_up"),
]


@pytest.mark.parametrize(("wrong", "words"), WRONG, ids=[words for _, words in WRONG])
def test_what_cannot_be_done_is_a_400_that_names_it(client, wrong, words):
    with pytest.raises(openai.BadRequestError, match=words) as caught:
        client.chat.completions.create(**{"model": "writer", "messages": said("x")} | wrong)
    assert isinstance(caught.value.body, dict)
    assert (caught.value.body["type"], caught.value.body["message"][-1]) == ("invalid_request_error", ".")
    assert client.chat.completions.create(model="writer", messages=said("ok")).choices[0].message.content == "ok"


def test_a_missing_model_is_404_and_a_wrong_key_401(served, client):
    for name, words in (("wrtier", "did you mean 'writer'.*counter, writer"), ("writer:9", "version"), ("writer/ada", "It has loud")):
        with pytest.raises(openai.NotFoundError, match=words) as missing:
            client.chat.completions.create(model=name, messages=said("x"))
        assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with client_of(served, api_key="wrong") as stranger:
        for call in (lambda: stranger.models.list(), lambda: stranger.completions.create(model="writer", prompt="x")):
            with pytest.raises(openai.AuthenticationError) as refused:
                call()
            assert refused.value.code == "invalid_api_key"


def test_a_busy_model_is_asked_again_when_it_says(served, client):
    with pytest.raises(openai.InternalServerError) as busy:
        client.chat.completions.create(model="writer", messages=said("full"))
    assert (busy.value.status_code, busy.value.response.headers["retry-after"]) == (503, "1")
    asked: list[Any] = []
    http = httpx.Client(event_hooks={"request": [asked.append]})
    with client_of(served, max_retries=1, http_client=http) as patient, pytest.raises(openai.InternalServerError):
        patient.chat.completions.create(model="writer", messages=said("full"))
    assert len(asked) == 2


def test_a_model_without_text_or_without_vectors_says_so(client):
    with pytest.raises(openai.BadRequestError, match="embeddings"):
        client.chat.completions.create(model="counter", messages=said("x"))
    with pytest.raises(openai.NotFoundError, match="chat/completions"):
        client.embeddings.create(model="writer", input="x")


@pytest.mark.parametrize("lane", ["fast", "other"])
@pytest.mark.parametrize(("words", "told"), [("exit!", "worker"), ("break!", "engine broke")])
def test_a_stream_that_breaks_off_ends_with_an_error_event(served, client, words, told, lane):
    body: Any = json.dumps({"model": "writer", "messages": said(words), "stream": True}).encode()
    headers = {"authorization": f"Bearer {TOKEN}"}
    address = f"{served.addresses['inference']}/v1/chat/completions"
    content = body if lane == "fast" else iter([body])  # chunked bodies go the other way
    with httpx.stream("POST", address, content=content, headers=headers, timeout=60) as answer:
        text = answer.read().decode()  # raises where the body has no end
    assert answer.status_code == 200
    *events, last, end = text.split("\n\n")
    assert "".join(json.loads(event[6:])["choices"][0]["delta"]["content"] for event in events if event) == words[:4]
    assert told in json.loads(last.removeprefix("data: "))["error"]["message"]
    assert end == ""


def test_the_openai_client_raises_the_error_of_a_stream(client):
    with pytest.raises(openai.APIError, match="engine broke"):
        list(client.chat.completions.create(model="writer", messages=said("break!"), stream=True))


@pytest.mark.parametrize(
    ("body", "content_type", "status", "words"),
    [
        (b'{"model": "counter", "input": ["a"]}', "application/json", 200, "embedding"),
        (b'{"model": "nobody", "input": ["a"]}', "application/json", 404, "Models here: counter, writer."),
        (b'{"input": ["a"]}', "application/json", 400, "Models here: counter, writer."),
        (b'{"model": "counter"}', "application/json", 400, "input"),
        (b"no", "application/json", 400, "JSON"),
        (b'{"model": "counter"}', "application/x-www-form-urlencoded", 400, "Content-Type: application/json"),
    ],
)
def test_both_lanes_answer_alike(served, body, content_type, status, words):
    headers = {"authorization": f"Bearer {TOKEN}", "content-type": content_type}
    answers = [served.ask(body, "/v1/embeddings", lane=lane, **headers) for lane in ("fast", "other")]
    assert [answer.status_code for answer in answers] == [status] * 2
    assert answers[0].json() == answers[1].json()
    assert words in answers[0].text
    assert ("error" in answers[0].json()) == (status >= 400)


def test_other_methods_and_addresses_say_where_to_go(served):
    headers = {"authorization": f"Bearer {TOKEN}"}
    answer = served.inference.get("/v1/embeddings", headers=headers)
    assert (answer.status_code, answer.headers["allow"], answer.json()["error"]["type"]) == (405, "POST", "invalid_request_error")
    elsewhere = served.management.post("/v1/embeddings", json={}, headers=headers)
    assert (elsewhere.status_code, "inference address" in elsewhere.json()["error"]["message"]) == (404, True)
    assert served.inference.post("/v1/audio/transcriptions", json={}, headers=headers).status_code == 400


def test_requests_for_later_and_under_a_key_have_the_model_in_the_body_too(server, store):
    make_model(store / "counted.mar", COUNTER)
    server.register("counted.mar", initial_workers=1)
    try:
        body = b'{"model": "counted:1.0", "input": "ab"}'
        headers = {"content-type": "application/json"}
        later = server.ask(body, "/v1/embeddings", prefer="respond-async, wait=20", **headers)
        twice = [server.ask(body, "/v1/embeddings", idempotency_key="k", **headers) for _ in range(2)]
        assert {answer.json()["data"][0]["embedding"][0] for answer in (later, *twice)} == {1.0}
        alone = server.ask(b'{"input": "ab"}', "/v1/embeddings", **headers)
        assert (alone.status_code, "Models here: counted, talker." in alone.text) == (400, True)
    finally:
        server.call(lambda: server.registry.unregister("counted"))


def test_torchserves_form_of_the_paths(served):
    address = f"{served.addresses['inference']}/predictions/writer"
    with openai.OpenAI(base_url=f"{address}//v1", api_key=TOKEN) as client:  # whichever version the traffic says
        assert client.chat.completions.create(model="writer/loud", messages=said("hi")).choices[0].message.content == "HI"
    with openai.OpenAI(base_url=f"{address}/1.0/v1", api_key=TOKEN) as client:
        assert client.chat.completions.create(model="any", messages=said("hi")).choices[0].message.content == "hi"
        with pytest.raises(openai.BadRequestError, match="made_up"):
            client.completions.create(model="any", prompt="x", extra_body={"made_up": 1})


def test_langchain(served):
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings  # a second of imports, for this test alone

    address: Any = {"base_url": f"{served.addresses['inference']}/v1", "api_key": TOKEN}
    chat = ChatOpenAI(model="writer", **address)
    assert chat.invoke("say hi").content == "hi"
    assert "".join(str(part.content) for part in chat.stream("say hi")) == "hi"
    call = chat.bind_tools([WEATHER]).invoke('say {"name": "weather", "arguments": {"city": "Rome"}}')
    assert call.tool_calls[0]["args"] == {"city": "Rome"}
    vectors = OpenAIEmbeddings(model="counter", check_embedding_ctx_length=False, **address)
    assert vectors.embed_documents(["a", "bb"]) == [[1.0, 0.0, 0.0], [0.0, 2.0, 0.0]]
