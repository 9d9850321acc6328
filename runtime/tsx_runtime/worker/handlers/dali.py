"""Prepares images with NVIDIA DALI, by a pipeline in the archive. https://docs.nvidia.com/deeplearning/dali

`dali: {pipeline_file: FILE, batch_size: N, num_threads: N, device_id: N, seed: N}` of model-config.yaml names a serialized pipeline whose
external source is called `source`: it takes the bytes of image files and gives tensors of one shape.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from tsx_runtime.worker.exceptions import BadRows, LoadError, in_words
from tsx_runtime.worker.handler_api.context import Context
from tsx_runtime.worker.handler_api.loader import own_file
from tsx_runtime.worker.handlers.base import BaseHandler
from tsx_runtime.worker.handlers.image_classifier import ImageClassifier
from tsx_runtime.worker.handlers.steps.timing import timed
from tsx_runtime.worker.handlers.vision import NotAnImage, image_bytes


class DALIHandler(BaseHandler):
    """Has the pipeline as `pipe`."""

    def __init__(self) -> None:
        super().__init__()
        self.pipe: Any = None

    def initialize(self, context: Context) -> None:
        super().initialize(context)
        settings = context.model_yaml_config.get("dali")
        if not isinstance(settings, dict) or not settings.get("pipeline_file"):
            raise LoadError("The handler prepares images by DALI, but model-config.yaml does not say `dali: {pipeline_file: FILE}`.")
        path = Path(context.system_properties["model_dir"]) / str(settings["pipeline_file"])
        if not path.is_file():
            raise LoadError(f"DALI's pipeline {path.name} is not in the archive. Add it with --extra-files.")
        own_file(path, Path(context.system_properties["model_dir"]))
        try:
            from nvidia.dali.pipeline import Pipeline  # not one of tsx's dependencies: there is a build for each release of CUDA
        except ModuleNotFoundError as error:
            raise LoadError("The handler prepares images by DALI, which is not installed here: pip install nvidia-dali-cuda120") from error
        batch_size = settings.get("batch_size") or context.system_properties["batch_size"]
        known = {name: settings[name] for name in ("num_threads", "device_id", "seed") if name in settings}
        try:
            self.pipe = Pipeline.deserialize(filename=str(path), batch_size=batch_size, prefetch_queue_depth=1, **known)
        except (RuntimeError, ValueError, TypeError) as error:  # what DALI raises for what it cannot read
            raise LoadError(f"DALI cannot read the pipeline {path.name}: {in_words(error)}") from error

    @timed
    def preprocess(self, data: Any) -> Any:
        sources: list[Any] = []
        faults: dict[int, str] = {}
        for idx, row in enumerate(data):
            try:
                sources.append(np.frombuffer(image_bytes(row), dtype=np.uint8))
            except NotAnImage as error:
                faults[idx] = str(error)
        if faults:
            raise BadRows(faults)
        prepared = self.pipe.run(source=sources)[0]
        return torch.stack([_tensor(entry) for entry in prepared]).to(self.device)


class DALIImageClassifier(DALIHandler, ImageClassifier):
    """The likeliest classes, as `ImageClassifier` gives them."""


def _tensor(entry: Any) -> torch.Tensor:
    """What DALI gives lies on its GPU, or is an array."""
    return torch.as_tensor(entry, device="cuda") if hasattr(entry, "__cuda_array_interface__") else torch.from_numpy(np.array(entry))
