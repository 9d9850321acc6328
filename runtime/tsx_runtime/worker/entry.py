"""The first function in a worker's process. The front end imports this module to name it, so it imports nothing itself."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable


def run(sock: socket.socket, files: int | None = None, hidden: Iterable[str] = ()) -> None:
    """`files`: how many it may have open, where the front end has raised the limit for itself. `hidden`: variables it must not have."""
    for name in hidden:
        os.environ.pop(name, None)
    from tsx_runtime.worker import main  # here, because the front end must not import what a worker needs

    main.begin_process(sock, files)  # here, because `main.run` may also serve in a thread of somebody else's process
    main.run(sock)
