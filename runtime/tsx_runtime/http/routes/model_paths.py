"""The predictions of models that report a signature, as paths of the OpenAPI documents.

Models come and go, so the paths are made for each request of a document.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any
from urllib.parse import quote

from fastapi.openapi.utils import validation_error_definition, validation_error_response_definition

from tsx_runtime.api.access.auth import Guard
from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.core.scheduling.job import Headers
from tsx_runtime.core.workers.signature import ModelSignature
from tsx_runtime.errors import TsxError
from tsx_runtime.http.routes import openapi

SCHEMAS = "#/components/schemas/"
BINARY = {"type": "string", "format": "binary"}
# These content types have the fields of the JSON body, if it is an object.
JSON_LIKE = ("application/json", "multipart/form-data", "application/x-www-form-urlencoded")


def visible_versions(
    registry: Registry, guard: Guard | None, headers: Headers
) -> list[ModelVersion]:
    """Return the default versions of the models that a request with these headers may call."""
    try:
        if guard is not None:
            guard.check(headers)
    except TsxError:  # Without a token, the documents name no model.
        return []
    return [registry.find(name) for name in registry.models]


def add_models(document: dict[str, Any], versions: Iterable[ModelVersion]) -> dict[str, Any]:
    """Return a document with a path for each version that has a signature."""
    paths: dict[str, Any] = {}
    schemas: dict[str, Any] = {
        "HTTPValidationError": validation_error_response_definition,
        "ValidationError": validation_error_definition,
    }
    for version in versions:
        if (signature := version.signature) is not None:
            path = f"/predictions/{quote(version.name, safe='')}"
            paths[path] = _describe(path, version.name, signature, schemas)
    if not paths:
        return document
    components = document["components"]
    schemas = components["schemas"] | schemas
    return document | {
        "paths": document["paths"] | paths,
        "components": components | {"schemas": schemas},
    }


def describe_predictions(version: ModelVersion) -> dict[str, Any]:
    """Return the OpenAPI document of the predictions of one version."""
    return add_models(openapi.describe_predictions(version.name), [version])


def _describe(
    path: str, name: str, signature: ModelSignature, schemas: dict[str, Any]
) -> dict[str, Any]:
    """Return the path item of a model, and add its schemas to `schemas`."""
    body = _add_schema(f"{name}.input", signature.input, schemas)
    answer = _add_schema(f"{name}.output", signature.output, schemas)
    content = {kind: {"schema": _schema_for(kind, body)} for kind in signature.content_types}
    if signature.example is not None and "application/json" in content:
        content["application/json"]["example"] = signature.example
    output_type = "text/event-stream" if signature.streams else signature.output_type
    summary, _, description = signature.description.strip().partition("\n")
    operation = openapi.prediction(path, [])["post"]
    operation |= {
        "tags": ["models"],
        "summary": summary or f"Predict with {name}",
        "description": description.strip(),
        "operationId": f"predict_{name}",
        "requestBody": {"required": True, "content": content},
    }
    operation["responses"] |= {
        "200": {
            "description": "the data of each event" if signature.streams else "the prediction",
            "content": {
                output_type: {
                    "schema": answer if signature.streams else _schema_for(output_type, answer)
                }
            },
        },
        "422": {
            "description": "the input does not have the types of the model, or another request has"
            " this Idempotency-Key",
            "content": {
                "application/json": {
                    "schema": {
                        "anyOf": [
                            {"$ref": f"{SCHEMAS}HTTPValidationError"},
                            {"$ref": f"{SCHEMAS}ErrorBody"},
                        ]
                    }
                }
            },
        },
    }
    return {"post": operation}


def _add_schema(name: str, schema: dict[str, Any], schemas: dict[str, Any]) -> dict[str, str]:
    """Add a JSON schema and its definitions to `schemas`, and return a reference to it.

    OpenAPI resolves references from the root of the document, so those to `#/$defs` change.
    """
    text = json.dumps(schema).replace('"#/$defs/', f'"{SCHEMAS}{name}.')
    root = json.loads(text.replace('"$ref": "#"', f'"$ref": "{SCHEMAS}{name}"'))
    definitions = root.pop("$defs", {})
    schemas |= {name: root} | {f"{name}.{key}": value for key, value in definitions.items()}
    return {"$ref": f"{SCHEMAS}{name}"}


def _schema_for(content_type: str, schema: dict[str, str]) -> dict[str, str]:
    if content_type in JSON_LIKE:
        return schema
    return {"type": "string"} if content_type.startswith("text/") else BINARY
