"""Downloaded archives, which are removed with their versions."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from tsx_runtime.core.concurrency.daemon_threads import DaemonThreads
from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.models.plan import RegisterOrder
from tsx_runtime.plugins import Source
from tsx_runtime.settings.schema import Settings
from tsx_runtime.sources import Fetcher, Trust

MOST = 16  # at a time


class Downloads:
    """The downloaded archives in the model store."""

    def __init__(self, settings: Settings, sources: Mapping[str, Source]) -> None:
        self._fetcher = Fetcher(settings, sources=sources)
        self._threads = DaemonThreads(MOST, "downloads")
        self._files: dict[ModelVersion, Path] = {}

    async def local_file(self, order: RegisterOrder, trust: Trust) -> Path | None:
        """Where a `file:` URL leads; None for any other. Raises ModelNotFound."""
        return await asyncio.to_thread(self._fetcher.local_file, order.url, trust)

    async def fetch(self, order: RegisterOrder, trust: Trust) -> Path:
        """A thread cannot be broken off: where its client leaves, what it downloads later is removed at once.

        What replaces a version is laid beside the file that came for that, under another name.
        """
        beside = frozenset(self._files.values()) if order.replaces else frozenset()
        work = partial(self._fetcher.fetch, order.url, trust, sse_kms=order.s3_sse_kms, beside=beside)
        fetching = asyncio.create_task(self._threads.call(work))
        try:
            return await asyncio.shield(fetching)
        except asyncio.CancelledError:
            fetching.add_done_callback(_remove_fetched)
            raise

    def belongs(self, version: ModelVersion, file: Path) -> None:
        self._files[version] = file

    def remove(self, version: ModelVersion) -> None:
        """What was downloaded for it, if anything was."""
        file = self._files.pop(version, None)
        if file is not None:
            file.unlink(missing_ok=True)

    def close(self) -> None:
        self._fetcher.close()


def _remove_fetched(fetching: asyncio.Task[Path]) -> None:
    if not fetching.cancelled() and fetching.exception() is None:
        fetching.result().unlink(missing_ok=True)
