"""A process (rank) of a group: rank 0 answers the front end, and forwards frames to the others.

Every rank loads the model, since the ranks connect to each other while loading. With `broadcast`,
every rank gets every batch, and all run the handler in step; only the result of rank 0 is sent as a
response. Without it (pipelines), only rank 0 gets requests. The other ranks take part through the
connections that they have made in `initialize`. See `torchrun` in docs/reference/torchserve.md.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Sequence

from tsx_runtime.wire import Buffer, Frame, Kind, encode
from tsx_runtime.worker import main
from tsx_runtime.worker.channel import FrameSocket, send_buffers
from tsx_runtime.worker.launch.group import fetch_sockets

_PR_SET_PDEATHSIG = 1
# the time in which the death of a rank becomes visible after a failed batch
RANK_DEATH_WAIT_MS = 200

logger = logging.getLogger("tsx.worker")


def serve(directory: str, max_open_files: int | None, *, broadcast: bool) -> None:
    end_with_parent()
    rank, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    sock, *followers = fetch_sockets(directory, rank, ranks)
    main.begin_process(sock, max_open_files)
    channel = Leader(sock, followers, broadcast=broadcast) if rank == 0 else Follower(sock)
    main.run(sock, channel, ignores_signals=False)  # The agent ends a rank with SIGTERM.


class Leader(FrameSocket):
    """The channel of rank 0, which forwards frames from the front end to the other ranks.

    It reports success only after all ranks have loaded the model.
    """

    def __init__(
        self, sock: socket.socket, followers: Sequence[socket.socket], *, broadcast: bool
    ) -> None:
        super().__init__(sock)
        self._followers = followers
        self._forwarded_kinds = {Kind.LOAD, Kind.BATCH} if broadcast else {Kind.LOAD}
        self._loaded_followers = threading.Semaphore(0)
        self._failure_lock = threading.Lock()
        for position, follower in enumerate(followers, start=1):
            threading.Thread(
                target=self._listen,
                args=(follower, position),
                name=f"tsx-rank-{position}",
                daemon=True,
            ).start()

    def read(self) -> Frame | None:
        frame = super().read()
        if frame is not None and frame.kind in self._forwarded_kinds:
            for follower in self._followers:
                send_buffers(follower, encode(frame.kind, frame.batch, frame.items, frame.extra))
        return frame

    def send(
        self,
        kind: Kind,
        batch: int,
        items: Sequence[tuple[int, Buffer, Buffer]] = (),
        extra: Buffer = b"",
    ) -> None:
        if kind is Kind.LOADED:
            for _ in self._followers:
                self._loaded_followers.acquire()
        elif kind is Kind.FAILED:
            self._fail(extra)
            return
        super().send(kind, batch, items, extra)

    def reply(
        self, batch: int, answers: Sequence[tuple[int, Buffer, Buffer]], extra: Buffer
    ) -> None:
        if any(code >= 500 for code, _, _ in answers):
            poller = select.poll()
            for follower in self._followers:
                poller.register(follower, 0)  # With the mask 0, only a hang-up ends the poll.
            if poller.poll(RANK_DEATH_WAIT_MS):
                logger.error("a batch failed because another rank has ended")
                # Wait for the agent, which is about to end the group. This reports the failure.
                threading.Event().wait()
        super().reply(batch, answers, extra)

    def _listen(self, follower: socket.socket, position: int) -> None:
        """Receive from another rank that it has loaded the model, or why it has not.

        If the rank ends, the agent handles this.
        """
        channel = FrameSocket(follower)
        try:
            while (frame := channel.read()) is not None:
                if frame.kind is Kind.LOADED:
                    self._loaded_followers.release()
                else:
                    report = json.loads(bytes(frame.extra))
                    self._fail(
                        json.dumps(
                            {**report, "message": f"rank {position}: {report['message']}"}
                        ).encode()
                    )
        except ConnectionError:
            return

    def _fail(self, extra: Buffer) -> None:
        """Report a failure if it is the first one. The front end then ends the group."""
        if self._failure_lock.acquire(blocking=False):
            super().send(Kind.FAILED, 0, extra=extra)


class Follower(FrameSocket):
    """The channel of another rank, which reads from rank 0 and reports only how loading ended."""

    def _write(self, buffers: Sequence[Buffer]) -> None:
        # The first byte of a frame is its kind.
        if buffers[0][0] in (Kind.LOADED, Kind.FAILED):
            super()._write(buffers)


def end_with_parent() -> None:
    """Let the kernel kill this process when its parent ends for any reason.

    This works only on Linux. Elsewhere the process ends when its socket is closed.
    """
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # The parent has ended meanwhile.
            os._exit(1)
