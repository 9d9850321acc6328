"""One process of a group: rank 0 answers the front end, and forwards its frames to the others.

Every rank loads the model, since they meet while they do. With `broadcast` every rank then gets
every batch: the handler runs in step on all of them, and only what rank 0 returns is an answer.
Without it (pipelines) rank 0 alone gets requests, and what the others do is up to what they have
joined in `initialize`. Contract section 6.7.
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
from tsx_runtime.worker.launch.group import fetch

_PR_SET_PDEATHSIG = 1
MOMENT = 200  # ms in which the death of another rank shows, where it made a batch fail

logger = logging.getLogger("tsx.worker")


def serve(directory: str, files: int | None, *, broadcast: bool) -> None:
    end_with_parent()
    rank, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    sock, *others = fetch(directory, rank, ranks)
    main.begin_process(sock, files)
    channel = Leader(sock, others, broadcast=broadcast) if rank == 0 else Follower(sock)
    main.run(sock, channel, ignores_signals=False)  # the agent ends a rank with SIGTERM


class Leader(FrameSocket):
    """The channel of rank 0: reads from the front end and forwards to the other ranks; answers once
    all of them have loaded.
    """

    def __init__(
        self, sock: socket.socket, others: Sequence[socket.socket], *, broadcast: bool
    ) -> None:
        super().__init__(sock)
        self._others = others
        self._forwarded = {Kind.LOAD, Kind.BATCH} if broadcast else {Kind.LOAD}
        self._loaded = threading.Semaphore(0)
        self._refused = threading.Lock()
        for position, other in enumerate(others, start=1):
            threading.Thread(
                target=self._listen,
                args=(other, position),
                name=f"tsx-rank-{position}",
                daemon=True,
            ).start()

    def read(self) -> Frame | None:
        frame = super().read()
        if frame is not None and frame.kind in self._forwarded:
            for other in self._others:
                send_buffers(other, encode(frame.kind, frame.batch, frame.items, frame.extra))
        return frame

    def send(
        self,
        kind: Kind,
        batch: int,
        items: Sequence[tuple[int, Buffer, Buffer]] = (),
        extra: Buffer = b"",
    ) -> None:
        if kind is Kind.LOADED:
            for _ in self._others:
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
            for other in self._others:
                poller.register(other, 0)  # wakes for a hang-up only
            if poller.poll(MOMENT):
                logger.error("a batch failed because another rank has ended")
                # its death shows by the end of the group, which the agent is about to cause
                threading.Event().wait()
        super().reply(batch, answers, extra)

    def _listen(self, other: socket.socket, position: int) -> None:
        """Read from another rank whether it has loaded, or why not.

        Its end is handled by the agent.
        """
        channel = FrameSocket(other)
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
        if self._refused.acquire(blocking=False):
            super().send(Kind.FAILED, 0, extra=extra)


class Follower(FrameSocket):
    """The channel of another rank: reads from rank 0, and reports only the result of loading."""

    def _write(self, buffers: Sequence[Buffer]) -> None:
        if buffers[0][0] in (Kind.LOADED, Kind.FAILED):  # a frame begins with its kind
            super()._write(buffers)


def end_with_parent() -> None:
    """Be killed when the process that started this one ends, however it ends.

    Linux only: elsewhere the closed socket shows it.
    """
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended in between
            os._exit(1)
