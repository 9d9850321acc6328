"""OpenAI's own client: the examples of its first page, typed answers, and an agent with a tool."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import openai
import pytest
from pydantic import BaseModel, Field

from tests.runtime.features.openai.clients.conftest import TOKEN

pytestmark = pytest.mark.usefixtures("processes")
SHORT: dict[str, Any] = {"model": "tiny", "max_tokens": 24}


class City(BaseModel):
    city: str = Field(max_length=12)
    country: str = Field(max_length=12)


class GetWeather(BaseModel):
    """Get the weather in a city."""

    city: str = Field(max_length=12)


TOOLS: Any = [openai.pydantic_function_tool(GetWeather, name="get_weather")]
QUESTION: Any = [{"role": "user", "content": "What is the weather in Paris?"}]


@pytest.fixture(scope="module")
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key=TOKEN, max_retries=0) as client:
        yield client


def test_responses_and_chats_stream_what_they_answer_whole(client: openai.OpenAI) -> None:
    request: Any = {
        "model": "tiny",
        "instructions": "You are a coding assistant that talks like a pirate.",
        "input": "How do I check if a Python object is an instance of a class?",
        "max_output_tokens": 24,
    }
    text = client.responses.create(**request).output_text
    events = client.responses.create(**request, stream=True)
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == text
    assert text

    messages: Any = [{"role": "developer", "content": "Talk like a pirate."}, *QUESTION]
    answer = client.chat.completions.create(messages=messages, **SHORT).choices[0].message.content
    chunks = client.chat.completions.create(messages=messages, stream=True, **SHORT)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer
    assert answer


def test_typed_answers_follow_their_schemas(client: openai.OpenAI) -> None:
    chat = client.chat.completions.parse(model="tiny", messages=QUESTION, response_format=City)
    city = chat.choices[0].message.parsed
    assert isinstance(city, City)
    with client.chat.completions.stream(
        model="tiny", messages=QUESTION, response_format=City
    ) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == city
    response = client.responses.parse(model="tiny", input=QUESTION, text_format=City)
    assert isinstance(response.output_parsed, City)


def test_an_agent_calls_a_tool_and_answers_with_its_result(client: openai.OpenAI) -> None:
    forced: Any = {"type": "function", "function": {"name": "get_weather"}}
    choice = client.chat.completions.parse(
        model="tiny", messages=QUESTION, tools=TOOLS, tool_choice=forced
    ).choices[0]
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    arguments = call.function.parsed_arguments
    assert isinstance(arguments, GetWeather)
    assert choice.finish_reason == "stop"  # OpenAI has it so for a named function.

    with client.chat.completions.stream(
        model="tiny",
        messages=QUESTION,
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
    ) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert streamed.message.tool_calls is not None
    assert streamed.message.tool_calls[0].function.parsed_arguments == arguments
    assert streamed.finish_reason == "tool_calls"

    result: Any = {"role": "tool", "tool_call_id": call.id, "content": json.dumps({"celsius": 21})}
    messages: Any = [*QUESTION, choice.message, result]
    answer = client.chat.completions.create(messages=messages, tools=TOOLS, **SHORT)
    assert answer.choices[0].message.content


def test_an_agent_calls_a_tool_by_responses(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", **TOOLS[0]["function"]}
    request: Any = {"model": "tiny", "tools": [tool]}
    with client.responses.stream(
        input=QUESTION, tool_choice="required", parallel_tool_calls=False, **request
    ) as stream:
        deltas = [e.delta for e in stream if e.type == "response.function_call_arguments.delta"]
        response = stream.get_final_response()
    (call,) = response.output
    assert call.type == "function_call"
    assert (call.name, call.arguments) == ("get_weather", "".join(deltas))
    GetWeather.model_validate_json(call.arguments)
    named = client.responses.create(
        input=QUESTION, tool_choice={"type": "function", "name": "get_weather"}, **request
    )
    assert [item.type for item in named.output] == ["function_call"]

    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "21"}
    answer = client.responses.create(
        input=[*QUESTION, *response.output, result], max_output_tokens=24, **request
    )
    assert answer.output_text


def test_the_error_of_a_grammar_names_its_field(client: openai.OpenAI) -> None:
    schema: Any = {"name": "a", "schema": {"type": "nonsense"}}
    format: Any = {"type": "json_schema", "json_schema": schema}
    nonsense: Any = {"name": "f", "parameters": schema["schema"]}
    tools: Any = [{"type": "function", "function": nonsense}]
    text: Any = {"format": {"type": "json_schema", **schema}}
    outputs = {"structured_outputs": {"regex": "a(?=b)"}}
    chat = partial(client.chat.completions.create, messages=QUESTION, **SHORT)
    requests: dict[str, Any] = {
        "response_format": partial(chat, response_format=format),
        "tools": partial(chat, tools=tools, tool_choice="required"),
        "text.format": partial(client.responses.create, model="tiny", input="a", text=text),
        "structured_outputs": partial(
            client.completions.create, model="tiny", prompt="a", extra_body=outputs
        ),
    }
    for field, request in requests.items():
        with pytest.raises(openai.BadRequestError, match="cannot be used") as exc_info:
            request()
        assert exc_info.value.param == field
