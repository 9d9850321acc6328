"""The choice of a parser for a model's answers, by its chat template or its response template.

https://huggingface.co/docs/transformers/chat_response_parsing
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from tsx_runtime.features.generation.worker.generator import TextGenerator
from tsx_runtime.features.generation.worker.interface import Prompt
from tsx_runtime.features.openai.worker.tool_calls import (
    CALL_MARKERS,
    AnswerParser,
    find_reasoning_tags,
)
from tsx_runtime.worker.codecs.bodies import JsonObject

PROMPT_END_TOKENS = 64  # enough for the beginning of the assistant's turn
# The parts of a message by the fields of response templates.
PARTS = {"content": "content"} | dict.fromkeys(
    ("reasoning_content", "reasoning", "thinking"), "reasoning_content"
)


class AnswerFormat(NamedTuple):
    """The format of the answers to a prompt.

    Attributes:
        prompt: The prompt; its reasoning is ended if a grammar begins after it.
        visible_tokens: The special tokens that the parser needs.
        new_parser: Create the parser of one answer.
    """

    prompt: Prompt
    visible_tokens: frozenset[str]
    new_parser: Callable[[], AnswerParser]


def choose_format(
    generator: TextGenerator,
    prompt: Prompt,
    tools: Sequence[Mapping[str, Any]],
    *,
    has_grammar: bool,
    allows_several_calls: bool = True,
) -> AnswerFormat:
    """Choose the parser of the answers to a prompt."""
    template = None if has_grammar else generator.response_template
    tags = None if template else find_reasoning_tags(generator.chat_template)
    markers = (
        str(template).replace("\\", "")
        if template
        else ({*(CALL_MARKERS if tools else ()), *(tags or ())})
    )
    visible_tokens = frozenset(token for token in generator.special_tokens if token in markers)
    prompt_end = generator.decode(prompt.token_ids[-PROMPT_END_TOKENS:], visible_tokens)
    is_reasoning = tags is not None and prompt_end.rstrip().endswith(tags.start)
    if has_grammar:
        if tags is not None and is_reasoning:
            end = generator.encode(f"\n{tags.end}\n\n", add_special_tokens=False)
            prompt = prompt._replace(token_ids=[*prompt.token_ids, *end])
        tags, is_reasoning = None, False
    functions = [tool["function"] for tool in tools]
    new_parser = partial(
        AnswerParser if template is None else partial(TemplateParser, template, prompt_end),
        tools={function["name"]: function.get("parameters") for function in functions},
        reasoning_tags=tags,
        is_reasoning=is_reasoning,
        allows_several_calls=allows_several_calls,
        special_tokens=visible_tokens,
    )
    return AnswerFormat(prompt, visible_tokens, new_parser)


class TemplateParser(AnswerParser):
    """A parser that follows a response template. It returns each call as a whole."""

    def __init__(self, template: Any, prompt: str, **options: Any) -> None:
        """Create the parser.

        Args:
            template: The tokenizer's `response_template`.
            prompt: The end of the prompt, since the answer may begin in it.
            options: The tools and other arguments of `AnswerParser`.
        """
        from transformers.utils.chat_parsing import ResponseParser  # an extra

        super().__init__(**options)
        tools = [
            {"function": {"name": name, "parameters": schema}}
            for name, schema in self._tools.items()
        ]
        self._parser: Any = ResponseParser(template, prompt, tools=tools)

    def _parse(self) -> Iterator[JsonObject | None]:
        events, call_text = self._parser.initial_events, ""
        while True:
            for event in events:
                part, text = PARTS.get(event["field"]), event.get("text", "")
                self.is_reasoning = part == "reasoning_content" and "value" not in event
                if part is None:
                    call_text += text
                elif text:
                    yield {part: text}
                if event["field"] == "tool_calls" and "value" in event:
                    yield from self._convert_calls(event["value"], call_text)
                    call_text = ""
            if self._parser is None:
                return
            if not self._text and not self._has_ended:
                yield None
            text, self._text = self._text, ""
            try:
                events = self._parser.feed(text)
                if self._has_ended:
                    events += self._parser.finalize()[1]
                    self._parser = None
            except (KeyError, ValueError):
                # A call cannot be parsed, so the rest of the answer is text.
                events, self._parser = [], None
                yield {"content": call_text + text}
                for rest in self._find():
                    yield {"content": rest} if rest else None

    def _convert_calls(self, value: Any, text: str) -> Iterator[JsonObject]:
        calls = value if isinstance(value, list) else [value]
        functions = [call.get("function", call) for call in calls]
        if any(function.get("name") not in self._tools for function in functions):
            yield {"content": text}
            return
        for function in functions:
            if self._calls and not self._allows_several_calls:
                return
            arguments = function.get("arguments") or {}
            yield self._call_delta(function["name"])
            yield self._arguments_delta(
                arguments
                if isinstance(arguments, str)
                else json.dumps(arguments, ensure_ascii=False)
            )
