"""The grammars that a request asks for by its formats."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tsx_runtime.features.generation.worker.interface import Grammar
from tsx_runtime.features.openai.worker.completions import CompletionRequest
from tsx_runtime.features.openai.worker.requests import read
from tsx_runtime.features.openai.worker.responses import ResponseRequest
from tsx_runtime.worker.codecs.bodies import RefusedField

SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}}
BOUND = ("json_schema", json.dumps(SCHEMA))
ANY_OBJECT = ("json_schema", '{"type": "object"}')
SCHEMA_FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}


def grammar_of(**fields: Any) -> Grammar | None:
    request = read(CompletionRequest, json.dumps({"prompt": "a", **fields}))
    return request.grammar(request.response_format, "response_format")


@pytest.mark.parametrize(
    ("format", "grammar"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, ANY_OBJECT),
        ({"type": "json_object", "schema": SCHEMA}, BOUND),
        *(
            (
                {
                    "type": "json_schema",
                    "json_schema": {
                        "name": "my-name_1",
                        "schema": SCHEMA,
                        "strict": strict,
                        "description": "d",
                    },
                },
                BOUND,
            )
            for strict in (True, False, None)
        ),
    ],
)
def test_a_response_format_is_a_grammar(format: dict[str, Any], grammar: Any) -> None:
    expected = grammar and Grammar(*grammar, "response_format")
    assert grammar_of(response_format=format) == expected


@pytest.mark.parametrize(
    ("format", "param"),
    [
        ({}, "response_format"),
        ({"type": "xml"}, "response_format"),
        ({"type": "json_schema"}, "response_format.json_schema.name"),
        (
            {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
            "response_format.json_schema.name",
        ),
        (
            {"type": "json_schema", "json_schema": {"name": "a name", "schema": SCHEMA}},
            "response_format.json_schema.name",
        ),
        (
            {"type": "json_schema", "json_schema": {"name": "n"}},
            "response_format.json_schema.schema",
        ),
        (
            {"type": "json_schema", "json_schema": {"name": "n", "schema": [SCHEMA]}},
            "response_format.json_schema.schema",
        ),
    ],
)
def test_an_invalid_format_is_refused_with_the_place(format: dict[str, Any], param: str) -> None:
    with pytest.raises(RefusedField) as exc_info:
        grammar_of(response_format=format)
    assert exc_info.value.param == param


def test_the_format_of_responses_has_the_same_fields() -> None:
    format = {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}
    request = read(ResponseRequest, {"input": "a", "text": {"format": format}})
    assert request.grammar(request.text.format, "text.format") == Grammar(*BOUND, "text.format")


@pytest.mark.parametrize(
    ("outputs", "grammar"),
    [
        ({"json": SCHEMA}, BOUND),
        ({"json": json.dumps(SCHEMA)}, BOUND),
        ({"json": SCHEMA, "regex": None}, BOUND),
        ({"json_object": True}, ANY_OBJECT),
        ({"regex": "[ab]+"}, ("regex", "[ab]+")),
        ({"choice": ["yes", "no"]}, ("choice", '["yes", "no"]')),
        ({"grammar": 'start: "a"'}, ("lark", 'start: "a"')),
    ],
)
def test_structured_outputs_are_a_grammar(outputs: dict[str, Any], grammar: Any) -> None:
    expected = Grammar(*grammar, "structured_outputs")
    assert grammar_of(structured_outputs=outputs) == expected
    assert grammar_of(structured_outputs=outputs, response_format={"type": "text"}) == expected
    with pytest.raises(RefusedField) as exc_info:
        grammar_of(structured_outputs=outputs, response_format=SCHEMA_FORMAT)
    assert exc_info.value.param == "structured_outputs"


@pytest.mark.parametrize(
    ("outputs", "param"),
    [
        ({}, "structured_outputs"),
        ({"regex": "a", "choice": ["a"]}, "structured_outputs"),
        ({"json_object": False}, "structured_outputs.json_object"),
        ({"json": "{"}, "structured_outputs.json"),
        ({"json": "[]"}, "structured_outputs.json"),
        ({"choice": []}, "structured_outputs.choice"),
        ({"choice": [1]}, "structured_outputs.choice[0]"),
        ({"structural_tag": "{}"}, "structured_outputs.structural_tag"),
    ],
)
def test_invalid_structured_outputs_are_refused_with_the_place(
    outputs: dict[str, Any], param: str
) -> None:
    with pytest.raises(RefusedField) as exc_info:
        grammar_of(structured_outputs=outputs)
    assert exc_info.value.param == param
