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
from asyncio.subprocess import PIPE
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from tsx_archiver.errors import CacheError
from tsx_archiver.storage.locks import FileLock
from tsx_archiver.storage.private_directory import private_directory
from tsx_runtime.errors import Unavailable
from tsx_runtime.features.monitor.messages import (
    FRAME,
    MAX_HEAD_BYTES,
    RawSample,
    VersionState,
    encode_frame,
    encode_sample,
)

MAX_WAITING_BYTES = 32 << 20  # limit of the bytes that the process has not read
# Samples are sent together, after this time or with this many bytes.
BATCH_S = 0.05
MAX_BATCH_BYTES = 1 << 20
CALL_TIMEOUT_S = 30.0
CLOSE_TIMEOUT_S = 10.0  # limit for the process to store everything and to end
PAUSE_S, MAX_PAUSE_S = 0.5, 30.0  # pause before another start; it doubles with each failure
MAX_SILENCE_S = 60.0  # A process that reads and writes nothing for this long is killed.
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
        self.dropped = defaultdict[str, Counter[str]](Counter)  # samples by model and reason
        self.is_up = False
        self.problem: str | None = None
        self._command = command
        self._variables = variables
        self._lock_path = lock
        self._announcements = announcements
        self._on_states = on_states
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False
        self._stdin: asyncio.StreamWriter | None = None
        self._numbers = itertools.count()
        # Calls without a result; a process that starts gets their frames.
        self._calls: dict[int, tuple[bytes, asyncio.Future[tuple[int, bytes]]]] = {}
        self._slow_since: float | None = None
        # Samples that are sent together, by model and version.
        self._samples = defaultdict[tuple[str, str], list[RawSample]](list)
        self._sample_bytes = 0
        self._sample_timer: asyncio.TimerHandle | None = None
        self._kill: Callable[[], None] = lambda: None

    def start(self) -> None:
        if self._task is None and not self._is_closed:
            self._task = asyncio.get_running_loop().create_task(self._run())

    def send(self, frame: bytes, *, can_drop: bool = True) -> str | None:
        """Send a frame after the samples that wait, or return why it is dropped."""
        self._send_samples()
        reason = self._reason_to_drop()
        if self._stdin is None or reason == "stopped" or (reason is not None and can_drop):
            return reason
        self._stdin.write(frame)
        return None

    def send_sample(self, model: str, version: str, sample: RawSample) -> None:
        """Send a sample soon, together with others."""
        self._samples[model, version].append(sample)
        self._sample_bytes += len(sample.body) + len(sample.answer)
        if self._sample_bytes >= MAX_BATCH_BYTES:
            self._send_samples()
        elif self._sample_timer is None:
            loop = asyncio.get_running_loop()
            self._sample_timer = loop.call_later(BATCH_S, self._send_samples)

    def _send_samples(self) -> None:
        if self._sample_timer is not None:
            self._sample_timer.cancel()
            self._sample_timer = None
        waiting = [*self._samples.items()]
        self._samples.clear()
        self._sample_bytes = 0
        for (model, version), samples in waiting:
            if (reason := self._reason_to_drop()) is not None or self._stdin is None:
                self.dropped[model][reason or "stopped"] += len(samples)
                continue
            head = {"kind": "samples", "model": model, "version": version}
            self._stdin.write(encode_frame(head, *map(encode_sample, samples)))

    def _reason_to_drop(self) -> str | None:
        stdin = self._stdin
        if stdin is None or stdin.is_closing():
            return "stopped"
        if stdin.transport.get_write_buffer_size() <= MAX_WAITING_BYTES:
            return None
        now = time.monotonic()
        self._slow_since = self._slow_since or now
        if now - self._slow_since > MAX_SILENCE_S:
            with suppress(ProcessLookupError):  # It may just have ended.
                self._kill()
        return "slow"

    async def call(
        self, operation: str, arguments: Mapping[str, Any], body: bytes = b""
    ) -> tuple[int, bytes]:
        """Return the status and the JSON of the process's response; start it if necessary.

        Raises:
            Unavailable: The process does not answer in time, or has ended.
        """
        self.start()
        number = next(self._numbers)
        head = {"kind": "call", "id": number, "operation": operation, "arguments": arguments}
        frame = encode_frame(head, body)
        result: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        self._calls[number] = frame, result
        try:
            if not self._is_closed and self.send(frame) != "slow":
                await asyncio.wait([result], timeout=CALL_TIMEOUT_S)
        finally:
            del self._calls[number]
        if result.done() and not result.cancelled():
            return result.result()
        raise Unavailable(
            f"The monitor process does not answer{f': {self.problem}' if self.problem else ''}. Try"
            " again later.",
            retry_after=10,
        )

    def close(self) -> None:
        """Let the process store everything and end; after a limit, it is killed."""
        if self._task is not None and not self._is_closed:
            self._task.cancel()
        self._is_closed = True
        if self._stdin is None:
            self._end_calls()

    async def wait_closed(self) -> None:
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        pause = PAUSE_S
        while not self._is_closed:
            begin = time.monotonic()
            try:
                with self._lock():
                    problem = f"it has ended with the code {await self._run_process()}"
            except (OSError, CacheError) as error:
                problem = f"it cannot be started: {error}"
            if problem != self.problem:
                logger.warning("the monitor process: %s; it is started again", problem)
            self.problem = problem
            if time.monotonic() - begin > HEALTHY_S:
                pause = PAUSE_S
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_S)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Hold the lock of the store.

        Raises:
            OSError, CacheError: It cannot be locked.
        """
        if self._lock_path is None:
            yield
            return
        private_directory(self._lock_path.parent)
        with closing(FileLock(self._lock_path)) as lock:
            if not lock.lock_exclusive(wait=False):
                raise OSError(
                    f"another server uses monitor_store ({self._lock_path}); name another file, or"
                    " PostgreSQL for several servers"
                )
            yield

    async def _run_process(self) -> int:
        """Run a process until it ends, or until this task is cancelled; return its code."""
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
        stdin.writelines(self._announcements())
        stdin.writelines(frame for frame, _ in self._calls.values())
        self._stdin, self._kill, self._slow_since = stdin, process.kill, None
        reading = asyncio.gather(self._read(stdout), _log_lines(stderr))
        try:
            await asyncio.shield(reading)
        except Exception:
            logger.exception("the monitor process sent no frame")
        finally:
            self._send_samples()
            self._stdin, self.is_up = None, False
            stdin.close()
            ending = asyncio.ensure_future(process.wait())
            await asyncio.wait([ending], timeout=CLOSE_TIMEOUT_S)
            if not ending.done():
                process.kill()
            code = await ending
            await asyncio.wait([reading])
            self._end_calls()
        return code

    def _end_calls(self) -> None:
        for _, result in self._calls.values():
            result.cancel()

    async def _read(self, stdout: asyncio.StreamReader) -> None:
        """Read the frames of a process until it ends."""
        while start := await stdout.read(1):
            start += await stdout.readexactly(FRAME.size - 1)
            head_size, size = FRAME.unpack(start)
            if max(head_size, size) > MAX_HEAD_BYTES:
                raise ValueError(f"a frame of {max(head_size, size)} bytes")
            head = json.loads(await stdout.readexactly(head_size))
            body = await stdout.readexactly(size)
            self._slow_since = None
            if head["kind"] == "ready":
                self.is_up, self.problem = True, head["problem"]
            elif head["kind"] == "state":
                self._on_states([VersionState(**state) for state in head["states"]])
            elif head["id"] in self._calls:
                self._calls[head["id"]][1].set_result((head["status"], body))


async def _log_lines(stderr: asyncio.StreamReader) -> None:
    """Write what a process prints to the server's log."""
    while output := await stderr.read(1 << 16):
        for line in output.decode("utf-8", "replace").splitlines():
            logger.warning("the monitor process: %s", line)
