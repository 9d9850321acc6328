"""LangChain's client: chats, streams, typed answers, and an agent with a tool."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from pydantic import BaseModel, ConfigDict, Field

from tests.runtime.features.openai.clients.conftest import TOKEN

pytestmark = [pytest.mark.usefixtures("processes"), pytest.mark.nightly]
QUESTION = "What is the weather in Paris?"


class Joke(BaseModel):
    """A joke to tell a user."""

    model_config = ConfigDict(extra="forbid")  # Random weights would add keys without end.

    setup: str = Field(description="The setup of the joke", max_length=12)
    rating: int = Field(description="How funny it is", ge=1, le=10)


@pytest.fixture(scope="module")
def chat(base_url: str) -> Any:
    from langchain_openai import ChatOpenAI  # The import takes a second.

    return ChatOpenAI(
        model="tiny", base_url=base_url, api_key=TOKEN, max_retries=0, max_completion_tokens=200
    )


def test_a_chat_streams_what_it_answers_whole(chat: Any) -> None:
    messages = [("system", "You translate English to French."), ("human", "I love programming.")]
    short = chat.bind(max_completion_tokens=24)
    answer = short.invoke(messages)
    assert answer.content
    assert answer.usage_metadata["output_tokens"] <= 24
    assert "".join(part.content for part in short.stream(messages)) == answer.content


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_typed_answers_follow_their_schemas(chat: Any, method: str) -> None:
    typed = chat.with_structured_output(Joke, method=method)
    joke = typed.invoke("Tell me a joke about cats")
    assert isinstance(joke, Joke)
    *_, last = typed.stream("Tell me a joke about cats")
    assert last == joke


def test_an_agent_calls_a_tool_and_answers_with_its_result(chat: Any) -> None:
    from langchain_core.tools import tool

    @tool
    def get_weather(location: Annotated[str, Field(max_length=12)]) -> str:
        """Get the weather in a location."""
        return f"It is sunny in {location}."

    forced = chat.bind_tools(
        [get_weather], tool_choice="any", strict=True, parallel_tool_calls=False
    )
    message = forced.invoke(QUESTION)
    (call,) = message.tool_calls
    assert call["name"] == "get_weather"
    first, *chunks = forced.stream(QUESTION)
    streamed = sum(chunks, first)
    assert [call["args"] for call in streamed.tool_calls] == [call["args"]]

    result = get_weather.invoke(call)
    free = chat.bind_tools([get_weather]).bind(max_completion_tokens=24)
    answer = free.invoke([("human", QUESTION), message, result])
    assert answer.content
