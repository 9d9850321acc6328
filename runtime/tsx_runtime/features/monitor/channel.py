"""The monitor process of a server, and the frames to and from it.

Frames are written without waiting. If the process does not read them fast enough, samples are
dropped, so that no request waits for it.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import logging
import time
from asyncio.subprocess import PIPE
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tsx_archiver.errors import CacheError
from tsx_archiver.storage.locks import FileLock
from tsx_archiver.storage.private_directory import private_directory
from tsx_runtime.core.concurrency.events import wait_for_event
from tsx_runtime.errors import Unavailable
from tsx_runtime.features.monitor.messages import FRAME, MAX_HEAD_BYTES, VersionState, encode_frame

MAX_WAITING_BYTES = 32 << 20  # limit of the bytes that the process has not read
CALL_TIMEOUT_S = 30.0
CLOSE_TIMEOUT_S = 10.0  # limit for the process to store everything and to end
PAUSE_S, MAX_PAUSE_S = 0.5, 30.0  # before a further start; it doubles with each failure
HEALTHY_S = 60.0  # A process that ran this long did not fail at its start.

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
        self._stdin: asyncio.StreamWriter | None = None
        self._connected = asyncio.Event()  # set while `_stdin` is usable, and at the end
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[tuple[int, bytes]]] = {}

    def start(self) -> None:
        if self._task is None and not self._closing.is_set():
            self._task = asyncio.get_running_loop().create_task(self._run())

    def send(self, frame: bytes) -> str | None:
        """Send a frame, or return why it is dropped."""
        stdin = self._stdin
        if stdin is None or stdin.is_closing():
            return "stopped"
        if stdin.transport.get_write_buffer_size() > MAX_WAITING_BYTES:
            return "slow"
        stdin.write(frame)  # uvloop writes the frames of one turn of the loop together.
        return None

    async def connect(self) -> None:
        """Start the process if necessary, and wait a limited time until it gets frames."""
        self.start()
        await wait_for_event(self._connected, CALL_TIMEOUT_S)

    async def call(
        self, operation: str, arguments: Mapping[str, Any], body: bytes = b""
    ) -> tuple[int, bytes]:
        """Return the status and the JSON of the process's response.

        Raises:
            Unavailable: The process does not answer in time, or has ended.
        """
        await self.connect()
        number = next(self._numbers)
        head = {"kind": "call", "id": number, "operation": operation, "arguments": arguments}
        result = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            if self.send(encode_frame(head, body)) is None:
                return await asyncio.wait_for(result, CALL_TIMEOUT_S)
        except (TimeoutError, asyncio.TimeoutError):
            pass
        finally:
            del self._calls[number]
        raise Unavailable(
            f"The monitor process does not answer{f': {self.problem}' if self.problem else ''}. Try"
            " again later.",
            retry_after=10,
        )

    async def close(self) -> None:
        """Let the process store everything and end; after a limit, kill it."""
        self._closing.set()
        self._connected.set()
        if self._task is not None:
            await self._task

    async def _run(self) -> None:
        failures = 0
        while not self._closing.is_set():
            begin, lock = time.monotonic(), None
            try:
                lock = self._lock()
                problem = await self._run_process()
                failures = 0 if time.monotonic() - begin > HEALTHY_S else failures + 1
            except (OSError, CacheError) as error:
                problem = f"it cannot be started: {error}"
            finally:
                if lock is not None:
                    lock.close()
            if problem != self.problem and not self._closing.is_set():
                logger.warning("the monitor process: %s; it is started again", problem)
            self.problem = problem
            await wait_for_event(self._closing, min(PAUSE_S * 2**failures, MAX_PAUSE_S))

    def _lock(self) -> FileLock | None:
        """Lock the store.

        Raises:
            OSError, CacheError: It cannot be locked.
        """
        if self._lock_path is None:
            return None
        private_directory(self._lock_path.parent)
        lock = FileLock(self._lock_path)
        if not lock.lock_exclusive(wait=False):
            lock.close()
            raise OSError(errno.EBUSY, "another server uses monitor_store", str(self._lock_path))
        return lock

    async def _run_process(self) -> str:
        """Run a process from start to end, and return why it ended."""
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            env=self._variables,
            start_new_session=True,
        )
        stdin, stdout, stderr = process.stdin, process.stdout, process.stderr
        assert stdin is not None
        assert stdout is not None
        assert stderr is not None
        self._stdin = stdin
        stdin.writelines(self._announcements())
        self._connected.set()
        reading = asyncio.ensure_future(self._read(stdout))
        logging_ = asyncio.ensure_future(_log_lines(stderr))
        closing = asyncio.ensure_future(self._closing.wait())
        await asyncio.wait([reading, closing], return_when=asyncio.FIRST_COMPLETED)
        closing.cancel()
        self._stdin, self.is_up = None, False
        if not self._closing.is_set():
            self._connected.clear()
        stdin.close()
        try:
            await asyncio.wait_for(process.wait(), CLOSE_TIMEOUT_S)
        except (TimeoutError, asyncio.TimeoutError):
            process.kill()
        code = await process.wait()
        for error in await asyncio.gather(reading, logging_, return_exceptions=True):
            if error is not None:
                logger.error("the monitor process sent no frame", exc_info=error)
        for call in self._calls.values():
            if not call.done():
                text = "The monitor process has ended before it answered. Try again."
                call.set_exception(Unavailable(text, retry_after=2))
        return f"it has ended with the code {code}"

    async def _read(self, stdout: asyncio.StreamReader) -> None:
        """Read the frames of a process until it ends."""
        while start := await stdout.read(1):
            start += await stdout.readexactly(FRAME.size - 1)
            head_size, size = FRAME.unpack(start)
            if max(head_size, size) > MAX_HEAD_BYTES:
                raise ValueError(f"a frame of {max(head_size, size)} bytes")
            head = json.loads(await stdout.readexactly(head_size))
            body = await stdout.readexactly(size)
            if head["kind"] == "ready":
                self.is_up, self.problem = True, head["problem"]
            elif head["kind"] == "state":
                self._on_states([VersionState(**state) for state in head["states"]])
            elif (call := self._calls.get(head["id"])) is not None and not call.done():
                call.set_result((head["status"], body))


async def _log_lines(stderr: asyncio.StreamReader) -> None:
    """Write what a process prints to the server's log."""
    while output := await stderr.read(1 << 16):
        for line in output.decode("utf-8", "replace").splitlines():
            logger.warning("the monitor process: %s", line)
