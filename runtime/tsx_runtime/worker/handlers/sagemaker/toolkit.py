"""The handler for models in the layout of SageMaker's PyTorch toolkit.

It calls the user's functions as the toolkit documents them:

    pre_model_fn(model_dir)              once, before the model is loaded
    model_fn(model_dir)                  returns the model; default: the only .pt or .pth file
    model_warmup_fn(model_dir, model)    once, after the model is loaded
    input_fn(data, content_type)         for each request
    predict_fn(input, model)             for each request
    output_fn(prediction, accept)        for each request: returns the body, or body and type
    transform_fn(model, data, content_type, accept)
                                         replaces these three
    batch_predict_fn(inputs, model)      replaces predict_fn for a whole batch, only in tsx

With `independentRows: true` in model-config.yaml, predict_fn gets the rows of all requests at once.
Each function may take the context as a further argument. An error fails one request alone.
https://sagemaker.readthedocs.io/en/stable/frameworks/pytorch/using_pytorch.html
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from tsx_runtime.errors import TsxError, error_body
from tsx_runtime.shared.content_types import best_type
from tsx_runtime.worker.codecs.requests import media_type_of
from tsx_runtime.worker.codecs.responses import failure, is_out_of_device_memory
from tsx_runtime.worker.diagnostics.failures import log_failure
from tsx_runtime.worker.exceptions import LoadError, PredictionException, describe_error
from tsx_runtime.worker.handler_api.context import Context
from tsx_runtime.worker.handler_api.loader import import_file, own_file
from tsx_runtime.worker.handler_api.modules import own_modules
from tsx_runtime.worker.handlers.base import choose_device
from tsx_runtime.worker.handlers.models.model_files import load_model_file
from tsx_runtime.worker.handlers.sagemaker.formats import (
    JSON,
    LINES,
    TEXT_TYPES,
    to_body,
    to_tensor,
)
from tsx_runtime.worker.handlers.steps.tensor_requests import (
    TensorBatch,
    TensorRequest,
    UnusableRows,
)

WEIGHTS = (".pt", ".pth", ".pt2")
DEFAULT_NAMES = "model.pth", "model.pt"
FAILED = 500  # the status if a function fails
# The number of arguments of each function.
ARGUMENTS = {
    "pre_model_fn": 1,
    "model_fn": 1,
    "model_warmup_fn": 2,
    "input_fn": 2,
    "predict_fn": 2,
    "output_fn": 2,
}
ARGUMENTS |= {"transform_fn": 4, "batch_predict_fn": 2}

logger = logging.getLogger("tsx.worker")


class ToolkitRequest(NamedTuple):
    """The arguments that the functions get for a request."""

    data: Any
    content_type: str
    accept: str
    default: str  # the type of the response if the client accepts any type


class ToolkitHandler:
    """A handler that calls the functions of a program written for SageMaker's toolkit."""

    takes_raw_bodies = True  # `input_fn` decodes bodies itself.

    def __init__(self) -> None:
        self.model: Any = None
        self.device = torch.device("cpu")
        # The default type of a response.
        self._accepts = os.environ.get("SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT", "").strip()
        self._functions: dict[str, Callable[..., Any]] = {}
        self._rows_are_independent = False
        self._joinable: dict[Any, bool] = {}  # see `TensorBatch.run`

    def initialize(self, context: Context) -> None:
        """Import the program and load the model.

        Raises:
            LoadError: The program or the model cannot be used.
        """
        model_dir = str(context.system_properties["model_dir"])
        # The front end has checked that the level is valid.
        if level := os.environ.get("SAGEMAKER_CONTAINER_LOG_LEVEL", "").strip():
            logging.getLogger().setLevel(int(level) if level.isdigit() else level.upper())
        self.device = choose_device(context.system_properties.get("gpu_id"))
        self._functions = functions_of(
            _program(Path(model_dir), context.manifest.get("sagemaker") or {})
        )
        if "pre_model_fn" in self._functions:
            self._call("pre_model_fn", context, model_dir)
        self.model = (
            self._call("model_fn", context, model_dir)
            if "model_fn" in self._functions
            else self._load(Path(model_dir))
        )
        if "predict_fn" not in self._functions and isinstance(self.model, torch.nn.Module):
            self.model = self.model.to(self.device).eval()
        if "model_warmup_fn" in self._functions:
            self._call("model_warmup_fn", context, model_dir, self.model)
        self._rows_are_independent = context.model_yaml_config.get("independentRows") is True

    def handle(self, data: Sequence[Any], context: Context) -> list[Any]:
        requests = [self._request(row, index, context) for index, row in enumerate(data)]
        if "transform_fn" in self._functions:
            transform = partial(self._functions["transform_fn"], context, self.model)
            results = [
                self._guarded(
                    "transform_fn", transform, request.data, request.content_type, request.accept
                )
                for request in requests
            ]
        else:
            inputs = [
                self._guarded("input_fn", self._read, request, context) for request in requests
            ]
            results = [
                self._guarded("output_fn", self._written, prediction, request, context)
                for prediction, request in zip(
                    self._predictions(inputs, context), requests, strict=True
                )
            ]
        return [
            self._answer(result, index, request, context)
            for index, (result, request) in enumerate(zip(results, requests, strict=True))
        ]

    # The steps

    def _request(self, row: dict[str, Any], index: int, context: Context) -> ToolkitRequest:
        headers = context.get_all_request_header(index)
        content_type, accept = headers.get("content-type") or JSON, headers.get("accept") or ""
        data = row.get("body", row)
        if isinstance(data, bytes | bytearray):
            data = (
                data.decode("utf-8", "replace")
                if media_type_of(content_type) in TEXT_TYPES
                else bytes(data)
            )
        default = self._accepts or (LINES if media_type_of(content_type) == LINES else JSON)
        return ToolkitRequest(
            data, content_type, default if accept.strip() in ("", "*/*") else accept, default
        )

    def _read(self, request: ToolkitRequest, context: Context) -> Any:
        if "input_fn" in self._functions:
            return self._call("input_fn", context, request.data, request.content_type)
        return to_tensor(request.data, request.content_type).to(self.device)

    def _predictions(self, inputs: list[Any], context: Context) -> list[Any]:
        """Return a prediction for each input; failures among the inputs are kept."""
        positions = [
            index for index, value in enumerate(inputs) if not isinstance(value, _FunctionFailure)
        ]
        results = list(inputs)
        usable = [inputs[index] for index in positions]
        if not usable:
            return results
        if "batch_predict_fn" in self._functions:
            predictions = list(self._call("batch_predict_fn", context, usable, self.model))
            if len(predictions) != len(usable):
                raise PredictionException(
                    f"batch_predict_fn got {len(usable)} inputs and returned {len(predictions)}"
                    " predictions.",
                    FAILED,
                )
        else:
            predictions = self._predict_all(usable, context)
        for index, prediction in zip(positions, predictions, strict=True):
            results[index] = prediction
        return results

    def _predict_all(self, inputs: list[Any], context: Context) -> list[Any]:
        """Predict for each input separately, or in one call if rows are independent."""
        is_table = [isinstance(value, torch.Tensor) and value.ndim > 1 for value in inputs]
        if self._rows_are_independent and len(inputs) > 1 and all(is_table):
            batch = TensorBatch([TensorRequest((rows,), single=False) for rows in inputs])
            with suppress(UnusableRows):  # On errors, each request is run separately below.
                return list(
                    batch.run(lambda rows: self._predict(rows, context), self._joinable).outputs
                )
        return [self._guarded("predict_fn", self._predict, value, context) for value in inputs]

    def _predict(self, value: Any, context: Context) -> Any:
        if "predict_fn" in self._functions:
            return self._call("predict_fn", context, value, self.model)
        # inference_mode would restrict what an output_fn can do with the tensor.
        with torch.no_grad():
            return self.model(value.to(self.device) if isinstance(value, torch.Tensor) else value)

    def _written(self, prediction: Any, request: ToolkitRequest, context: Context) -> Any:
        if isinstance(prediction, _FunctionFailure):
            return prediction
        if "output_fn" in self._functions:
            return self._call("output_fn", context, prediction, request.accept)
        return to_body(prediction, request.accept, request.default)

    def _answer(self, result: Any, index: int, request: ToolkitRequest, context: Context) -> Any:
        if isinstance(result, _FunctionFailure):
            return result.answer(index, context)
        named = [media_type_of(part) for part in request.accept.split(",") if "*" not in part]
        content_type = best_type(request.accept, [request.default, *named]) or request.default
        if isinstance(result, tuple) and len(result) == 2:
            result, content_type = result
        if context.get_response_content_type(index) is None:
            context.set_response_content_type(index, content_type)
        return result

    # The functions

    def _call(self, name: str, context: Context, *arguments: Any) -> Any:
        return self._functions[name](context, *arguments)

    def _guarded(self, name: str, act: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return act(*arguments)
        except Exception as error:  # the boundary to a user's code
            if is_out_of_device_memory(error):
                raise  # The worker retries with a smaller batch.
            return _FunctionFailure(name, error)

    def _load(self, model_dir: Path) -> Any:
        files = sorted(path for path in model_dir.iterdir() if path.suffix in WEIGHTS)
        default = [path for path in files if path.name in DEFAULT_NAMES]
        if len(files) != 1 and len(default) != 1:
            names = ", ".join(path.name for path in files) or "none"
            raise LoadError(
                "Without a model_fn there has to be one .pt or .pth beside code/ (there is:"
                f" {names}). Define model_fn(model_dir)."
            )
        return load_model_file((files if len(files) == 1 else default)[0], None, self.device)


class _FunctionFailure:
    """The error of a function for one request."""

    def __init__(self, function: str, error: Exception) -> None:
        self._function, self._error = function, error

    def answer(self, index: int, context: Context) -> bytes:
        """Set the status of the response, and return its body.

        A refusal (PredictionException) is not logged.
        """
        error = self._error
        if isinstance(error, PredictionException | TsxError):
            status, _, body = failure(error)
        else:
            log_failure([str(context.get_request_id(index))], error, self._function)
            status, body = (
                FAILED,
                error_body(
                    FAILED, TsxError.type, f"{self._function} failed: {describe_error(error)}"
                ),
            )
        context.set_response_status(status, idx=index)
        context.set_response_content_type(index, JSON)
        return bytes(body)


def _program(model_dir: Path, layout: dict[str, str]) -> ModuleType | None:
    """Import the program, whose modules are in the directory `code`."""
    if not layout.get("program"):
        return None
    code = own_file(model_dir / layout["code"], model_dir).absolute()
    own_modules.add(code)
    return import_file(own_file(code / layout["program"], model_dir), "Program")


def functions_of(program: ModuleType | None) -> dict[str, Callable[..., Any]]:
    """Return the program's functions by name, wrapped to take the context as first argument.

    Raises:
        LoadError: Some functions exclude each other, or have wrong parameters.
    """
    functions = {
        name: function for name in ARGUMENTS if callable(function := getattr(program, name, None))
    }
    clash = [
        name
        for name in ("input_fn", "predict_fn", "output_fn", "batch_predict_fn")
        if name in functions
    ]
    if "transform_fn" in functions and clash:
        raise LoadError(
            f"The program has transform_fn and {', '.join(clash)}, which it replaces. Remove"
            " transform_fn or the others."
        )
    return {
        name: _with_context(name, function, ARGUMENTS[name]) for name, function in functions.items()
    }


def _with_context(name: str, function: Callable[..., Any], count: int) -> Callable[..., Any]:
    """Wrap a function; the context is passed on only if the function has a parameter for it."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a function in C
        return lambda context, *arguments: function(*arguments)
    positional = [
        parameter
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    needed = [parameter for parameter in positional if parameter.default is parameter.empty]
    if len(needed) > count + 1 or (
        len(positional) < count
        and not any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)
    ):
        raise LoadError(
            f"{name} takes {len(needed)} arguments; it is called with {count}, or with the context"
            " in addition."
        )
    if len(positional) > count and (len(needed) > count or positional[count].name == "context"):
        return lambda context, *arguments: function(*arguments, context)
    return lambda context, *arguments: function(*arguments)
