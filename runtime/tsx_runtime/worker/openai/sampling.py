"""How a request wants its text continued, in the fields that OpenAI's three text APIs share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from tsx_runtime.worker.generation.interface import Sampling, TextGenerator
from tsx_runtime.worker.openai.errors import RefusedField
from tsx_runtime.worker.openai.fields import Fields, adapter_of

MOST_CHOICES = 16
MOST_STOPS = 16
MOST_LOGPROBS = 20
MOST_TOKENS = 1 << 31


class Continuation(NamedTuple):
    """One choice of the answer."""

    prompt: list[int]
    sampling: Sampling


def read_sampling(fields: Fields, generator: TextGenerator, model: str, max_tokens: int | None) -> Sampling:
    """Without `logprobs` and a schema, which each API has in its own way. Raises RefusedField."""
    adapter = adapter_of(fields.model, model)
    if adapter is not None and adapter not in generator.adapters:
        known = f"It has {', '.join(generator.adapters)}." if generator.adapters else "It has none."
        raise RefusedField(f"Model {model} has no adapter '{adapter}'. {known}", "model", code="model_not_found", status=404)
    top_k = fields.whole("top_k", -1, MOST_TOKENS)
    return Sampling(
        max_tokens=max_tokens,
        temperature=fields.number("temperature", 0, 2),
        top_p=fields.number("top_p", 0, 1),
        top_k=top_k if top_k is None else max(top_k, 0),  # -1 is vLLM's word for all
        seed=fields.whole("seed", -(1 << 63), (1 << 63) - 1),
        stop=tuple(stop for stop in fields.texts("stop", MOST_STOPS) if stop),
        adapter=adapter,
    )


def continuations(prompts: list[list[int]], sampling: Sampling, n: int, generator: TextGenerator) -> list[Continuation]:
    """`n` of each prompt; where there is a seed, each has another one. Raises RefusedField for a prompt that is too long."""
    most = generator.context_length
    for prompt in prompts:
        if len(prompt) >= most:
            text = f"The prompt has {len(prompt)} tokens, but the model's context has {most}, with at least one for the answer. Shorten it."
            raise RefusedField(text, code="context_length_exceeded")
    seeds = [sampling.seed if sampling.seed is None else sampling.seed + idx for idx in range(n)]
    return [Continuation(prompt, replace(sampling, seed=seed)) for prompt in prompts for seed in seeds]


def read_schema(format: Fields | None, name: str, *, nested: bool) -> Mapping[str, Any] | None:
    """Of `response_format`, or of Responses' `text.format`, where the schema is not `nested`. {}: any JSON object. Raises RefusedField."""
    if format is None:
        return None
    kind = format.choice("type", "text", "json_object", "json_schema")
    schema: dict[str, Any] | None = {} if kind == "json_object" else None
    if kind == "json_schema":
        holder = format.object("json_schema") if nested else format
        given = holder.take("schema") if holder is not None else None
        if holder is None or not isinstance(given, dict):
            raise RefusedField(f"The field '{name}' has no schema. Send a JSON schema, an object, in its field 'schema'.", name)
        for label in ("name", "strict", "description"):
            holder.take(label)
        holder.finish()
        schema = given
    format.finish()
    return schema
