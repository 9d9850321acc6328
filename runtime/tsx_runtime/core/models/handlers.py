"""The choice of a model's handler, and the check whether a registration may use it."""

from __future__ import annotations

from pathlib import Path

from tsx_archiver import (
    BUILTIN_HANDLERS,
    ArchiveError,
    OpenArchive,
    describe_model_file,
    handler_fault,
    is_inside,
    shown,
    split_handler,
)
from tsx_runtime.errors import BadRequest

CPP_RUNTIME = "LSP"
# The handlers of the C++ backend, in lower case: they load TorchScript.
CPP_HANDLERS = ("", "basehandler", "torchscripthandler", "torch_scripted_handler")
PYTHON_EQUIVALENT = "torchscript_handler"  # the built-in handler that replaces these
BUILTIN = (*BUILTIN_HANDLERS, "torchscript_handler")
PREFIX = "ts.torch_handler."  # allowed before the name of a built-in handler, as in TorchServe


def chosen_handler(archive: OpenArchive, requested: str | None, default: str | None) -> str:
    """Return the requested handler, or else the manifest's, or else the default.

    A registration may choose among the archive's own files and the built-in handlers. Only the
    manifest and the settings may name an installed module.

    Raises:
        BadRequest: The handler must not be used.
    """
    configured = archive.manifest.handler or default or ""
    handler = requested or configured
    fault = handler_fault(handler) if handler else None
    if fault:
        raise BadRequest(f"The handler {shown(handler)} is refused: {fault}. {_ADVICE}")
    file = handler.strip(" ").partition(":")[0]
    path = _find(file, archive.directory)
    if path is not None and not is_inside(path, archive.directory):
        raise BadRequest(
            f"The handler {shown(handler)} is refused: its file is a link to a file outside the"
            f" model's directory. {_ADVICE}"
        )
    if (
        requested
        and requested != configured
        and path is None
        and file.removeprefix(PREFIX).removesuffix(".py") not in BUILTIN
    ):
        raise BadRequest(
            f"The handler {shown(handler)} is refused: it is neither a file of the archive nor a"
            f" built-in handler. {_ADVICE}"
        )
    return handler


def _find(name: str, directory: Path) -> Path | None:
    """Find the file that a worker would import, or return None.

    The name may be a path, a path of which only the last part exists, or a dotted module name.
    """
    stem = name.removesuffix(".py")
    modules = (
        stem,
        stem.rpartition("/")[2],
        stem.replace(".", "/"),
        f"{stem.replace('.', '/')}/__init__",
    )
    return next(
        (path for module in modules if (path := directory / f"{module}.py").is_file()), None
    )


_ADVICE = "Name a file of the archive, as file.py or file.py:function, or a built-in handler."


def handler_of(archive: OpenArchive, handler: str, runtime: str) -> str:
    """Return the handler to serve with.

    An archive of the C++ backend (`runtime: LSP`) gets the equivalent handler in Python.

    Raises:
        BadRequest: No handler in Python is equivalent.
    """
    if runtime.upper() != CPP_RUNTIME:
        return handler
    file, _ = split_handler(handler)
    if file.endswith(".py") or (archive.directory / f"{file}.py").is_file():
        return handler  # The archive has a handler in Python.
    if file.rpartition("/")[2].lower() not in CPP_HANDLERS:
        raise BadRequest(
            f"{archive.source.name} is an archive of TorchServe's C++ backend (runtime LSP), and"
            f" its handler {handler} is compiled code, which tsx does not run. Pack the model again"
            " with a handler in Python: tsx archive MODEL --handler handler.py"
        )
    name = archive.manifest.serialized_file
    try:
        kind = "nothing" if name is None else describe_model_file(archive.directory / name).kind
    except ArchiveError as error:
        raise BadRequest(str(error)) from error
    if kind != "torchscript":
        raise BadRequest(
            f"{archive.source.name} is an archive of TorchServe's C++ backend (runtime LSP). tsx"
            f" serves those that hold TorchScript, and {name or 'this one'} holds {kind}. Pack the"
            " model again with runtime python."
        )
    return PYTHON_EQUIVALENT
