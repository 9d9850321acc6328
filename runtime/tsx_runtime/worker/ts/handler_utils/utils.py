"""`ts.handler_utils.utils`."""

import importlib
from typing import Any

from tsx_runtime.worker.codecs.streaming import send_intermediate_predict_response

__all__ = ["import_class", "send_intermediate_predict_response"]


def import_class(class_name: str, module_prefix: str | None = None) -> Any:
    """The class of a dotted name, below `module_prefix` where one is given: ("LlamaForCausalLM", "transformers")."""
    dotted = f"{module_prefix}.{class_name}" if module_prefix else class_name
    module, _, name = dotted.rpartition(".")
    if not module:
        raise ImportError(f"{class_name!r} has no module: give it as module.Class, or name the module as module_prefix")
    try:
        return getattr(importlib.import_module(module), name)
    except AttributeError as error:
        raise ImportError(f"module {module!r} has no class {name!r}") from error
