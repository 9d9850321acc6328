"""The entry points of a worker's process, named by the front end and by commands.

This module imports no other module of the worker.
"""

from __future__ import annotations

import os
import site
import socket
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


def run(sock: socket.socket, files: int | None = None, hidden: Iterable[str] = ()) -> None:
    """Serve a model in this process.

    Args:
        sock: The socket to the front end.
        files: The limit of open files, if the front end has raised it for itself.
        hidden: The environment variables to remove.
    """
    for name in hidden:
        os.environ.pop(name, None)
    # The front end must not import what a worker needs.
    from tsx_runtime.worker import main

    # `main.run` may also serve in a thread of another process, and so does not begin one.
    main.begin_process(sock, files)
    main.run(sock)


def run_thread(sock: socket.socket, hidden: Iterable[str] = ()) -> None:
    """Serve a model in a thread of the front end's process.

    The signals, output and descriptors of that process stay unchanged.
    """
    for name in hidden:
        os.environ.pop(name, None)
    from tsx_runtime.worker import main

    main.run(sock)


def run_program(
    fd: int, files: int | None, packages: str | None, group: dict[str, Any] | None = None
) -> None:
    """Serve a model, or a group's, in a process that was not forked.

    Its socket is descriptor `fd`. See `Launch` in core/workers/launch.py.
    """
    from tsx_runtime.worker.launch import group as groups

    if packages is not None:
        prioritize_packages(packages)
    sock = socket.socket(fileno=fd)
    sock.set_inheritable(False)  # Programs that a handler starts would hold it open.
    if group is None:
        run(sock, files)
    else:
        groups.launch(sock, files, packages, **group)


def run_rank(directory: str, files: int | None, packages: str | None, broadcast: bool) -> None:
    """Serve as one process of a torchrun group. See worker/launch/group.py."""
    from tsx_runtime.worker.launch.rank import serve

    if packages is not None:
        prioritize_packages(packages)
    serve(directory, files, broadcast=broadcast)


def prioritize_packages(packages: str) -> None:
    """Put a directory of packages before the installed packages, after the standard library.

    The same holds for the paths of its .pth files.
    """
    before = list(sys.path)
    if packages in before:
        # The interpreter is the environment's own, and has ordered its paths.
        return
    site.addsitedir(packages)
    added = [path for path in sys.path if path not in before]
    paths = sysconfig.get_paths()
    library = {paths["stdlib"], paths["platstdlib"], f"{paths['platstdlib']}/lib-dynload"}
    sys.path[:] = [
        *(path for path in before if path in library),
        *added,
        *(path for path in before if path not in library),
    ]


def import_code(
    answer: Connection,
    directory: Path,
    handler: str | None,
    model: Mapping[str, Any],
    config: Mapping[str, Any],
) -> None:
    """Import a model's code as `run` would, and send what is wrong, or None.

    If the model file has several model classes, the one that fits the weights is chosen.

    Args:
        answer: The receiver of the failure report; `missing` in it means a missing module.
        directory: The directory of the model.
        handler: The handler's name.
        model: The `model` of the manifest.
        config: The model's configuration.
    """
    # Only this process imports these, and torch.
    from tsx_runtime.worker.exceptions import LoadError
    from tsx_runtime.worker.handler_api import loader, modules, ts_shim
    from tsx_runtime.worker.main import failure_report

    os.dup2(2, 1)  # The command prints its results on stdout.
    os.chdir(directory)
    modules.own_modules.enter(directory)
    ts_shim.install()
    model_file = model.get("modelFile")
    try:
        if handler is not None:
            loader.find_entry(handler, directory)
        # A handler may make the model in its own way.
        if model_file is not None and handler is not None:
            loader.import_file(directory / model_file, "The model file")
        elif model_file is not None:
            from tsx_runtime.worker.handlers.models.weights import check_class

            weights = directory / model["serializedFile"] if "serializedFile" in model else None
            check_class(directory / model_file, weights, config, model.get("modelClass"))
    except LoadError as error:
        answer.send(
            failure_report(error)
            | ({"missing": ""} if isinstance(error.__cause__, ModuleNotFoundError) else {})
        )
    else:
        answer.send(None)
