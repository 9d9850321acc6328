"""The entry points of a worker's process, which the front end and commands refer to by name.

To keep the front end small, this module itself imports no other module of the worker.
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


def run(
    sock: socket.socket, max_open_files: int | None = None, hidden_variables: Iterable[str] = ()
) -> None:
    """Serve a model in this process.

    Args:
        sock: The socket to the front end.
        max_open_files: The limit of open files, if the front end has raised its own limit.
        hidden_variables: The environment variables to remove.
    """
    for name in hidden_variables:
        os.environ.pop(name, None)
    # Imported here, since the front end must not import the modules of a worker.
    from tsx_runtime.worker import main

    # `main.run` does not do this, since it may also serve in a thread of another process.
    main.begin_process(sock, max_open_files)
    main.run(sock)


def run_thread(sock: socket.socket, hidden_variables: Iterable[str] = ()) -> None:
    """Serve a model in a thread of the front end's process.

    The process keeps its signals, output and descriptors.
    """
    for name in hidden_variables:
        os.environ.pop(name, None)
    from tsx_runtime.worker import main

    main.run(sock)


def run_program(
    fd: int, max_open_files: int | None, packages: str | None, group: dict[str, Any] | None = None
) -> None:
    """Serve a model, or start a group for it, in a process that was not forked.

    The socket is the descriptor `fd`. See `Launch` in core/workers/launch.py.
    """
    from tsx_runtime.worker.launch import group as groups

    if packages is not None:
        prioritize_packages(packages)
    sock = socket.socket(fileno=fd)
    sock.set_inheritable(False)  # Programs that a handler starts would keep the socket open.
    if group is None:
        run(sock, max_open_files)
    else:
        groups.launch(sock, max_open_files, packages, **group)


def run_rank(
    directory: str, max_open_files: int | None, packages: str | None, broadcast: bool
) -> None:
    """Serve as one process of a torchrun group. See worker/launch/group.py."""
    from tsx_runtime.worker.launch.rank import serve

    if packages is not None:
        prioritize_packages(packages)
    serve(directory, max_open_files, broadcast=broadcast)


def prioritize_packages(packages: str) -> None:
    """Put a directory of packages before the installed packages, but after the standard library.

    The paths of its .pth files are put there, too.
    """
    previous_paths = list(sys.path)
    if packages in previous_paths:
        # This Python belongs to the environment, and has ordered its paths already.
        return
    site.addsitedir(packages)
    added_paths = [path for path in sys.path if path not in previous_paths]
    paths = sysconfig.get_paths()
    library_paths = {paths["stdlib"], paths["platstdlib"], f"{paths['platstdlib']}/lib-dynload"}
    sys.path[:] = [
        *(path for path in previous_paths if path in library_paths),
        *added_paths,
        *(path for path in previous_paths if path not in library_paths),
    ]


def import_code(
    connection: Connection,
    directory: Path,
    handler: str | None,
    model: Mapping[str, Any],
    config: Mapping[str, Any],
) -> None:
    """Import a model's code as `run` would, and send the failure report, or None for success.

    If the model file has several model classes, the one that fits the weights is chosen.

    Args:
        connection: The connection for the report, which has the key `missing` if a module is
            missing.
        directory: The directory of the model.
        handler: The handler's name.
        model: The `model` of the manifest.
        config: The model's configuration.
    """
    # Only this process imports these modules, and torch.
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
        # The model file is only imported, since the handler may create the model in its own way.
        if model_file is not None and handler is not None:
            loader.import_file(directory / model_file, "The model file")
        elif model_file is not None:
            from tsx_runtime.worker.handlers.models.weights import check_class

            weights = directory / model["serializedFile"] if "serializedFile" in model else None
            check_class(directory / model_file, weights, config, model.get("modelClass"))
    except LoadError as error:
        connection.send(
            failure_report(error)
            | ({"missing": ""} if isinstance(error.__cause__, ModuleNotFoundError) else {})
        )
    else:
        connection.send(None)
