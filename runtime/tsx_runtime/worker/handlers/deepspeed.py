"""Models that DeepSpeed distributes over the processes of one worker. https://deepspeed.readthedocs.io/en/latest/inference-init.html

`deepspeed: {config: FILE, checkpoint: FILE}` of model-config.yaml names two JSON files of the archive: what `init_inference` is given,
and, where the model is built without weights, what its checkpoint is. With `handler: {model_path: DIRECTORY}` the checkpoint is the
files of weights in that directory instead.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from tsx_runtime.worker.exceptions import LoadError
from tsx_runtime.worker.handler_api.context import Context
from tsx_runtime.worker.handler_api.loader import own_file
from tsx_runtime.worker.handlers.base import BaseHandler


class BaseDeepSpeedHandler(BaseHandler):
    """Sets the device of its process; a derived handler makes the model and calls `get_ds_engine`."""

    def initialize(self, ctx: Context) -> None:
        self.context = ctx
        self.manifest = ctx.manifest
        rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.device = torch.device(f"cuda:{rank}") if torch.cuda.is_available() else torch.device("cpu")
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)


def get_ds_engine(model: Any, ctx: Context) -> Any:
    """DeepSpeed's inference engine around `model`, which can be called as the model can."""
    settings = ctx.model_yaml_config.get("deepspeed")
    if not isinstance(settings, dict) or not settings.get("config"):
        raise LoadError("The model asks for DeepSpeed, but model-config.yaml does not say `deepspeed: {config: FILE}`.")
    directory = Path(ctx.system_properties["model_dir"])
    config = _read_json(own_file(directory / str(settings["config"]), directory))
    model_path = (ctx.model_yaml_config.get("handler") or {}).get("model_path")
    if settings.get("checkpoint") and model_path:
        weights = [str(path) for path in Path(model_path).rglob("*.bin")]
        config |= {"base_dir": str(model_path), "checkpoint": {"type": "ds_model", "version": 1.0, "checkpoints": weights}}
    elif settings.get("checkpoint"):
        config["checkpoint"] = str(own_file(_existing(directory / str(settings["checkpoint"])), directory))
    try:
        import deepspeed  # not one of tsx's dependencies: it needs CUDA's compiler where it is installed
    except ModuleNotFoundError as error:
        raise LoadError("The model asks for DeepSpeed, which is not installed here: pip install deepspeed") from error
    return deepspeed.init_inference(model, config=config)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(_existing(path).read_bytes())
    except ValueError as error:
        raise LoadError(f"DeepSpeed's configuration {path.name} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise LoadError(f"DeepSpeed's configuration {path.name} holds a {type(found).__name__}, not keys and values.")
    return found


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise LoadError(
            f"The file {path.name} that `deepspeed` of model-config.yaml names is not in the archive. Add it with --extra-files."
        )
    return path
