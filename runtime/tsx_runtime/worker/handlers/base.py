"""The base class of handlers."""

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

from tsx_archiver.metadata.compile_settings import is_compiled_ahead
from tsx_archiver.storage.private_directory import private_directory, temporary_directory
from tsx_runtime.shared.example_requests import ExampleInput, example_body, printing_command
from tsx_runtime.worker.codecs.v2_json import MalformedTensors
from tsx_runtime.worker.exceptions import BadRows, LoadError, map_rows
from tsx_runtime.worker.forms.loading import configured_forms, load_form
from tsx_runtime.worker.handler_api.context import Context
from tsx_runtime.worker.handler_api.loader import own_file
from tsx_runtime.worker.handlers.models.compiling import compile_model, load_library
from tsx_runtime.worker.handlers.models.input_spec import InputSpec, examples, input_specs
from tsx_runtime.worker.handlers.models.model_files import (
    check_present,
    load_model_file,
    load_torchscript,
)
from tsx_runtime.worker.handlers.models.precision import configured_precision, in_precision
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
    """A handler that loads a model of any kind, and takes and returns rows of numbers.

    A subclass overrides the steps that differ: `initialize`, `preprocess`, `inference` or
    `postprocess`.

    Attributes:
        context: The context of the worker.
        device: The torch.device of the model.
        explain: TorchServe's flag, which this class ignores.
        form: The name of the loaded form, or None if no `forms` are configured.
        forms_passed_over: The reasons why earlier forms of `forms` do not fit.
        initialized: Whether the model is loaded.
        manifest: The content of the archive's MANIFEST.json.
        map_location: The type of the device, such as `cuda`.
        mapping: The names of the classes by number, from `index_to_name.json`, or None.
        model: The loaded model.
        model_pt_path: The path of the serialized file, or None.
        precision: The configured precision, after it was applied to the model.
        profiler_args: Arguments of torch.profiler.profile, for ENABLE_TORCH_PROFILER.
        target: TorchServe's attribute, which this class ignores.

    Examples:
        >>> import torch
        >>> class Doubles(BaseHandler):
        ...     def initialize(self, context):
        ...         self.context, self.model = context, lambda rows: 2 * rows
        ...     def preprocess(self, data):
        ...         return torch.tensor([row["body"] for row in data])
        >>> handler = Doubles()
        >>> from tsx_runtime.worker.handler_api.testing import MockContext
        >>> handler.initialize(MockContext(gpu_id=None))
        >>> handler.device = torch.device("cpu")
        >>> handler.handle([{"body": [1.0, 2.0]}], handler.context)
        [[2.0, 4.0]]
    """

    def __init__(self) -> None:
        """Create a handler without a model, which `initialize` loads."""
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
        self.precision: str | None = None
        self.form: str | None = None
        self.forms_passed_over: tuple[str, ...] = ()
        self.profiler_args: dict[str, Any] = {}

    # Loading

    def initialize(self, context: Context) -> None:
        """Load the model of the archive onto the worker's device.

        Raises:
            LoadError: The model cannot be loaded; the message says what to do.
        """
        properties = context.system_properties
        self.context = context
        self.manifest = context.manifest
        self.device = choose_device(properties.get("gpu_id"))
        self.map_location = self.device.type
        model_dir = Path(properties["model_dir"])
        manifest_model = self.manifest.get("model") or {}  # It is null in some manifests.
        model_file = (
            own_file(model_dir / manifest_model["modelFile"], model_dir)
            if manifest_model.get("modelFile")
            else None
        )
        path = (
            model_dir / manifest_model["serializedFile"]
            if manifest_model.get("serializedFile")
            else None
        )
        if path is None and model_file is None:
            raise LoadError(
                "No model weights could be loaded: the archive names no serialized file. Add one"
                " with --serialized-file, or --model-file with a class that loads its weights"
                " itself."
            )
        self.model_pt_path = None if path is None else str(path)
        self.model = self.in_form(lambda: self._load_model(path, model_file))
        if self._config.get("input_shape"):
            # This raises an error if the model has no input of a configured name.
            _ = self._input_specs
        self.mapping = load_label_mapping(model_dir / "index_to_name.json")
        self.initialized = True

    def in_form(self, load: Callable[[], Any]) -> Any:
        """Return the model in the first configured form that fits this worker.

        If no form fits, the model of `load` is returned in the configured precision, and compiled
        if this is configured. A handler that loads its model itself must set `context` and `device`
        in `initialize`, and then call this method.

        Args:
            load: Loads the model of the archive.
        """

        def reference() -> Any:
            # A form may load the model during a request. Explanations then need its gradients.
            with torch.inference_mode(False):
                return compile_model(self.in_precision(load()), self._config.get("pt2"))

        names = configured_forms(self._config)
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
        """Load the model from a serialized file, a model file, or both."""
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
        """Return the model in the configured precision.

        A handler that loads its model itself must set `context` and `device` first.
        """
        precision = configured_precision(self._config)
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
        return is_compiled_ahead(self._config.get("pt2"))

    def _load_torch_export_aot_compile(self, model_so_path: str) -> Any:
        """Load a library of AOTInductor; handlers may override this."""
        return load_library(model_so_path, self.device)

    def _load_torchscript_model(self, model_pt_path: str) -> Any:
        """Load a model without a model file; handlers may override this."""
        return load_torchscript(Path(model_pt_path), self.device)

    def _load_pickled_model(
        self, model_dir: str, model_file: str, model_pt_path: str | None
    ) -> Any:
        """Load a model with a model file; handlers may override this."""
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
        """The content of model-config.yaml."""
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
        from tsx_archiver import parse_model_config  # It imports pydantic.

        config, problems = parse_model_config({"init_args": value})
        if problems:
            raise LoadError(f"model-config.yaml cannot be used: {problems[0]}")
        return config.init_args or {}

    # The three steps

    @timed
    def preprocess(self, data: Any) -> Any:
        """Convert the requests to tensors.

        Args:
            data: A list of requests; each is a dict with `data` or `body`.

        Returns:
            A `TensorBatch` for the steps of this class. If a subclass overrides `inference` or
            `postprocess`, one tensor with a row for each request, or a list of such tensors for a
            model with several inputs.

        Raises:
            BadRows: Some requests have no tensors, or tensors of a wrong shape or dtype.
        """
        if not self._takes_tensors and not any(
            isinstance(row, dict | bytes | bytearray) for row in data
        ):
            # A subclass has already parsed the requests.
            return torch.as_tensor(data, device=self.device)
        is_single_tensor = self._is_explain() or not self._answers_tensors

        def read(position: int, row: Any) -> TensorRequest:
            try:
                request = read_request(row, self._input_specs)
                for name in ("data", "body") if isinstance(row, dict) else ():
                    self.context.keep_parameters(position, row.get(name))
                if is_single_tensor and request.rows != 1:
                    raise MalformedTensors(f"The request has {request.rows} rows; send one.")
                return request
            except MalformedTensors as error:
                raise MalformedTensors(f"{error} {self._input_advice}") from error

        requests = map_rows(read, data, MalformedTensors)
        if not is_single_tensor:
            return TensorBatch(requests)
        inputs = [
            torch.cat(columns).to(self.device)
            for columns in zip(*(request.inputs for request in requests), strict=True)
        ]
        return inputs[0] if len(inputs) == 1 else inputs

    @timed
    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the model without gradients.

        Args:
            data: The result of `preprocess`.
            *args: Further arguments of the model.
            **kwargs: Further arguments of the model.

        Returns:
            The output of the model; a `TensorBatch` with its outputs for a `TensorBatch`.

        Raises:
            BadRows: The model does not take the shapes of some requests.
        """
        with torch.inference_mode():
            if not isinstance(data, TensorBatch):
                return self.model(to_device(data, self.device), *args, **kwargs)
            try:
                return data.run(self._call, self._joinable)
            except UnusableRows as unusable:
                # No input is known to work, so the model itself may be faulty.
                if self._example is None:
                    raise next(iter(unusable.errors.values())) from None
                shapes = [request.shape for request in data.requests]
                faults = {
                    position: (
                        f"The model does not take this input of shape {shapes[position]}:"
                        f" {reason_of(error)}. {self._input_advice}"
                    )
                    for position, error in unusable.errors.items()
                }
                raise BadRows(faults) from unusable

    @timed
    def postprocess(self, data: Any) -> list[Any]:
        """Return a JSON value for each request.

        Args:
            data: The result of `inference`.
        """
        if isinstance(data, TensorBatch):
            return data.answers(self.context, self.mapping)
        result: list[Any] = data.tolist()
        return result

    def _call(self, *inputs: torch.Tensor) -> Any:
        return self.model(*(to_device(tensor, self.device) for tensor in inputs))

    # Inputs and outputs

    @property
    def _takes_tensors(self) -> bool:
        """Whether requests contain tensors, so that `describe_handle` can show an example."""
        return type(self).preprocess is BaseHandler.preprocess

    @property
    def _answers_tensors(self) -> bool:
        kind = type(self)
        return (
            kind.inference is BaseHandler.inference and kind.postprocess is BaseHandler.postprocess
        )

    @functools.cached_property
    def _joinable(self) -> dict[Any, bool]:
        """Whether inputs of each kind can be joined, as `TensorBatch.run` has found out."""
        return {}

    @functools.cached_property
    def _input_specs(self) -> tuple[InputSpec, ...]:
        """The known properties of the model's inputs."""
        shape = self._config.get("input_shape")
        if shape is not None:
            from tsx_archiver import parse_model_config  # It imports pydantic.

            shape = parse_model_config({"input_shape": shape})[0].input_shape
        return input_specs(self.model, shape, casts=self.precision is not None)

    @functools.cached_property
    def _example(self) -> list[ExampleInput] | None:
        """A request that the model accepts, or None if none was found."""
        for example in examples(self._input_specs):
            try:
                with torch.inference_mode():
                    self._call(
                        *read_request({"body": example_body(example)}, self._input_specs).inputs
                    )
            except Exception:  # A trial may fail in any way.
                continue
            return example
        return None

    def _example_text(self) -> str | None:
        """Return the body of the example, or a command that prints it."""
        if self._example is None:
            return None
        body = example_body(self._example, self.context.envelope)
        return printing_command(body) or json.dumps(body)

    @functools.cached_property
    def _input_advice(self) -> str:
        """The advice for a client that has sent an invalid input."""
        forms, example = FORMS.get(self.context.envelope, FORMS[""]), self._example_text()
        text = f"The model takes {' and '.join(map(str, self._input_specs))}. {forms}"
        if example is None:
            return text
        if example.startswith("python3"):
            example = f"what {example} prints."
        return f"{text} Example: {example}"

    def handle(self, data: Any, context: Context) -> Any:
        """Answer a batch: preprocess, inference and postprocess.

        Args:
            data: A list of requests; each is a dict with `data` or `body`, or the fields of a form.
            context: The context of the worker.

        Returns:
            A list with a JSON value, str or bytes for each request.
        """
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
        inputs = self.preprocess(data)
        if self._is_explain():
            return self.explain_handle(inputs, data)
        return self.postprocess(self.inference(inputs))

    # Describe and explain

    def get_device(self) -> Any:
        """Return the torch.device of the model."""
        return self.device

    def describe_handle(self) -> Any:
        """Return the description of the model for a describe call with `?customized=true`.

        This method describes the tensors that the model takes, with an example of a request.
        Subclasses may override it.
        """
        if not self._takes_tensors:
            logger.info("the handler has nothing of its own to describe; override describe_handle")
            return None
        inputs = [spec.described() for spec in self._input_specs]
        if self._example is None:
            return {"inputs": inputs}
        shapes = [{"example": list(example.shape)} for example in self._example]
        return {
            "inputs": [spec | shape for spec, shape in zip(inputs, shapes, strict=True)],
            "example": self._example_text(),
        }

    def explain_handle(self, data_preprocess: Any, raw_data: Any) -> Any:
        """Explain the response to the first request with `get_insights`.

        Args:
            data_preprocess: The result of `preprocess`.
            raw_data: The requests. A request names the class to explain in `target`, by its number
                or its label; the default is 0.
        """
        inputs: Any = None
        target: Any = 0
        row = raw_data[0]
        if isinstance(row, dict):
            inputs = row.get("data") or row.get("body")
            target = row.get("target") or 0
        label = bytes(target).decode() if isinstance(target, bytes | bytearray) else target
        if not str(label).isdecimal():
            numbers = {name: number for number, name in (self.mapping or {}).items()}
            target = numbers.get(str(label), target)
        return self.get_insights(data_preprocess, inputs, target)

    def get_insights(self, tensor_data: Any, raw_data: Any, target: Any = 0) -> Any:
        """Return how much each number of the input contributes to a class.

        The method is integrated gradients (https://arxiv.org/abs/1703.01365), computed by Captum.

        Args:
            tensor_data: The preprocessed input, a tensor with one row for each request.
            raw_data: The request.
            target: The number of the class.

        Returns:
            Nested lists of the shape of `tensor_data`.
        """
        result: list[Any] = input_attributions(self.model, tensor_data, target).tolist()
        return result

    def _is_explain(self) -> bool:
        return bool(self.context) and self.context.get_request_header(0, "explain") == "True"

    def _is_describe(self) -> bool:
        return bool(self.context) and self.context.get_request_header(0, "describe") == "True"

    def _infer_with_profiler(self, data: Any) -> tuple[Any, Any]:
        """Run the steps under torch's profiler, which writes a trace for chrome://tracing."""
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
    """Return TorchServe's directory for traces, or a new one if another user owns that."""
    directory = Path(tempfile.gettempdir()) / "pytorch_profiler" / model
    try:
        private_directory(directory)
    except PermissionError:
        return Path(tempfile.mkdtemp(prefix="pytorch_profiler-", dir=temporary_directory()))
    return directory


def choose_device(gpu_id: int | str | None) -> torch.device:
    """Return the device of a worker: its GPU if torch finds one, otherwise the CPU.

    Args:
        gpu_id: The number of the assigned GPU, or None.
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
