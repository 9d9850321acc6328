"""The parts of the OpenAPI documents that FastAPI cannot derive from signatures.

These are examples, and the paths that bypass FastAPI, such as those of predictions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from tsx_runtime.api import request_options
from tsx_runtime.api.management.schemas import ErrorBody
from tsx_runtime.version import __version__

ERROR = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorBody"}}}
_STATUS_TEXTS = {
    400: "the request cannot be used, or its token is missing or wrong",
    401: "the token is missing or wrong, where token_failure_status is 401",
    403: "not allowed",
    404: "no such model, version or route",
    405: "enable_model_api is false",
    408: "requests of the model were not finished in time",
    409: "it is registered already, or has no such state",
    413: "the body is larger than max_request_size",
    422: "another request has this Idempotency-Key",
    429: "there is no room in the queue, where overload_status is 429",
    500: "the handler failed, the worker died, or the model does not load; the message says why",
    503: "no worker, a full queue, or a deadline that cannot be met",
    507: "the worker ran out of memory",
}


def parameter(
    name: str,
    description: str,
    example: str = "",
    location: str = "path",
    schema: dict[str, Any] = {"type": "string"},  # noqa: B006  # It is never modified.
) -> dict[str, Any]:
    """Return a parameter of a path item."""
    described = {
        "name": name,
        "in": location,
        "required": location == "path",
        "description": description,
        "schema": schema,
    }
    return described | ({"example": example} if example else {})


_OPTION_HEADERS = [
    parameter(
        request_options.PRIORITY.decode(),
        "the waiting request with the highest priority is served first; 0 if not given",
        location="header",
        schema={
            "type": "integer",
            "minimum": -request_options.MAX_PRIORITY,
            "maximum": request_options.MAX_PRIORITY,
        },
    ),
    parameter(
        request_options.TIMEOUT.decode(),
        "milliseconds that the client will wait for the answer",
        location="header",
        schema={"type": "integer", "minimum": 1, "maximum": request_options.MAX_TIMEOUT_MS},
    ),
    # These have no examples, because the page at /docs would send them with each request.
    *(
        parameter(name, description, location="header")
        for name, description in (
            ("Prefer", "respond-async: answer later, at the Location of a 202"),
            (
                "Idempotency-Key",
                "a request that comes again under the same key gets the first one's answer, and"
                " runs no model",
            ),
            ("x-tsx-callback-url", "with respond-async: where the answer is sent"),
        )
    ),
]

_QUERY = "Query parameters are inputs as well. "
_PATHS_WITH_QUERY = {
    "/invocations",
    "/models/{model}/invoke",
    "/{model}/predict",
    "/{model}/{version}/predict",
}
_ONLY_MODEL = parameter(
    "model_name", "a registered model; needed where there are several", "digits", "query"
)


def failures(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return FastAPI's `responses` argument for these error statuses."""
    return {
        status: {"model": ErrorBody, "description": _STATUS_TEXTS[status]} for status in statuses
    }


def to_json(document: dict[str, Any]) -> bytes:
    return json.dumps(document, indent=2, ensure_ascii=False).encode() + b"\n"


def query_or_body(model: type[BaseModel]) -> dict[str, Any]:
    """Describe a route whose parameters come from the query string or from a JSON body."""
    schema = model.model_json_schema()
    query = [
        {
            "name": name,
            "in": "query",
            "required": name == "url",
            "description": field.get("description", ""),
            "schema": {
                key: value for key, value in field.items() if key not in ("description", "title")
            },
        }
        for name, field in schema["properties"].items()
    ]
    body = {
        "required": False,
        "content": {"application/json": {"schema": schema, "example": schema["examples"][0]}},
    }
    return {"parameters": query, "requestBody": body}


def body_of(model: type[BaseModel], example: object) -> dict[str, Any]:
    """Describe a JSON body that the route parses itself, to have better error messages."""
    schema = model.model_json_schema()
    return json_body(_inline_definitions(schema, schema.pop("$defs", {})), example)


def json_body(schema: dict[str, Any], example: object) -> dict[str, Any]:
    return {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": schema, "example": example}},
        }
    }


def _inline_definitions(part: Any, definitions: dict[str, Any]) -> Any:
    if isinstance(part, list):
        return [_inline_definitions(item, definitions) for item in part]
    if not isinstance(part, dict):
        return part
    if "$ref" in part:
        return _inline_definitions(definitions[part["$ref"].rpartition("/")[2]], definitions)
    return {key: _inline_definitions(value, definitions) for key, value in part.items()}


def prediction_paths() -> dict[str, Any]:
    """Return the paths of predictions and explanations; all methods are described as POST."""
    version = parameter("version", "one of its versions; the default one if not given", "1.0")
    url_path = parameter(
        "rest", "passed to the handler as the request header `url_path`", "v1/completions"
    )
    model = parameter("model", "a registered model", "digits")
    paths: dict[str, Any] = {}
    for path, parameters in (
        ("/predictions/{model}", [model]),
        ("/predictions/{model}/{version}", [model, version]),
        ("/predictions/{model}/{version}/{rest}", [model, version, url_path]),
        ("/explanations/{model}", [model]),
        ("/explanations/{model}/{version}", [model, version]),
        ("/v1/models/{model}:predict", [model]),
        ("/v1/models/{model}:explain", [model]),
        ("/v2/models/{model}/infer", [model]),
        ("/v2/models/{model}/explain", [model]),
        ("/v2/models/{model}/versions/{version}/infer", [model, version]),
        ("/invocations", [_ONLY_MODEL]),
        ("/models/{model}/invoke", [model]),
        ("/{model}/predict", [model]),
        ("/{model}/{version}/predict", [model, version]),
    ):
        paths[path] = prediction(path, parameters)
    return paths


def prediction(path: str, parameters: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the path item of a path whose requests run a model."""
    is_explanation = path.startswith("/explanations") or path.endswith("explain")
    path_name = re.sub(r"[/:]", "_", re.sub(r"[{}]", "", path.strip("/")))
    binary = {"type": "string", "format": "binary"}
    operation = {
        "tags": ["inference"],
        "summary": "Explain a prediction" if is_explanation else "Predict",
        "description": (
            "The body stays as it is; the handler gets a form's fields by their names, and any"
            " other body as `body`. "
            + (_QUERY if path in _PATHS_WITH_QUERY else "")
            + "The answer is what the handler returns; it has a Content-Type only if the handler"
            " sets one."
        ),
        "operationId": f"post_{path_name}",
        "parameters": [*parameters, *_OPTION_HEADERS],
        "requestBody": {
            "content": {
                "application/octet-stream": {"schema": binary},
                "application/json": {"schema": {}, "example": {"data": [0.1, 0.2]}},
                "text/plain": {"schema": {"type": "string"}, "example": "a sentence"},
                "multipart/form-data": {
                    "schema": {"type": "object", "properties": {"data": binary}}
                },
            }
        },
        "responses": (
            {
                "200": {
                    "description": "what the handler returned",
                    "content": {"*/*": {"schema": {}, "example": {"7": 0.998}}},
                }
            }
            | {"202": {"description": "the request is stored, with Prefer: respond-async"}}
            | {
                str(status): {"description": _STATUS_TEXTS[status], "content": ERROR}
                for status in (400, 401, 404, 413, 422, 429, 500, 503, 507)
            }
        ),
    }
    return {"post": operation}


def named_in_body(
    path: str, tag: str, summary: str, example: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return the path item of requests whose body names the model.

    The bodies are described by the documentation of the API to which the path belongs.
    """
    content = "multipart/form-data" if "audio" in path else "application/json"
    statuses = (400, 401, 404, 413, 429, 500, 503, 507)
    operation = {
        "tags": [tag],
        "summary": summary,
        "description": (
            "The body names the model: NAME[:VERSION-or-LABEL][/ADAPTER]; without a name it is the"
            " only one."
        ),
        "operationId": "post" + re.sub(r"[/]", "_", path),
        "parameters": _OPTION_HEADERS,
        "requestBody": {
            "content": {
                content: {"schema": {"type": "object"}, "example": {"model": "digits", **example}}
            }
        },
        "responses": {
            "200": {
                "description": "as that API has it; with `stream`, server-sent events",
                "content": {"*/*": {"schema": {}}},
            }
        }
        | {
            str(status): {"description": _STATUS_TEXTS[status], "content": ERROR}
            for status in statuses
        },
    }
    return {"post": operation}


def replace_validation_errors(document: dict[str, Any]) -> None:
    """Replace FastAPI's 422 for invalid parameters by this server's 400 with the error JSON."""
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for schema_name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(schema_name, None)
    schemas.setdefault("ErrorBody", ErrorBody.model_json_schema())
    document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{}, {"token": []}]  # Tokens are optional.
    for item in document["paths"].values():
        for operation in item.values():
            if operation["responses"].pop("422", None):
                operation["responses"].setdefault(
                    "400", {"description": _STATUS_TEXTS[400], "content": ERROR}
                )


def describe_predictions(name: str) -> dict[str, Any]:
    """Return the OpenAPI document of one model's predictions."""
    paths = {path: item for path, item in prediction_paths().items() if "{version}" not in path}
    return _model_document(name, paths, {"ErrorBody": ErrorBody.model_json_schema()})


def describe_management(name: str, document: dict[str, Any]) -> dict[str, Any]:
    """Return the management paths of one model, from the document of the listener."""
    model_paths = {
        path: item
        for path, item in sorted(document["paths"].items())
        if path.startswith("/models/{model}")
    }
    model_paths.pop("/models/{model}/invoke", None)  # This path runs a prediction.
    return _model_document(name, model_paths, document["components"]["schemas"])


def _model_document(name: str, paths: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    """Return a document with the paths of one model, and with the schemas that they use."""
    model_paths = {}
    for path, item in paths.items():
        model_paths[path.replace("{model}", name)] = {
            method: (
                operation
                | {
                    "parameters": [
                        parameter
                        for parameter in operation.get("parameters", ())
                        if parameter["name"] != "model"
                    ]
                }
            )
            for method, operation in item.items()
        }
    used_schemas: dict[str, Any] = {}
    _add_schemas(model_paths, schemas, used_schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": f"tsx: {name}", "version": __version__},
        "paths": model_paths,
        "components": {"schemas": used_schemas},
    }


def _add_schemas(part: Any, schemas: dict[str, Any], used_schemas: dict[str, Any]) -> None:
    """Add the schemas that a part of a document refers to, directly or not, to `used_schemas`."""
    if isinstance(part, list):
        for item in part:
            _add_schemas(item, schemas, used_schemas)
    elif isinstance(part, dict):
        reference = part.get("$ref")
        if (
            isinstance(reference, str)
            and (name := reference.rpartition("/")[2]) not in used_schemas
        ):
            used_schemas[name] = schemas[name]
            _add_schemas(used_schemas[name], schemas, used_schemas)
        for value in part.values():
            _add_schemas(value, schemas, used_schemas)
