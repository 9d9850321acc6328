"""The monitor process of a server, and the frames to and from it.

Frames are written without waiting. If the process does not read them fast enough, samples are
dropped, so that no request waits for it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from tsx_archiver.errors import CacheError
from tsx_archiver.storage.locks import FileLock
from tsx_archiver.storage.private_directory import private_directory
from tsx_runtime.core.concurrency.events import wait_for_event
from tsx_runtime.errors import Unavailable
from tsx_runtime.features.monitor.messages import (
    FRAME,
    MAX_HEAD_BYTES,
    VersionState,
    encode_frame,
)

MAX_WAITING_BYTES = 32 << 20  # limit of the bytes that the process has not read
CALL_TIMEOUT_S = 30.0
CLOSE_TIMEOUT_S = 10.0  # limit for the process to store everything and to end
BACK_OFF_S = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)  # pauses between starts
HEALTHY_S = 60.0  # A process that ran this long starts again without a longer pause.
LOCK_PAUSE_S = 0.5  # between checks whether another server has released the store
EXIT_TIMEOUT_S = 1.0  # limit for the process to end after it has closed its output

logger = logging.getLogger("tsx.monitor")


class MonitorChannel:
    """Starts the monitor process when it is needed first, and again after its death."""

    def __init__(
        self,
        command: Sequence[str],
        variables: Mapping[str, str],
        lock: Path | None,
        announcements: Callable[[], Iterable[bytes]],
        on_states: Callable[[list[VersionState]], None],
    ) -> None:
        """Prepare the channel; nothing is started yet.

        Args:
            command: The program and its arguments.
            variables: Its environment variables.
            lock: A file that is locked while the process runs, since one process writes the store.
            announcements: Returns the frames with which each process begins.
            on_states: Gets the states of the versions.
        """
        self.is_up = False
        self.problem: str | None = None
        self._command = command
        self._variables = variables
        self._lock_path = lock
        self._announcements = announcements
        self._on_states = on_states
        self._task: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._connected = asyncio.Event()  # set while `_stdin` is usable
        self._stdin: asyncio.StreamWriter | None = None
        self._is_pausing = False
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self._is_flushing = False
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[tuple[int, bytes]]] = {}

    @property
    def has_started(self) -> bool:
        return self._task is not None

    def start(self) -> None:
        if self._task is None and not self._closing.is_set():
            self._task = asyncio.get_running_loop().create_task(self._run())

    def send(self, frame: bytes) -> Literal["slow", "stopped"] | None:
        """Send a sample in the current turn of the event loop, or return why it is dropped."""
        if self._is_pausing or self._closing.is_set():
            return "stopped"
        if self._unread_bytes + len(frame) > MAX_WAITING_BYTES:
            return "slow"
        self._put(frame)
        return None

    def tell(self, frame: bytes) -> None:
        """Send a message to the running process; a later process begins with `announcements`."""
        if self._stdin is not None:
            self._put(frame)

    async def call(
        self, operation: str, arguments: Mapping[str, Any], body: bytes = b""
    ) -> tuple[int, bytes]:
        """Return the status and the JSON of the process's response.

        Raises:
            Unavailable: The process has not answered in time, or has ended.
        """
        self.start()
        number = next(self._numbers)
        head = {"kind": "call", "id": number, "operation": operation, "arguments": arguments}
        try:
            return await asyncio.wait_for(
                self._call(number, encode_frame(head, body)), CALL_TIMEOUT_S
            )
        except (TimeoutError, asyncio.TimeoutError):
            raise Unavailable(
                f"The monitor process has not answered within {CALL_TIMEOUT_S:g} s"
                f"{f': {self.problem}' if self.problem else ''}. Try again later.",
                retry_after=10,
            ) from None
        finally:
            self._calls.pop(number, None)

    async def close(self) -> None:
        """Let the process store everything and end; after a limit, kill it."""
        self._closing.set()
        self._connected.set()  # Waiting calls are refused.
        if self._task is not None:
            await self._task

    async def _call(self, number: int, frame: bytes) -> tuple[int, bytes]:
        await self._connected.wait()
        if self._closing.is_set() or self._unread_bytes + len(frame) > MAX_WAITING_BYTES:
            raise Unavailable(
                "The monitor process has too much work, or is being stopped. Try again later.",
                retry_after=10,
            )
        result: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        self._calls[number] = result
        self._put(frame)
        return await result

    @property
    def _unread_bytes(self) -> int:
        stdin = self._stdin
        return self._waiting_bytes + (
            0 if stdin is None else stdin.transport.get_write_buffer_size()
        )

    def _put(self, frame: bytes) -> None:
        self._waiting.append(frame)
        self._waiting_bytes += len(frame)
        if not self._is_flushing:
            self._is_flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        """Write the frames of one turn of the event loop together."""
        self._is_flushing = False
        if self._stdin is not None and not self._stdin.is_closing():
            self._stdin.write(b"".join(self._waiting))
            self._waiting, self._waiting_bytes = [], 0

    async def _run(self) -> None:
        pauses = iter(BACK_OFF_S)
        while not self._closing.is_set():
            begin = time.monotonic()
            try:
                self.problem = await self._run_locked()
            except (OSError, CacheError) as error:
                self.problem = f"it cannot be started: {error}"
            self._disconnect()
            if self._closing.is_set():
                return
            if time.monotonic() - begin > HEALTHY_S:
                pauses = iter(BACK_OFF_S)
            pause = next(pauses, BACK_OFF_S[-1])
            logger.error(
                "the monitor process: %s; it is started again in %g s, and requests are answered"
                " meanwhile",
                self.problem,
                pause,
            )
            self._is_pausing = True
            await wait_for_event(self._closing, pause)
            self._is_pausing = False

    def _disconnect(self) -> None:
        self._stdin, self.is_up = None, False
        if not self._closing.is_set():
            self._connected.clear()
        self._waiting, self._waiting_bytes = [], 0
        for call in self._calls.values():
            if not call.done():
                text = "The monitor process has ended before it answered. Try again."
                call.set_exception(Unavailable(text, retry_after=2))

    async def _run_locked(self) -> str:
        """Run a process from start to end, and return why it ended.

        Raises:
            OSError, CacheError: No process can be started.
        """
        if self._lock_path is None:
            return await self._run_process()
        private_directory(self._lock_path.parent)
        lock = FileLock(self._lock_path)
        try:
            while not lock.lock_exclusive(wait=False):
                if self.problem is None:
                    self.problem = f"another server has locked {lock.path}"
                    logger.info("the monitor process waits: %s; see monitor_store", self.problem)
                await wait_for_event(self._closing, LOCK_PAUSE_S)
                if self._closing.is_set():
                    return "the server stops"
            return await self._run_process()
        finally:
            lock.close()

    async def _run_process(self) -> str:
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            env=self._variables,
            start_new_session=True,
        )
        assert process.stdin is not None
        self.problem, self._stdin = None, process.stdin
        self._waiting[:0] = self._announcements()
        self._flush()
        self._connected.set()
        reading = asyncio.ensure_future(self._read(process))
        logging_ = asyncio.ensure_future(_log_output(process))
        closing = asyncio.ensure_future(self._closing.wait())
        await asyncio.wait([reading, closing], return_when=asyncio.FIRST_COMPLETED)
        closing.cancel()
        if not reading.done():
            self._flush()
            process.stdin.close()
            await asyncio.wait([reading], timeout=CLOSE_TIMEOUT_S)
        with suppress(TimeoutError, asyncio.TimeoutError):
            await asyncio.wait_for(process.wait(), EXIT_TIMEOUT_S)
        if process.returncode is None:
            process.kill()
        reading.cancel()
        code = await process.wait()
        await asyncio.gather(reading, logging_, return_exceptions=True)
        return f"it has ended with the code {code}"

    async def _read(self, process: Process) -> None:
        """Read the frames of a process until it ends."""
        assert process.stdout is not None
        while True:
            try:
                head_size, size = FRAME.unpack(await process.stdout.readexactly(FRAME.size))
                if max(head_size, size) > MAX_HEAD_BYTES:
                    raise ValueError(f"a frame of {max(head_size, size)} bytes")
                head = json.loads(await process.stdout.readexactly(head_size))
                body = await process.stdout.readexactly(size)
            except asyncio.IncompleteReadError:
                return
            if head["kind"] == "ready":
                self.is_up, self.problem = True, head.get("problem")
            elif head["kind"] == "state":
                self._on_states([VersionState(**state) for state in head["states"]])
            elif (call := self._calls.get(head["id"])) is not None and not call.done():
                call.set_result((head["status"], body))


async def _log_output(process: Process) -> None:
    """Write what a process prints to stderr to the server's log."""
    assert process.stderr is not None
    while output := await process.stderr.read(1 << 16):
        for line in output.decode("utf-8", "replace").splitlines():
            logger.warning("the monitor process: %s", line)
