"""The active recordings of this server, which are resumed after a restart and uploaded to S3."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ValidationError

from tsx_archiver.monitor.recording import RecordingConfig
from tsx_runtime.core.concurrency.events import wait_for_event
from tsx_runtime.core.concurrency.task_group import TaskGroup
from tsx_runtime.core.persistence import StateStore
from tsx_runtime.core.traffic.manager import TrafficManager
from tsx_runtime.errors import Conflict
from tsx_runtime.features.recording.recorder import HeaderFilter, Recorder
from tsx_runtime.features.recording.segments import Segments, StoredSize
from tsx_runtime.features.recording.settings import RecordingModelSettings, RecordingSettings
from tsx_runtime.features.recording.upload import RecordingUploader

MAX_FROZEN_BYTES = 1_000_000  # recorded bytes that may be lost with a frozen process

logger = logging.getLogger("tsx.recording")


class RecordingManager:
    """The recordings of all models, at most one per model; used only in the event loop."""

    def __init__(
        self,
        traffic: TrafficManager,
        state: StateStore,
        settings: RecordingSettings,
        models: Mapping[str, BaseModel],
        s3_endpoint: str | None,
    ) -> None:
        """Begin each saved or configured recording when its model is registered.

        `models` are the settings of models by their names.
        """
        self._traffic = traffic
        self._state = state
        self._models = models
        self._filter = HeaderFilter(settings.record_headers)
        self._interval = settings.record_upload_interval
        url = settings.record_url
        self._uploader = None if url is None else RecordingUploader(url, s3_endpoint)
        self._file_ended = asyncio.Event()
        self._running: dict[str, Recorder] = {}
        self._ending = TaskGroup()
        traffic.on_traffic.append(self._on_traffic)

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
        self._begin(name, config)
        self._state.save(name, record=config.model_dump())

    async def stop(self, name: str, *, remove: bool = False) -> None:
        """End the recording of a model; its files stay unless `remove` is set.

        Raises:
            ModelNotFound: No model has this name.
        """
        self._traffic.find(name)
        # False keeps a configured recording from starting again.
        self._state.save(name, record=None if self._configured(name) is None else False)
        await self._end(name)
        directory = self.directory(name)
        if remove and directory is not None:
            await asyncio.to_thread(Segments(directory, name, 0, 0).remove)

    async def upload_repeatedly(self) -> None:
        """Upload files when they are full, and recorded requests within `record_upload_interval`.

        This ends only by a cancellation.
        """
        while self._uploader is not None:
            await wait_for_event(self._file_ended, self._interval / 4)
            self._file_ended.clear()
            recorders = self._running.values()
            await asyncio.gather(
                *(recorder.upload(self._interval * 3 / 4) for recorder in recorders)
            )

    async def before_freeze(self, seconds: float, *, ends: bool) -> None:
        """Upload what has waited for `record_upload_interval`, or all if the process ends.

        An upload that takes more than `seconds` continues when the process runs again.
        """
        uploads = [
            asyncio.ensure_future(recorder.upload())
            for recorder in self._running.values()
            if ends or recorder.has_waiting(self._interval, MAX_FROZEN_BYTES)
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
            config = self._configured(name)
            saved = self._state.load(name).get("record")
            try:
                if saved:
                    config = RecordingConfig.model_validate(saved)
            except ValidationError as error:
                logger.warning("model %s: its saved recording cannot be resumed: %s", name, error)
            if config is not None and saved is not False:
                self._begin(name, config)

    def _configured(self, name: str) -> RecordingConfig | None:
        """Return the recording in the settings of a model, or else in its archive."""
        setting = RecordingModelSettings.of(self._models, name).record
        if setting is not None:
            return setting or None
        versions = self._traffic.models[name].versions.values()
        in_archives = (version.config.record for version in versions)
        return next(filter(None, in_archives), None)

    def _begin(self, name: str, config: RecordingConfig) -> None:
        directory = self.directory(name)
        if directory is None:
            logger.warning("model %s is not recorded: set state_dir to a directory", name)
            return
        recorder = self._running[name] = Recorder(
            name, config, directory, self._filter, self._uploader, self._file_ended.set
        )
        self._traffic.observe(name, recorder)
        logger.info(
            "model %s: %g %% of its requests are recorded in %s", name, config.share, directory
        )

    async def _end(self, name: str) -> None:
        recorder = self._running.pop(name, None)
        if recorder is not None:
            self._traffic.unobserve(name, recorder)
            await recorder.close()
