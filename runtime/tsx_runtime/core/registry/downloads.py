"""Downloads of archives, and of models of the Hugging Face Hub.

Archives are removed with their versions. Models of the Hub stay in its cache.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from tsx_archiver import BUILTIN_HANDLERS, ArchiveError, OpenArchive, plan_archive
from tsx_archiver.linking import open_linked
from tsx_archiver.metadata.huggingface import MANIFEST_KEY
from tsx_archiver.pretrained import pretrained_spec
from tsx_runtime.core.concurrency.daemon_threads import DaemonThreads
from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.models.plan import RegisterOrder
from tsx_runtime.errors import BadRequest
from tsx_runtime.plugins import Source
from tsx_runtime.settings.schema import Settings
from tsx_runtime.sources import Fetcher, Trust
from tsx_runtime.sources.hub import (
    SCHEME,
    HubModel,
    Progress,
    check_allowed,
    download,
    log_progress,
    parse_hub,
)

MAX_DOWNLOADS = 16

ResultT = TypeVar("ResultT")
logger = logging.getLogger("tsx.registry")


class Downloads:
    """The downloaded archives in the model store."""

    def __init__(self, settings: Settings, sources: Mapping[str, Source]) -> None:
        self._settings = settings
        self._fetcher = Fetcher(settings, sources=sources)
        self._closed = threading.Event()
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
        return await self._call(download_archive, lambda file: file.unlink(missing_ok=True))

    async def from_hub(
        self, order: RegisterOrder, trust: Trust, progress: Progress
    ) -> tuple[OpenArchive, RegisterOrder]:
        """Download a model of the Hub; return it, and the order with the commit in its URL.

        Raises:
            BadRequest: The model cannot be served.
            ModelNotFound: The model does not exist.
            DownloadFailed: The download failed.
        """
        model = parse_hub(order.url)
        if trust is Trust.CLIENT:
            check_allowed(model, self._settings.allowed_urls)
        # Any other handler could be code in the model's directory, which is not trusted.
        if order.handler is not None and order.handler not in BUILTIN_HANDLERS:
            raise BadRequest(
                f"The handler of {model} must be one that comes with tsx. With another: tsx archive"
                f" {model} --handler FILE."
            )
        archive = await self._call(partial(self._open_hub, model, progress), OpenArchive.close)
        commit = str(archive.manifest.data[MANIFEST_KEY]["revision"])
        return archive, replace(order, url=str(model._replace(revision=commit)))

    def _open_hub(self, model: HubModel, progress: Progress) -> OpenArchive:
        """Download and open a model; this blocks."""
        start_time = time.monotonic()
        log = log_progress(model, logger.info)

        def report(done: int, total: int) -> None:
            progress(done, total)
            log(done, total)

        directory = download(
            model,
            max_bytes=self._settings.max_archive_size,
            progress=report,
            stopped=self._closed.is_set,
        )
        logger.info(
            "%s is commit %s, downloaded in %.1f s",
            model,
            directory.name,
            time.monotonic() - start_time,
        )
        try:
            spec, notes = pretrained_spec(
                directory, source=f"{SCHEME}{model.repo}", revision=directory.name
            )
            for note in notes:
                if note.startswith("note: "):
                    logger.warning("%s: %s", model, note.removeprefix("note: "))
            return open_linked(
                plan_archive(spec), f"{model.repo}@{directory.name}", self._settings.archive_cache()
            )
        except ArchiveError as error:
            raise BadRequest(f"{model} cannot be served: {error}") from error

    async def _call(
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
        self._fetcher.close()
        self._closed.set()
