"""The conversion of requests to tensors, and of the model's outputs to responses.

A body is a .npy file or JSON:

- a row or a list of rows, alone or under `data` or `inputs`,
- `{"instances": [rows]}`, or a table of MLflow's clients; the response is `{"predictions": [...]}`,
- tensors of the Open Inference Protocol, which the response has too.

A model with several inputs takes them by name.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch

# torch.export shapes its results with these.
from torch.utils._pytree import tree_leaves, tree_map

from tsx_runtime.worker.codecs.responses import is_device_lost, is_out_of_resources
from tsx_runtime.worker.codecs.v2_binary import (
    DEFAULT_OUTPUT_NAME,
    DTYPES,
    OutputRequest,
    as_response,
    output_request_of_json,
    parse_output_request,
)
from tsx_runtime.worker.codecs.v2_json import MalformedTensors, read_input
from tsx_runtime.worker.exceptions import error_text, form_advice, quote_field_names
from tsx_runtime.worker.handler_api.context import Context
from tsx_runtime.worker.handlers.models.input_spec import InputSpec
from tsx_runtime.worker.handlers.steps.labels import map_class_to_label

# Forms of a response: the output itself, {"predictions": ...}, or tensors for an encoder.
PLAIN, PREDICTIONS, TENSORS = "plain", "predictions", "tensors"
SPLIT, RECORDS = "dataframe_split", "dataframe_records"
NPY = b"\x93NUMPY"
IMAGES = {b"\x89PNG": "a PNG", b"\xff\xd8\xff": "a JPEG", b"GIF8": "a GIF", b"RIFF": "a WebP"}
INSTANCES = 'Send JSON of the form {"instances": [rows]}.'
# The forms of a request, by envelope.
FORMS = {
    "": (
        'Send JSON: one row or a list of rows, {"instances": [rows]}, {"inputs": ...}, {"data":'
        " ...} or tensors of the Open Inference Protocol; or a .npy file."
    ),
    "json": INSTANCES,
    "kserve": INSTANCES,
    "kservev2": "Send tensors of the Open Inference Protocol.",
}


@dataclass(frozen=True)
class TensorRequest:
    """A request as tensors.

    Attributes:
        inputs: The tensors, rows first.
        single: Whether the request and its response are a single row.
        form: The form of the response; an OutputRequest belongs to the Open Inference Protocol.
        ambiguous: Whether `single` is a guess, which only the model can confirm.
    """

    inputs: tuple[torch.Tensor, ...]
    single: bool
    form: str | OutputRequest = PLAIN
    ambiguous: bool = False

    @property
    def shape(self) -> list[int]:
        """The shape in which the first input was sent."""
        return list(self.inputs[0].shape[1:] if self.single else self.inputs[0].shape)

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(self.inputs[0])

    def otherwise(self) -> TensorRequest:
        """Return the request with its numbers read as one row instead of several, or vice versa."""
        inputs = tuple(tensor[0] if self.single else tensor[None] for tensor in self.inputs)
        return TensorRequest(inputs, not self.single, self.form)


class UnusableRows(Exception):
    """The errors of single requests, by position."""

    def __init__(self, errors: dict[int, Exception]) -> None:
        super().__init__(str(errors))
        self.errors = errors


@dataclass
class TensorBatch:
    """The requests of a batch, and after the call the model's output for each."""

    requests: list[TensorRequest]
    outputs: Sequence[Any] = ()

    def run(self, call: Callable[..., Any], joinable: dict[Any, bool]) -> TensorBatch:
        """Run the model for all requests; requests with equal shapes run in one call.

        Args:
            call: The model.
            joinable: Whether the outputs have a row for each input row, by kind of input. This
                method fills it in.

        Raises:
            UnusableRows: The model failed for some requests. Errors of the device, and a lack of
                memory, are raised as they are.
        """
        requests, outputs, errors = list(self.requests), dict[int, Any](), dict[int, Exception]()
        for positions in _joinable_positions(requests):
            try:
                outputs.update(
                    zip(
                        positions,
                        _run(call, [requests[position] for position in positions], joinable),
                        strict=True,
                    )
                )
                continue
            except Exception as error:
                if is_out_of_resources(error) or is_device_lost(error):
                    raise
                if len(positions) == 1:
                    errors[positions[0]] = error
            for position in positions:
                try:
                    requests[position], outputs[position] = _run_alone(call, requests[position])
                    errors.pop(position, None)
                except Exception as error:  # The error becomes the response to this request.
                    if is_out_of_resources(error) or is_device_lost(error):
                        raise
                    errors.setdefault(position, error)
        if errors:
            raise UnusableRows(errors)
        return TensorBatch(requests, [outputs[position] for position in range(len(requests))])

    def answers(self, context: Context, names: Mapping[str, str] | None = None) -> list[Any]:
        """Return a response for each request; `names` are the names of the classes."""
        return [
            answer_of(request, output, context, names)
            for request, output in zip(self.requests, self.outputs, strict=True)
        ]


def read_request(row: Any, specs: Sequence[InputSpec]) -> TensorRequest:
    """Read the request in a row of a handler's data.

    Raises:
        MalformedTensors: The row has no tensors that the model accepts.
    """
    values, form, is_row = _content(row)
    if len(values) == 1 and len(specs) == 1:
        values = {specs[0].name: next(iter(values.values()))}
    elif len(specs) > 1 or specs[0].certain:
        names = [spec.name for spec in specs]
        if len(values) != len(names):
            raise MalformedTensors(
                f"The model takes {len(names)} inputs ({', '.join(names)}); the request has"
                f" {len(values)}."
            )
        values = (
            {name: values[name] for name in names}
            if set(names) == set(values)
            else dict(zip(names, values.values(), strict=True))
        )
    inputs = tuple(
        map(_tensor, values.values(), (*specs, *[InputSpec()] * (len(values) - len(specs))))
    )
    single, ambiguous = _is_single(inputs[0], specs[0], is_row)
    if single:
        inputs = tuple(tensor[None] for tensor in inputs)
    for tensor, spec in zip(inputs, specs, strict=False):
        if spec.certain and not spec.fits(tensor.shape[1:]):
            shape = list(tensor.shape[1:] if single else tensor.shape)
            raise MalformedTensors(
                "The request has the shape"
                f" {shape}{f' for the input {spec.name!r}' if len(specs) > 1 else ''}."
            )
    if any(len(tensor) != len(inputs[0]) for tensor in inputs):
        raise MalformedTensors(
            "The inputs have different numbers of rows:"
            f" {', '.join(str(len(tensor)) for tensor in inputs)}."
        )
    if not len(inputs[0]):
        raise MalformedTensors("The request has no rows.")
    return TensorRequest(inputs, single, form, ambiguous)


def answer_of(
    request: TensorRequest, output: Any, context: Context, names: Mapping[str, str] | None = None
) -> Any:
    """Convert the model's output to the response, in the form of the request."""
    if request.form in (PLAIN, PREDICTIONS):
        if request.single:
            row = _numbers(_row(output, 0, 1))
            return _named(row, names) if names else row
        rows = output.tolist() if isinstance(output, torch.Tensor) else _rows(output, request.rows)
        if names and isinstance(rows, list):
            rows = [_named(row, names) for row in rows]
        return {"predictions": rows} if request.form == PREDICTIONS else rows
    if isinstance(output, list | tuple):
        output = {f"{DEFAULT_OUTPUT_NAME}-{number}": value for number, value in enumerate(output)}
    if request.single:
        output = _row(output, 0, 1)
    if not isinstance(request.form, OutputRequest):
        return output
    response = as_response(output, request.form)
    outputs = [
        {**tensor, "data": tensor["data"].ravel().tolist()} for tensor in response["outputs"]
    ]
    version = (context.manifest.get("model") or {}).get("modelVersion", "")
    id = {"id": request.form.id} if request.form.id else {}
    return {"model_name": context.model_name, "model_version": version, **id, "outputs": outputs}


def reason_of(error: Exception) -> str:
    """Return the reason of a model's error, without TorchScript's traceback."""
    lines = error_text(error).strip().splitlines() or [type(error).__name__]
    return (
        lines[-1].removeprefix("RuntimeError: ") if "TorchScript" in lines[0] else lines[0]
    ).rstrip(".")


# Requests


def _content(row: Any) -> tuple[dict[str, Any], str | OutputRequest, bool | None]:
    """Return the values by name, the form of the response, and whether they are a single row.

    The last item is None if the form of the request does not tell.
    """
    if not isinstance(row, dict):  # an instance of an envelope
        return (
            _of_json(row, is_row=True)
            if isinstance(row, list)
            else _of_json(_parsed(row), is_row=None)
        )
    if "datatype" in row and "shape" in row:  # a tensor of the envelope kservev2
        return {"": _typed(read_input(row))}, TENSORS, False
    arrays = {name: value for name, value in row.items() if isinstance(value, np.ndarray)}
    # The protocol's binary form has each tensor under its name, and the first again as the body.
    if arrays:
        named = {name: value for name, value in arrays.items() if name != "body"}
        return named or arrays, TENSORS, False
    for name in ("data", "body"):
        if row.get(name) is not None:
            row[name] = _parsed(row[name])
            return _of_json(row[name], is_row=None)
    if not row:
        raise MalformedTensors("The request is empty.")
    if advice := form_advice(row):
        raise MalformedTensors(
            f"The fields of the form ({quote_field_names(row)}) have no value.{advice}"
        )
    return {name: _parsed(value) for name, value in row.items()}, PLAIN, None


def _parsed(value: Any) -> Any:
    """Parse a body as JSON or as a .npy file.

    Raises:
        MalformedTensors: The body is neither.
    """
    if isinstance(value, bytes | bytearray | memoryview):
        raw = bytes(value)
        if raw.startswith(NPY):
            try:
                return np.load(io.BytesIO(raw), allow_pickle=False)
            except (
                ValueError,
                OSError,
                EOFError,
                SyntaxError,
                TypeError,
                OverflowError,
                MemoryError,
            ) as error:
                raise MalformedTensors(f"The .npy file cannot be read: {error}.") from error
        if kind := next((kind for start, kind in IMAGES.items() if raw.startswith(start)), None):
            raise MalformedTensors(
                f"The body is {kind} image, and this model takes numbers (--handler"
                " image_classifier takes images)."
            )
        value = raw
    if not isinstance(value, str | bytes):
        return value
    if not value.strip():
        raise MalformedTensors("The body is empty.")
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise MalformedTensors(f"The body is not JSON: {error}.") from error


def _of_json(
    value: Any, *, is_row: bool | None
) -> tuple[dict[str, Any], str | OutputRequest, bool | None]:
    if not isinstance(value, dict):
        return {"": value}, PLAIN, is_row
    if "instances" in value:
        instances = value["instances"]
        if not isinstance(instances, list):
            raise MalformedTensors('"instances" must be a list of rows.')
        if instances and all(isinstance(instance, dict) for instance in instances):
            names = list(instances[0])
            if any(set(instance) != set(names) for instance in instances):
                raise MalformedTensors('All "instances" must have the same names.')
            return (
                {name: [instance[name] for instance in instances] for name in names},
                PREDICTIONS,
                False,
            )
        return {"": instances}, PREDICTIONS, False
    for name in ("inputs", "data"):
        if name in value:
            return (
                _of_inputs(value, value[name])
                if name == "inputs"
                else _of_json(value[name], is_row=is_row)
            )
    if SPLIT in value or RECORDS in value:
        return {"": _of_table(value)}, PREDICTIONS, False
    if not value:
        raise MalformedTensors("The request is empty.")
    return value, PLAIN, is_row


def _of_inputs(
    request: dict[str, Any], inputs: Any
) -> tuple[dict[str, Any], str | OutputRequest, bool | None]:
    """Read the value of `inputs`: tensors of the Open Inference Protocol, or rows."""
    if not (
        isinstance(inputs, list)
        and inputs
        and all(isinstance(entry, dict) and "datatype" in entry for entry in inputs)
    ):
        return _of_json(inputs, is_row=None)
    tensors = [read_input(entry) for entry in inputs]
    # The worker encodes binary responses itself.
    form = TENSORS if output_request_of_json(request) is not None else parse_output_request(request)
    return {str(tensor["name"]): _typed(tensor) for tensor in tensors}, form, None


def _of_table(request: dict[str, Any]) -> list[Any]:
    """Return the rows of `dataframe_split` or `dataframe_records`."""
    split, records = request.get(SPLIT), request.get(RECORDS)
    if isinstance(split, dict) and isinstance(split.get("data"), list):
        return list(split["data"])
    if isinstance(records, list) and all(
        isinstance(record, dict) and set(record) == set(records[0]) for record in records
    ):
        return [[record[name] for name in records[0]] for record in records]
    raise MalformedTensors(
        f'"{SPLIT}" has "columns" and "data", a list of rows; "{RECORDS}" is a list of objects with'
        " the same names."
    )


def _typed(tensor: dict[str, Any]) -> Any:
    """Convert the data of a protocol's tensor to its datatype."""
    data, datatype = tensor["data"], tensor["datatype"]
    if isinstance(data, np.ndarray) or datatype not in DTYPES:
        return data
    try:
        return np.array(data, DTYPES[datatype])
    except (ValueError, TypeError, OverflowError) as error:
        raise MalformedTensors(
            f"The data of {tensor['name']!r} is not {datatype}: {error}."
        ) from error


def _tensor(value: Any, spec: InputSpec) -> torch.Tensor:
    """Convert a value to a tensor of the model's dtype.

    If this dtype is unknown, the tensor keeps the request's dtype, or float32 by default.
    """
    typed = isinstance(value, np.ndarray)
    try:
        tensor = torch.from_numpy(_usable(value)) if typed else torch.tensor(value)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise MalformedTensors(
            f"The values cannot be read as numbers in lists of equal lengths: {error}."
        ) from error
    wanted = spec.dtype
    if tensor.is_complex() and wanted is not None and not wanted.is_complex:
        raise MalformedTensors(
            f"These are complex numbers, and the model takes {str(wanted).removeprefix('torch.')}."
        )
    if wanted is None:
        return tensor if typed and tensor.dtype != torch.float64 else tensor.float()
    if tensor.is_floating_point() and not wanted.is_floating_point:
        if not spec.certain:
            return tensor.float()  # The dtype of the spec is only a guess.
        if not torch.equal(tensor, tensor.trunc()):
            raise MalformedTensors(f"The request has fractions, and the model takes {spec.kind}.")
    return tensor.to(wanted)


def _usable(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return a writable copy in the byte order of this machine."""
    return np.array(array, dtype=array.dtype.newbyteorder("="), order="C", copy=True).view(
        np.ndarray
    )


def _is_single(tensor: torch.Tensor, spec: InputSpec, is_row: bool | None) -> tuple[bool, bool]:
    """Tell whether the request is one row, and whether that is a guess."""
    if is_row is False:
        return False, False
    if spec.fits(tensor.shape):
        return True, False
    if tensor.ndim and spec.fits(tensor.shape[1:]):
        return False, False
    if spec.certain and spec.shape is not None:
        return tensor.ndim <= len(spec.shape), False
    single = is_row or tensor.ndim < 2
    return single, tensor.ndim > 0


# The model


def _joinable_positions(requests: Sequence[TensorRequest]) -> Iterable[list[int]]:
    """Return groups of positions whose requests fit into one batch."""
    groups: dict[Any, list[int]] = {}
    for position, request in enumerate(requests):
        groups.setdefault(
            tuple((tensor.dtype, tensor.shape[1:]) for tensor in request.inputs), []
        ).append(position)
    return groups.values()


def _run(
    call: Callable[..., Any], requests: Sequence[TensorRequest], joinable: dict[Any, bool]
) -> list[Any]:
    """Return the model's output for each request."""
    first = requests[0]
    kind = tuple((tensor.dtype, tensor.ndim) for tensor in first.inputs)
    if len(requests) == 1 or not joinable.get(kind, True):
        return [call(*request.inputs) for request in requests]
    columns = [
        torch.cat(inputs) for inputs in zip(*(request.inputs for request in requests), strict=True)
    ]
    output = call(*columns)
    is_rows = all(_has_rows(leaf, len(columns[0])) for leaf in tree_leaves(output))
    # A constant output may have this number of rows by chance, so another call checks it.
    if kind not in joinable:
        joinable[kind] = is_rows and all(
            _has_rows(leaf, first.rows) for leaf in tree_leaves(call(*first.inputs))
        )
    if not is_rows or not joinable[kind]:  # The output does not have a row for each input row.
        return [call(*request.inputs) for request in requests]
    ends = list(accumulate(request.rows for request in requests))
    parts = [slice(end - request.rows, end) for end, request in zip(ends, requests, strict=True)]
    return [tree_map(lambda leaf, part=part: leaf[part], output) for part in parts]


def _run_alone(call: Callable[..., Any], request: TensorRequest) -> tuple[TensorRequest, Any]:
    """Run the model for one request.

    If this fails and the request is ambiguous, it is read in the other way and run again.
    """
    try:
        return request, call(*request.inputs)
    except Exception:
        if not request.ambiguous:
            raise
    alternative = request.otherwise()
    return alternative, call(*alternative.inputs)


# Answers


def _has_rows(leaf: Any, count: int) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.ndim > 0 and len(leaf) == count


def _row(output: Any, position: int, count: int) -> Any:
    return tree_map(lambda leaf: leaf[position] if _has_rows(leaf, count) else leaf, output)


def _rows(output: Any, count: int) -> list[Any]:
    return [_numbers(_row(output, position, count)) for position in range(count)]


def _named(row: Any, names: Mapping[str, str]) -> Any:
    """Return the scores of a row by class name, if the row has one score for each name."""
    if (
        isinstance(row, list)
        and len(row) == len(names) == len({*names.values()})
        and isinstance(row[0], float)
    ):
        return map_class_to_label([row], names)[0]
    return row


def _numbers(output: Any) -> Any:
    return tree_map(lambda leaf: leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf, output)
