"""The encoding of requests for each supported protocol."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import quote

from tsx_cli.bench.load.payloads import UNSENT_HEADERS, Payload
from tsx_cli.common.failure import UsageError
from tsx_cli.common.server_address import ServerAddress, read_url

GRPC = ("grpc", "kserve-v2-grpc")
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BINARY_HEAD = (
    "Inference-Header-Content-Length"  # header for binary tensors of the Open Inference Protocol
)
SAFE_QUERY = "%=&+;,/?:@!$'()*~[]"  # characters that stay unquoted


def read_target(url: str) -> ServerAddress:
    """Return the parsed address of a server.

    Raises:
        UsageError: The text is not an address.
    """
    return read_url(url, ("http", "https", "grpc"))


class EncodedRequest(NamedTuple):
    """A payload that is encoded for a protocol."""

    path: str
    body: bytes
    content_type: str | None
    headers: tuple[tuple[str, str], ...] = ()


Encoder = Callable[[str, "str | None", Payload], EncodedRequest]


def _predictions(model: str, version: str | None, payload: Payload) -> EncodedRequest:
    return EncodedRequest(
        _path("predictions", model, *([version] if version else [])),
        payload.body,
        payload.content_type,
    )


def _kserve_v1(model: str, version: str | None, payload: Payload) -> EncodedRequest:
    _refuse_version("kserve-v1", version)
    value = _json_of(payload)
    if not (isinstance(value, Mapping) and "instances" in value):
        instance = {"b64": base64.b64encode(payload.body).decode()} if value is None else value
        payload = payload._replace(body=_to_json({"instances": [instance]}))
    return EncodedRequest(
        f"{_path('v1', 'models', model)}:predict", payload.body, "application/json"
    )


def _kserve_v2(model: str, version: str | None, payload: Payload) -> EncodedRequest:
    path = _path("v2", "models", model, *(["versions", version] if version else []), "infer")
    value = _json_of(payload)
    if isinstance(value, Mapping) and "inputs" in value:
        return EncodedRequest(path, payload.body, "application/json")
    if any(name.lower() == BINARY_HEAD.lower() for name, _ in payload.headers):
        return EncodedRequest(path, payload.body, payload.content_type)
    tensor = tensor_of(value)
    if tensor is not None:
        return EncodedRequest(path, _to_json({"inputs": [tensor]}), "application/json")
    raw = len(payload.body).to_bytes(4, "little") + payload.body
    input_ = {
        "name": "input-0",
        "shape": [1],
        "datatype": "BYTES",
        "parameters": {"binary_data_size": len(raw)},
    }
    head = _to_json({"inputs": [input_]})
    return EncodedRequest(
        path, head + raw, "application/octet-stream", ((BINARY_HEAD, str(len(head))),)
    )


def _invocations(model: str, version: str | None, payload: Payload) -> EncodedRequest:
    _refuse_version("invocations", version)
    return EncodedRequest(
        f"/invocations?model_name={quote(model, safe='')}", payload.body, payload.content_type
    )


def _post(model: str, version: str | None, payload: Payload) -> EncodedRequest:
    """Encode a request to the given address itself; the model does not matter."""
    _refuse_version("post", version)
    return EncodedRequest("", payload.body, payload.content_type)


def _openai(path: str, model: str, version: str | None, payload: Payload) -> EncodedRequest:
    """Encode a request of an OpenAI API.

    The payload is a text, Hugging Face's `{"inputs", "parameters"}` or an OpenAI request, whose
    model is replaced. The answer is streamed, with `usage` at the end, unless the request says
    otherwise.
    """
    request = _json_of(payload)
    body: dict[str, Any] = (
        {**request}
        if isinstance(request, Mapping)
        else {"inputs": payload.body.decode("utf-8", "replace")}
    )
    if "inputs" in body:
        text, parameters = body.pop("inputs"), body.pop("parameters", None) or {}
        options = {
            "max_tokens" if name == "max_new_tokens" else name: value
            for name, value in parameters.items()
        }
        body |= options | (
            {"prompt": text}
            if path == COMPLETIONS
            else {
                "messages": text if isinstance(text, list) else [{"role": "user", "content": text}]
            }
        )
    body["model"] = f"{model}:{version}" if version else model
    if body.setdefault("stream", True):
        body.setdefault("stream_options", {"include_usage": True})
    return EncodedRequest(path, _to_json(body), "application/json")


ENCODERS: dict[str, Encoder] = {
    "tsx": _predictions,
    "torchserve": _predictions,
    "kserve-v1": _kserve_v1,
    "kserve-v2": _kserve_v2,
    "invocations": _invocations,
    "openai-chat": partial(_openai, CHAT),
    "openai-completions": partial(_openai, COMPLETIONS),
    "post": _post,
}
PROTOCOLS = (*ENCODERS, *GRPC)


def render(
    protocol: str,
    url: str,
    model: str,
    payload: Payload,
    token: str | None = None,
    *,
    version: str | None = None,
) -> bytes:
    """Return a request as bytes of HTTP/1.1.

    Raises:
        UsageError: The protocol is not an HTTP protocol, or the address is invalid.
    """
    if protocol not in ENCODERS:
        raise UsageError(
            f"'{protocol}' is not a protocol over HTTP; there are {', '.join(ENCODERS)}"
        )
    target = read_target(url)
    request = ENCODERS[protocol](model, version, payload)
    path = quote(target.prefix) + request.path or "/"
    if payload.query:
        path += ("&" if "?" in path else "?") + quote(
            payload.query, safe=SAFE_QUERY, encoding="latin-1"
        )
    lines = [f"POST {path} HTTP/1.1", f"Host: {target.authority}"]
    if request.content_type is not None:
        lines.append(f"Content-Type: {request.content_type}")
    skipped = (
        UNSENT_HEADERS | {"content-type"}
        if token is not None
        else (UNSENT_HEADERS | {"content-type"}) - {"authorization"}
    )
    lines += [
        f"{name}: {value}"
        for name, value in (*payload.headers, *request.headers)
        if name.lower() not in skipped
    ]
    if token is not None:
        lines.append(f"Authorization: Bearer {token}")
    head = "\r\n".join([*lines, f"Content-Length: {len(request.body)}", "", ""])
    return head.encode("latin-1", "replace") + request.body


def tensor_of(value: Any) -> dict[str, Any] | None:
    """Return nested lists of numbers as a tensor of the Open Inference Protocol.

    Return None for other values, and for ragged lists.
    """
    shape: list[int] = []
    flat = value
    while isinstance(flat, list) and flat and isinstance(flat[0], list):
        shape.append(len(flat[0]))
        if any(not isinstance(row, list) or len(row) != len(flat[0]) for row in flat):
            return None
        flat = [number for row in flat for number in row]
    if (
        not isinstance(flat, list)
        or not flat
        or any(isinstance(number, bool) or not isinstance(number, int | float) for number in flat)
    ):
        return None
    datatype = "INT64" if all(isinstance(number, int) for number in flat) else "FP32"
    return {"name": "input-0", "shape": [len(value), *shape], "datatype": datatype, "data": flat}


def _json_of(payload: Payload) -> Any:
    """Return the value of a JSON body, or None."""
    if payload.content_type is not None and "json" not in payload.content_type:
        return None
    try:
        return json.loads(payload.body)
    except (ValueError, RecursionError):
        return None


def _refuse_version(protocol: str, version: str | None) -> None:
    if version:
        raise UsageError(
            f"{protocol} has no way to name a version; leave --version out, or choose another"
            " --protocol"
        )


def _path(*segments: str) -> str:
    return "".join(f"/{quote(segment, safe='')}" for segment in segments)


def _to_json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
