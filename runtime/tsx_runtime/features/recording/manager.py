"""The active recordings of this server, which are resumed after a restart and uploaded to S3."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from tsx_archiver.monitor.recording import RecordingConfig
from tsx_runtime.core.concurrency.task_group import TaskGroup
from tsx_runtime.core.registry.model_parts import configured_part
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.errors import Conflict
from tsx_runtime.features.recording.recorder import HeaderFilter, Recorder
from tsx_runtime.features.recording.segments import Segments, StoredSize
from tsx_runtime.features.recording.settings import RecordingSettings
from tsx_runtime.features.recording.upload import RecordingUploader

MAX_FROZEN_BYTES = 1_000_000  # recorded bytes that may be lost with a frozen process

logger = logging.getLogger("tsx.recording")


class RecordingManager:
    """The recordings of all models, at most one per model; used only in the event loop."""

    def __init__(self, registry: Registry) -> None:
        """Begin each saved or configured recording when its model is registered."""
        settings = RecordingSettings.of(registry.settings)
        self.upload_interval = settings.record_upload_interval
        self._registry = registry
        self._traffic = registry.traffic_manager
        self._state = registry.state
        self._filter = HeaderFilter(settings.record_headers)
        url, endpoint = settings.record_url, registry.settings.s3_endpoint_url
        self._uploader = None if url is None else RecordingUploader(url, endpoint)
        self._running: dict[str, Recorder] = {}
        self._ending = TaskGroup()
        self._traffic.on_traffic.append(self._on_traffic)

    def find(self, name: str) -> Recorder | None:
        """Return the active recording of a model, or None.

        Raises:
            ModelNotFound: No model has this name.
        """
        self._traffic.find(name)
        return self._running.get(name)

    def directory(self, name: str) -> Path | None:
        """Return the directory of a model's recordings, or None if nothing can be stored."""
        directory = self._state.directory
        return None if directory is None else directory / "recordings" / name

    async def start(self, name: str, config: RecordingConfig) -> None:
        """Start a recording, after ending the active one, whose files stay.

        Raises:
            ModelNotFound: No model has this name.
            Conflict: The server has no directory for recordings.
        """
        self._traffic.find(name)
        if self.directory(name) is None:
            raise Conflict(
                "Requests cannot be recorded: there is no directory for it. Set state_dir to one."
            )
        # While one recording ends, another request may begin a new one.
        while name in self._running:
            await self._end(name)
        self._traffic.find(name)
        self._state.save(name, record=config.model_dump())
        self._begin(name, config)

    async def stop(self, name: str, *, remove: bool = False) -> None:
        """End the recording of a model; its files stay unless `remove` is set.

        Raises:
            ModelNotFound: No model has this name.
        """
        self._traffic.find(name)
        self._state.save(name, record=False)
        await self._end(name)
        directory = self.directory(name)
        if remove and directory is not None:
            await asyncio.to_thread(Segments(directory, name, 0, 0).remove)

    async def upload(self) -> None:
        """Upload what would wait longer than `record_upload_interval` at the next call.

        This is called four times in each interval.
        """
        min_age = self.upload_interval * 3 / 4
        await asyncio.gather(*(recorder.upload(min_age) for recorder in self._running.values()))

    async def before_freeze(self, seconds: float, *, ends: bool) -> None:
        """Upload what has waited for `record_upload_interval`, or all if the process ends.

        An upload that takes more than `seconds` continues when the process runs again.
        """
        uploads = [
            asyncio.ensure_future(recorder.upload())
            for recorder in self._running.values()
            if ends or recorder.has_waiting(self.upload_interval, MAX_FROZEN_BYTES)
        ]
        if uploads:
            await asyncio.wait(uploads, timeout=seconds)

    async def stored_size(self, name: str) -> StoredSize:
        """Return the number, size and age of a model's recorded files."""
        directory = self.directory(name)
        if directory is None:
            return StoredSize(0, 0, None)
        return await asyncio.to_thread(Segments(directory, name, 0, 0).stored_size)

    async def close(self) -> None:
        """End all recordings, and write all captured requests."""
        for name in list(self._running):
            await self._end(name)
        await self._ending.wait_all()

    def _on_traffic(self, name: str) -> None:
        """Begin or end a recording after a model was registered or unregistered."""
        if name not in self._traffic.models:
            if name in self._running:
                self._ending.begin(self._end(name))
        elif name not in self._running:
            config = configured_part(self._registry, name, "record", RecordingConfig)
            if config is not None:
                self._begin(name, config)

    def _begin(self, name: str, config: RecordingConfig) -> None:
        directory = self.directory(name)
        if directory is None:
            logger.warning("model %s is not recorded: set state_dir to a directory", name)
            return
        recorder = Recorder(name, config, directory, self._filter, self._uploader)
        self._running[name] = recorder
        self._traffic.observe(name, recorder)
        logger.info(
            "model %s: %g %% of its requests are recorded in %s", name, config.share, directory
        )

    async def _end(self, name: str) -> None:
        recorder = self._running.pop(name, None)
        if recorder is not None:
            self._traffic.unobserve(name, recorder)
            await recorder.close()
