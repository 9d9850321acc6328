"""The first functions in a worker's process, which the front end and the commands name: it imports
no other module of the worker.
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
    """`files`: how many it may have open, where the front end has raised the limit for itself.

    `hidden`: variables it must not have.
    """
    for name in hidden:
        os.environ.pop(name, None)
    from tsx_runtime.worker import (
        main,
    )  # here, because the front end must not import what a worker needs

    main.begin_process(
        sock, files
    )  # here, because `main.run` may also serve in a thread of another process
    main.run(sock)


def run_thread(sock: socket.socket, hidden: Iterable[str] = ()) -> None:
    """The same, in a thread of the front end's process, whose signals, output and descriptors are
    not the worker's to change.
    """
    for name in hidden:
        os.environ.pop(name, None)
    from tsx_runtime.worker import main  # here, as above

    main.run(sock)


def run_program(
    fd: int, files: int | None, packages: str | None, group: dict[str, Any] | None = None
) -> None:
    """As `run`, in a process that was not forked: its socket is descriptor `fd`.

    See `Launch` in core/workers/launch.py.
    """
    from tsx_runtime.worker.launch import group as groups

    if packages is not None:
        put_first(packages)
    sock = socket.socket(fileno=fd)
    sock.set_inheritable(False)  # the programs that a handler starts would hold it open
    if group is None:
        run(sock, files)
    else:
        groups.launch(sock, files, packages, **group)


def run_rank(directory: str, files: int | None, packages: str | None, broadcast: bool) -> None:
    """One process of a torchrun group. See worker/launch/group.py."""
    from tsx_runtime.worker.launch.rank import serve

    if packages is not None:
        put_first(packages)
    serve(directory, files, broadcast=broadcast)


def put_first(packages: str) -> None:
    """Put a directory of packages, and the paths of its .pth files, before installed packages and
    behind the standard library.
    """
    before = list(sys.path)
    if (
        packages in before
    ):  # the interpreter is the environment's own, and has put it where it belongs
        return
    site.addsitedir(packages)
    added = [place for place in sys.path if place not in before]
    paths = sysconfig.get_paths()
    library = {paths["stdlib"], paths["platstdlib"], f"{paths['platstdlib']}/lib-dynload"}
    sys.path[:] = [
        *(place for place in before if place in library),
        *added,
        *(place for place in before if place not in library),
    ]


def import_code(
    answer: Connection,
    directory: Path,
    handler: str | None,
    model: Mapping[str, Any],
    config: Mapping[str, Any],
) -> None:
    """Import a model's code as `run` would.

    Of several model classes, the one that the weights fit is chosen. `model` is that of the
    manifest. Sends what is wrong (`missing`: a module), or None.
    """
    from tsx_runtime.worker.exceptions import LoadError  # these, and torch, in this process alone
    from tsx_runtime.worker.handler_api import loader, modules, ts_shim
    from tsx_runtime.worker.main import failure_report

    os.dup2(2, 1)  # stdout is for the results of the command
    os.chdir(directory)
    modules.own_modules.enter(directory)
    ts_shim.install()
    model_file = model.get("modelFile")
    try:
        if handler is not None:
            loader.find_entry(handler, directory)
        if (
            model_file is not None and handler is not None
        ):  # which may make the model in a way of its own
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
