"""C++ archives (`runtime: LSP`): TorchScript in them runs in Python; other content is refused with the reason."""

from __future__ import annotations

from tsx_archiver import ArchiveError, OpenArchive, describe_model_file, split_handler
from tsx_runtime.errors import BadRequest

RUNTIME = "LSP"
HANDLERS = ("", "basehandler", "torchscripthandler", "torch_scripted_handler")  # of the C++ backend, lower case: they load TorchScript
IN_PYTHON = "torchscript_handler"  # the built-in handler that answers as these do


def handler_of(archive: OpenArchive, handler: str, runtime: str) -> str:
    """The handler to serve with: for an archive of the C++ backend, the one that does in Python what its own would do.

    Raises BadRequest where nothing in Python can.
    """
    if runtime.upper() != RUNTIME:
        return handler
    file, _ = split_handler(handler)
    if file.endswith(".py") or (archive.directory / f"{file}.py").is_file():
        return handler  # it was given a handler in Python
    if file.rpartition("/")[2].lower() not in HANDLERS:
        raise BadRequest(
            f"{archive.source.name} is an archive of TorchServe's C++ backend (runtime LSP), and its handler {handler} is compiled code, "
            "which tsx does not run. Pack the model again with a handler in Python: tsx archive MODEL --handler handler.py"
        )
    name = archive.manifest.serialized_file
    try:
        kind = "nothing" if name is None else describe_model_file(archive.directory / name).kind
    except ArchiveError as error:
        raise BadRequest(str(error)) from error
    if kind != "torchscript":
        raise BadRequest(
            f"{archive.source.name} is an archive of TorchServe's C++ backend (runtime LSP). tsx serves those that hold TorchScript, and "
            f"{name or 'this one'} holds {kind}. Pack the model again with runtime python."
        )
    return IN_PYTHON
