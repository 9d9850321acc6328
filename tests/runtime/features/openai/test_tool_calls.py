"""Reasoning, text and tool calls in an answer that comes in arbitrary pieces."""

from __future__ import annotations

import json
import re
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from tsx_runtime.features.openai.worker.tool_calls import REASONING_TAGS, AnswerParser

TOOLS = {
    "f": {
        "properties": {
            "text": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "count": {"type": "integer"},
        }
    },
    "g": None,
}
ARGUMENTS = '{"text": "a \\"}\\\\", "list": [1, {"b": "]"}], "é": null}'
F, G = f'{{"name": "f", "arguments": {ARGUMENTS}}}', '{"name": "g", "arguments": {}}'
BOTH = [("f", ARGUMENTS), ("g", "{}")]
ANSWERS = {
    "hermes": f"Let me see.\n<tool_call>\n{F}\n</tool_call>\n<tool_call>\n{G}\n</tool_call>",
    "llama": f"{F.replace('arguments', 'parameters')}; {G}",
    "llama with a tag": f'<|python_tag|>{{"type": "function", {F[1:]}\n{G}',
    "mistral": f'[TOOL_CALLS] [{F[:-1]}, "id": "abcdefghi"}}, {G}]',
    "mistral by name": f"[TOOL_CALLS]f[ARGS]{ARGUMENTS}[TOOL_CALLS]g[CALL_ID]abc[ARGS]{{}}",
    "bound by a grammar": f" [ {F} , {G} ] ",
}
TEXTS = [
    "  ",
    "Hm <tool",
    "a < b [1, 2]\n",
    '{"a": 1}',
    '[{"name": 1}]',
    '{"name": "f"}',
    F.replace('"f"', '"h"'),
    '{"arguments": {}, "name": "f"}',
    '{"name": "f", "arguments": "{}"}',
    f" <tool_call>{F.replace('f', 'h')}</tool_call> so",
    "<tool_call>broken</tool_call>",
    "[TOOL_CALLS]f{",
    "<tool_call><function=h><parameter=a>1</parameter></function></tool_call>",
]
Parsed = tuple[str, str, list[tuple[str, str]]]


def parse(text: str, sizes: list[int], **options: Any) -> Parsed:
    """Parse a text in pieces of these sizes, and return its reasoning, content and calls."""
    parser = AnswerParser(**{"tools": TOOLS} | options)
    texts = {"reasoning_content": "", "content": ""}
    calls: list[tuple[str, str]] = []
    for index, size in enumerate([*sizes, len(text)]):
        piece, text = text[:size], text[size:]
        for kind, part in parser.push(piece, is_last=index == len(sizes)):
            if kind == "name":
                calls.append((part, ""))
            elif kind == "arguments":
                name, arguments = calls[-1]
                calls[-1] = (name, arguments + part)
            else:
                texts[kind] += part
    return texts["reasoning_content"], texts["content"], calls


SIZES = st.lists(st.integers(0, 9), max_size=40)


@given(st.sampled_from([*ANSWERS.values()]), SIZES)
def test_calls_are_parsed_however_the_text_is_split(text: str, sizes: list[int]) -> None:
    content = "Let me see." if text.startswith("Let") else ""
    assert parse(text, sizes) == ("", content, BOTH)
    assert parse(text, sizes, allows_several_calls=False) == ("", content, BOTH[:1])


@given(st.sampled_from(TEXTS), SIZES)
def test_a_text_that_only_resembles_a_call_is_not_lost(text: str, sizes: list[int]) -> None:
    if text == "[TOOL_CALLS]f{":
        assert parse(text, sizes) == ("", "", [("f", "{")])
        return
    assert parse(text, sizes) == ("", text, [])


@given(st.sampled_from([*ANSWERS.values(), *TEXTS]), SIZES)
def test_without_tools_the_text_is_the_content(text: str, sizes: list[int]) -> None:
    assert parse(text, sizes, tools={}) == ("", text, [])


@given(SIZES)
def test_xml_parameters_become_json_by_the_functions_schema(sizes: list[int]) -> None:
    text = (
        '<tool_call>\n<function=f>\n<parameter=text>\n1\n"2"\n</parameter>\n<parameter=count>\n'
        "3\n</parameter>\n<parameter=flag>\nTrue\n</parameter>\n<parameter=word>\nfour\n"
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n"
        "</tool_call>\nDone."
    )
    reasoning, content, ((name, arguments), empty) = parse(text, sizes)
    assert (reasoning, content, name, empty) == ("", "Done.", "f", ("g", "{}"))
    assert json.loads(arguments) == {"text": '1\n"2"', "count": 3, "flag": True, "word": "four"}


@given(SIZES, st.integers(0, len(ARGUMENTS) - 2))
@example([], ARGUMENTS.index("\\\\") + 1)  # It breaks off after a whole escape.
def test_arguments_that_break_off_are_those_that_were_written(sizes: list[int], end: int) -> None:
    text = ANSWERS["hermes"]
    start = text.index(ARGUMENTS)
    name, arguments = parse(text[: start + 1 + end], sizes)[2][0]
    without_broken_escape = re.sub(r"(?<!\\)((\\\\)*)\\$", r"\1", ARGUMENTS[: end + 1])
    assert (name, arguments) == ("f", without_broken_escape)


@given(SIZES, st.booleans())
def test_reasoning_ends_before_the_text_and_the_calls(sizes: list[int], in_prompt: bool) -> None:
    tags = REASONING_TAGS[0]
    text = f"{'' if in_prompt else '<think>'}\nIs it {G} or <tool_call>?\n</think>\n\nYes. {G}"
    text += f"<tool_call>{G}</tool_call>"
    expected = (f"Is it {G} or <tool_call>?", f"Yes. {G}", [("g", "{}")])
    assert parse(text, sizes, reasoning_tags=tags, is_reasoning=in_prompt) == expected
    assert parse("Yes.", sizes, reasoning_tags=tags) == ("", "Yes.", [])


def test_arguments_are_streamed_as_they_are_written() -> None:
    parser = AnswerParser(TOOLS)
    assert parser.push('<tool_call>{"name": "f", "arg', is_last=False) == []
    assert parser.push('uments": {"text": "a', is_last=False) == [
        ("name", "f"),
        ("arguments", '{"text": "a'),
    ]
    assert parser.push(" b", is_last=False) == [("arguments", " b")]


def test_a_marker_that_is_a_special_token_is_no_text() -> None:
    special = frozenset({"<|python_tag|>"})
    text = "<|python_tag|>print(1)"
    assert parse(text, [3], special_tokens=special) == ("", "print(1)", [])
    assert parse(text, [3]) == ("", text, [])
