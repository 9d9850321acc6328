"""Downloads of archives, which are removed with their versions."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

from tsx_runtime.core.concurrency.daemon_threads import DaemonThreads
from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.models.plan import RegisterOrder
from tsx_runtime.plugins import Source
from tsx_runtime.settings.schema import Settings
from tsx_runtime.sources import Fetcher, Trust

MAX_DOWNLOADS = 16

ResultT = TypeVar("ResultT")


class Downloads:
    """The downloaded archives in the model store."""

    def __init__(self, settings: Settings, sources: Mapping[str, Source]) -> None:
        self.closed = threading.Event()
        self._fetcher = Fetcher(settings, sources=sources, stop=self.closed)
        self._threads = DaemonThreads(MAX_DOWNLOADS, "downloads")
        self._files: dict[ModelVersion, Path] = {}

    def serve(self, path: Path) -> None:
        """Let clients register a file again that the operator gave at the start."""
        self._fetcher.startup_archives.add(path)

    async def local_file(self, order: RegisterOrder, trust: Trust) -> Path | None:
        """Return the file of a `file:` URL, or None for another URL.

        Raises:
            ModelNotFound: The file cannot be used.
        """
        return await asyncio.to_thread(self._fetcher.local_file, order.url, trust)

    async def fetch(self, order: RegisterOrder, trust: Trust) -> Path:
        """Download an archive.

        A thread cannot be cancelled. If the client leaves, the download therefore continues, and
        its file is removed at the end. The archive of a replacement gets a name that no other one
        has.
        """
        occupied_files = frozenset(self._files.values()) if order.replaces else frozenset()
        download_archive = partial(
            self._fetcher.fetch,
            order.url,
            trust,
            sse_kms=order.s3_sse_kms,
            taken_paths=occupied_files,
        )
        return await self.call(download_archive, lambda file: file.unlink(missing_ok=True))

    async def call(
        self, function: Callable[[], ResultT], remove: Callable[[ResultT], None]
    ) -> ResultT:
        """Run a function in a thread; if the client leaves, pass the later result to `remove`."""
        fetching = asyncio.create_task(self._threads.call(function))

        def clean(task: asyncio.Task[ResultT]) -> None:
            if not task.cancelled() and task.exception() is None:
                remove(task.result())

        try:
            return await asyncio.shield(fetching)
        except asyncio.CancelledError:
            fetching.add_done_callback(clean)
            raise

    def assign(self, version: ModelVersion, file: Path) -> None:
        self._files[version] = file

    def remove(self, version: ModelVersion) -> None:
        """Remove the file that was downloaded for a version, if there is one."""
        file = self._files.pop(version, None)
        if file is not None:
            file.unlink(missing_ok=True)

    def close(self) -> None:
        self.closed.set()
