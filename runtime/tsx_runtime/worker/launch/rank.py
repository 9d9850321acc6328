"""A process of a group: rank 0 answers the front end, and forwards its frames to the others.

Every rank loads the model, since the ranks meet while loading. With `broadcast`, every rank gets
every batch: the handler runs in step on all of them, and only the result of rank 0 is a response.
Without it (pipelines), only rank 0 gets requests. The other ranks run what they have joined in
`initialize`. See `torchrun` in docs/reference/torchserve.md.
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
HANGUP_WAIT_MS = 200  # A dead rank, which made a batch fail, shows in this time.

logger = logging.getLogger("tsx.worker")


def serve(directory: str, files: int | None, *, broadcast: bool) -> None:
    end_with_parent()
    rank, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    sock, *followers = fetch_sockets(directory, rank, ranks)
    main.begin_process(sock, files)
    channel = Leader(sock, followers, broadcast=broadcast) if rank == 0 else Follower(sock)
    main.run(sock, channel, ignores_signals=False)  # The agent ends a rank with SIGTERM.


class Leader(FrameSocket):
    """The channel of rank 0, which forwards to the other ranks what it reads from the front end.

    It reports success once all ranks have loaded.
    """

    def __init__(
        self, sock: socket.socket, followers: Sequence[socket.socket], *, broadcast: bool
    ) -> None:
        super().__init__(sock)
        self._followers = followers
        self._forwarded = {Kind.LOAD, Kind.BATCH} if broadcast else {Kind.LOAD}
        self._loaded = threading.Semaphore(0)
        self._failed = threading.Lock()
        for position, follower in enumerate(followers, start=1):
            threading.Thread(
                target=self._listen,
                args=(follower, position),
                name=f"tsx-rank-{position}",
                daemon=True,
            ).start()

    def read(self) -> Frame | None:
        frame = super().read()
        if frame is not None and frame.kind in self._forwarded:
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
                self._loaded.acquire()
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
                poller.register(follower, 0)  # Only a hang-up wakes it.
            if poller.poll(HANGUP_WAIT_MS):
                logger.error("a batch failed because another rank has ended")
                # The agent is about to end the group, which reports the failure.
                threading.Event().wait()
        super().reply(batch, answers, extra)

    def _listen(self, follower: socket.socket, position: int) -> None:
        """Read from another rank whether it has loaded, or why not.

        The agent handles the end of a rank.
        """
        channel = FrameSocket(follower)
        try:
            while (frame := channel.read()) is not None:
                if frame.kind is Kind.LOADED:
                    self._loaded.release()
                else:
                    failure = json.loads(bytes(frame.extra))
                    self._fail(
                        json.dumps(
                            {**failure, "message": f"rank {position}: {failure['message']}"}
                        ).encode()
                    )
        except ConnectionError:
            return

    def _fail(self, extra: Buffer) -> None:
        """Report the first failure; the front end then ends the group."""
        if self._failed.acquire(blocking=False):
            super().send(Kind.FAILED, 0, extra=extra)


class Follower(FrameSocket):
    """The channel of another rank, which reads from rank 0 and reports only how loading ended."""

    def _write(self, buffers: Sequence[Buffer]) -> None:
        # A frame begins with its kind.
        if buffers[0][0] in (Kind.LOADED, Kind.FAILED):
            super()._write(buffers)


def end_with_parent() -> None:
    """Have this process killed when its parent ends, however it ends.

    This is Linux only; elsewhere the closed socket shows the end of the parent.
    """
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # The parent has ended meanwhile.
            os._exit(1)
