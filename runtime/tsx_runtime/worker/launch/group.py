"""A worker of several processes, which torchrun starts and which share a set of sockets.

The front end knows one socket and one process, this one. It runs torch's own elastic agent, so that
the keys under `torchrun` mean what they mean there, and gives the front end's socket to rank 0:

    front end ==== rank 0 ==== rank 1
                     ||======= rank 2 ...

Sockets cannot be inherited through the agent, so each rank fetches its own from a directory that
only this user can enter. The agent ends all when one ends; then this process ends, and the front
end starts another group.
"""

from __future__ import annotations

import json
import logging
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from tsx_runtime.shared.safe_path import CLEAN
from tsx_runtime.shared.socket_paths import socket_directory

RANK_BOOT = (
    CLEAN + "import json; sys.path[:] = json.loads(sys.argv[1]); "
    "from tsx_runtime.worker.launch.entry import run_rank; run_rank(**json.loads(sys.argv[2]))"
)
SWITCH = "switch"  # the name of the socket from which ranks fetch their own

logger = logging.getLogger("tsx.worker")


def launch(
    sock: socket.socket,
    files: int | None,
    packages: str | None,
    arguments: Sequence[str],
    ranks: int,
    broadcast: bool,
) -> None:
    """Run a group until it ends, and exit with the code of the rank that failed first."""
    # Only a worker that is a group needs torchrun.
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from tsx_runtime.worker.launch.rendezvous import stay_on_loopback

    if not any(argument.startswith("--rdzv-backend=") for argument in arguments):
        arguments = [*arguments, *stay_on_loopback()]
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)-7s %(name)s (pid %(process)d): %(message)s",
    )
    directory = Path(tempfile.mkdtemp(prefix="tsx-group-", dir=socket_directory()))
    try:
        listener = _listen(directory)
        threading.Thread(
            target=hand_out_sockets,
            args=(directory, listener, sock, ranks),
            name="tsx-switch",
            daemon=True,
        ).start()
        rank_arguments = {
            "directory": str(directory),
            "files": files,
            "packages": packages,
            "broadcast": broadcast,
        }
        program = [
            "--no-python",
            sys.executable,
            "-c",
            RANK_BOOT,
            json.dumps([path for path in sys.path if path]),
            json.dumps(rank_arguments),
        ]
        options = torchrun.parse_args([*arguments, f"--log-dir={directory}", *program])  # type: ignore[no-untyped-call]  # torch's
        torchrun.run(options)  # type: ignore[no-untyped-call]  # torch's
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        logger.error(
            "rank %d (pid %d) of the group has ended with exit code %d, so the group ends",
            rank,
            failure.pid,
            failure.exitcode,
        )
        sys.exit(128 - failure.exitcode if failure.exitcode < 0 else failure.exitcode)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _listen(directory: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(directory / SWITCH))
    listener.listen()
    return listener


def hand_out_sockets(
    directory: Path, listener: socket.socket, front: socket.socket, ranks: int
) -> None:
    """Give each rank its sockets, and keep none of them.

    Rank 0 gets the front end's socket and one to each other rank.
    """
    pairs = [socket.socketpair() for _ in range(1, ranks)]
    # The sockets by rank.
    shares = [[front, *(leading for leading, _ in pairs)], *([following] for _, following in pairs)]
    with listener:
        for _ in range(ranks):
            connection, _ = listener.accept()
            with connection:
                share = shares[int.from_bytes(connection.recv(4), "little")]
                socket.send_fds(connection, [b"."], [sock.fileno() for sock in share])
                for sock in share:
                    sock.close()
    # A group is ended by killing it, so the directory goes at once.
    shutil.rmtree(directory, ignore_errors=True)


def fetch_sockets(directory: str, rank: int, ranks: int) -> list[socket.socket]:
    """Return the sockets of a rank from `hand_out_sockets`; the first one brings its work."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(Path(directory) / SWITCH))
        connection.sendall(rank.to_bytes(4, "little"))
        _, fds, _, _ = socket.recv_fds(connection, 1, ranks)
    sockets = [socket.socket(fileno=fd) for fd in fds]
    for sock in sockets:
        sock.set_inheritable(False)
    return sockets
