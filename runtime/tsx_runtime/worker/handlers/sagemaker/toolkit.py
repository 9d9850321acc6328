"""A model in the layout of SageMaker's PyTorch toolkit: the user's functions, called as the toolkit
documents them, for whole batches.

    pre_model_fn(model_dir)              once, before the model is loaded
    model_fn(model_dir)                  the model; by default the only .pt or .pth beside `code`
    model_warmup_fn(model_dir, model)    once, after it
    input_fn(data, content_type)         of each request
    predict_fn(input, model)             of each request; of all rows at once with `independentRows: true` in model-config.yaml
    output_fn(prediction, accept)        of each request: the body, or the body and its type
    transform_fn(model, data, content_type, accept)    in place of these three
    batch_predict_fn(inputs, model)      tsx's own: the predictions of all requests of a batch, in place of predict_fn

Each may take one argument more, the context. What one request does to these functions fails that
request alone. https://sagemaker.readthedocs.io/en/stable/frameworks/pytorch/using_pytorch.html
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
from tsx_runtime.worker.exceptions import LoadError, PredictionException, in_words
from tsx_runtime.worker.handler_api.context import Context
from tsx_runtime.worker.handler_api.loader import import_file, own_file
from tsx_runtime.worker.handler_api.modules import own_modules
from tsx_runtime.worker.handlers.base import choose_device
from tsx_runtime.worker.handlers.models.model_files import load_model_file
from tsx_runtime.worker.handlers.sagemaker.formats import (
    JSON,
    LINES,
    TEXT,
    to_body,
    to_tensor,
)
from tsx_runtime.worker.handlers.steps.tensor_requests import (
    TensorBatch,
    TensorRequest,
    UnusableRows,
)

WEIGHTS = (".pt", ".pth", ".pt2")
USUAL = "model.pth", "model.pt"
FAILED = 500
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
    data: Any
    content_type: str
    accept: str
    default: str  # that is written where anything is accepted


class ToolkitHandler:
    takes_raw_bodies = True  # `input_fn` decodes them

    def __init__(self) -> None:
        self.model: Any = None
        self.device = torch.device("cpu")
        self._accepts = os.environ.get(
            "SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT", ""
        ).strip()  # where a request accepts anything
        self._functions: dict[str, Callable[..., Any]] = {}
        self._rows_are_independent = False
        self._joinable: dict[Any, bool] = {}  # see `TensorBatch.run`

    def initialize(self, context: Context) -> None:
        model_dir = str(context.system_properties["model_dir"])
        if level := os.environ.get(
            "SAGEMAKER_CONTAINER_LOG_LEVEL", ""
        ).strip():  # the front end has checked it
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
                self._guarded("transform_fn", transform, each.data, each.content_type, each.accept)
                for each in requests
            ]
        else:
            inputs = [self._guarded("input_fn", self._read, own, context) for own in requests]
            results = [
                self._guarded("output_fn", self._written, prediction, own, context)
                for prediction, own in zip(
                    self._predictions(inputs, context), requests, strict=True
                )
            ]
        return [
            self._answer(result, index, own, context)
            for index, (result, own) in enumerate(zip(results, requests, strict=True))
        ]

    # The steps

    def _request(self, row: dict[str, Any], index: int, context: Context) -> ToolkitRequest:
        headers = context.get_all_request_header(index)
        content_type, accept = headers.get("content-type") or JSON, headers.get("accept") or ""
        data = row.get("body", row)
        if isinstance(data, bytes | bytearray):
            data = (
                data.decode("utf-8", "replace")
                if media_type_of(content_type) in TEXT
                else bytes(data)
            )
        default = self._accepts or (LINES if media_type_of(content_type) == LINES else JSON)
        return ToolkitRequest(
            data, content_type, default if accept.strip() in ("", "*/*") else accept, default
        )

    def _read(self, own: ToolkitRequest, context: Context) -> Any:
        if "input_fn" in self._functions:
            return self._call("input_fn", context, own.data, own.content_type)
        return to_tensor(own.data, own.content_type).to(self.device)

    def _predictions(self, inputs: list[Any], context: Context) -> list[Any]:
        """In step with the inputs; what failed before stays as it is."""
        positions = [
            index for index, each in enumerate(inputs) if not isinstance(each, _FunctionFailure)
        ]
        results = list(inputs)
        given = [inputs[index] for index in positions]
        if not given:
            return results
        if "batch_predict_fn" in self._functions:
            found = list(self._call("batch_predict_fn", context, given, self.model))
            if len(found) != len(given):
                raise PredictionException(
                    f"batch_predict_fn got {len(given)} inputs and returned {len(found)}"
                    " predictions.",
                    FAILED,
                )
        else:
            found = self._predict_all(given, context)
        for index, each in zip(positions, found, strict=True):
            results[index] = each
        return results

    def _predict_all(self, inputs: list[Any], context: Context) -> list[Any]:
        """Predict for each input alone, or in one call if the archive says that rows are
        independent.
        """
        is_table = [isinstance(value, torch.Tensor) and value.ndim > 1 for value in inputs]
        if self._rows_are_independent and len(inputs) > 1 and all(is_table):
            batch = TensorBatch([TensorRequest((rows,), single=False) for rows in inputs])
            with suppress(UnusableRows):  # each request then gets its own error
                return list(
                    batch.run(lambda rows: self._predict(rows, context), self._joinable).outputs
                )
        return [self._guarded("predict_fn", self._predict, value, context) for value in inputs]

    def _predict(self, given: Any, context: Context) -> Any:
        if "predict_fn" in self._functions:
            return self._call("predict_fn", context, given, self.model)
        with torch.no_grad():  # and not inference_mode: an output_fn may go on with the tensor
            return self.model(given.to(self.device) if isinstance(given, torch.Tensor) else given)

    def _written(self, prediction: Any, own: ToolkitRequest, context: Context) -> Any:
        if isinstance(prediction, _FunctionFailure):
            return prediction
        if "output_fn" in self._functions:
            return self._call("output_fn", context, prediction, own.accept)
        return to_body(prediction, own.accept, own.default)

    def _answer(self, result: Any, index: int, own: ToolkitRequest, context: Context) -> Any:
        if isinstance(result, _FunctionFailure):
            return result.answer(index, context)
        named = [media_type_of(part) for part in own.accept.split(",") if "*" not in part]
        content_type = best_type(own.accept, [own.default, *named]) or own.default
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
                raise  # a smaller batch will do
            return _FunctionFailure(name, error)

    def _load(self, model_dir: Path) -> Any:
        files = sorted(path for path in model_dir.iterdir() if path.suffix in WEIGHTS)
        usual = [path for path in files if path.name in USUAL]
        if len(files) != 1 and len(usual) != 1:
            there = ", ".join(path.name for path in files) or "none"
            raise LoadError(
                "Without a model_fn there has to be one .pt or .pth beside code/ (there is:"
                f" {there}). Define model_fn(model_dir)."
            )
        return load_model_file((files if len(files) == 1 else usual)[0], None, self.device)


class _FunctionFailure:
    """The error of a function for one request."""

    def __init__(self, function: str, error: Exception) -> None:
        self._function, self._error = function, error

    def answer(self, index: int, context: Context) -> bytes:
        """Sets the status of the answer and returns its body.

        Refusals (PredictionException) are not logged.
        """
        error = self._error
        if isinstance(error, PredictionException | TsxError):
            status, _, body = failure(error)
        else:
            log_failure([str(context.get_request_id(index))], error, self._function)
            status, body = (
                FAILED,
                error_body(FAILED, TsxError.type, f"{self._function} failed: {in_words(error)}"),
            )
        context.set_response_status(status, idx=index)
        context.set_response_content_type(index, JSON)
        return bytes(body)


def _program(model_dir: Path, layout: dict[str, str]) -> ModuleType | None:
    """Its own modules are beside it, or below `code`."""
    if not layout.get("program"):
        return None
    code = own_file(model_dir / layout["code"], model_dir).absolute()
    own_modules.add(code)
    return import_file(own_file(code / layout["program"], model_dir), "Program")


def functions_of(program: ModuleType | None) -> dict[str, Callable[..., Any]]:
    """Those that it has, each to be called with the context first. Raises LoadError."""
    found = {name: given for name in ARGUMENTS if callable(given := getattr(program, name, None))}
    clash = [
        name
        for name in ("input_fn", "predict_fn", "output_fn", "batch_predict_fn")
        if name in found
    ]
    if "transform_fn" in found and clash:
        raise LoadError(
            f"The program has transform_fn and {', '.join(clash)}, which it replaces. Remove"
            " transform_fn or the others."
        )
    return {name: _with_context(name, given, ARGUMENTS[name]) for name, given in found.items()}


def _with_context(name: str, given: Callable[..., Any], count: int) -> Callable[..., Any]:
    """Called with (context, *arguments) whether or not it wants the context."""
    try:
        parameters = list(inspect.signature(given).parameters.values())
    except (TypeError, ValueError):  # written in C
        return lambda context, *arguments: given(*arguments)
    positional = [
        each
        for each in parameters
        if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
    needed = [each for each in positional if each.default is each.empty]
    if len(needed) > count + 1 or (
        len(positional) < count and not any(each.kind is each.VAR_POSITIONAL for each in parameters)
    ):
        raise LoadError(
            f"{name} takes {len(needed)} arguments; it is called with {count}, or with the context"
            " in addition."
        )
    if len(positional) > count and (len(needed) > count or positional[count].name == "context"):
        return lambda context, *arguments: given(*arguments, context)
    return lambda context, *arguments: given(*arguments)
