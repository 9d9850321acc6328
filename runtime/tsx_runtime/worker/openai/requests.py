"""What the bodies of these APIs have in common.

No field is passed over that would change the answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import Field

from tsx_runtime.worker.codecs.bodies import (
    MAX_TOKENS,
    BodyObject,
    RefusedField,
    Seed,
    Stops,
    unsupported,
    validated,
)
from tsx_runtime.worker.generation.generator import TextGenerator
from tsx_runtime.worker.generation.interface import Sampling

# What tells who asks, or how OpenAI's own service is to treat a request: the answer is the same
# without them.
HARMLESS = frozenset(
    {
        *(
            "user",
            "metadata",
            "store",
            "service_tier",
            "safety_identifier",
            "prompt_cache_key",
            "prompt_cache_retention",
        ),
        *("parallel_tool_calls", "stream_options"),  # where an API has them, it declares them
    }
)
NEUTRAL: Mapping[
    str, Any
] = {  # of fields that are not supported, the value that means the same as none
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
    "reasoning": {},
    "verbosity": "medium",
    "chat_template_kwargs": {},
    "ignore_eos": False,
    "skip_special_tokens": True,
    "min_tokens": 0,
    "length_penalty": 1,
    "stop_token_ids": [],
    "top_logprobs": 0,
}
MOST_CHOICES = 16
MOST_LOGPROBS = 20
MOST_BIASES = 300

Choices: TypeAlias = Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None
Penalty: TypeAlias = Annotated[float, Field(ge=-2, le=2)]
TokenId: TypeAlias = Annotated[
    int, Field(ge=0, lt=MAX_TOKENS, strict=False)
]  # The key of an object is a text.
Logprobs: TypeAlias = Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None


class OpenAIRequest(BodyObject, extra="allow"):
    model: str | None = None

    def adapter(self, model: str) -> str | None:
        """Of `NAME[:VERSION][/ADAPTER]`, where that name is the model's; other names are those of
        clients that choose it by the path.
        """
        name, _, adapter = (self.model or "").partition("/")
        return adapter or None if name.partition(":")[0] in ("", model) else None


RequestT = TypeVar("RequestT", bound=OpenAIRequest)


def read(kind: type[RequestT], body: Any) -> RequestT:
    """As `validated`, and no field is passed over that would change the answer."""
    request = validated(kind, body)
    for name, value in (request.model_extra or {}).items():
        if (
            value is not None
            and name not in HARMLESS
            and not (name in NEUTRAL and value == NEUTRAL[name])
        ):
            raise unsupported(name)
    return request


class TextRequest(OpenAIRequest):
    """The fields that the three APIs of text share."""

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
            dict[TokenId, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MOST_BIASES)
        ]
        | None
    ) = None

    def sampling(
        self, generator: TextGenerator, model: str, max_tokens: int | None, **own: Any
    ) -> Sampling:
        """`own`: what each API has in its own way. Raises RefusedField."""
        adapter = self.adapter(model)
        if adapter is not None and adapter not in generator.adapters:
            known = (
                f"It has {', '.join(generator.adapters)}." if generator.adapters else "It has none."
            )
            raise RefusedField(
                f"Model {model} has no adapter '{adapter}'. {known}",
                "model",
                code="model_not_found",
                status=404,
            )
        return Sampling(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=(
                self.top_k if self.top_k is None else max(self.top_k, 0)
            ),  # -1 is vLLM's word for all
            seed=self.seed,
            stop=tuple(stop for stop in self.stop or () if stop),
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias,
            adapter=adapter,
            **own,
        )
