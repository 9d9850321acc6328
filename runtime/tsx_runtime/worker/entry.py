"""The first function in a worker's process. The front end imports this module to name it, so it imports nothing itself."""

from __future__ import annotations

import socket


def run(sock: socket.socket) -> None:
    from tsx_runtime.worker import main  # here, because the front end must not import what a worker needs

    main.begin_process(sock)  # here, because `main.run` may also serve in a thread of somebody else's process
    main.run(sock)
