"""Reads the fields of a JSON body: each with its kind and its bounds, and none is passed over that would change the answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tsx_runtime.worker.codecs.json_text import read_json
from tsx_runtime.worker.openai.errors import RefusedField

# What tells who asks, or how OpenAI's own service is to treat a request: the answer is the same without them.
HARMLESS = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
        *("parallel_tool_calls", "model"),
    }
)
NEUTRAL: Mapping[str, Any] = {  # fields that are not supported: the values that mean no more than that they are not given
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "suffix": ("",),
    "best_of": (1,),
    "min_p": (0,),
    "functions": ([],),
    "background": (False,),
    "include": ([],),
    "truncation": ("disabled",),
    "reasoning_effort": ("none",),
}


class Fields:
    """A field that is null counts as not given, as for OpenAI."""

    def __init__(self, given: Mapping[str, Any], within: str = "") -> None:
        self._left = {str(name): value for name, value in given.items() if value is not None}
        self._within = within
        self.model = self._left.get("model") if isinstance(self._left.get("model"), str) else None

    def take(self, name: str) -> Any:
        return self._left.pop(name, None)

    def text(self, name: str) -> str | None:
        value = self.take(name)
        if value is None or isinstance(value, str):
            return value
        raise self.wrong(name, value, "a string")

    def flag(self, name: str) -> bool:
        value = self._left.pop(name, False)
        if isinstance(value, bool):
            return value
        raise self.wrong(name, value, "true or false")

    def whole(self, name: str, least: int, most: int) -> int | None:
        value = self.take(name)
        if value is None or (isinstance(value, int) and not isinstance(value, bool) and least <= value <= most):
            return value
        raise self.wrong(name, value, f"a whole number from {least} to {most}")

    def number(self, name: str, least: float, most: float) -> float | None:
        value = self.take(name)
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most):
            return value
        raise self.wrong(name, value, f"a number from {least} to {most}")

    def choice(self, name: str, *choices: str) -> str:
        """The first one where it is not given."""
        value = self._left.pop(name, choices[0])
        if value in choices:
            return str(value)
        raise self.wrong(name, value, f"one of {', '.join(choices)}")

    def object(self, name: str) -> Fields | None:
        value = self.take(name)
        if value is None:
            return None
        if isinstance(value, dict):
            return Fields(value, f"{self._within}{name}.")
        raise self.wrong(name, value, "an object")

    def texts(self, name: str, most: int) -> list[str]:
        """A string, or a list of strings."""
        value = self.take(name)
        found = [value] if isinstance(value, str) else [] if value is None else value
        if isinstance(found, list) and len(found) <= most and all(isinstance(each, str) for each in found):
            return found
        raise self.wrong(name, value, f"a string or a list of up to {most} strings")

    def finish(self) -> None:
        """Raises RefusedField for a field that nothing has taken and that means something."""
        for name, value in self._left.items():
            if (name in HARMLESS and not self._within) or value in NEUTRAL.get(name, ()):
                continue
            path = self._within + name
            raise RefusedField(
                f"The field '{path}' is not supported here. Send the request without it.", path, code="unsupported_parameter"
            )

    def wrong(self, name: str, value: Any, must: str) -> RefusedField:
        path = self._within + name
        return RefusedField(f"The field '{path}' is {shown(value)}; it must be {must}.", path, code="invalid_value")

    def missing(self, name: str, example: str) -> RefusedField:
        path = self._within + name
        return RefusedField(f"The field '{path}' is missing or empty. Send it, such as {example}.", path, code="missing_required_parameter")


def read_document(body: Any) -> Mapping[str, Any]:
    """A body as a handler gets it: as bytes, or parsed. Raises RefusedField."""
    if isinstance(body, bytes | bytearray | memoryview | str):
        try:
            body = read_json(body if isinstance(body, str) else bytes(body))
        except ValueError as error:
            raise RefusedField(
                f"The body is not JSON: {error}. Send a JSON object with the header Content-Type: application/json."
            ) from None
    if not isinstance(body, Mapping):
        raise RefusedField("The body is JSON, but no object. Send a JSON object.")
    return body


def adapter_of(asked: str | None, model: str) -> str | None:
    """Of `NAME[:VERSION][/ADAPTER]`, where that name is the model's; other names are those of clients that choose the model by the path."""
    name, _, adapter = (asked or "").partition("/")
    return adapter or None if name.partition(":")[0] in ("", model) else None


def shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else f"{text[:80]}..."
