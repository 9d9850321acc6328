"""Tool calls in a text that comes in arbitrary pieces."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tsx_runtime.features.openai.worker.tool_calls import ToolText

PLAIN = '{"name": "f", "parameters": {}}'


def split(text: str, sizes: list[int]) -> tuple[str, list[str]]:
    tools, shown_text = ToolText(["f"]), ""
    for size in [*sizes, len(text)]:
        piece, text = text[:size], text[size:]
        shown_text += tools.add(piece)
    last_text, calls = tools.end()
    return shown_text + last_text, [call["function"]["name"] for call in calls]


@given(
    st.sampled_from(
        [
            "Hm <tool",
            "  ",
            f" {PLAIN}",
            "a < b",
            PLAIN,
            PLAIN.replace('"f"', '"g"'),
            "{1}",
            f"[{PLAIN}, {PLAIN}]",
        ]
    ),
    st.lists(st.integers(0, 5)),
)
def test_splitting_the_text_does_not_change_the_result(text: str, sizes: list[int]) -> None:
    assert split(text, sizes) == split(text, [])
    if '"f"' not in text:
        assert split(text, sizes) == (text, [])


@pytest.mark.parametrize("sizes", [[], [1] * 99, [30, 1, 1]])
def test_calls_are_removed_from_the_text(sizes: list[int]) -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert split(f"Well. {call}{call}", sizes) == ("Well. ", ["f", "f"])
    assert split("<tool_call>broken</tool_call>", sizes) == ("<tool_call>broken</tool_call>", [])


def test_arguments_are_encoded_as_json() -> None:
    tools = ToolText(["f"])
    tools.add('{"name": "f", "arguments": {"city": "Köln"}}')
    ((call,),) = [tools.end()[1]]
    assert json.loads(call["function"]["arguments"]) == {"city": "Köln"}
