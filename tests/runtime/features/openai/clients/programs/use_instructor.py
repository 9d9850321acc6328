"""A typed object from a text, whole and while it is written, as instructor's first page has it."""

import json
import os

import instructor
from pydantic import BaseModel, ConfigDict, Field


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")  # Random weights would add keys without end.


class Pet(Closed):
    name: str = Field(max_length=12)


class User(Closed):
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)
    pet: Pet


client = instructor.from_provider("openai/tiny", base_url=os.environ["OPENAI_BASE_URL"])
request = {
    "response_model": User,
    "messages": [{"role": "user", "content": "John is 25 years old and has a dog."}],
    "max_retries": 0,
}
print(
    json.dumps(
        {
            "user": client.chat.completions.create(**request).model_dump(),
            "streamed": [part.model_dump() for part in client.create_partial(**request)][-1],
        }
    )
)
