"""Chooses the handler of a model, and checks the handler of a registration."""

from __future__ import annotations

from pathlib import Path

from tsx_archiver import BUILTIN_HANDLERS, OpenArchive, handler_fault, is_inside, shown
from tsx_runtime.errors import BadRequest

BUILTIN = (*BUILTIN_HANDLERS, "torchscript_handler")
PREFIX = "ts.torch_handler."  # that TorchServe's users may write before the name of a built-in handler


def chosen_handler(archive: OpenArchive, asked: str | None, default: str | None) -> str:
    """`asked` by the registration, else what the manifest names, else the `default` of the settings.

    A registration chooses among the archive's own files and the built-in handlers. A module that is installed beside the server is
    for the manifest and the settings to name. Raises BadRequest.
    """
    named = archive.manifest.handler or default or ""
    handler = asked or named
    fault = handler_fault(handler) if handler else None
    if fault:
        raise BadRequest(f"The handler {shown(handler)} is refused: {fault}. {_WANTED}")
    file = handler.strip(" ").partition(":")[0]
    found = _find(file, archive.directory)
    if found is not None and not is_inside(found, archive.directory):
        raise BadRequest(f"The handler {shown(handler)} is refused: its file is a link to a file outside the model's directory. {_WANTED}")
    if asked and asked != named and found is None and file.removeprefix(PREFIX).removesuffix(".py") not in BUILTIN:
        raise BadRequest(f"The handler {shown(handler)} is refused: it is neither a file of the archive nor a built-in handler. {_WANTED}")
    return handler


def _find(name: str, directory: Path) -> Path | None:
    """The file that a worker would import: as the path says, by its last part, or as a module of a package."""
    stem = name.removesuffix(".py")
    places = (stem, stem.rpartition("/")[2], stem.replace(".", "/"), f"{stem.replace('.', '/')}/__init__")
    return next((path for place in places if (path := directory / f"{place}.py").is_file()), None)


_WANTED = "Name a file of the archive, as file.py or file.py:function, or a built-in handler."
