"""The handler for MLflow's pytorch flavour with a signature of tensors, by torch alone."""

from __future__ import annotations

import functools
import json
from contextlib import suppress
from typing import Any

import torch

from tsx_archiver.metadata.mlmodel import MANIFEST_KEY, PYTORCH, MLmodel
from tsx_runtime.features.mlflow.worker.pyfunc import missing_modules, model_in
from tsx_runtime.worker.exceptions import LoadError
from tsx_runtime.worker.handler_api.context import Context
from tsx_runtime.worker.handler_api.loader import own_file
from tsx_runtime.worker.handler_api.modules import own_modules
from tsx_runtime.worker.handlers.base import BaseHandler, choose_device
from tsx_runtime.worker.handlers.models.input_spec import InputSpec
from tsx_runtime.worker.handlers.models.model_files import load_model_file


class MLflowPyTorch(BaseHandler):
    """A handler for MLflow's scoring protocol, and for all formats of `BaseHandler`.

    The rows of several requests run in one call.
    """

    _takes_tensors = True  # The override of `preprocess` hides it from the base class.
    mlmodel: MLmodel

    def initialize(self, context: Context) -> None:
        """Load the model by torch.

        Raises:
            LoadError: The model cannot be loaded, or its signature has no tensors.
        """
        self.context, self.manifest = context, context.manifest
        self.device = choose_device(context.system_properties.get("gpu_id"))
        directory, self.mlmodel = model_in(context)
        if self.mlmodel.handler != PYTORCH:
            raise LoadError(
                "The model has no flavour pytorch with a signature of tensors; use the handler"
                f" {self.mlmodel.handler}."
            )
        flavor = self.mlmodel.flavors["pytorch"]
        if flavor.get("code"):
            own_modules.add(own_file(directory / flavor["code"], directory))
        exported = directory / str(flavor.get("model_data", "data")) / "model.pt2"
        path = exported if exported.is_file() else exported.with_name("model.pth")
        with missing_modules():  # The file is a pickled model, which its packer trusts.
            self.model = self.in_form(
                lambda: load_model_file(path, None, self.device, weights_only=False)
            )
        self.initialized = True

    @functools.cached_property
    def _input_specs(self) -> tuple[InputSpec, ...]:
        return tuple(
            InputSpec(tensor.name, tensor.shape, getattr(torch, tensor.dtype), True)
            for tensor in self.mlmodel.tensors
        )

    def preprocess(self, data: Any) -> Any:
        """Convert MLflow's requests to those of `BaseHandler`, and these to tensors.

        Raises:
            BadRows: Some requests hold no tensors, or tensors of a wrong shape or dtype.
        """
        return super().preprocess([_as_instances(row) for row in data])

    def describe_handle(self) -> Any:
        """Return the description of `BaseHandler` with the model's MLflow metadata."""
        return {**super().describe_handle(), MANIFEST_KEY: self.manifest.get(MANIFEST_KEY)}


def _as_instances(row: Any) -> Any:
    """Return a request with `inputs` as `instances`, so that the response has `predictions`.

    Any other request is returned unchanged.
    """
    body = row.get("body") if isinstance(row, dict) else None
    # The body is bytes without a content type, or if the worker does not decode it.
    if isinstance(body, bytearray | bytes) and body.startswith(b"{"):
        with suppress(ValueError):
            body = json.loads(body)
    inputs = body.get("inputs") if isinstance(body, dict) else None
    if isinstance(inputs, dict) and inputs:
        columns = list(inputs.values())
        if not all(
            isinstance(column, list) and len(column) == len(columns[0]) for column in columns
        ):
            return row
        inputs = [dict(zip(inputs, values, strict=True)) for values in zip(*columns, strict=True)]
    elif not isinstance(inputs, list) or any(isinstance(value, dict) for value in inputs):
        return row  # These may be tensors of the Open Inference Protocol.
    return {"body": {"instances": inputs}}
