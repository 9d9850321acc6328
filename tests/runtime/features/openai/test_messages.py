"""The grammars of responses that are tool calls."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from tsx_runtime.features.generation.worker.interface import Grammar
from tsx_runtime.features.openai.worker.messages import Tool, choose_tools
from tsx_runtime.worker.codecs.bodies import RefusedField

CITY = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
TOOLS = [
    Tool.model_validate({"type": "function", "function": function})
    for function in (
        {
            "name": "weather",
            "parameters": {
                "$defs": {"City": CITY},
                "properties": {"city": {"$ref": "#/$defs/City"}},
                "required": ["city"],
            },
        },
        {"name": "time"},
    )
]
NAMED = {"type": "function", "function": {"name": "weather"}}
WEATHER = {"name": "weather", "arguments": {"city": {"name": "Rome"}}}
TIME: dict[str, Any] = {"name": "time", "arguments": {}}
INVALID_CALLS = [
    {"name": "weather", "arguments": {"city": {"name": 5}}},
    {"name": "weather", "arguments": {}},
    {"name": "clock", "arguments": {}},
    {"name": "time", "arguments": []},
    {"name": "time"},
]
ANSWER = Grammar("json_schema", json.dumps({"$defs": {"City": CITY}, "$ref": "#/$defs/City"}))


def validator_of(grammar: Grammar | None) -> Draft202012Validator:
    assert grammar is not None
    assert (grammar.kind, grammar.field) == ("json_schema", "tools")
    schema = json.loads(grammar.text)
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def test_required_calls_are_a_list_or_one_object() -> None:
    several = validator_of(choose_tools(TOOLS, "required")[1])
    assert several.is_valid([TIME, WEATHER, TIME])
    for response in ([], WEATHER, [TIME, "a"], *([call] for call in INVALID_CALLS)):
        assert not several.is_valid(response)
    single = validator_of(choose_tools(TOOLS, "required", is_parallel=False)[1])
    assert single.is_valid(WEATHER)
    assert single.is_valid(TIME)
    for call in ([TIME], *INVALID_CALLS):
        assert not single.is_valid(call)


def test_a_named_function_is_called_once() -> None:
    tools, grammar = choose_tools(TOOLS, NAMED, grammar=ANSWER)
    assert tools == TOOLS[:1]
    assert choose_tools(TOOLS, {"type": "function", "name": "weather"}) == (tools, grammar)
    named = validator_of(grammar)
    assert named.is_valid(WEATHER)
    for call in (TIME, [WEATHER], {"name": "Rome"}, *INVALID_CALLS):
        assert not named.is_valid(call)


def test_with_a_schema_a_free_response_is_a_call_or_follows_the_schema() -> None:
    free = validator_of(choose_tools(TOOLS, "auto", grammar=ANSWER)[1])
    for response in (WEATHER, TIME, {"name": "Rome"}):
        assert free.is_valid(response)
    for response in ("a", {"name": 5}, {}):
        assert not free.is_valid(response)


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_without_a_schema_a_free_response_has_no_grammar(choice: str) -> None:
    assert choose_tools(TOOLS, choice) == ([] if choice == "none" else TOOLS, None)
    assert choose_tools([], choice, grammar=ANSWER) == ([], ANSWER)


def allowed(mode: str, *names: str, is_flat: bool = False) -> Any:
    functions = [{"name": name} for name in names]
    if is_flat:  # the form of /v1/responses
        tools = [{"type": "function"} | function for function in functions]
        return {"type": "allowed_tools", "mode": mode, "tools": tools}
    tools = [{"type": "function", "function": function} for function in functions]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize("is_flat", [False, True])
def test_only_allowed_tools_are_shown_and_called(is_flat: bool) -> None:
    assert choose_tools(TOOLS, allowed("auto", "time", is_flat=is_flat)) == (TOOLS[1:], None)
    tools, grammar = choose_tools(TOOLS, allowed("required", "time", is_flat=is_flat))
    assert tools == TOOLS[1:]
    required = validator_of(grammar)
    assert required.is_valid([TIME, TIME])
    assert not required.is_valid([WEATHER])
    both = allowed("required", "time", "weather", is_flat=is_flat)
    assert choose_tools(TOOLS, both) == choose_tools(TOOLS, "required")


@pytest.mark.parametrize("choice", ["auto", "required", NAMED])
def test_a_grammar_without_calls_is_refused_together_with_tools(choice: Any) -> None:
    grammar = Grammar("regex", "[ab]+")
    with pytest.raises(RefusedField) as exc_info:
        choose_tools(TOOLS, choice, grammar=grammar)
    assert exc_info.value.param == "structured_outputs"
    assert choose_tools(TOOLS, "none", grammar=grammar) == ([], grammar)


@pytest.mark.parametrize(
    "choice",
    [
        "any",
        {},
        {"function": {"name": "clock"}},
        5,
        {"type": "allowed_tools"},
        {"type": "allowed_tools", "allowed_tools": 5},
        allowed("none", "time"),
        allowed("auto"),
        allowed("auto", "time", "clock"),
    ],
)
def test_an_unknown_choice_is_refused(choice: Any) -> None:
    with pytest.raises(RefusedField) as exc_info:
        choose_tools(TOOLS, choice)
    assert (exc_info.value.param, exc_info.value.code) == ("tool_choice", "invalid_value")
