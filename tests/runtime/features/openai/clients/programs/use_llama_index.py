"""Completions, chats and their streams, a typed answer, and an agent that multiplies."""

import asyncio
import json
import os

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field

options = {
    "model": "tiny",
    "api_base": os.environ["OPENAI_BASE_URL"],
    "context_window": 4096,
    "is_chat_model": True,
    "is_function_calling_model": True,
    "temperature": 0.0,
}
llm = OpenAILike(max_tokens=24, **options)
messages = [
    ChatMessage(role="system", content="You are a pirate with a colorful personality."),
    ChatMessage(role="user", content="What is your name?"),
]


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=12)


class Factors(BaseModel):
    a: int = Field(ge=0, le=9999)
    b: int = Field(ge=0, le=9999)


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    products.append([a, b])
    return a * b


products: list[list[int]] = []
agent = FunctionAgent(
    tools=[FunctionTool.from_defaults(multiply, fn_schema=Factors)],
    llm=OpenAILike(max_tokens=200, **options),
    system_prompt="You multiply two numbers with a tool.",
    initial_tool_choice="multiply",
)


async def run_agent() -> str:
    return str(await agent.run(user_msg="What is 1234 * 4567?"))


typed = OpenAILike(max_tokens=200, should_use_structured_outputs=True, **options)
print(
    json.dumps(
        {
            "text": llm.complete("Paul Graham is ").text,
            "streamed": "".join(part.delta for part in llm.stream_complete("Paul Graham is ")),
            "chat": llm.chat(messages).message.content,
            "streamed_chat": "".join(part.delta for part in llm.stream_chat(messages)),
            "city": typed.as_structured_llm(City).complete("Name a city.").raw.model_dump(),
            "called_city": OpenAILike(max_tokens=200, **options)
            .as_structured_llm(City)
            .complete("Name a city.")
            .raw.model_dump(),
            "answer": asyncio.run(run_agent()),
            "products": products,
        }
    )
)
