"""OpenAI's Agents SDK: an agent with a tool, its stream, and an agent with a typed output."""

import asyncio
import json
from typing import Annotated, Any

from agents import Agent, ModelSettings, Runner, function_tool, set_tracing_disabled
from pydantic import BaseModel, Field

# The SDK refuses answers that `max_tokens` breaks off, so the end token ends all texts at once.
END_SOON = {"logit_bias": {"0": 100}}
Short = Annotated[str, Field(max_length=12)]
cities: list[str] = []


class CalendarEvent(BaseModel):
    name: Short
    participants: list[Short] = Field(max_length=2)


@function_tool
def get_weather(city: Short) -> str:
    """Return the weather in a city."""
    cities.append(city)
    return f"The weather in {city} is sunny."


assistant = Agent(
    name="Assistant",
    instructions="You are a helpful assistant.",
    model="tiny",
    tools=[get_weather],
    # After the first call, the SDK asks for "auto".
    model_settings=ModelSettings(
        tool_choice="required", parallel_tool_calls=False, extra_body=END_SOON
    ),
)
extractor = Agent(name="Calendar extractor", model="tiny", output_type=CalendarEvent)
QUESTION = "What's the weather in Tokyo?"


async def main() -> dict[str, Any]:
    set_tracing_disabled(True)
    answer = await Runner.run(assistant, QUESTION)
    streamed = Runner.run_streamed(assistant, QUESTION)
    events = [event async for event in streamed.stream_events()]
    event = await Runner.run(extractor, "Lunch with Ann on Friday")
    return {
        "items": [item.type for item in answer.new_items],
        "streamed_items": [
            event.item.type for event in events if event.type == "run_item_stream_event"
        ],
        "cities": cities,
        "event": event.final_output.model_dump(),
    }


print(json.dumps(asyncio.run(main())))
