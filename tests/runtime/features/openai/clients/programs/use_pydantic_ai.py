"""An agent that answers, one that streams, a typed answer, and an agent that uses a tool."""

import asyncio
import json
import os
from typing import Annotated, Any

from pydantic import BaseModel, Field
from pydantic_ai import Agent, RunContext
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=os.environ["OPENAI_BASE_URL"]))
short = {"max_tokens": 24, "temperature": 0.0}
one_call = {"parallel_tool_calls": False}  # Random weights would call without end.
agent = Agent(model, instructions="Reply with one sentence.", model_settings=short)


class City(BaseModel):
    city: str = Field(max_length=12)
    country: str = Field(max_length=12)


async def stream_text() -> str:
    async with agent.run_stream("Where does 'hello world' come from?") as result:
        return "".join([delta async for delta in result.stream_text(delta=True)])


def force_tool_first(context: RunContext[int]) -> dict[str, Any]:
    choice = ["roulette_wheel"] if context.run_step == 1 else "none"
    return {"tool_choice": choice, "parallel_tool_calls": False}


croupier = Agent(model, deps_type=int, output_type=bool, model_settings=force_tool_first)
squares: list[int] = []
Square = Annotated[int, Field(ge=0, le=36)]


@croupier.tool
async def roulette_wheel(context: RunContext[int], square: Square) -> str:
    """Check whether the square is the winner."""
    squares.append(square)
    return "winner" if square == context.deps else "loser"


print(
    json.dumps(
        {
            "text": agent.run_sync("Where does 'hello world' come from?").output,
            "streamed": asyncio.run(stream_text()),
            "city": Agent(model, output_type=City, model_settings=one_call)
            .run_sync("Where was it?")
            .output.model_dump(),
            "won": croupier.run_sync("Put my money on square eighteen.", deps=18).output,
            "squares": squares,
        }
    )
)
