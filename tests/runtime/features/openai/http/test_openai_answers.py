"""The answers of OpenAI's API, tested with its own client and with LangChain's."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

import openai
import pytest

from tests.runtime.features.openai.http.conftest import TOKEN, WEATHER, messages

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("processes")]


def text_of(completion):
    return completion.choices[0].message.content


def test_chat(chat):
    answer = chat("hello", user="me", frequency_penalty=0)
    (choice,) = answer.choices
    assert (choice.message.role, text_of(answer)) == ("assistant", "hello")
    assert choice.finish_reason == "stop"
    assert answer.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": 15,
        "completion_tokens": 5,
        "total_tokens": 20,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert (answer.model, answer.object) == ("writer", "chat.completion")
    assert answer.id.startswith("chatcmpl-")


def test_chat_template_variables_reach_the_prompt(client, chat):
    variables = {"chat_template_kwargs": {"enable_thinking": False}}
    effort = {"reasoning_effort": "low"}
    for body, tokens in (
        ({}, 15),
        ({"chat_template_kwargs": {}}, 15),
        (variables, 37),
        (effort, 36),
        (effort | {"chat_template_kwargs": effort | {"reasoning_effort": "none"}}, 37),
    ):
        answer = chat("hello", extra_body=body)
        assert (text_of(answer), answer.usage.prompt_tokens) == ("hello", tokens)
    answer = client.responses.create(
        model="writer", input="say hi", reasoning={"effort": "low"}, extra_body=variables
    )
    assert (answer.output_text, answer.usage.input_tokens) == ("hi", 12 + 21 + 22)


def test_chat_streams(chat):
    *chunks, last = chat("hello", stream=True, stream_options={"include_usage": True})
    assert [chunk.choices[0].delta.content for chunk in chunks] == ["", *"hello", None]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * 6 + ["stop"]
    assert (last.choices, last.usage.total_tokens) == ([], 20)


def test_several_choices_use_different_seeds(chat):
    request = {"n": 3, "seed": 4, "temperature": 1.0}
    texts = [choice.message.content for choice in chat("12345678", **request).choices]
    assert len(set(texts)) == 3
    streams = ["", "", ""]
    for chunk in chat("12345678", **request, stream=True):
        streams[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streams == texts


def test_stops_limits_and_logprobs(chat):
    assert text_of(chat("one two", stop=[" "])) == "one"
    truncated = chat("one two", max_completion_tokens=2)
    assert (text_of(truncated), truncated.choices[0].finish_reason) == ("on", "length")
    token = chat("a", logprobs=True, top_logprobs=2).choices[0].logprobs.content[0]
    assert (token.token, token.logprob, token.bytes) == ("a", -0.5, [97])
    assert [top.logprob for top in token.top_logprobs] == [-0.5, -9999.0]


def test_text_parts_roles_and_json_format(chat):
    text_parts = [{"type": "text", "text": "say "}, {"type": "text", "text": "b"}]
    roles = [{"role": "developer", "content": "x"}, {"role": "user", "content": text_parts}]
    assert text_of(chat(messages=roles)) == "b"
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    for response_format in ({"type": "json_object"}, schema):
        assert text_of(chat("b", response_format=response_format)) == '{"a": 1}'


@pytest.mark.parametrize(
    "reply",
    [
        'Hm.<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>',
        '{"name": "weather", "parameters": {"city": "Rome"}}',
    ],
)
def test_tool_calls(client, chat, reply):
    answer = chat(reply, tools=[WEATHER])
    choice = answer.choices[0]
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, call.function.name) == ("tool_calls", "weather")
    assert json.loads(call.function.arguments) == {"city": "Rome"}
    request = {"model": "writer", "messages": messages(reply), "tools": [WEATHER]}
    with client.chat.completions.stream(**request) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    assert (final.message.content or "") == (choice.message.content or "")
    assert final.message.tool_calls[0].function.arguments == call.function.arguments
    result = {"role": "tool", "tool_call_id": call.id, "content": "say sunny"}
    second_reply = chat(messages=[*messages("x"), choice.message, result], tools=[WEATHER])
    assert text_of(second_reply) == "sunny"


def test_tool_choice_forces_or_forbids_a_tool_call(chat):
    tools = [WEATHER, {"type": "function", "function": {"name": "time"}}]
    for is_parallel, names in ((True, ["weather", "time"]), (False, ["weather"])):
        forced_choice = chat(
            tools=tools, tool_choice="required", parallel_tool_calls=is_parallel
        ).choices[0]
        assert forced_choice.finish_reason == "tool_calls"
        assert [call.function.name for call in forced_choice.message.tool_calls] == names
    free_choice = chat(tools=tools, tool_choice="none").choices[0]
    assert (free_choice.finish_reason, free_choice.message.content) == ("stop", "x")


def test_completions(client):
    def create_completion(prompt, **parameters):
        return client.completions.create(model="writer", prompt=prompt, **parameters)

    answer = create_completion(["say ab", [*b"say cd"]], n=2, max_tokens=9, echo=True)
    assert [choice.text for choice in answer.choices] == ["say abab"] * 2 + ["say cdcd"] * 2
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (12, 8)
    chunks = create_completion("say abc", stream=True, echo=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "say abcabc"
    best = create_completion("say abcdefgh", n=2, best_of=3, temperature=1.0, seed=4)
    assert len({choice.text for choice in best.choices}) == 2
    assert best.usage.completion_tokens == 3 * 8
    logprobs = create_completion("say ab", logprobs=1).choices[0].logprobs
    assert (logprobs.tokens, logprobs.text_offset) == (["a", "b"], [0, 1])
    assert logprobs.top_logprobs[0] == {"a": -0.5}
    # OpenAI's default is 16 tokens.
    assert create_completion("say 12345678901234567890").choices[0].text == "1234567890123456"


def test_responses(client):
    answer = client.responses.create(model="writer", input="say hi", instructions="Be brief.")
    assert (answer.output_text, answer.status, answer.usage.output_tokens) == ("hi", "completed", 2)
    content = [{"type": "input_text", "text": "say hi"}]
    truncated = client.responses.create(
        model="writer", input=[{"role": "user", "content": content}], max_output_tokens=1
    )
    assert (truncated.output_text, truncated.status) == ("h", "incomplete")
    assert truncated.incomplete_details.reason == "max_output_tokens"
    with client.responses.stream(model="writer", input="say hi") as stream:
        event_types = [event.type.removeprefix("response.") for event in stream]
        assert stream.get_final_response().output_text == "hi"
    expected = (
        "created in_progress output_item.added content_part.added output_text.delta "
        "output_text.delta output_text.done content_part.done output_item.done completed"
    )
    assert event_types == expected.split()


def test_responses_continue_without_earlier_reasoning(client):
    items: list[Any] = [
        {"type": "message", "role": "user", "content": "say ho"},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"role": "assistant", "content": "ho"},
        {"role": "user", "content": "say hi"},
    ]
    answer = client.responses.create(
        model="writer",
        input=items,
        reasoning={"effort": None},
        text={"format": {"type": "text"}},
        extra_body={"text": {"verbosity": None}},
    )
    prompt = "user: say ho\nassistant: ho\nuser: say hi"
    assert (answer.output_text, answer.usage.input_tokens) == ("hi", len(prompt))


def test_the_error_for_an_unsupported_item_names_its_type(client):
    for kind in ("item_reference", "web_search_call"):
        items: list[Any] = [
            {"role": "user", "content": "say hi"},
            {"type": kind, "id": "x", "call_id": "c", "name": "f", "arguments": "{}"},
        ]
        with pytest.raises(
            openai.BadRequestError, match=f"{kind}.* it must be a message"
        ) as exc_info:
            client.responses.create(model="writer", input=items)
        assert exc_info.value.param == "input[1]"


def test_embeddings(client):
    def embed(input, **parameters):
        return client.embeddings.create(model="counter", input=input, **parameters)

    # The client asks for base64.
    answer = embed(["aab", "c"])
    assert [row.embedding for row in answer.data] == [[2.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    assert answer.usage.prompt_tokens == 4
    raw = client.embeddings.with_raw_response.create(
        model="counter", input="ab", encoding_format="base64", dimensions=1
    ).http_response
    assert struct.unpack("<1f", base64.b64decode(raw.json()["data"][0]["embedding"])) == (1.0,)
    assert embed("a", encoding_format="float").data[0].embedding == [1.0, 0.0, 0.0]
    for invalid_options in ({"dimensions": 4}, {"input": []}, {"input": [1, 2]}):
        with pytest.raises(openai.BadRequestError, match=next(iter(invalid_options))):
            embed(**{"input": "a"} | invalid_options)


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_rerank(openai_server, path):
    def rerank(**body):
        headers = {"authorization": f"Bearer {TOKEN}"}
        return openai_server.inference.post(
            path, json={"model": "counter", **body}, headers=headers
        )

    documents = ["a", {"text": "bb"}, "b"]
    answer = rerank(query="b", documents=documents, top_n=2, return_documents=True)
    assert answer.json()["results"] == [
        {"index": 1, "relevance_score": 0.2, "document": {"text": "bb"}},
        {"index": 2, "relevance_score": 0.1, "document": {"text": "b"}},
    ]
    refusal = rerank(documents=["a"])
    assert (refusal.status_code, refusal.json()["error"]["type"]) == (400, "invalid_request_error")


def test_transcriptions(client):
    def transcribe(**parameters):
        return client.audio.transcriptions.create(model="counter", file=b"hello", **parameters)

    assert transcribe().text == "hello"
    assert transcribe(response_format="text") == "hello\n"
    verbose = transcribe(response_format="verbose_json")
    assert (verbose.text, verbose.duration, verbose.segments[0].end) == ("hello", 1.5, 1.5)
    for invalid_options in ({"response_format": "srt"}, {"prompt": "x"}):
        with pytest.raises(openai.BadRequestError, match=next(iter(invalid_options))):
            transcribe(**invalid_options)


def test_langchain(openai_server):
    # The import takes a second and only this test needs it.
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings

    address: Any = {"base_url": f"{openai_server.addresses['inference']}/v1", "api_key": TOKEN}
    chat = ChatOpenAI(model="writer", **address)
    assert chat.invoke("say hi").content == "hi"
    assert "".join(str(part.content) for part in chat.stream("say hi")) == "hi"
    reply = 'say {"name": "weather", "arguments": {"city": "Rome"}}'
    (call,) = chat.bind_tools([WEATHER]).invoke(reply).tool_calls
    assert call["args"] == {"city": "Rome"}
    vectors = OpenAIEmbeddings(model="counter", check_embedding_ctx_length=False, **address)
    assert vectors.embed_documents(["a", "bb"]) == [[1.0, 0.0, 0.0], [0.0, 2.0, 0.0]]
