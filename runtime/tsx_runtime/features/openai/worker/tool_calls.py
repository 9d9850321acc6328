"""The parts of a chat model's answer: its reasoning, its text and its tool calls.

The models write calls in these forms, which are told apart by what they write:

- Hermes and Qwen: `<tool_call>{"name": "f", "arguments": {}}</tool_call>`
- Llama 3: `{"name": "f", "parameters": {}}`, with `;` between calls, perhaps after `<|python_tag|>`
- Mistral: `[TOOL_CALLS] [{"name": "f", "arguments": {}}]`, or `[TOOL_CALLS]f[ARGS]{}`
- Qwen3-Coder: `<tool_call><function=f><parameter=x>1</parameter></function></tool_call>`

A call that a grammar enforces has Llama's form, or is in a JSON array.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import regex  # It matches incomplete texts, unlike `re`. transformers requires it.
from pydantic_core import from_json

Kind: TypeAlias = Literal["content", "reasoning_content", "name", "arguments"]
Piece: TypeAlias = tuple[Kind, str]

# Quantifiers of spaces are possessive, so the time of a match is linear.
_compile = partial(regex.compile, flags=regex.DOTALL)
CALL_MARKERS = frozenset(
    {"<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<|python_tag|>"}
)
_SPACE = r"\s{0,4}"  # A long run of spaces is not held back.
_MARKER = _compile(
    rf"{_SPACE}(?:(?P<end></tool_call>|</function>)|<tool_call>|\[TOOL_CALLS\]|<\|python_tag\|>)"
)
_NAME = r'"name"\s*+:\s*+"(?P<name>[^"\\]{1,256})"'
_LABELS = r'(?:"(?:type|id)"\s*+:\s*+"[^"]{0,99}"\s*+,\s*+){0,3}'
_ARGUMENTS = r'"(?:arguments|parameters)"\s*+:\s*+(?=\{)'
_JSON_CALL = rf"\{{\s*+{_LABELS}{_NAME}\s*+,\s*+{_LABELS}{_ARGUMENTS}"
_XML_CALL = r"(?P<xml><function=)(?P<name>[^>]+)>"
_NAMED_CALL = r"(?P<name>[\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*+(?=\{)"
_UNMARKED_CALL = _compile(rf"\s*+(?:(?:\[\s*+)?{_JSON_CALL}|{_XML_CALL})")
_MARKED_CALL = _compile(rf"\s*+(?:(?:\[\s*+)?{_JSON_CALL}|{_XML_CALL}|{_NAMED_CALL})")
_NEXT_CALL = _compile(rf"[\s,;]*+(?:{_JSON_CALL}|{_XML_CALL})")
_CALL_END = _compile(r'\s*+(?:,\s*+"\w+"\s*+:\s*+(?:"[^"]{0,99}"|[\w.]+)\s*+){0,3}\}')
_BETWEEN_CALLS = " \t\r\n,;]}"  # characters that are no text if they follow a call
_JSON_MARK = _compile(r'\\.?|[][{}"]')
_PARAMETER = _compile(r"\s*+<parameter=(?P<name>[^>]+)>(?:\n|(?=[^\n]))")
_PARAMETER_END = _compile(r"\n?</parameter>")
_FUNCTION_END = _compile(r"\s*+</function>")


class ReasoningTags(NamedTuple):
    """The tags around a model's reasoning."""

    start: str
    end: str


REASONING_TAGS = (ReasoningTags("<think>", "</think>"), ReasoningTags("[THINK]", "[/THINK]"))


class AnswerParser:
    """A parser of a text that arrives in pieces.

    Its results are pieces of the content and of the reasoning, and of each call the name of the
    function and then pieces of the arguments. A text is a call as soon as the name of a known
    function and the beginning of the arguments have arrived. All other text is content.

    Attributes:
        is_reasoning: Whether the next text continues the reasoning.
    """

    def __init__(
        self,
        tools: Mapping[str, Any],
        reasoning_tags: ReasoningTags | None = None,
        *,
        is_reasoning: bool = False,
        allows_several_calls: bool = True,
        special_tokens: frozenset[str] = frozenset(),
    ) -> None:
        """Create the parser.

        Args:
            tools: The JSON schemas of the functions' arguments by the functions' names.
            reasoning_tags: The tags around the reasoning.
            is_reasoning: Whether the prompt ends with the start of the reasoning.
            allows_several_calls: Whether the answer goes on at a second call, or ends before it.
            special_tokens: Markers that are never part of the content.
        """
        self.is_reasoning = is_reasoning
        self._tools = tools
        self._tags = reasoning_tags
        self._allows_several_calls = allows_several_calls
        self._special_tokens = special_tokens
        self._calls = 0
        self._text = ""  # text that is not parsed yet
        self._has_ended = False
        self._match: Any = None  # the result of `_find` and `_expect`
        self._pieces = self._parse()

    def push(self, text: str, *, is_last: bool) -> list[Piece]:
        """Add a piece of the text, and return the pieces of the answer that it completes."""
        self._text += text
        self._has_ended = is_last
        pieces = []
        while piece := next(self._pieces, None):
            self._calls += piece[0] == "name"
            if piece[1] and (self._calls < 2 or self._allows_several_calls):
                pieces.append(piece)
        return pieces

    # The generators below yield None where they wait for more text.

    def _parse(self) -> Iterator[Piece | None]:
        ignored = ""  # characters that are left out before the next text
        if self._tags is not None:
            start, end = (_compile(_SPACE + regex.escape(tag)) for tag in self._tags)
            yield from self._expect(start)
            self.is_reasoning = self.is_reasoning or self._match is not None
            if self.is_reasoning:
                yield from self._find("reasoning_content", end, " \r\n")
                self.is_reasoning, ignored = False, " \r\n"
        if self._tools:
            yield from self._expect(_UNMARKED_CALL)
            if (yield from self._read_calls("")):
                ignored = _BETWEEN_CALLS
        while True:
            if (yield from self._find("content", _MARKER if self._tools else None, ignored)):
                ignored = ""
            if (marker := self._match) is None:
                return
            if marker["end"] is None:
                yield from self._expect(_MARKED_CALL)
                is_call = yield from self._read_calls(marker.group())
                ignored = _BETWEEN_CALLS if is_call else ""
            elif not ignored:
                yield "content", marker.group()

    def _read_calls(self, marker: str) -> Generator[Piece | None, None, bool]:
        """Read the call whose beginning was matched, and those after it.

        If the function is unknown, the text is content. Return whether the last text was a call.
        """
        text = "" if marker.strip() in self._special_tokens else marker
        while (head := self._match) is not None and head["name"] in self._tools:
            text = ""
            yield "name", head["name"]
            if head["xml"]:
                yield from self._read_parameters(self._tools[head["name"]])
            else:
                yield from self._read_object()
            yield from self._expect(_CALL_END)
            yield from self._expect(_NEXT_CALL)
        text += head.group() if head is not None else ""
        if text:
            yield "content", text
        return self._calls > 0 and not text

    def _read_object(self) -> Iterator[Piece | None]:
        """Read a JSON object as it is written."""
        depth, is_string = 0, False
        while True:
            text, end = self._text, len(self._text)
            for mark in _JSON_MARK.finditer(text):
                if mark.group() == "\\":  # The rest of an escape is missing.
                    end = mark.start()
                elif mark.group() == '"':
                    is_string = not is_string
                elif not is_string and mark.group() in "[]{}":
                    depth += 1 if mark.group() in "[{" else -1
                    if not depth:
                        end = mark.end()
                        break
            self._text = text[end:]
            if end:
                yield "arguments", text[:end]
            if not depth or self._has_ended:
                return
            yield None

    def _read_parameters(self, schema: Any) -> Iterator[Piece | None]:
        """Read the XML parameters of a call, as a JSON object."""
        start = "{"
        yield from self._expect(_PARAMETER)
        while (parameter := self._match) is not None:
            name, value = parameter["name"], ""
            yield "arguments", f"{start}{json.dumps(name)}: "
            start = ", "
            is_string = _takes_string(schema, name)
            if is_string:
                yield "arguments", '"'
            for piece in self._find("arguments", _PARAMETER_END):
                if piece is None:
                    yield None
                elif is_string:
                    yield "arguments", _to_json(piece[1])[1:-1]
                else:
                    value += piece[1]
            if self._match is None:
                return
            yield "arguments", '"' if is_string else _json_value(value)
            yield from self._expect(_PARAMETER)
        yield from self._expect(_FUNCTION_END)
        if self._match is not None or self._text:
            yield "arguments", "{}" if start == "{" else "}"

    def _find(
        self, kind: Kind, pattern: Any = None, ignored: str = ""
    ) -> Generator[Piece | None, None, bool]:
        """Yield the text before the next match, and return whether there is any.

        Without a pattern, this is all further text. The match is left in `_match`, which is None at
        the end of the answer.
        """
        has_text = False
        while True:
            self._text = self._text if has_text else self._text.lstrip(ignored)
            match = pattern and pattern.search(self._text, partial=not self._has_ended)
            start = len(self._text) if match is None else match.start()
            if start:
                has_text = True
                yield kind, self._text[:start]
            self._text = self._text[start:]
            if self._has_ended or (match is not None and not match.partial):
                self._match = match
                self._text = "" if match is None else match.string[match.end() :]
                return has_text
            yield None

    def _expect(self, pattern: Any) -> Iterator[None]:
        """Wait until the text begins with a match, which is left in `_match`, or cannot."""
        while (match := pattern.match(self._text, partial=not self._has_ended)) and match.partial:
            yield None
        self._match = match
        if match is not None:
            self._text = self._text[match.end() :]


def _takes_string(schema: Any, name: str) -> bool:
    """Tell whether a JSON schema of arguments allows a string for one of them."""
    try:
        parameter = schema["properties"][name]
        types = [option.get("type") or () for option in (parameter, *parameter.get("anyOf", ()))]
        return any("string" in kind for kind in types)
    except (AttributeError, KeyError, TypeError):
        return False


def _json_value(text: str) -> str:
    """Return a value as JSON; a text that is not JSON becomes a string."""
    text = {"True": "true", "False": "false", "None": "null"}.get(text.strip(), text.strip())
    try:
        from_json(text, allow_inf_nan=False)
    except ValueError:
        return _to_json(text)
    return text


def _to_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
