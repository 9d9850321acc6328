"""A group: a worker of several processes (ranks), which torchrun starts.

The front end knows only one process, this one, and its socket. This process runs torch's own
elastic agent, so that the keys under `torchrun` have the same meaning as there. It gives the front
end's socket to rank 0:

    front end ==== rank 0 ==== rank 1
                     ||======= rank 2 ...

Ranks cannot inherit sockets through the agent. Therefore each rank fetches its sockets from a
directory that only this user can enter. If a rank ends, the agent ends the others and this process
ends, too. The front end then starts another group.
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

RANK_PROGRAM = (
    CLEAN + "import json; sys.path[:] = json.loads(sys.argv[1]); "
    "from tsx_runtime.worker.launch.entry import run_rank; run_rank(**json.loads(sys.argv[2]))"
)
SWITCH_SOCKET = "switch"  # the name of the socket from which ranks fetch their sockets

logger = logging.getLogger("tsx.worker")


def launch(
    sock: socket.socket,
    max_open_files: int | None,
    packages: str | None,
    arguments: Sequence[str],
    ranks: int,
    broadcast: bool,
) -> None:
    """Run a group until it ends, and exit with the code of the rank that failed first."""
    # Imported here, since only groups need torchrun.
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
            "max_open_files": max_open_files,
            "packages": packages,
            "broadcast": broadcast,
        }
        program = [
            "--no-python",
            sys.executable,
            "-c",
            RANK_PROGRAM,
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
    listener.bind(str(directory / SWITCH_SOCKET))
    listener.listen()
    return listener


def hand_out_sockets(
    directory: Path, listener: socket.socket, front_end_socket: socket.socket, ranks: int
) -> None:
    """Give each rank its sockets, and close them here.

    Rank 0 gets the front end's socket, and a socket to each of the other ranks.
    """
    pairs = [socket.socketpair() for _ in range(1, ranks)]
    sockets_by_rank = [
        [front_end_socket, *(leading for leading, _ in pairs)],
        *([following] for _, following in pairs),
    ]
    with listener:
        for _ in range(ranks):
            connection, _ = listener.accept()
            with connection:
                rank_sockets = sockets_by_rank[int.from_bytes(connection.recv(4), "little")]
                socket.send_fds(connection, [b"."], [sock.fileno() for sock in rank_sockets])
                for sock in rank_sockets:
                    sock.close()
    # The directory is removed now, since this process will be killed at its end.
    shutil.rmtree(directory, ignore_errors=True)


def fetch_sockets(directory: str, rank: int, ranks: int) -> list[socket.socket]:
    """Fetch the sockets of a rank from `hand_out_sockets`; requests arrive at the first one."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(Path(directory) / SWITCH_SOCKET))
        connection.sendall(rank.to_bytes(4, "little"))
        _, fds, _, _ = socket.recv_fds(connection, 1, ranks)
    sockets = [socket.socket(fileno=fd) for fd in fds]
    for sock in sockets:
        sock.set_inheritable(False)
    return sockets
