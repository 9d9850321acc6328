"""Chooses the handler of a model, and checks the handler of a registration."""

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
CPP_HANDLERS = (
    "",
    "basehandler",
    "torchscripthandler",
    "torch_scripted_handler",
)  # of the C++ backend, lower case: they load TorchScript
IN_PYTHON = "torchscript_handler"  # the built-in handler that answers as these do
BUILTIN = (*BUILTIN_HANDLERS, "torchscript_handler")
PREFIX = (  # that TorchServe's users may write before the name of a built-in handler
    "ts.torch_handler."
)


def chosen_handler(archive: OpenArchive, asked: str | None, default: str | None) -> str:
    """`asked` by the registration, else what the manifest names, else the `default` of the
    settings.

    A registration chooses among the archive's own files and the built-in handlers. A module that is
    installed beside the server is for the manifest and the settings to name. Raises BadRequest.
    """
    named = archive.manifest.handler or default or ""
    handler = asked or named
    fault = handler_fault(handler) if handler else None
    if fault:
        raise BadRequest(f"The handler {shown(handler)} is refused: {fault}. {_WANTED}")
    file = handler.strip(" ").partition(":")[0]
    found = _find(file, archive.directory)
    if found is not None and not is_inside(found, archive.directory):
        raise BadRequest(
            f"The handler {shown(handler)} is refused: its file is a link to a file outside the"
            f" model's directory. {_WANTED}"
        )
    if (
        asked
        and asked != named
        and found is None
        and file.removeprefix(PREFIX).removesuffix(".py") not in BUILTIN
    ):
        raise BadRequest(
            f"The handler {shown(handler)} is refused: it is neither a file of the archive nor a"
            f" built-in handler. {_WANTED}"
        )
    return handler


def _find(name: str, directory: Path) -> Path | None:
    """The file that a worker would import: as the path says, by its last part, or as a module of a
    package.
    """
    stem = name.removesuffix(".py")
    places = (
        stem,
        stem.rpartition("/")[2],
        stem.replace(".", "/"),
        f"{stem.replace('.', '/')}/__init__",
    )
    return next((path for place in places if (path := directory / f"{place}.py").is_file()), None)


_WANTED = "Name a file of the archive, as file.py or file.py:function, or a built-in handler."


def handler_of(archive: OpenArchive, handler: str, runtime: str) -> str:
    """The handler to serve with: for an archive of the C++ backend (`runtime: LSP`), the one that
    does in Python what its own would do.

    Raises BadRequest where nothing in Python can.
    """
    if runtime.upper() != CPP_RUNTIME:
        return handler
    file, _ = split_handler(handler)
    if file.endswith(".py") or (archive.directory / f"{file}.py").is_file():
        return handler  # it was given a handler in Python
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
    return IN_PYTHON
