"""The handlers of Hugging Face models."""

from __future__ import annotations

import os
from pathlib import Path

from tsx_archiver.errors import CannotPack
from tsx_archiver.metadata.huggingface import (
    DIRECTORY,
    GENERATION_HANDLER,
    HANDLER,
    check_references,
    external_code,
)
from tsx_runtime.worker.exceptions import LoadError
from tsx_runtime.worker.handler_api.context import Context
from tsx_runtime.worker.handler_api.loader import BuiltinHandler


def forbid_external_code(context: Context) -> None:
    """Check that a Hugging Face model needs no files from outside its archive.

    Raises:
        LoadError: A file refers to code or weights elsewhere.
    """
    properties = context.system_properties
    trusted = properties.get("trust_remote_code", False)
    if not trusted:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    model_dir = Path(properties["model_dir"])
    directory = model_dir / DIRECTORY if (model_dir / DIRECTORY).is_dir() else model_dir
    try:
        check_references(directory)
        repository = external_code(directory) if trusted else None
    except CannotPack as error:
        raise LoadError(str(error)) from error
    if repository:
        raise LoadError(
            f"The model's code is in another repository: {repository}. It is not run, as it can"
            " change at any time. Copy its files into the model's directory, and name them there"
            " without 'ORG/OTHER--'; or serve the model without trust_remote_code."
        )


HANDLERS = {
    HANDLER: BuiltinHandler(
        "tsx_runtime.features.huggingface.worker.handler:HuggingFaceHandler", forbid_external_code
    ),
    GENERATION_HANDLER: BuiltinHandler(
        "tsx_runtime.features.huggingface.worker.generation:HuggingFaceGeneration",
        forbid_external_code,
    ),
}
