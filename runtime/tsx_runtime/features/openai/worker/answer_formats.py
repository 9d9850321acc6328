"""The choice of a parser for a model's answers, by its chat template or its response template.

https://huggingface.co/docs/transformers/chat_response_parsing
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from tsx_runtime.features.generation.worker.generator import TextGenerator
from tsx_runtime.features.generation.worker.interface import Grammar, Prompt
from tsx_runtime.features.openai.worker.messages import (
    ChatFields,
    Message,
    choose_tools,
    encode_messages,
)
from tsx_runtime.features.openai.worker.replies import ParsedChoice
from tsx_runtime.features.openai.worker.tool_calls import (
    CALL_MARKERS,
    REASONING_TAGS,
    AnswerParser,
    Kind,
    Piece,
)

PROMPT_END_TOKENS = 64  # enough for the beginning of the assistant's turn
# The parts of a message by the fields of response templates.
PARTS: dict[str, Kind] = {
    "content": "content",
    "reasoning_content": "reasoning_content",
    "reasoning": "reasoning_content",
    "thinking": "reasoning_content",
}


class AnswerFormat(NamedTuple):
    """The format of the answers to a chat.

    Attributes:
        prompt: The prompt; its reasoning is ended if a grammar begins after it.
        sampling: The sampling parameters that bind the answer and show its markers.
        new_answer: Create an answer.
    """

    prompt: Prompt
    sampling: Mapping[str, Any]
    new_answer: Callable[[], ParsedChoice]


def choose_format(
    generator: TextGenerator,
    request: ChatFields,
    messages: Mapping[str, Message],
    grammar: Grammar | None,
    effort: str | None,
) -> AnswerFormat:
    """Encode a chat, and choose the grammar and the parser of its answers.

    Args:
        generator: The model.
        request: The request.
        messages: The messages by their fields in the request.
        grammar: The grammar of an answer that is not a call.
        effort: The effort of the reasoning, which the chat template may use.

    Raises:
        InvalidInput: The messages, tools or files cannot be used.
    """
    tools, grammar = choose_tools(
        request.tools, request.tool_choice, request.parallel_tool_calls, grammar
    )
    variables = {"reasoning_effort": effort} if effort else {}
    prompt = encode_messages(generator, messages, tools, variables | request.chat_template_kwargs)
    template = None if grammar else generator.response_template
    tags = next((tags for tags in REASONING_TAGS if tags.end in generator.chat_template), None)
    # A response template has its markers in regular expressions, whose escapes are removed.
    markers = (
        str(template).replace("\\", "")
        if template
        else {*(CALL_MARKERS if tools else ()), *(tags or ())}
    )
    visible_tokens = frozenset(token for token in generator.special_tokens if token in markers)
    prompt_end = generator.decode(prompt.token_ids[-PROMPT_END_TOKENS:], visible_tokens)
    is_reasoning = tags is not None and prompt_end.rstrip().endswith(tags.start)
    if grammar and tags is not None:
        if is_reasoning:
            end = generator.encode(f"\n{tags.end}\n\n", add_special_tokens=False)
            prompt = prompt._replace(token_ids=[*prompt.token_ids, *end])
        tags, is_reasoning = None, False
    new_parser = partial(
        partial(TemplateParser, template, prompt_end) if template else AnswerParser,
        tools={tool.function.name: tool.function.parameters for tool in tools},
        reasoning_tags=tags,
        is_reasoning=is_reasoning,
        allows_several_calls=request.parallel_tool_calls,
        special_tokens=visible_tokens,
    )
    return AnswerFormat(
        prompt,
        {"grammar": grammar, "visible_tokens": visible_tokens},
        lambda: ParsedChoice(parser=new_parser()),
    )


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

    def _parse(self) -> Iterator[Piece | None]:
        events, call_text = self._parser.initial_events, ""
        while True:
            for event in events:
                part, text = PARTS.get(event["field"]), event.get("text", "")
                self.is_reasoning = part == "reasoning_content" and "value" not in event
                if part is None:
                    call_text += text
                elif text:
                    yield part, text
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
                yield "content", call_text + text
                yield from self._find("content")
                return

    def _convert_calls(self, value: Any, text: str) -> Iterator[Piece]:
        calls = value if isinstance(value, list) else [value]
        functions = [call.get("function", call) for call in calls]
        if any(function.get("name") not in self._tools for function in functions):
            yield "content", text
            return
        for function in functions:
            arguments = function.get("arguments") or {}
            yield "name", function["name"]
            yield (
                "arguments",
                arguments
                if isinstance(arguments, str)
                else json.dumps(arguments, ensure_ascii=False),
            )
