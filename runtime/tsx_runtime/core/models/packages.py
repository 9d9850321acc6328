"""The check, before a worker starts, that the packages of a built-in handler are installed."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

from tsx_archiver import OpenArchive
from tsx_archiver.metadata.huggingface import GENERATION_HANDLER, HANDLER
from tsx_archiver.metadata.mlmodel import PYFUNC
from tsx_runtime.core.models.handlers import BUILTIN
from tsx_runtime.errors import InvalidModel

# The package that loads the model, and the extra that installs it, by handler or file suffix.
PACKAGES: Mapping[str, tuple[str, str]] = {
    HANDLER: ("transformers", "transformers"),
    GENERATION_HANDLER: ("transformers", "transformers"),
    PYFUNC: ("mlflow", "mlflow"),
    ".onnx": ("onnxruntime", "onnx"),
}

# This advice is added to an error about a missing module.
INSTALL_HINT = (
    "Or let the server install the packages of the requirements file: --set"
    " install_py_dep_per_model=true."
)


def check_packages(archive: OpenArchive, handler: str) -> None:
    """Refuse a model whose built-in handler needs a package that the server lacks.

    Raises:
        InvalidModel: The package is not installed.
    """
    file = archive.manifest.serialized_file or ""
    requirement = PACKAGES.get(handler) or (
        PACKAGES[".onnx"] if handler in BUILTIN and file.endswith(".onnx") else None
    )
    if requirement is not None and find_spec(requirement[0]) is None:
        package, extra = requirement
        raise InvalidModel(
            f"{archive.source.name} needs the package {package}, which is not installed: pip"
            f" install 'tsx-serve[{extra}]'"
        )
