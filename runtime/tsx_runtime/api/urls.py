"""The mapping of URLs to models, with one parser for both lanes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from itertools import pairwise
from typing import NamedTuple
from urllib.parse import parse_qs, quote

from python_multipart.multipart import parse_options_header

from tsx_runtime.api import openai
from tsx_runtime.api.errors import NOT_FOUND
from tsx_runtime.api.headers import JSON, Pair, shown_headers
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.core.scheduling.job import Headers, Route
from tsx_runtime.core.traffic.routing import resolve_label
from tsx_runtime.errors import BadRequest, ModelNotFound, PayloadTooLarge, ResourceNotFound
from tsx_runtime.wire import OPENAI_HEADER, TENSORS_HEAD, V2_HEADER, Body, Parts

_EXPLAIN: Pair = (b"explain", b"True")
_PREDICT: Pair = (b"explain", b"False")
_MULTIPART = b"multipart/form-data"
_FORMS = (_MULTIPART, b"application/x-www-form-urlencoded")
_FIELD = b"model_name"
# A query string or form with more fields is not searched for the model's name.
MAX_FIELDS = 1000
# Longer headers are not parsed: a content type, or the headers of a part of a form.
MAX_HEAD_BYTES = 4096
# These paths need no token, because probes call them and they reveal nothing about models.
HEALTH_PATHS = frozenset({"/v2/health/live", "/v2/health/ready"})
# First segments of the server's own paths. Those of features belong to them even if a feature is
# missing, so that a path of a plugin or of a model means the same on every server.
RESERVED_PATHS = {
    "predictions",
    "explanations",
    "invocations",
    "wfpredict",
    "models",
    "workflows",
    "v1",
    "v2",
    "metrics",
    "token",
    "debug",
    "mcp",
    "ui",
    "jobs",
    "feedback",
}
RESERVED_PATHS |= {"ping", "livez", "readyz", "api-description", "openapi.json", "docs"}
# The segment in place of the version that marks a stored response; no model is run.
PRECOMPUTED = "precomputed"
_PRINTABLE = "".join(chr(code) for code in range(0x20, 0x7F))


class Target(NamedTuple):
    """The model that a URL addresses; without a name, the only model (`/invocations`)."""

    name: str | None
    version: str | None = None
    headers: tuple[Pair, ...] = ()  # headers that the route adds for the handler
    json: bool = False  # whether a body without a content type is JSON
    query: bool = False  # whether the parameters of the query string are inputs
    # Whether an unknown version is an error. Otherwise the default one is used, as in TorchServe.
    strict: bool = True
    in_body: bool = False  # whether the body names the model, as in OpenAI's API (`with_model`)


def check_query(query: bytes) -> None:
    """Check a query string before it is parsed.

    Raises:
        BadRequest: It has too many parameters.
    """
    if query.count(b"&") >= MAX_FIELDS:
        raise BadRequest(
            f"The query string has {query.count(b'&') + 1} parameters; at most {MAX_FIELDS} are"
            " read."
        )


def without_empty(query: bytes) -> bytes:
    """Return a query string without empty parameters, which TorchServe ignores."""
    return b"&".join(pair for pair in query.split(b"&") if pair.partition(b"=")[2])


def runs_model(path: str) -> bool:
    try:
        return find_target(path) is not None
    except ResourceNotFound:
        return True  # The route's error tells what is missing.


def find_target(path: str, query: bytes = b"") -> Target | None:
    """Return the target of a percent-decoded path, or None if it runs no model.

    Raises:
        ResourceNotFound: The name of the model is missing.
        BadRequest: The query string has too many parameters.
    """
    if path.startswith(("/predictions/", "/explanations/")):
        return _from_predictions(path)
    if path in openai.PATHS:
        headers = ((b"url_path", openai.PATHS[path]), OPENAI_HEADER, _PREDICT)
        return Target(None, headers=headers, json=path[1:] != openai.TRANSCRIPTIONS, in_body=True)
    if path.startswith("/v1/models/"):
        return _from_kserve_v1(path)
    if path.startswith("/v2/models/"):
        return _from_kserve_v2(path)
    if path in ("/invocations", "/invocations/"):
        check_query(query)
        names = parse_qs(query.decode("latin-1")).get("model_name", []) if query else []
        return Target(names[-1] if names else None, query=True)
    if path.endswith("/invoke"):
        return _from_sagemaker(path)
    return _from_legacy(path) if path.endswith("/predict") else None


def resolve(registry: Registry, target: Target, headers: Headers = ()) -> Route:
    """Return the route of a target.

    Raises:
        ModelNotFound: No model has this name.
        ModelVersionNotFound: The model has no such version.
        BadRequest: The target has no name, and the server does not have exactly one model.
    """
    if target.name is None:
        return registry.route(_only_model(registry), None, headers)
    if target.strict or target.version is None:
        return registry.route(target.name, target.version, headers)
    model = registry.models.get(target.name)
    known = (
        model is not None
        and resolve_label(target.version, model.versions, model.labels) in model.versions
    )
    return registry.route(target.name, target.version if known else None, headers)


def model_in_body(target: Target, headers: Headers, body: Body) -> openai.ModelName:
    """Return the model that the body names; the name is empty if the body has none.

    Raises:
        BadRequest: The body has the wrong format.
        PayloadTooLarge: The form has too many fields.
    """
    if target.json and not is_form(headers):
        text = openai.model_in_json(body)
    elif target.json:
        raise BadRequest("Send the body as JSON, with the header Content-Type: application/json.")
    elif not _is_multipart(_content_type(headers)):
        raise BadRequest(
            "Send the audio as multipart/form-data, with the fields 'file' and 'model'."
        )
    else:
        text = model_in_form(
            headers, b"".join(body.pieces) if isinstance(body, Parts) else bytes(body), b"model"
        )
    return openai.split_name(text or "")


def with_model(registry: Registry, target: Target, headers: Headers, body: Body) -> Target:
    """Return a target with the name and the version that the body names.

    Raises:
        BadRequest: The body has the wrong format, or names no model although there are several.
        ModelNotFound: No model has this name.
        PayloadTooLarge: The form has too many fields.
    """
    named_model = model_in_body(target, headers, body)
    try:
        if named_model.name:
            registry.find(named_model.name)
        return target._replace(
            name=named_model.name or _only_model(registry), version=named_model.version
        )
    except (ModelNotFound, BadRequest) as error:
        problem = (
            error.message.removesuffix(".")
            if named_model.name
            else "Name the model in the field 'model'"
        )
        stop = "" if problem.endswith("?") else "."
        raise type(error)(
            f"{problem}{stop} Models here: {openai.name_list(registry.names) or 'none'}."
        ) from None


def _from_predictions(path: str) -> Target | None:
    segments = path.split("/", 4)  # "", predictions, model, version, remaining path
    if segments[3:4] == [PRECOMPUTED] and segments[1] == "predictions" and len(segments) == 5:
        return None
    if not segments[2]:
        raise ResourceNotFound(f"{NOT_FOUND} The path names no model: /{segments[1]}/MODEL.")
    version = (segments[3] or None) if len(segments) > 3 else None
    remaining = segments[4] if len(segments) > 4 else ""
    return Target(
        segments[2],
        version,
        (
            (b"url_path", url_path(remaining)),
            _EXPLAIN if segments[1] == "explanations" else _PREDICT,
        ),
    )


def _from_kserve_v1(path: str) -> Target | None:
    model, colon, verb = path[len("/v1/models/") :].rpartition(":")
    return _kserve(model, verb) if colon and verb in ("predict", "explain") else None


def _from_kserve_v2(path: str) -> Target | None:
    model, slash, verb = path[len("/v2/models/") :].rpartition("/")
    target = _kserve(model, verb) if slash and verb in ("infer", "explain") else None
    return target and target._replace(headers=(*target.headers, V2_HEADER), json=True)


def _from_sagemaker(path: str) -> Target | None:
    """Return the target of `/models/MODEL/invoke`, SageMaker's path for several models."""
    segments = path.split("/")
    return (
        Target(segments[2], query=True)
        if len(segments) == 4 and segments[1] == "models" and segments[2]
        else None
    )


def _from_legacy(path: str) -> Target | None:
    """Return the target of `/MODEL/predict` or `/MODEL/VERSION/predict`, TorchServe's old paths."""
    _, model, *remaining = path.split("/")
    if not model or model in RESERVED_PATHS or len(remaining) not in (1, 2) or not remaining[0]:
        return None
    return Target(model, remaining[0] if len(remaining) == 2 else None, query=True)


def _kserve(model: str, verb: str) -> Target | None:
    name, _, version = model.partition("/versions/")
    if not name or "/" in name or "/" in version:
        return None
    return Target(
        name, version or None, (_EXPLAIN if verb == "explain" else _PREDICT,), strict=False
    )


def _only_model(registry: Registry) -> str:
    """Return the only model, or the only one that was loaded at the start."""
    models = registry.models
    names = list(models)
    if len(names) > 1:
        names = [
            name
            for name, model in models.items()
            if any(version.loaded_at_startup for version in model.versions.values())
        ]
    if len(names) != 1:
        raise BadRequest("Parameter model_name is required.")
    return names[0]


def url_path(remaining: str) -> bytes:
    """Return the path after the version as a header's value, percent-encoded if necessary."""
    return (
        remaining.encode()
        if remaining.isascii() and remaining.isprintable()
        else quote(remaining, safe=_PRINTABLE).encode()
    )


def with_headers(headers: list[Pair], target: Target, hidden: Collection[bytes] = ()) -> list[Pair]:
    """Return the visible headers; the target's replace those of the client with the same name."""
    target_headers = target.headers
    if target.json and not any(
        name.lower() in (b"content-type", TENSORS_HEAD) for name, _ in headers
    ):
        target_headers = (*target_headers, JSON)
    names = {*hidden, *(name for name, _ in target_headers)}
    return [*shown_headers(headers, names), *target_headers]


def is_form(headers: Headers) -> bool:
    return any(
        name == b"content-type" and value.lower().startswith(_FORMS) for name, value in headers
    )


def model_in_form(headers: Headers, body: bytes, field: bytes = _FIELD) -> str | None:
    """Return the last value of the field that names the model in a form, or None.

    The fields are counted, and only this field is parsed. The worker reports other errors.

    Raises:
        PayloadTooLarge: The form has too many fields.
    """
    content_type = _content_type(headers)
    model = None
    for value in (
        _values_in_parts(content_type, body, field)
        if _is_multipart(content_type)
        else _values_in_pairs(body)
    ):
        model = value
    return None if model is None else model.decode("utf-8", "replace")


def field_counter(headers: list[Pair]) -> Callable[[bytes], None]:
    """Return a function that counts a form's fields part by part, and raises PayloadTooLarge.

    A form with too many fields would be refused later, so the server need not hold it in memory.
    A separator that spans two parts is not counted.
    """
    content_type = _content_type(headers)
    boundary = _option(content_type, b"boundary")
    separators = (
        [b"&", b";"]
        if not _is_multipart(content_type)
        else [b"\r\n--" + boundary]
        if boundary
        else []
    )
    count = 0

    def add(part: bytes) -> None:
        nonlocal count
        count += sum(part.count(separator) for separator in separators)
        _check_fields(count)

    return add


def _content_type(headers: Headers) -> bytes:
    return next((value for name, value in headers if name == b"content-type"), b"")


def _is_multipart(content_type: bytes) -> bool:
    return content_type.lower().startswith(_MULTIPART)


def _values_in_parts(content_type: bytes, body: bytes, field: bytes) -> Iterator[bytes]:
    boundary = _option(content_type, b"boundary")
    if not boundary:
        return
    separator = b"--" + boundary
    starts = [0] if body.startswith(separator) else []
    starts += [position + 2 for position in _positions(body, b"\r\n" + separator, MAX_FIELDS)]
    _check_fields(len(starts))
    for start, end in pairwise([*starts, len(body) + 2]):
        part = body[start + len(separator) : min(end - 2, start + len(separator) + MAX_HEAD_BYTES)]
        head, _, value = part.partition(b"\r\n\r\n")
        for line in head.split(b"\r\n"):
            name, _, disposition = line.partition(b":")
            if name.strip().lower() != b"content-disposition" or field not in disposition:
                continue
            if _option(disposition, b"name") == field and _option(disposition, b"filename") is None:
                yield value


def _values_in_pairs(body: bytes) -> Iterator[bytes]:
    ends = sorted([*_positions(body, b"&", MAX_FIELDS), *_positions(body, b";", MAX_FIELDS)])
    _check_fields(len(ends) + 1)
    start = 0
    for end in [*ends, len(body)]:
        name, _, value = body[start : min(end, start + MAX_HEAD_BYTES)].partition(b"=")
        if name == _FIELD:
            yield value
        start = end + 1


def _positions(body: bytes, separator: bytes, limit: int) -> Iterator[int]:
    """Yield at most `limit + 1` positions of a separator, so that the time is limited."""
    at = body.find(separator)
    for _ in range(limit + 1):
        if at < 0:
            return
        yield at
        at = body.find(separator, at + len(separator))


def _check_fields(count: int) -> None:
    if count > MAX_FIELDS:
        text = (
            f"The form has more than {MAX_FIELDS} fields, which are not searched for the model's"
            " name. Name it as ?model_name=NAME."
        )
        raise PayloadTooLarge(text)


def _option(header: bytes, name: bytes) -> bytes | None:
    return parse_options_header(header)[1].get(name) if len(header) <= MAX_HEAD_BYTES else None
