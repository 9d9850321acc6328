"""The base class of handlers: loads any kind of model, and answers a batch in three steps.

Contract section 5.3.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tsx_archiver.metadata.compile_settings import wants_ahead
from tsx_archiver.storage.private_directory import private_directory, temporary_place
from tsx_runtime.shared.example_requests import ExampleInput, example_body, printing_command
from tsx_runtime.worker.codecs.v2_json import MalformedTensors
from tsx_runtime.worker.exceptions import BadRows, LoadError, each_or_bad
from tsx_runtime.worker.forms.loading import load_form, wanted_forms
from tsx_runtime.worker.handler_api.context import Context
from tsx_runtime.worker.handler_api.loader import own_file
from tsx_runtime.worker.handlers.models.compiling import compiled, load_library
from tsx_runtime.worker.handlers.models.input_spec import InputSpec, examples, input_specs
from tsx_runtime.worker.handlers.models.model_files import (
    check_present,
    load_model_file,
    load_torchscript,
)
from tsx_runtime.worker.handlers.models.precision import in_precision, wanted_precision
from tsx_runtime.worker.handlers.models.weights import load_eager
from tsx_runtime.worker.handlers.staging import to_device
from tsx_runtime.worker.handlers.steps.explaining import input_attributions
from tsx_runtime.worker.handlers.steps.labels import load_label_mapping
from tsx_runtime.worker.handlers.steps.tensor_requests import (
    FORMS,
    TensorBatch,
    TensorRequest,
    UnusableRows,
    read_request,
    reason_of,
)
from tsx_runtime.worker.handlers.steps.timing import timed

logger = logging.getLogger("tsx.worker")


class BaseHandler:
    """Takes rows of numbers, gives rows of numbers.

    Override what differs: preprocess, inference, postprocess, initialize.
    """

    def __init__(self) -> None:
        self.model: Any = None
        self.mapping: dict[str, str] | None = None
        self.device: Any = None
        self.initialized = False
        self.context: Any = None
        self.model_pt_path: str | None = None
        self.manifest: Any = None
        self.map_location: str | None = None
        self.explain = False
        self.target = 0
        self.precision: str | None = None  # the configured precision, once the model has it
        self.form: str | None = (
            None  # which of the configured `forms` the model has; None if none are configured
        )
        self.forms_passed_over: tuple[str, ...] = ()  # for each form before it, why it is not used
        self.profiler_args: dict[str, Any] = {}

    # Loading

    def initialize(self, context: Context) -> None:
        properties = context.system_properties
        self.context = context
        self.manifest = context.manifest
        self.device = choose_device(properties.get("gpu_id"))
        self.map_location = self.device.type
        model_dir = Path(properties["model_dir"])
        files = self.manifest.get("model") or {}  # some manifests have null there
        model_file = (
            own_file(model_dir / files["modelFile"], model_dir) if files.get("modelFile") else None
        )
        path = model_dir / files["serializedFile"] if files.get("serializedFile") else None
        if path is None and model_file is None:
            raise LoadError(
                "No model weights could be loaded: the archive names no serialized file. Add one"
                " with --serialized-file, or --model-file with a class that loads its weights"
                " itself."
            )
        self.model_pt_path = None if path is None else str(path)
        self.model = self.in_form(lambda: self._load_model(path, model_file))
        if self._config.get("input_shape"):
            _ = self._input_specs  # raises for a name that the model does not have
        self.mapping = load_label_mapping(model_dir / "index_to_name.json")
        self.initialized = True

    def in_form(self, load: Callable[[], Any]) -> Any:
        """The model in the first of the configured `forms` that fits this worker.

        If none does, what `load` returns, in the configured
        precision and compiled. A handler that loads its model itself sets `context` and `device`,
        then calls this in `initialize`.
        """

        def reference() -> Any:
            # a form may load it during a request, and explanations need its gradients
            with torch.inference_mode(False):
                return compiled(self.in_precision(load()), self._config.get("pt2"))

        names = wanted_forms(self._config)
        if not names:
            return reference()
        model, self.form, self.forms_passed_over = load_form(
            names,
            Path(self.context.system_properties["model_dir"]),
            self.context.manifest,
            reference,
            torch.device(self.device),
        )
        return model

    def _load_model(self, path: Path | None, model_file: Path | None) -> Any:
        """`path` is the serialized file; at least one of the two is not None."""
        if path is not None and path.suffix == ".so":
            return self._load_library(path)
        if model_file is not None and (
            path is None or type(self)._load_pickled_model is not BaseHandler._load_pickled_model
        ):
            model = self._load_pickled_model(
                self.context.system_properties["model_dir"],
                self.manifest["model"]["modelFile"],
                self.model_pt_path,
            )
            return model.to(self.device).eval()
        assert path is not None
        if (
            model_file is None
            and type(self)._load_torchscript_model is not BaseHandler._load_torchscript_model
        ):
            return self._load_torchscript_model(str(path))
        return load_model_file(
            path,
            model_file,
            self.device,
            weights_only=self._weights_only(),
            compile_ahead=self._use_torch_export_aot_compile(),
            init_args=self._init_args(),
            class_name=self.manifest["model"].get("modelClass"),
        )

    def in_precision(self, model: Any) -> Any:
        """The model in the configured `precision`; handlers that load one themselves set `context`
        and `device` before.
        """
        precision = wanted_precision(self._config)
        if precision is not None:
            model = in_precision(model, precision, self.device)
            self.precision = precision
        return model

    def _load_library(self, path: Path) -> Any:
        check_present(path)
        if not self._use_torch_export_aot_compile():
            raise LoadError(
                f"{path.name} is a library, and loading it runs its code. If torch's AOTInductor"
                " wrote it and you trust it, set `pt2: {export: {aot_compile: true}}` in"
                " model-config.yaml."
            )
        return self._load_torch_export_aot_compile(str(path))

    def _use_torch_export_aot_compile(self) -> bool:
        return wants_ahead(self._config.get("pt2"))

    def _load_torch_export_aot_compile(self, model_so_path: str) -> Any:
        """For handlers that load a compiled library in a way of their own."""
        return load_library(model_so_path, self.device)

    def _load_torchscript_model(self, model_pt_path: str) -> Any:
        """For handlers that load a model without a model file in a way of their own."""
        return load_torchscript(Path(model_pt_path), self.device)

    def _load_pickled_model(
        self, model_dir: str, model_file: str, model_pt_path: str | None
    ) -> Any:
        """For handlers that load a model with a model file in a way of their own."""
        weights = None if model_pt_path is None else Path(model_pt_path)
        return load_eager(
            Path(model_dir) / model_file,
            weights,
            weights_only=self._weights_only(),
            init_args=self._init_args(),
            class_name=self.manifest["model"].get("modelClass"),
        )

    @property
    def _config(self) -> dict[str, Any]:
        """The whole of model-config.yaml."""
        config: dict[str, Any] = {} if self.context is None else self.context.model_yaml_config
        return config

    def _weights_only(self) -> bool:
        value = self._config.get("weightsOnly", True)
        if not isinstance(value, bool):
            raise LoadError(
                f"weightsOnly in model-config.yaml is {value!r}; it must be true or false"
            )
        return value

    def _init_args(self) -> dict[str, Any]:
        value = self._config.get("init_args")
        if value is None:
            return {}
        from tsx_archiver import parse_model_config  # here: it imports pydantic

        config, problems = parse_model_config({"init_args": value})
        if problems:
            raise LoadError(f"model-config.yaml cannot be used: {problems[0]}")
        return config.init_args or {}

    # The three steps

    @timed
    def preprocess(self, data: Any) -> Any:
        """The requests as tensors (`steps.tensor_requests`); where another step is a subclass's
        own, one tensor with a row for each.
        """
        if not self._takes_tensors and not any(
            isinstance(row, dict | bytes | bytearray) for row in data
        ):
            return torch.as_tensor(
                data, device=self.device
            )  # for a subclass that has read the requests
        alone = self._is_explain() or not self._answers_tensors

        def read(position: int, row: Any) -> TensorRequest:
            try:
                request = read_request(row, self._input_specs)
                for name in ("data", "body") if isinstance(row, dict) else ():
                    self.context.keep_parameters(position, row.get(name))
                if alone and request.rows != 1:
                    raise MalformedTensors(f"The request has {request.rows} rows; send one.")
                return request
            except MalformedTensors as error:
                raise MalformedTensors(f"{error} {self._wanted}") from error

        requests = each_or_bad(read, data, MalformedTensors)
        if not alone:
            return TensorBatch(requests)
        inputs = [
            torch.cat(columns).to(self.device)
            for columns in zip(*(request.inputs for request in requests), strict=True)
        ]
        return inputs[0] if len(inputs) == 1 else inputs

    @timed
    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.inference_mode():
            if not isinstance(data, TensorBatch):
                return self.model(to_device(data, self.device), *args, **kwargs)
            try:
                return data.run(self._call, self._joinable)
            except UnusableRows as unusable:
                if self._example is None:  # the model may be at fault
                    raise next(iter(unusable.errors.values())) from None
                shapes = [request.shape for request in data.requests]
                faults = {
                    position: (
                        f"The model does not take this input of shape {shapes[position]}:"
                        f" {reason_of(error)}. {self._wanted}"
                    )
                    for position, error in unusable.errors.items()
                }
                raise BadRows(faults) from unusable

    @timed
    def postprocess(self, data: Any) -> list[Any]:
        if isinstance(data, TensorBatch):
            return data.answers(self.context, self.mapping)
        result: list[Any] = data.tolist()
        return result

    def _call(self, *inputs: torch.Tensor) -> Any:
        return self.model(*(to_device(tensor, self.device) for tensor in inputs))

    # What the steps above take

    @property
    def _takes_tensors(self) -> bool:
        """Whether `describe_handle` has an example of a request."""
        return type(self).preprocess is BaseHandler.preprocess

    @property
    def _answers_tensors(self) -> bool:
        kind = type(self)
        return (
            kind.inference is BaseHandler.inference and kind.postprocess is BaseHandler.postprocess
        )

    @functools.cached_property
    def _joinable(self) -> dict[Any, bool]:
        """Whether the model's inputs of each kind can be joined, as `TensorBatch.run` found."""
        return {}

    @functools.cached_property
    def _input_specs(self) -> tuple[InputSpec, ...]:
        """What the model takes, as far as it is known."""
        shape = self._config.get("input_shape")
        if shape is not None:
            from tsx_archiver import parse_model_config  # here: it imports pydantic

            shape = parse_model_config({"input_shape": shape})[0].input_shape
        return input_specs(self.model, shape, casts=self.precision is not None)

    @functools.cached_property
    def _example(self) -> list[ExampleInput] | None:
        """A request that the model has answered; None if there is none."""
        for example in examples(self._input_specs):
            try:
                with torch.inference_mode():
                    self._call(
                        *read_request({"body": example_body(example)}, self._input_specs).inputs
                    )
            except Exception:  # a trial: what the model says of a wrong one is of no use to anybody
                continue
            return example
        return None

    def _example_text(self) -> str | None:
        """Its body, or a command that prints it."""
        if self._example is None:
            return None
        body = example_body(self._example, self.context.envelope)
        return printing_command(body) or json.dumps(body)

    @functools.cached_property
    def _wanted(self) -> str:
        """What to send, for a client that has sent something else."""
        forms, example = FORMS.get(self.context.envelope, FORMS[""]), self._example_text()
        text = f"The model takes {' and '.join(map(str, self._input_specs))}. {forms}"
        if example is None:
            return text
        if example.startswith("python3"):
            example = f"what {example} prints."
        return f"{text} Example: {example}"

    def handle(self, data: Any, context: Context) -> Any:
        start = time.perf_counter()
        self.context = context
        if os.environ.get("ENABLE_TORCH_PROFILER"):
            output, _ = self._infer_with_profiler(data)
        elif self._is_describe():
            output = [self.describe_handle()]
        else:
            output = self._run_steps(data)
        if context.metrics is not None:
            context.metrics.add_time(
                "HandlerTime", round((time.perf_counter() - start) * 1000, 2), None, "ms"
            )
        return output

    def _run_steps(self, data: Any) -> Any:
        prepared = self.preprocess(data)
        if self._is_explain():
            return self.explain_handle(prepared, data)
        return self.postprocess(self.inference(prepared))

    # Describe and explain

    def get_device(self) -> Any:
        return self.device

    def describe_handle(self) -> Any:
        """What `?customized=true` of a describe call shows of the model: of one that takes tensors,
        their shapes, and an example of a request: its body, or a command that prints it. Override
        it.
        """
        if not self._takes_tensors:
            logger.info("the handler has nothing of its own to describe; override describe_handle")
            return None
        inputs = [spec.described() for spec in self._input_specs]
        if self._example is None:
            return {"inputs": inputs}
        shapes = [{"example": list(each.shape)} for each in self._example]
        return {
            "inputs": [each | shape for each, shape in zip(inputs, shapes, strict=True)],
            "example": self._example_text(),
        }

    def explain_handle(self, data_preprocess: Any, raw_data: Any) -> Any:
        """An explanation of the answer: the result of `get_insights` for the first row and its
        `target` (0 if it has none).
        """
        inputs, target = None, 0
        row = raw_data[0]
        if isinstance(row, dict):
            inputs = row.get("data") or row.get("body")
            target = row.get("target") or 0
        return self.get_insights(data_preprocess, inputs, target)

    def get_insights(self, tensor_data: Any, raw_data: Any, target: Any = 0) -> Any:
        """How much each number of the preprocessed input contributes to class `target`: Captum's
        integrated gradients.
        """
        result: list[Any] = input_attributions(self.model, tensor_data, target).tolist()
        return result

    def _is_explain(self) -> bool:
        return bool(self.context) and self.context.get_request_header(0, "explain") == "True"

    def _is_describe(self) -> bool:
        return bool(self.context) and self.context.get_request_header(0, "describe") == "True"

    def _infer_with_profiler(self, data: Any) -> tuple[Any, Any]:
        """The same three steps under torch's profiler; a trace for chrome://tracing is left
        behind.
        """
        arguments = dict(self.profiler_args)
        if "on_trace_ready" not in arguments:
            directory = _trace_directory(str(self.context.model_name))
            arguments["on_trace_ready"] = torch.profiler.tensorboard_trace_handler(str(directory))
            logger.info("torch's profiler writes its traces into %s", directory)
        arguments.setdefault("activities", torch.profiler.supported_activities())  # type: ignore[no-untyped-call]  # torch's
        with torch.profiler.profile(**arguments) as profiler:
            output = self._run_steps(data)
            profiler.step()
        return output, profiler


@functools.cache
def _trace_directory(model: str) -> Path:
    """TorchServe's directory, or a new one where that belongs to another user."""
    directory = Path(tempfile.gettempdir()) / "pytorch_profiler" / model
    try:
        private_directory(directory)
    except PermissionError:
        return Path(tempfile.mkdtemp(prefix="pytorch_profiler-", dir=temporary_place()))
    return directory


def choose_device(gpu_id: int | str | None) -> torch.device:
    """A worker that was given a GPU uses it; one that was not, and one on a machine without, uses
    the CPU.
    """
    if gpu_id is None:
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device(f"cuda:{gpu_id}")
    if torch.xpu.is_available():
        return torch.device(f"xpu:{gpu_id}")
    if torch.backends.mps.is_available():
        return torch.device("mps")
    logger.warning(
        "the worker was assigned GPU %s, but torch finds no GPU here, so it uses the CPU", gpu_id
    )
    return torch.device("cpu")
