"""Chats with tools and reasoning, with tiny models that write a given answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.runtime.features.openai.conftest import (
    CITY,
    HEAD,
    HERMES,
    REASONER,
    TAGS,
    TAIL,
    Client,
)
from tsx_runtime.features.generation.worker.interface import Grammar
from tsx_runtime.features.openai.worker.answer_formats import choose_format
from tsx_runtime.features.openai.worker.chat import ChatRequest
from tsx_runtime.features.openai.worker.messages import Message

LLAMA = (
    HEAD + '{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson'
    " }}}" + TAIL
)
MISTRAL = (
    HEAD + "{% if call.id | length != 9 %}{{ raise_exception('A call has a wrong id.') }}{% endif"
    " %}[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}" + TAIL
)
CODER = (
    HEAD + "<tool_call>\n<function={{ call.function.name }}>{% for name, value in"
    " call.function.arguments | items %}\n<parameter={{ name }}>\n{{ value }}\n</parameter>{%"
    " endfor %}\n</function>\n</tool_call>" + TAIL
)
DAYS = '{"city": "Oslo", "days": 2}'
MISTRAL_TAGS = {"[TOOL_CALLS]": True, "[ARGS]": True}


def joined_calls(choices: Sequence[Any]) -> list[tuple[str, str]]:
    """Join the deltas of calls as OpenAI's clients do."""
    calls: list[tuple[str, str]] = []
    for choice in choices:
        for call in choice["delta"].get("tool_calls", ()):
            if call["index"] == len(calls):
                assert (call["type"], call["function"]["arguments"]) == ("function", "")
                calls.append((call["function"]["name"], ""))
            name, arguments = calls[-1]
            calls[-1] = (name, arguments + call["function"]["arguments"])
    return calls


@pytest.mark.parametrize(
    ("text", "template", "markers", "content"),
    [
        (
            f'Let me see.\n<tool_call>\n{{"name": "weather", "arguments": {CITY}}}\n</tool_call>',
            HERMES,
            TAGS,
            "Let me see.",
        ),
        (f"[TOOL_CALLS]weather[ARGS]{CITY}", MISTRAL, MISTRAL_TAGS, ""),
        (
            "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n"
            "</tool_call>",
            CODER,
            TAGS,
            "",
        ),
    ],
    ids=["hermes", "mistral", "qwen-coder"],
)
def test_a_call_is_parsed_streamed_and_returned_with_its_result(
    start: Callable[..., Client],
    text: str,
    template: str,
    markers: dict[str, bool],
    content: str,
) -> None:
    client = start(text, template, markers)
    choices = client.stream()
    assert joined_calls(choices) == [("weather", CITY)]
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == content
    assert choices[-1]["finish_reason"] == "tool_calls"
    start_delta, *arguments = [
        part for choice in choices for part in choice["delta"].get("tool_calls", ())
    ]
    assert len(arguments) > 1
    call = start_delta | {"function": {"name": "weather", "arguments": CITY}}
    chat = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "sunny"},
    ]
    prompt = client.generator._tokenizer.apply_chat_template(
        [Message.model_validate(item).for_template() for item in chat], tokenize=False
    )
    assert "Rome" in prompt
    assert prompt.endswith("<|tool|>sunny<|end|>")


def test_several_calls_are_numbered_or_only_the_first_is_returned(
    start: Callable[..., Client],
) -> None:
    calls = "; ".join(
        f'{{"name": "weather", "parameters": {arguments}}}' for arguments in (CITY, DAYS)
    )
    client = start(f"<|python_tag|>{calls}", LLAMA, {"<|python_tag|>": True})
    expected = [("weather", CITY), ("weather", DAYS)]
    assert joined_calls(client.stream()) == expected
    (choice,) = client.chat(parallel_tool_calls=False)["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
    assert [call["function"]["arguments"] for call in choice["message"]["tool_calls"]] == [CITY]
    (choice,) = client.chat(tools=[])["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (calls, "stop")


def test_reasoning_is_split_off(start: Callable[..., Client]) -> None:
    text = f'Hm.\n</think>\n\n<tool_call>{{"name": "weather", "arguments": {CITY}}}</tool_call>'
    markers = TAGS | {"<think>": True, "</think>": True}
    client = start(text, REASONER, markers, "<think>")
    response = client.chat()
    message = response["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", None)
    assert message["tool_calls"][0]["function"]["arguments"] == CITY
    assert response["usage"]["completion_tokens_details"]["reasoning_tokens"] > 1
    choices = client.stream()
    deltas = [choice["delta"] for choice in choices]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm."
    assert joined_calls(choices) == [("weather", CITY)]
    (choice,) = client.chat(max_tokens=2)["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "length")
    shown = Message.model_validate(message | {"content": "Fine."}).for_template()
    prompt = client.generator._tokenizer.apply_chat_template([shown], tokenize=False)
    assert prompt.startswith("<|assistant|><think>Hm.</think>Fine.<tool_call>")


def test_a_grammar_begins_after_the_reasoning(start: Callable[..., Client]) -> None:
    generator = start("ok", REASONER, {"<think>": True, "</think>": True}, "<think>").generator
    request = ChatRequest.model_validate({"messages": [{"role": "user", "content": "?"}]})

    def parse(grammar: Grammar | None) -> tuple[str, list[Any]]:
        prompt, _, new_answer = choose_format(
            generator, request, {"messages[0]": request.messages[0]}, grammar, None
        )
        shown = generator.decode(prompt.token_ids, {"<|assistant|>", "<think>", "</think>"})
        return shown.partition("<|assistant|>")[2], new_answer().parser.push("{}", is_last=True)

    # This tokenizer has no token for line ends.
    assert parse(Grammar("regex", "{}")) == ("<think></think>", [("content", "{}")])
    assert parse(None) == ("<think>", [("reasoning_content", "{}")])


def test_a_tokenizers_response_template_is_followed(start: Callable[..., Client]) -> None:
    response_template = {
        "start_anchor": "<|assistant|>",
        "fields": {
            "reasoning_content": {"open": "<|think|>", "close": "<|/think|>"},
            "tool_calls": {
                "open_pattern": r"<\|call\|>(?P<name>\w+)",
                "close": "<|/call|>",
                "repeats": True,
                "content": "xml-inline",
                "content_args": {"tag_pattern": r"(?P<key>\w+)=(?P<value>\w+)"},
                "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
            },
            "content": {},
        },
    }
    markers = dict.fromkeys(["<|think|>", "<|/think|>", "<|call|>", "<|/call|>", "<|other|>"], True)
    text = "<|think|>Hm.<|/think|>Well.<|other|><|call|>weather city=Oslo days=2<|/call|>"
    client = start(text, HERMES, markers, response_template=response_template)
    choices = client.stream()
    deltas = [choice["delta"] for choice in choices]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm."
    assert "".join(delta.get("content", "") for delta in deltas) == "Well."
    assert joined_calls(choices) == [("weather", DAYS)]
