"""What OpenAI's API answers, driven by its own client and by LangChain's."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from typing import Any

import openai
import pytest

from tests.runtime.http.openai_api.conftest import TOKEN, WEATHER, said

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("processes")]


def test_chat(client):
    answer = client.chat.completions.create(
        model="writer", messages=said("hello"), user="me", frequency_penalty=0
    )
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == (
        "assistant",
        "hello",
        "stop",
    )
    assert answer.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": 15,
        "completion_tokens": 5,
        "total_tokens": 20,
    }
    assert (answer.model, answer.object, answer.id[:9]) == (
        "writer",
        "chat.completion",
        "chatcmpl-",
    )


def test_variables_of_the_chat_template_are_part_of_the_prompt(client):
    for more, tokens in (
        ({}, 15),
        ({"chat_template_kwargs": {}}, 15),
        ({"chat_template_kwargs": {"enable_thinking": False}}, 37),
    ):
        answer = client.chat.completions.create(
            model="writer", messages=said("hello"), extra_body=more
        )
        assert (answer.choices[0].message.content, answer.usage.prompt_tokens) == ("hello", tokens)
    answer = client.responses.create(
        model="writer",
        input="say hi",
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    )
    assert (answer.output_text, answer.usage.input_tokens) == ("hi", 12 + 22)


def test_chat_streams(client):
    stream = client.chat.completions.create(
        model="writer", messages=said("hello"), stream=True, stream_options={"include_usage": True}
    )
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
    assert (
        ask(model="writer", messages=said("one two"), stop=[" "]).choices[0].message.content
        == "one"
    )
    cut = ask(model="writer", messages=said("one two"), max_completion_tokens=2).choices[0]
    assert (cut.message.content, cut.finish_reason) == ("on", "length")
    shown = (
        ask(model="writer", messages=said("a"), logprobs=True, top_logprobs=2)
        .choices[0]
        .logprobs.content[0]
    )
    assert (
        shown.token,
        shown.logprob,
        shown.bytes,
        [each.logprob for each in shown.top_logprobs],
    ) == ("a", -0.5, [97], [-0.5, -9999.0])


def test_parts_of_text_roles_and_json(client):
    ask = client.chat.completions.create
    parts = [
        {"role": "developer", "content": "x"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "say "}, {"type": "text", "text": "b"}],
        },
    ]
    assert ask(model="writer", messages=parts).choices[0].message.content == "b"
    assert (
        ask(model="writer", messages=said("b"), response_format={"type": "json_object"})
        .choices[0]
        .message.content
        == '{"a": 1}'
    )
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    assert (
        ask(model="writer", messages=said("b"), response_format=schema).choices[0].message.content
        == '{"a": 1}'
    )


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
    assert (choice.finish_reason, call.function.name, json.loads(call.function.arguments)) == (
        "tool_calls",
        "weather",
        {"city": "Rome"},
    )
    with client.chat.completions.stream(**ask) as stream:
        final = stream.get_final_completion().choices[0]
    assert (final.finish_reason, final.message.content or "") == (
        "tool_calls",
        choice.message.content or "",
    )
    assert final.message.tool_calls[0].function.arguments == call.function.arguments
    again = [
        *said("x"),
        choice.message,
        {"role": "tool", "tool_call_id": call.id, "content": "say sunny"},
    ]
    assert (
        client.chat.completions.create(model="writer", messages=again, tools=[WEATHER])
        .choices[0]
        .message.content
        == "sunny"
    )


def test_a_forced_tool_binds_the_answer_and_no_tool_leaves_it_free(client):
    tools = [WEATHER, {"type": "function", "function": {"name": "time"}}]
    forced = client.chat.completions.create(
        model="writer", messages=said("x"), tools=tools, tool_choice="required"
    ).choices[0]
    assert (forced.finish_reason, forced.message.tool_calls[0].function.name) == (
        "tool_calls",
        "weather",
    )
    free = client.chat.completions.create(
        model="writer", messages=said("x"), tools=tools, tool_choice="none"
    ).choices[0]
    assert (free.finish_reason, free.message.content) == ("stop", "x")


def test_completions(client):
    ask = client.completions.create
    answer = ask(model="writer", prompt=["say ab", [*b"say cd"]], n=2, max_tokens=9, echo=True)
    assert [choice.text for choice in answer.choices] == ["say abab"] * 2 + ["say cdcd"] * 2
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (12, 8)
    assert (
        "".join(
            chunk.choices[0].text
            for chunk in ask(model="writer", prompt="say abc", stream=True, echo=True)
        )
        == "say abcabc"
    )
    shown = ask(model="writer", prompt="say ab", logprobs=1).choices[0].logprobs
    assert (shown.tokens, shown.text_offset, shown.top_logprobs[0]) == (
        ["a", "b"],
        [0, 1],
        {"a": -0.5},
    )
    assert (
        ask(model="writer", prompt="say 12345678901234567890").choices[0].text == "1234567890123456"
    )  # OpenAI's default of 16


def test_responses(client):
    answer = client.responses.create(model="writer", input="say hi", instructions="Be brief.")
    assert (answer.output_text, answer.status, answer.usage.output_tokens) == ("hi", "completed", 2)
    cut = client.responses.create(
        model="writer",
        input=[{"role": "user", "content": [{"type": "input_text", "text": "say hi"}]}],
        max_output_tokens=1,
    )
    assert (cut.output_text, cut.status, cut.incomplete_details.reason) == (
        "h",
        "incomplete",
        "max_output_tokens",
    )
    with client.responses.stream(model="writer", input="say hi") as stream:
        kinds = [event.type.removeprefix("response.") for event in stream]
        assert stream.get_final_response().output_text == "hi"
    assert kinds == [
        *(
            "created",
            "in_progress",
            "output_item.added",
            "content_part.added",
            "output_text.delta",
            "output_text.delta",
        ),
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]


def test_responses_go_on_without_the_models_earlier_reasoning(client):
    items: list[Any] = [
        {"type": "message", "role": "user", "content": "say ho"},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"role": "assistant", "content": "ho"},
        {"role": "user", "content": "say hi"},
    ]
    asked = {
        "model": "writer",
        "input": items,
        "reasoning": {"effort": None},
        "text": {"format": {"type": "text"}},
    }
    answer = client.responses.create(**asked, extra_body={"text": {"verbosity": None}})
    assert (answer.output_text, answer.usage.input_tokens) == (
        "hi",
        len("user: say ho\nassistant: ho\nuser: say hi"),
    )


@pytest.mark.parametrize(
    "kind", ["function_call", "function_call_output", "item_reference", "web_search_call"]
)
def test_an_item_that_is_no_message_is_named_by_its_type(client, kind):
    items: list[Any] = [
        {"role": "user", "content": "say hi"},
        {"type": kind, "id": "x", "call_id": "c", "name": "f", "arguments": "{}"},
    ]
    with pytest.raises(
        openai.BadRequestError, match=f"'input\\[1\\]' is of type .*{kind}"
    ) as caught:
        client.responses.create(model="writer", input=items)
    assert caught.value.param == "input[1]"


def test_embeddings(client):
    made = client.embeddings.create(
        model="counter", input=["aab", "c"]
    )  # the client asks for base64
    assert [each.embedding for each in made.data] == [[2.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    assert made.usage.prompt_tokens == 4
    raw = client.embeddings.with_raw_response.create(
        model="counter", input="ab", encoding_format="base64", dimensions=1
    ).http_response
    assert struct.unpack("<1f", base64.b64decode(raw.json()["data"][0]["embedding"])) == (1.0,)
    assert client.embeddings.create(model="counter", input="a", encoding_format="float").data[
        0
    ].embedding == [1.0, 0.0, 0.0]
    for wrong in ({"dimensions": 4}, {"input": []}, {"input": [1, 2]}):
        with pytest.raises(openai.BadRequestError, match=next(iter(wrong))):
            client.embeddings.create(**{"model": "counter", "input": "a"} | wrong)


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_rerank(served, path):
    ask = {
        "model": "counter",
        "query": "b",
        "documents": ["a", {"text": "bb"}, "b"],
        "top_n": 2,
        "return_documents": True,
    }
    answer = served.inference.post(path, json=ask, headers={"authorization": f"Bearer {TOKEN}"})
    assert answer.json()["results"] == [
        {"index": 1, "relevance_score": 0.2, "document": {"text": "bb"}},
        {"index": 2, "relevance_score": 0.1, "document": {"text": "b"}},
    ]
    refused = served.inference.post(
        path,
        json={"model": "counter", "documents": ["a"]},
        headers={"authorization": f"Bearer {TOKEN}"},
    )
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
        async with openai.AsyncOpenAI(
            base_url=f"{served.addresses['inference']}/v1", api_key=TOKEN
        ) as client:
            stream = await client.chat.completions.create(
                model="writer", messages=said("hi"), stream=True
            )
            whole = client.chat.completions.create(model="writer", messages=said("ho"))
            parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
            return ["".join(parts), (await whole).choices[0].message.content or ""]

    assert asyncio.run(ask()) == ["hi", "ho"]


def test_langchain(served):
    from langchain_openai import (
        ChatOpenAI,
        OpenAIEmbeddings,
    )  # a second of imports, for this test alone

    address: Any = {"base_url": f"{served.addresses['inference']}/v1", "api_key": TOKEN}
    chat = ChatOpenAI(model="writer", **address)
    assert chat.invoke("say hi").content == "hi"
    assert "".join(str(part.content) for part in chat.stream("say hi")) == "hi"
    call = chat.bind_tools([WEATHER]).invoke(
        'say {"name": "weather", "arguments": {"city": "Rome"}}'
    )
    assert call.tool_calls[0]["args"] == {"city": "Rome"}
    vectors = OpenAIEmbeddings(model="counter", check_embedding_ctx_length=False, **address)
    assert vectors.embed_documents(["a", "bb"]) == [[1.0, 0.0, 0.0], [0.0, 2.0, 0.0]]
