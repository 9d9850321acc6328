"""The common fields of the bodies of these APIs.

A field that would change the response is either supported or refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import Field

from tsx_runtime.features.generation.worker.generator import TextGenerator, describe_adapters
from tsx_runtime.features.generation.worker.interface import Grammar, Sampling
from tsx_runtime.features.openai.worker.formats import StructuredOutputs, TextFormat
from tsx_runtime.worker.codecs.bodies import (
    MAX_TOKENS,
    BodyObject,
    RefusedField,
    Seed,
    Stops,
    unsupported_field_error,
    validate_body,
)

# Fields about the user, or for OpenAI's own service, which do not affect the response.
IGNORED_FIELDS = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "prediction",  # It makes OpenAI's answer faster, and changes no text.
        # APIs that support these two declare them as fields.
        "parallel_tool_calls",
        "stream_options",
    }
)
# For each unsupported field, the values that have no effect, such as OpenAI's default.
NEUTRAL_VALUES: Mapping[str, Sequence[Any]] = {
    "modalities": [["text"]],
    "suffix": [""],
    "best_of": [1],
    "min_p": [0],
    "functions": [[]],
    "function_call": ["none", "auto"],
    "tools": [[]],
    "background": [False],
    "include": [[], ["reasoning.encrypted_content"]],
    "truncation": ["disabled"],
    "reasoning": [{}],
    "verbosity": ["medium"],
    "chat_template_kwargs": [{}],
    "ignore_eos": [False],
    "skip_special_tokens": [True],
    "min_tokens": [0],
    "length_penalty": [1],
    "stop_token_ids": [[]],
    "top_logprobs": [0],
}
MAX_CHOICES = 16
MAX_LOGPROBS = 20
MAX_BIASES = 300

Choices: TypeAlias = Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None
Penalty: TypeAlias = Annotated[float, Field(ge=-2, le=2)]
# Token ids are texts, since they are keys of a JSON object.
TokenId: TypeAlias = Annotated[int, Field(ge=0, lt=MAX_TOKENS, strict=False)]
Logprobs: TypeAlias = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None


class OpenAIRequest(BodyObject, extra="allow"):
    """The body of a request to any of these APIs."""

    model: str | None = None

    def adapter(self, model: str) -> str | None:
        """Return the adapter if the request's `model` is `NAME[:VERSION][/ADAPTER]`.

        Any other name is ignored, since clients may choose the model by the path.
        """
        name, _, adapter = (self.model or "").partition("/")
        return adapter or None if name.partition(":")[0] in ("", model) else None


RequestT = TypeVar("RequestT", bound=OpenAIRequest)


def read(kind: type[RequestT], body: Any) -> RequestT:
    """Return the validated body.

    Raises:
        RefusedField: A field is invalid; or it is not supported and has an effect.
    """
    request = validate_body(kind, body)
    for name, value in (request.model_extra or {}).items():
        if (
            value is not None
            and name not in IGNORED_FIELDS
            and value not in NEUTRAL_VALUES.get(name, ())
        ):
            raise unsupported_field_error(name)
    return request


class TextRequest(OpenAIRequest):
    """The common fields of the three text APIs."""

    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOKENS)] | None = None
    seed: Seed = None
    stop: Stops[str] | None = None
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: (
        Annotated[
            dict[TokenId, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_BIASES)
        ]
        | None
    ) = None
    structured_outputs: StructuredOutputs | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None

    def grammar(self, format: TextFormat, field: str) -> Grammar | None:
        """Return the grammar of the text, or None for any text.

        Args:
            format: The format of the text, unless it is in `structured_outputs`.
            field: The name of the field with the format.

        Raises:
            RefusedField: Both the format and `structured_outputs` have a grammar.
        """
        outputs = self.structured_outputs
        if format.type == "text":
            return None if outputs is None else outputs.grammar()
        if outputs is not None:
            raise RefusedField(
                f"The fields 'structured_outputs' and '{field}' each bind the text. Send one of"
                " them.",
                "structured_outputs",
                code="invalid_value",
            )
        return Grammar("json_schema", json.dumps(format.definition), field)

    def sampling(
        self, generator: TextGenerator, model: str, max_tokens: int | None, **fields: Any
    ) -> Sampling:
        """Return the sampling parameters; `fields` are parameters that differ between the APIs.

        Raises:
            RefusedField: The model does not have the adapter.
        """
        adapter = self.adapter(model)
        if adapter is not None and adapter not in generator.adapters:
            raise RefusedField(
                f"Model {model} has no adapter '{adapter}'. {describe_adapters(generator.adapters)}",
                "model",
                code="model_not_found",
                status=404,
            )
        return Sampling(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            # In vLLM's API, -1 means all tokens.
            top_k=self.top_k if self.top_k is None else max(self.top_k, 0),
            seed=self.seed,
            stop=tuple(stop for stop in self.stop or () if stop),
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias,
            adapter=adapter,
            cache_salt=self.cache_salt or "",
            **fields,
        )
