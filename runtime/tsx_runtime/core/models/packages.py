"""The check, before a worker starts, that the packages of a built-in handler are installed."""

from __future__ import annotations

from importlib.util import find_spec

from tsx_archiver import OpenArchive
from tsx_runtime.core.models.handlers import BUILTIN
from tsx_runtime.errors import InvalidModel

ONNX = ("onnxruntime", "onnx")

# This advice is added to an error about a missing module.
INSTALL_HINT = (
    "Or let the server install the packages of the requirements file: --set"
    " install_py_dep_per_model=true."
)


def check_packages(archive: OpenArchive, handler: str, requirement: tuple[str, str] | None) -> None:
    """Refuse a model whose built-in handler needs a package that the server lacks.

    `requirement` is the package that all models of the handler need, and its extra; or None.

    Raises:
        InvalidModel: The package is not installed.
    """
    file = archive.manifest.serialized_file or ""
    if requirement is None and handler in BUILTIN and file.endswith(".onnx"):
        requirement = ONNX
    if requirement is not None and find_spec(requirement[0]) is None:
        package, extra = requirement
        raise InvalidModel(
            f"{archive.source.name} needs the package {package}, which is not installed: pip"
            f" install 'tsx-serve[{extra}]'"
        )
