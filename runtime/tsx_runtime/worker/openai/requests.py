"""What the bodies of these APIs have in common, declared for pydantic. No field is passed over that would change the answer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from tsx_runtime.worker.exceptions import InvalidInput
from tsx_runtime.worker.generation.interface import Sampling, TextGenerator

# What tells who asks, or how OpenAI's own service is to treat a request: the answer is the same without them.
HARMLESS = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
        *("parallel_tool_calls", "stream_options"),  # where an API has them, it declares them
    }
)
NEUTRAL: Mapping[str, Any] = {  # of fields that are not supported, the value that means the same as none
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "logit_bias": {},
    "modalities": ["text"],
    "suffix": "",
    "best_of": 1,
    "min_p": 0,
    "functions": [],
    "tools": [],
    "background": False,
    "include": [],
    "truncation": "disabled",
    "reasoning_effort": "none",
}
MOST_CHOICES = 16
MOST_STOPS = 16
MOST_LOGPROBS = 20
MOST_TOKENS = 1 << 31

TokenCount: TypeAlias = Annotated[int, Field(ge=1, le=MOST_TOKENS)] | None
Choices: TypeAlias = Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None
Logprobs: TypeAlias = Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None
one_or_several = BeforeValidator(lambda value: [value] if isinstance(value, str) else value)


class RefusedField(InvalidInput):
    """A field of the request cannot be used as it is."""

    def __init__(self, message: str, param: str | None = None, *, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.error_code = status


class BodyObject(BaseModel):
    """An object in a body. A field that is null counts as not given, as for OpenAI."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class OpenAIRequest(BodyObject, extra="allow"):
    model: str | None = None

    def adapter(self, model: str) -> str | None:
        """Of `NAME[:VERSION][/ADAPTER]`, where that name is the model's; other names are those of clients that choose it by the path."""
        name, _, adapter = (self.model or "").partition("/")
        return adapter or None if name.partition(":")[0] in ("", model) else None


RequestT = TypeVar("RequestT", bound=OpenAIRequest)


def read(kind: type[RequestT], body: Any) -> RequestT:
    """`body`: as a handler gets it, bytes or parsed. Raises RefusedField."""
    try:
        if isinstance(body, bytes | bytearray | memoryview | str):
            request = kind.model_validate_json(body if isinstance(body, str) else bytes(body))
        else:
            request = kind.model_validate(body)
    except ValidationError as error:
        raise _refusal(error) from None
    for name, value in (request.model_extra or {}).items():
        if value is not None and name not in HARMLESS and not (name in NEUTRAL and value == NEUTRAL[name]):
            raise _unsupported(name)
    return request


class TextRequest(OpenAIRequest):
    """The fields that the three APIs of text share."""

    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MOST_TOKENS)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: Annotated[list[str], one_or_several, Field(max_length=MOST_STOPS)] | None = None

    def sampling(self, generator: TextGenerator, model: str, max_tokens: int | None, **own: Any) -> Sampling:
        """`own`: what each API has in its own way. Raises RefusedField."""
        adapter = self.adapter(model)
        if adapter is not None and adapter not in generator.adapters:
            known = f"It has {', '.join(generator.adapters)}." if generator.adapters else "It has none."
            raise RefusedField(f"Model {model} has no adapter '{adapter}'. {known}", "model", code="model_not_found", status=404)
        return Sampling(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k if self.top_k is None else max(self.top_k, 0),  # -1 is vLLM's word for all
            seed=self.seed,
            stop=tuple(stop for stop in self.stop or () if stop),
            adapter=adapter,
            **own,
        )


def shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _refusal(error: ValidationError) -> RefusedField:
    first = error.errors(include_url=False)[0]
    why = re.sub(r"^(Input|List|Value) should", "it must", first["msg"].removeprefix("Value error, "))
    path = ""
    for step in first["loc"]:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    if not path:
        return RefusedField(f"The body cannot be read: {why}. Send a JSON object with the header Content-Type: application/json.")
    if first["type"] == "extra_forbidden":
        return _unsupported(path)
    if first["type"] == "missing":
        return RefusedField(f"The field '{path}' is missing. Send it.", path, code="missing_required_parameter")
    return RefusedField(f"The field '{path}' is {shown(first['input'])}: {why}.", path, code="invalid_value")


def _unsupported(path: str) -> RefusedField:
    return RefusedField(f"The field '{path}' is not supported here. Send the request without it.", path, code="unsupported_parameter")
