"""Envelopes: a protocol's wrapping of requests and answers, removed before the handler and added after it. Contract section 5.5.

`service_envelope` names one: `body`, `json`, `kserve` (KServe's version 1) or `kservev2` (the Open Inference Protocol). A request that is
not in its envelope's form is answered 400, and its neighbours without it. Where TorchServe reads only the first request of a batch, all
are answered: in one call of the handler where each holds one instance, else in one call each.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from tsx_runtime.errors import PredictionFailed
from tsx_runtime.worker.codecs.json_text import JsonText, to_compact_json
from tsx_runtime.worker.codecs.v2_json import MalformedTensors, output_tensor, read_input
from tsx_runtime.worker.exceptions import BadRows
from tsx_runtime.worker.handler_api.context import Context

Handle: TypeAlias = Callable[[Any, Context], Any]


class BaseEnvelope:
    """`handle_fn(data, context)` is the wrapped handler. It may not be a coroutine function."""

    def __init__(self, handle_fn: Handle) -> None:
        self._handle_fn = handle_fn

    def handle(self, data: Any, context: Context) -> Any:
        if _wants_description(context):
            return self._handle_fn(data, context)
        return self.answer([_opened(row) for row in data], context)

    def answer(self, contents: list[Any], context: Context) -> Any:
        """`contents`: the content of each request's row."""
        raise NotImplementedError

    def _call(self, rows: list[Any], owners: Sequence[int], context: Context) -> Any:
        """The handler's results for rows that belong to these requests; the rows that it refuses are refused as requests."""
        try:
            return self._handle_fn(rows, context)
        except BadRows as error:
            if all(0 <= idx < len(owners) for idx in error.faults):
                raise BadRows({owners[idx]: why for idx, why in error.faults.items()}, error.error_code) from error
            raise


class BodyEnvelope(BaseEnvelope):
    """The handler gets the bodies themselves, not rows that hold them."""

    def answer(self, contents: list[Any], context: Context) -> Any:
        return self._call(contents, range(len(contents)), context)


class JSONEnvelope(BaseEnvelope):
    """`{"instances": [...]}` in, the instances of all requests to the handler at once; `{"predictions": [...]}` out."""

    def answer(self, contents: list[Any], context: Context) -> Any:
        requests = read_all(contents, _instances)
        owners = [idx for idx, instances in enumerate(requests) for _ in instances]
        results = self._call([instance for instances in requests for instance in instances], owners, context) if owners else []
        _check_length(results, len(owners), "instances")
        rest = iter(results)
        return [_as_text({"predictions": [next(rest) for _ in instances]}, context.json_nan) for instances in requests]


class KServeEnvelope(BaseEnvelope):
    """`{"instances": [...]}` in, `{"predictions": [...]}` or `{"explanations": [...]}` out."""

    def answer(self, contents: list[Any], context: Context) -> Any:
        requests = read_all(contents, _instances)
        name = "explanations" if context.get_request_header(0, "explain") == "True" else "predictions"
        return [{name: results} for results in self.results(requests, context)]

    def results(self, requests: Sequence[list[Any]], context: Context) -> list[Any]:
        """The handler's results for each request."""
        if len(requests) == 1:
            return [self._call(requests[0], [0] * len(requests[0]), context) if requests[0] else []]
        if all(len(rows) == 1 for rows in requests):
            results = self._call([rows[0] for rows in requests], range(len(requests)), context)
            _check_length(results, len(requests), "requests")
            return [[result] for result in results]
        found = []
        for idx, rows in enumerate(requests):
            with context.only(idx):
                found.append(self._call(rows, [idx] * len(rows), context) if rows else [])
        return found


class KServev2Envelope(KServeEnvelope):
    """The Open Inference Protocol: `{"inputs": [tensors]}` in, the handler gets them with nested `data`; `{"outputs": [tensors]}` out."""

    def answer(self, contents: list[Any], context: Context) -> Any:
        requests = read_all(contents, _inputs)
        names = [[entry["name"] for entry in inputs] for inputs in requests]
        ids = [str(content.get("id") or context.get_request_id(idx)) for idx, content in enumerate(map(_json, contents))]
        context.input_names, context.input_request_id = names[0], ids[0]  # type: ignore[attr-defined]  # what handlers look for there
        model = context.manifest.get("model") or {}
        return [
            {
                "id": ids[idx],
                "model_name": context.model_name,
                "model_version": model.get("modelVersion"),
                "outputs": _outputs(results, names[idx]),
            }
            for idx, results in enumerate(self.results(requests, context))
        ]


ENVELOPES: dict[str, type[BaseEnvelope]] = {
    "body": BodyEnvelope,
    "json": JSONEnvelope,
    "kserve": KServeEnvelope,
    "kservev2": KServev2Envelope,
}


def read_all(contents: Sequence[Any], read: Callable[[Any], list[Any]]) -> list[list[Any]]:
    """What each request holds; raises `BadRows` for those that are not in the envelope's form."""
    found: list[list[Any]] = []
    faults: dict[int, str] = {}
    for idx, content in enumerate(contents):
        try:
            found.append(read(content))
        except MalformedTensors as error:
            faults[idx] = str(error)
        except RecursionError:
            faults[idx] = "The body is nested too deeply: write it with fewer levels of lists and objects."
    if faults:
        raise BadRows(faults)
    return found


def _wants_description(context: Context) -> bool:
    """A description is asked for without a body."""
    return bool(context.get_request_header(0, "describe") == "True")


def _opened(row: Any) -> Any:
    if not isinstance(row, dict):
        return row
    value = row.get("data")
    return row.get("body") if value is None else value


def _json(content: Any) -> Any:
    """Bodies that were not decoded (`decode_input_request = false`, or another content type) are parsed as JSON too."""
    if not isinstance(content, bytes | bytearray | str):
        return content
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise MalformedTensors(f"The body is not JSON: {error}") from error


def _instances(content: Any) -> list[Any]:
    content = _json(content)
    instances = content.get("instances") if isinstance(content, dict) else None
    if not isinstance(instances, list):
        raise MalformedTensors('The body must be JSON of the form {"instances": [...]}, with one entry for each input.')
    return [_decoded(instance) for instance in instances]


def _decoded(value: Any) -> Any:
    """With each {"b64": text} in it as the bytes that it stands for."""
    if isinstance(value, dict):
        if set(value) == {"b64"} and isinstance(value["b64"], str):
            try:
                return base64.b64decode(value["b64"])
            except (binascii.Error, ValueError) as error:
                raise MalformedTensors(f'The text of a "b64" entry is not base64: {error}') from error
        return {name: _decoded(entry) for name, entry in value.items()}
    return [_decoded(entry) for entry in value] if isinstance(value, list) and any(isinstance(entry, dict) for entry in value) else value


def _inputs(content: Any) -> list[Any]:
    content = _json(content)
    inputs = content.get("inputs") if isinstance(content, dict) else None
    if not isinstance(inputs, list) or not inputs:
        raise MalformedTensors('The body must be JSON of the form {"inputs": [{"name", "shape", "datatype", "data"}, ...]}.')
    return [read_input(entry) for entry in inputs]


def _outputs(results: Any, names: Sequence[str]) -> list[dict[str, Any]]:
    """The handler's results are tensors named as the inputs; what goes beyond those is numbered."""
    if not isinstance(results, list):
        raise PredictionFailed(f"The handler returned {type(results).__name__}, not a list with one entry for each output.")
    return [output_tensor(names[idx] if idx < len(names) else f"output-{idx}", value) for idx, value in enumerate(results)]


def _check_length(results: Any, expected: int, what: str) -> None:
    if not isinstance(results, list) or len(results) != expected:
        got = f"{len(results)}" if isinstance(results, list) else f"a {type(results).__name__}"
        raise PredictionFailed(f"number of batch response mismatched, expect: {expected}, got: {got}; the envelope held {expected} {what}.")


def _as_text(value: Any, nan: str) -> JsonText:
    try:
        return JsonText(to_compact_json(value, nan))
    except (TypeError, ValueError, RecursionError) as error:
        raise PredictionFailed(f"Unsupported model output data type. The json envelope cannot write it: {error}") from error
