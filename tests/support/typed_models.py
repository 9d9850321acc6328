"""A model with a signature: it labels a text, and refuses wrong input with 422 like FastAPI."""

from __future__ import annotations

from typing import Any

TAG = {
    "type": "object",
    "title": "Tag",
    "properties": {"name": {"type": "string"}, "weight": {"type": "number", "default": 1.0}},
    "required": ["name"],
}
SIGNATURE: dict[str, Any] = {
    "input": {
        "$defs": {"Tag": TAG},
        "type": "object",
        "title": "Text",
        "properties": {
            "text": {"type": "string", "title": "Text", "description": "the text to label"},
            "top": {"type": "integer", "default": 1},
            "scale": {"anyOf": [{"type": "number"}, {"type": "null"}], "default": None},
            "exact": {"type": "boolean", "default": False},
            "language": {"enum": ["en", "de"], "type": "string", "default": "en"},
            "tags": {"type": "array", "items": {"$ref": "#/$defs/Tag"}, "default": []},
            "image": {
                "anyOf": [
                    {
                        "type": "string",
                        "contentEncoding": "base64",
                        "contentMediaType": "image/png",
                    },
                    {"type": "null"},
                ],
                "default": None,
            },
        },
        "required": ["text"],
    },
    "output": {
        "$defs": {"Tag": TAG},
        "type": "object",
        "properties": {
            "label": {"type": "string"},
            "score": {"type": "number"},
            "tags": {"type": "array", "items": {"$ref": "#/$defs/Tag"}},
            "given": {"type": "object"},
        },
        "required": ["label", "score", "tags", "given"],
    },
    "description": "Label a text.\n\nThe label is positive or negative.",
    "content_types": ["application/json", "multipart/form-data"],
    "example": {"text": "what a nice day", "top": 2},
}
STREAM_SIGNATURE: dict[str, Any] = {
    "input": {
        "type": "object",
        "properties": {"count": {"type": "integer"}},
        "required": ["count"],
    },
    "output": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
    "output_type": "text/event-stream",
    "streams": True,
}

# The kinds of errors are those of pydantic, whose messages FastAPI passes on.
TYPED = f"""
import json

KINDS = {{"text": (str, "string"), "top": (int, "integer"), "tags": (list, "list")}}


class Sentiment:
    input_kind = "json"

    def initialize(self, context):
        self.signature = {SIGNATURE!r}

    def handle(self, data, context):
        return [
            self.answer(position, row.get("body", row), context)
            for position, row in enumerate(data)
        ]

    def answer(self, position, body, context):
        value = json.loads(body) if isinstance(body, (bytes, bytearray)) else body
        detail = [
            {{"type": name + "_type", "loc": ["body", field], "msg": "Input should be a valid " + name, "input": str(value[field])}}
            for field, (kind, name) in KINDS.items()
            if field in value and type(value[field]) is not kind
        ]
        if "text" not in value:
            detail.append({{"type": "missing", "loc": ["body", "text"], "msg": "Field required", "input": str(value)}})
        if detail:
            context.set_response_status(422, "", position)
            return {{"detail": detail}}
        label = "positive" if "nice" in value["text"] else "negative"
        return {{"label": label, "score": 0.5, "tags": value.get("tags", []), "given": value}}
"""

COUNTER = f"""
import json
from ts.handler_utils.utils import send_intermediate_predict_response


class Counter:
    def initialize(self, context):
        self.signature = {STREAM_SIGNATURE!r}

    def handle(self, data, context):
        return [self.answer(position, row["body"], context) for position, row in enumerate(data)]

    def answer(self, position, body, context):
        count = (json.loads(body) if isinstance(body, (bytes, bytearray)) else body)["count"]
        context.set_response_content_type(position, "text/event-stream")
        request_id = {{position: context.get_request_id(position)}}
        for n in range(count):
            piece = "data: " + json.dumps({{"n": n}}) + "\\n\\n"
            send_intermediate_predict_response([piece], request_id, "", 200, context)
        return ""
"""
