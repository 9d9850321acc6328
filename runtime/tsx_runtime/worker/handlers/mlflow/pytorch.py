"""Models of MLflow's pytorch flavour whose signature is of tensors: by torch alone, and the rows of
several requests in one call.
"""

from __future__ import annotations

import functools
import json
from contextlib import suppress
from typing import Any

import torch

from tsx_archiver.metadata.mlmodel import MANIFEST_KEY, PYTORCH, MLmodel
from tsx_runtime.worker.exceptions import LoadError
from tsx_runtime.worker.handler_api.context import Context
from tsx_runtime.worker.handler_api.loader import own_file
from tsx_runtime.worker.handler_api.modules import own_modules
from tsx_runtime.worker.handlers.base import BaseHandler, choose_device
from tsx_runtime.worker.handlers.mlflow.pyfunc import missing_modules, model_in
from tsx_runtime.worker.handlers.models.input_spec import InputSpec
from tsx_runtime.worker.handlers.models.model_files import load_model_file


class MLflowPyTorch(BaseHandler):
    """Takes MLflow's scoring protocol, and whatever the default handler takes."""

    _takes_tensors = True  # as the base would find of its own steps
    mlmodel: MLmodel

    def initialize(self, context: Context) -> None:
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
        with missing_modules():  # a whole model, which its packer trusts
            self.model = self.in_form(
                lambda: load_model_file(path, None, self.device, weights_only=False)
            )
        self.initialized = True

    @functools.cached_property
    def _input_specs(self) -> tuple[InputSpec, ...]:
        return tuple(
            InputSpec(each.name, each.shape, getattr(torch, each.dtype), True)
            for each in self.mlmodel.tensors
        )

    def preprocess(self, data: Any) -> Any:
        return super().preprocess([_as_instances(row) for row in data])

    def describe_handle(self) -> Any:
        return {**super().describe_handle(), MANIFEST_KEY: self.manifest.get(MANIFEST_KEY)}


def _as_instances(row: Any) -> Any:
    """A request with `inputs` in the form whose answer is `{"predictions": ...}`; one that is not
    right stays as it is.
    """
    body = row.get("body") if isinstance(row, dict) else None
    # without a content type, or not decoded
    if isinstance(body, bytearray | bytes) and body.startswith(b"{"):
        with suppress(ValueError):
            body = json.loads(body)
    inputs = body.get("inputs") if isinstance(body, dict) else None
    if isinstance(inputs, dict) and inputs:
        columns = list(inputs.values())
        if not all(isinstance(each, list) and len(each) == len(columns[0]) for each in columns):
            return row
        inputs = [dict(zip(inputs, values, strict=True)) for values in zip(*columns, strict=True)]
    elif not isinstance(inputs, list) or any(isinstance(each, dict) for each in inputs):
        return row  # among others, tensors of the Open Inference Protocol
    return {"body": {"instances": inputs}}
