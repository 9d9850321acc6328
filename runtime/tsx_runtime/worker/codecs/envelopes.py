"""Envelopes: the wrapping of requests and responses that a protocol prescribes.

A request's envelope is removed before the handler runs, and the response's is added afterwards. The
setting `service_envelope` is `body`, `json`, `kserve` (KServe's version 1) or `kservev2` (the Open
Inference Protocol).

A request without the envelope gets a 400, and the others of its batch are answered without it.
TorchServe reads only the first request of a batch; here all are answered. The handler is called
once if each request holds one instance, and otherwise once for each request.

In a workflow only the first nodes remove the envelope, and only the last nodes add it. Other nodes
pass the handler's results on as rows of the next node, each one as bytes.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

from tsx_runtime.errors import PredictionFailed
from tsx_runtime.worker.codecs.json_text import JsonText, RelayedRows, to_compact_json
from tsx_runtime.worker.codecs.responses import encode_body
from tsx_runtime.worker.codecs.v2_json import MalformedTensors, output_tensor, read_input
from tsx_runtime.worker.exceptions import BadRows
from tsx_runtime.worker.handler_api.context import Context

Handle: TypeAlias = Callable[[Any, Context], Any]


class RequestRows(NamedTuple):
    """The rows of one request.

    A request of the Open Inference Protocol also has an id and the names of its tensors.
    """

    rows: list[Any]
    names: list[str] = []
    id: str | None = None


class BaseEnvelope:
    """A wrapper around a handler, `handle_fn(data, context)`, which may not be a coroutine."""

    def __init__(self, handle_fn: Handle) -> None:
        self._handle_fn = handle_fn

    def handle(self, data: Any, context: Context) -> Any:
        # A request for a description has no body.
        if context.get_request_header(0, "describe") == "True":
            return self._handle_fn(data, context)
        return self.answer([_row_content(row) for row in data], context)

    def answer(self, contents: list[Any], context: Context) -> Any:
        """Return the responses to the requests with these contents.

        The content of a request is its row's `data` or `body`, or the row itself without both.
        """
        raise NotImplementedError

    def _call(self, rows: list[Any], request_indexes: Sequence[int], context: Context) -> Any:
        """Return the handler's results for rows.

        Args:
            rows: The rows of all requests.
            request_indexes: The index of each row's request. If the handler refuses a row, its
                request is refused.
            context: The context of the handler.
        """
        try:
            return self._handle_fn(rows, context)
        except BadRows as error:
            if all(0 <= idx < len(request_indexes) for idx in error.faults):
                raise BadRows(
                    {request_indexes[idx]: fault for idx, fault in error.faults.items()},
                    error.error_code,
                ) from error
            raise


class BodyEnvelope(BaseEnvelope):
    """An envelope that gives the handler the bodies themselves instead of rows."""

    def answer(self, contents: list[Any], context: Context) -> Any:
        return self._call(contents, range(len(contents)), context)


class KServeEnvelope(BaseEnvelope):
    """`{"instances": [...]}` in, `{"predictions": [...]}` or `{"explanations": [...]}` out."""

    def answer(self, contents: list[Any], context: Context) -> Any:
        workflow_places = [context.workflow_place(idx) for idx in range(len(contents))]
        requests: list[RequestRows] = []
        faults: dict[int, str] = {}
        for idx, content in enumerate(contents):
            try:
                if workflow_places[idx] in ("inner", "last"):
                    requests.append(_read_parent_results(content))
                else:
                    document = _parse_body(content)
                    requests.append(self.read(document))
                    context.keep_parameters(idx, document)
            except MalformedTensors as error:
                faults[idx] = str(error)
            except RecursionError:
                faults[idx] = (
                    "The body is nested too deeply: write it with fewer levels of lists and"
                    " objects."
                )
        if faults:
            raise BadRows(faults)
        answers = []
        for idx, results in enumerate(self.results(requests, context)):
            if (
                workflow_places[idx] in ("first", "inner")
                and context.get_response_status(idx)[0] < 400
            ):
                answers.append(_relay_results(results, requests[idx], context))
            else:
                answers.append(self.write(_parse_json_texts(results), requests[idx], idx, context))
        return answers

    def read(self, document: Any) -> RequestRows:
        """Remove the envelope.

        Raises:
            MalformedTensors: The document does not have the protocol's form.
        """
        return RequestRows(_read_instances(document))

    def write(self, results: Any, request: RequestRows, idx: int, context: Context) -> Any:
        """Add the envelope."""
        return {
            (
                "explanations"
                if context.get_request_header(0, "explain") == "True"
                else "predictions"
            ): results
        }

    def results(self, requests: Sequence[RequestRows], context: Context) -> list[Any]:
        """Return the handler's results for each request."""
        requests_rows = [request.rows for request in requests]
        if len(requests_rows) == 1:
            return [
                (
                    self._call(requests_rows[0], [0] * len(requests_rows[0]), context)
                    if requests_rows[0]
                    else []
                )
            ]
        if all(len(rows) == 1 for rows in requests_rows):
            results = self._call(
                [rows[0] for rows in requests_rows], range(len(requests_rows)), context
            )
            _check_length(results, len(requests_rows), "requests")
            return [[result] for result in results]
        results = []
        for idx, rows in enumerate(requests_rows):
            with context.single_request(idx):
                results.append(self._call(rows, [idx] * len(rows), context) if rows else [])
        return results


class JSONEnvelope(KServeEnvelope):
    """`{"instances": [...]}` in, `{"predictions": [...]}` out.

    The handler gets the instances of all requests at once.
    """

    def results(self, requests: Sequence[RequestRows], context: Context) -> list[Any]:
        """Return the handler's results for each request, after one call for all instances."""
        request_indexes = [idx for idx, request in enumerate(requests) for _ in request.rows]
        results = (
            self._call(
                [row for request in requests for row in request.rows], request_indexes, context
            )
            if request_indexes
            else []
        )
        _check_length(results, len(request_indexes), "instances")
        remaining = iter(results)
        return [list(islice(remaining, len(request.rows))) for request in requests]

    def write(self, results: Any, request: RequestRows, idx: int, context: Context) -> Any:
        return _as_json_text({"predictions": results}, context.json_nan)


class KServev2Envelope(KServeEnvelope):
    """The Open Inference Protocol: `{"inputs": [tensors]}` in, `{"outputs": [tensors]}` out.

    The handler gets the inputs with nested `data`.
    """

    def read(self, document: Any) -> RequestRows:
        inputs = _read_inputs(document)
        return RequestRows(
            inputs, [entry["name"] for entry in inputs], str(document.get("id") or "") or None
        )

    def results(self, requests: Sequence[RequestRows], context: Context) -> list[Any]:
        """Return the handler's results for each request.

        The context gives handlers the tensor names and the id of the first request.
        """
        first_request = requests[0]
        context.input_names = first_request.names  # type: ignore[attr-defined]  # for handlers
        context.input_request_id = first_request.id or context.get_request_id(0)  # type: ignore[attr-defined]
        return super().results(requests, context)

    def write(self, results: Any, request: RequestRows, idx: int, context: Context) -> Any:
        return {
            "id": request.id or context.get_request_id(idx),
            "model_name": context.model_name,
            "model_version": (context.manifest.get("model") or {}).get("modelVersion"),
            "outputs": _output_tensors(results, request.names),
        }


ENVELOPES: dict[str, type[BaseEnvelope]] = {
    "body": BodyEnvelope,
    "json": JSONEnvelope,
    "kserve": KServeEnvelope,
    "kservev2": KServev2Envelope,
}


def _row_content(row: Any) -> Any:
    if not isinstance(row, dict):
        return row
    value = row.get("data")
    return row.get("body", row) if value is None else value


def _parse_json_texts(results: Any) -> Any:
    """Return the results, in which texts that are JSON are parsed."""
    return (
        [json.loads(value) if isinstance(value, JsonText) else value for value in results]
        if isinstance(results, list)
        else results
    )


def _relay_results(results: Any, request: RequestRows, context: Context) -> RelayedRows:
    """Return the results as rows for the next nodes of a workflow."""
    if not isinstance(results, list):
        raise PredictionFailed(
            f"The handler returned {type(results).__name__}, not a list with one entry for each"
            " row."
        )
    rows = [base64.b64encode(encode_body(value, context.json_nan)).decode() for value in results]
    return RelayedRows(json.dumps(request._replace(rows=rows)))


def _read_parent_results(content: Any) -> RequestRows:
    """Read the rows that the previous nodes of the workflow have sent.

    One previous node sends them as the `body`; several send them under their names.
    """
    results_by_node = content if isinstance(content, dict) else {"body": content}
    try:
        requests_by_node = {
            name: RequestRows(*json.loads(value)) for name, value in results_by_node.items()
        }
        rows = [
            {
                name: bytearray(base64.b64decode(row))
                for name, row in zip(requests_by_node, values, strict=True)
            }
            for values in zip(*(request.rows for request in requests_by_node.values()), strict=True)
        ]
    except (ValueError, TypeError) as error:
        text = (
            f"The nodes before this one ({', '.join(results_by_node)}) gave no rows, or different"
            f" numbers of them: {error}."
        )
        raise MalformedTensors(text) from error
    return next(iter(requests_by_node.values()))._replace(rows=rows)


def _parse_body(content: Any) -> Any:
    """Parse a body, unless it was decoded before.

    With `decode_input_request = false` or another content type, the body is still bytes or text.
    """
    if not isinstance(content, bytes | bytearray | str):
        return content
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise MalformedTensors(f"The body is not JSON: {error}") from error


def _read_instances(content: Any) -> list[Any]:
    instances = content.get("instances") if isinstance(content, dict) else None
    if not isinstance(instances, list):
        raise MalformedTensors(
            'The body must be JSON of the form {"instances": [...]}, with one entry for each input.'
        )
    return [_decode_b64(instance) for instance in instances]


def _decode_b64(value: Any) -> Any:
    """Return a value in which each {"b64": text} is replaced by the decoded bytes."""
    if isinstance(value, dict):
        if set(value) == {"b64"} and isinstance(value["b64"], str):
            try:
                return base64.b64decode(value["b64"])
            except (binascii.Error, ValueError) as error:
                raise MalformedTensors(
                    f'The text of a "b64" entry is not base64: {error}'
                ) from error
        return {name: _decode_b64(entry) for name, entry in value.items()}
    return (
        [_decode_b64(entry) for entry in value]
        if isinstance(value, list) and any(isinstance(entry, dict) for entry in value)
        else value
    )


def _read_inputs(content: Any) -> list[Any]:
    inputs = content.get("inputs") if isinstance(content, dict) else None
    if not isinstance(inputs, list) or not inputs:
        raise MalformedTensors(
            'The body must be JSON of the form {"inputs": [{"name", "shape", "datatype", "data"},'
            " ...]}."
        )
    return [read_input(entry) for entry in inputs]


def _output_tensors(results: Any, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the results as tensors with the names of the inputs; further ones are numbered."""
    if not isinstance(results, list):
        raise PredictionFailed(
            f"The handler returned {type(results).__name__}, not a list with one entry for each"
            " output."
        )
    return [
        output_tensor(names[idx] if idx < len(names) else f"output-{idx}", value)
        for idx, value in enumerate(results)
    ]


def _check_length(results: Any, expected: int, unit: str) -> None:
    if not isinstance(results, list) or len(results) != expected:
        description = (
            f"{len(results)}" if isinstance(results, list) else f"a {type(results).__name__}"
        )
        raise PredictionFailed(
            f"number of batch response mismatched, expect: {expected}, got: {description}; the"
            f" envelope held {expected} {unit}."
        )


def _as_json_text(value: Any, nan: str) -> JsonText:
    try:
        return JsonText(to_compact_json(value, nan))
    except (TypeError, ValueError, RecursionError) as error:
        raise PredictionFailed(
            f"Unsupported model output data type. The json envelope cannot write it: {error}"
        ) from error
