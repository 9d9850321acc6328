"""Responses with reasoning and function calls, by tiny models that write a given answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tests.runtime.features.openai.conftest import CITY, HERMES, REASONER, TAGS, WEATHER, Client
from tsx_runtime.features.openai.worker.requests import read
from tsx_runtime.features.openai.worker.responses import ResponseRequest

PATH = "v1/responses"
TOOL = {"type": "function", **WEATHER["function"]}
QUESTION = {"role": "user", "content": "?"}
BODY = {"input": [QUESTION], "tools": [TOOL]}
CALL = f'<tool_call>{{"name": "weather", "arguments": {CITY}}}</tool_call>'
TEXT_EVENTS = "content_part.added output_text.delta output_text.done content_part.done"
CALL_EVENTS = "function_call_arguments.delta function_call_arguments.done"


def stream(client: Client, body: Any = BODY) -> list[Any]:
    return [*map(json.loads, client.events(client.post(body | {"stream": True}, PATH)))]


def without_ids(items: Any) -> Any:
    return [
        {name: value for name, value in item.items() if name not in ("id", "call_id")}
        for item in items
    ]


def test_a_function_is_called_and_its_output_returned(start: Callable[..., Client]) -> None:
    client = start(f"Let me see.{CALL}", HERMES, TAGS)
    response = client.post(BODY, PATH)
    message, call = response["output"]
    assert (message["type"], message["content"][0]["text"]) == ("message", "Let me see.")
    assert without_ids([call]) == [
        {"type": "function_call", "status": "completed", "name": "weather", "arguments": CITY}
    ]
    assert (response["tool_choice"], response["parallel_tool_calls"]) == ("auto", True)
    assert response["tools"][0]["parameters"] == TOOL["parameters"]

    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    body = {"input": [QUESTION, message, call, call, output], "tools": [TOOL]}
    assert client.post(body, PATH)["status"] == "completed"
    messages = read(ResponseRequest, body).messages()
    assert list(messages) == ["input[0]", "input[1]", "input[4]"]
    user, assistant, tool = (message.for_template() for message in messages.values())
    assert user == QUESTION
    assert assistant["content"] == "Let me see."
    # The calls of one turn are in one message.
    called = {"name": "weather", "arguments": json.loads(CITY)}
    assert [shown["function"] for shown in assistant["tool_calls"]] == [called, called]
    assert tool == {"role": "tool", "tool_call_id": call["call_id"], "content": "sunny"}


def test_the_events_of_a_call_are_those_of_openai(start: Callable[..., Client]) -> None:
    client = start(f"Let me see.{CALL}", HERMES, TAGS)
    events = stream(client)
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    kinds = [event["type"].removeprefix("response.") for event in events]
    item_events = ["output_item.added", *TEXT_EVENTS.split(), "output_item.done"]
    item_events += ["output_item.added", *CALL_EVENTS.split(), "output_item.done"]
    indexes = [event.get("output_index") for event in events]
    assert [*dict.fromkeys(zip(kinds, indexes, strict=True))] == [
        ("created", None),
        ("in_progress", None),
        *((kind, int(index > 5)) for index, kind in enumerate(item_events)),
        ("completed", None),
    ]
    deltas = [event["delta"] for event in events if event["type"].endswith("arguments.delta")]
    assert len(deltas) > 1
    assert "".join(deltas) == CITY
    response = events[-1]["response"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == response["output"]
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert [item.get("content", item.get("arguments")) for item in added] == [[], ""]
    assert without_ids(done) == without_ids(client.post(BODY, PATH)["output"])


def test_reasoning_is_an_item_of_its_own(start: Callable[..., Client]) -> None:
    markers = TAGS | {"<think>": True, "</think>": True}
    client = start(f"Hm.</think>{CALL}", REASONER, markers, "<think>")
    response = client.post(BODY, PATH)
    reasoning, call = response["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert (reasoning["type"], call["type"]) == ("reasoning", "function_call")
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] > 1
    events = stream(client)
    deltas = [e["delta"] for e in events if e["type"] == "response.reasoning_text.delta"]
    assert "".join(deltas) == "Hm."
    truncated = client.post(BODY | {"max_output_tokens": 1}, PATH)
    assert [item["status"] for item in truncated["output"]] == ["incomplete"]
    assert client.post(BODY | {"input": [QUESTION, *response["output"]]}, PATH)["output"]
