"""The active recordings of this server, which are resumed after a restart."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from tsx_runtime.core.concurrency.task_group import TaskGroup
from tsx_runtime.core.persistence import StateStore
from tsx_runtime.core.traffic.manager import TrafficManager
from tsx_runtime.errors import Conflict
from tsx_runtime.features.recording.recorder import HeaderFilter, Recorder, RecordingConfig
from tsx_runtime.features.recording.segments import Segments, StoredSize

logger = logging.getLogger("tsx.recording")


class RecordingManager:
    """The recordings of all models, at most one per model; used only in the event loop."""

    def __init__(
        self, traffic: TrafficManager, state: StateStore, headers: Sequence[str] | None
    ) -> None:
        """Resume each saved recording when its model is registered.

        `headers` configures the `HeaderFilter`.
        """
        self._traffic = traffic
        self._state = state
        self._filter = HeaderFilter(headers)
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
        self._state.save(name, record=None)
        await self._end(name)
        directory = self.directory(name)
        if remove and directory is not None:
            await asyncio.to_thread(Segments(directory, name, 0, 0).remove)

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
        elif (
            name not in self._running
            and (saved := self._state.load(name).get("record")) is not None
        ):
            try:
                self._begin(name, RecordingConfig.model_validate(saved))
            except ValidationError as error:
                logger.warning("model %s: its saved recording cannot be resumed: %s", name, error)

    def _begin(self, name: str, config: RecordingConfig) -> None:
        directory = self.directory(name)
        if directory is None:
            return
        recorder = self._running[name] = Recorder(name, config, directory, self._filter)
        self._traffic.observe(name, recorder)
        logger.info(
            "model %s: %g %% of its requests are recorded in %s", name, config.share, directory
        )

    async def _end(self, name: str) -> None:
        recorder = self._running.pop(name, None)
        if recorder is not None:
            self._traffic.unobserve(name, recorder)
            await recorder.close()
