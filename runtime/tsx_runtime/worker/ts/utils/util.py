"""`ts.utils.util`."""

import importlib
from types import ModuleType

from tsx_runtime.worker.exceptions import PredictionException
from tsx_runtime.worker.handler_api.loader import classes_of
from tsx_runtime.worker.handlers.steps.labels import load_label_mapping, map_class_to_label

__all__ = ["PredictionException", "check_valid_pt2_backend", "list_classes_from_module", "load_label_mapping", "map_class_to_label"]


def list_classes_from_module(module: ModuleType, parent_class: type | None = None) -> list[type]:
    """The classes defined in the module itself; with `parent_class`, those derived from it."""
    return classes_of(module, parent_class)


def check_valid_pt2_backend(backend: str) -> bool:
    """Whether torch.compile has a backend of this name here."""
    return bool(importlib.import_module("tsx_runtime.worker.handlers.models.compiling").is_backend(backend))  # here: it imports torch
