"""Models with signatures in the OpenAPI documents, in metadata and as samples."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jsonschema
import openapi_spec_validator
import pytest

from tests.support.typed_models import COUNTER, SIGNATURE, STREAM_SIGNATURE, TYPED
from tsx_runtime.core.workers.signature import ModelSignature
from tsx_runtime.http.routes.model_paths import add_models

ERROR_SCHEMA = {
    "anyOf": [
        {"$ref": "#/components/schemas/HTTPValidationError"},
        {"$ref": "#/components/schemas/ErrorBody"},
    ]
}
Start = Callable[..., AbstractContextManager[Any]]


@pytest.fixture
def typed(empty: Any) -> Any:
    """Register a model that answers and one that streams."""
    empty.write_mar("sentiment.mar", handler=TYPED)
    empty.write_mar("counter.mar", handler=COUNTER)
    for name in ("sentiment", "counter"):
        empty.register(f"{name}.mar", initial_workers=1)
    return empty


def test_documents_describe_the_registered_models_with_their_types(typed: Any) -> None:
    document = typed.inference.get("/openapi.json").json()
    openapi_spec_validator.validate(document)
    assert typed.inference.get("/api-description").json() == document
    assert typed.inference.options("/").json() == document
    assert typed.inference.head("/openapi.json").status_code == 200
    schemas = document["components"]["schemas"]

    operation = document["paths"]["/predictions/sentiment"]["post"]
    assert (operation["summary"], operation["description"]) == (
        "Label a text.",
        "The label is positive or negative.",
    )
    content = operation["requestBody"]["content"]
    reference = {"$ref": "#/components/schemas/sentiment.input"}
    assert content == {
        "application/json": {"schema": reference, "example": SIGNATURE["example"]},
        "multipart/form-data": {"schema": reference},
    }
    assert schemas["sentiment.input"]["properties"]["tags"]["items"] == {
        "$ref": "#/components/schemas/sentiment.input.Tag"
    }
    jsonschema.validate(
        {"tags": [{"name": "a"}], "text": "b"},
        {"$ref": "#/components/schemas/sentiment.input"} | {"components": {"schemas": schemas}},
    )
    responses = operation["responses"]
    assert responses["200"]["content"] == {
        "application/json": {"schema": {"$ref": "#/components/schemas/sentiment.output"}}
    }
    assert responses["422"]["content"] == {"application/json": {"schema": ERROR_SCHEMA}}
    refusal = typed.inference.post("/predictions/sentiment", json={"top": "x"})
    assert refusal.status_code == 422
    components = {"components": {"schemas": schemas}}
    jsonschema.validate(
        refusal.json(), {"$ref": "#/components/schemas/HTTPValidationError"} | components
    )

    stream = document["paths"]["/predictions/counter"]["post"]["responses"]["200"]["content"]
    assert stream == {
        "text/event-stream": {"schema": {"$ref": "#/components/schemas/counter.output"}}
    }
    assert schemas["counter.output"] == STREAM_SIGNATURE["output"]

    document = typed.inference.options("/predictions/sentiment/1.0").json()
    openapi_spec_validator.validate(document)
    assert document["paths"]["/predictions/sentiment"]["post"] == operation
    assert "/predictions/counter" not in document["paths"]
    assert (
        typed.management.get("/openapi.json")
        .json()["paths"]
        .keys()
        .isdisjoint({"/predictions/sentiment"})
    )
    typed.call(lambda: typed.registry.unregister("sentiment"))
    paths = typed.inference.get("/openapi.json").json()["paths"]
    assert ("/predictions/sentiment" in paths, "/predictions/counter" in paths) == (False, True)


def test_metadata_and_samples_come_from_the_signature(typed: Any) -> None:
    signature = typed.inference.get("/v2/models/sentiment").json()["signature"]
    assert (signature["input"], signature["contentTypes"]) == (
        SIGNATURE["input"],
        SIGNATURE["content_types"],
    )
    sample = typed.inference.get("/v2/models/sentiment/sample")
    assert (sample.json(), sample.headers["content-type"]) == (
        SIGNATURE["example"],
        "application/json",
    )
    samples = typed.management.get("/ui/api/samples/sentiment/1.0").json()
    assert [entry["name"] for entry in samples] == ["example.json"]
    body = typed.management.get("/ui/api/samples/sentiment/1.0/example.json")
    assert body.json() == SIGNATURE["example"]


def test_without_the_token_documents_name_no_model(start_server: Start) -> None:
    with start_server(inference_token="secret") as server:
        server.write_mar("sentiment.mar", handler=TYPED)
        server.register("sentiment.mar", initial_workers=1)
        path = "/predictions/sentiment"
        for token, is_visible in (("", False), ("Bearer wrong", False), ("Bearer secret", True)):
            answer = server.inference.get("/openapi.json", headers={"authorization": token})
            assert (answer.status_code, path in answer.json()["paths"]) == (200, is_visible)


class Version:
    """A version with a name and a signature."""

    def __init__(self, name: str, schema: dict[str, Any], content_type: str) -> None:
        self.name = name
        self.signature = ModelSignature(
            input=schema, output=schema, content_types=[content_type], output_type=content_type
        )


@pytest.mark.parametrize(
    ("schema", "content_type", "expected"),
    [
        ({"$defs": {"Node": {}}, "$ref": "#/$defs/Node"}, "application/json", None),
        ({"properties": {"next": {"$ref": "#"}}}, "application/json", None),
        ({"type": "string"}, "text/plain", {"type": "string"}),
        ({"type": "string"}, "image/*", {"type": "string", "format": "binary"}),
    ],
)
def test_any_schema_and_content_type_gives_a_valid_document(
    schema: dict[str, Any], content_type: str, expected: dict[str, str] | None
) -> None:
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "a", "version": "1"},
        "paths": {},
        "components": {"schemas": {"ErrorBody": {}}},
    }
    document = add_models(document, [Version("a-b.c", schema, content_type)])  # type: ignore[list-item]  # a version without workers
    openapi_spec_validator.validate(document)
    operation = document["paths"]["/predictions/a-b.c"]["post"]
    for part, name in (
        (operation["requestBody"], "input"),
        (operation["responses"]["200"], "output"),
    ):
        reference = {"$ref": f"#/components/schemas/a-b.c.{name}"}
        assert part["content"][content_type]["schema"] == (expected or reference)
