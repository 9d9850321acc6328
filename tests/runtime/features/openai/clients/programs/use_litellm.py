"""A chat, its stream, a typed answer, and a call of a tool and its result."""

import json
import os

from litellm import completion, stream_chunk_builder
from pydantic import BaseModel, Field

MESSAGES = [{"role": "user", "content": "What is the weather like in Paris?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_current_weather",
        "description": "Get the current weather in a location",
        "parameters": {
            "type": "object",
            "properties": {
                "location": {"type": "string", "maxLength": 12},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["location"],
            "additionalProperties": False,
        },
    },
}
address = {"model": "openai/tiny", "api_base": os.environ["OPENAI_BASE_URL"]}


class City(BaseModel):
    city: str = Field(max_length=12)


text = completion(messages=MESSAGES, max_tokens=24, **address).choices[0].message.content
chunks = completion(messages=MESSAGES, max_tokens=24, stream=True, **address)
streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
typed = completion(messages=MESSAGES, response_format=City, **address)

# Random weights would call without end.
one_call = {"tool_choice": "required", "parallel_tool_calls": False}
forced = {"messages": MESSAGES, "tools": [WEATHER], **one_call, **address}
message = completion(**forced).choices[0].message
(call,) = message.tool_calls
result = {"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": "22"}
answer = completion(
    messages=[*MESSAGES, message, result], tools=[WEATHER], max_tokens=24, **address
)
streamed_choice = stream_chunk_builder(list(completion(stream=True, **forced))).choices[0]
print(
    json.dumps(
        {
            "text": text,
            "streamed": streamed,
            "city": json.loads(typed.choices[0].message.content),
            "call": [call.function.name, json.loads(call.function.arguments)],
            "answer": answer.choices[0].message.content,
            "streamed_call": json.loads(streamed_choice.message.tool_calls[0].function.arguments),
            "streamed_reason": streamed_choice.finish_reason,
        }
    )
)
