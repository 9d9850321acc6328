"""Models of MLflow's pytorch flavour whose signature is of tensors: by torch alone, and the rows of several requests in one call."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

from tsx_archiver.metadata.mlmodel import MANIFEST_KEY, PYTORCH, MLmodel
from tsx_runtime.worker.codecs.v2_json import MalformedTensors
from tsx_runtime.worker.exceptions import BadRows, LoadError
from tsx_runtime.worker.handler_api.context import Context
from tsx_runtime.worker.handler_api.modules import own_modules
from tsx_runtime.worker.handlers.base import BaseHandler, choose_device
from tsx_runtime.worker.handlers.mlflow.scoring import as_instances, content_type_of, model_in, refuse
from tsx_runtime.worker.handlers.models.input_spec import InputSpec
from tsx_runtime.worker.handlers.models.model_files import load_model_file


class MLflowPyTorch(BaseHandler):
    """Takes MLflow's scoring protocol, and whatever the default handler takes."""

    mlmodel: MLmodel

    def initialize(self, context: Context) -> None:
        self.context, self.manifest = context, context.manifest
        self.device = choose_device(context.system_properties.get("gpu_id"))
        directory, self.mlmodel = model_in(context)
        if self.mlmodel.handler != PYTORCH:
            text = (
                f"The model is not of the flavour pytorch with a signature of tensors; register it with the handler {self.mlmodel.handler}."
            )
            raise LoadError(text)
        flavor = self.mlmodel.flavors["pytorch"]
        if flavor.get("code"):
            own_modules.add(directory / flavor["code"])
        self.model = self.in_form(lambda: self._load(directory / str(flavor.get("model_data", "data"))))
        self.initialized = True

    def _load(self, data: Path) -> Any:
        path = next((path for name in ("model.pth", "model.pt2") if (path := data / name).is_file()), data / "model.pth")
        try:
            return load_model_file(path, None, self.device, weights_only=False)  # a whole model, which its packer trusts
        except ModuleNotFoundError as error:
            text = f"The model's pickle needs the module {error.name}: install it where tsx runs, or set install_py_dep_per_model = true."
            raise LoadError(text) from error

    @functools.cached_property
    def _input_specs(self) -> tuple[InputSpec, ...]:
        return tuple(InputSpec(each.name, each.shape, getattr(torch, each.dtype), True) for each in self.mlmodel.tensors)

    @property
    def _takes_tensors(self) -> bool:
        return True

    def preprocess(self, data: Any) -> Any:
        rows, faults = list[Any](), dict[int, str]()
        for position, row in enumerate(data):
            try:
                rows.append(as_instances(row, content_type_of(self.context, position)) if isinstance(row, dict) else row)
            except MalformedTensors as error:
                faults[position] = f"{error} {self._wanted}"
        if faults:
            raise BadRows(faults)
        return super().preprocess(rows)

    def handle(self, data: Any, context: Context) -> Any:
        """As that of the default handler, except that a refusal is in MLflow's form, too."""
        try:
            return super().handle(data, context)
        except BadRows as bad:
            good = [row for position, row in enumerate(data) if position not in bad.faults]
            answers = iter(self.handle(good, context) if good else ())
            return [
                refuse(context, position, bad.faults[position], bad.error_code) if position in bad.faults else next(answers)
                for position in range(len(data))
            ]

    def describe_handle(self) -> Any:
        return {**super().describe_handle(), MANIFEST_KEY: self.manifest.get(MANIFEST_KEY)}
