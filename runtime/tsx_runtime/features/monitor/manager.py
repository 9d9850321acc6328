"""The monitored models of this server, and the samples of their requests."""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from tsx_archiver.monitor.baseline import MAX_BYTES, MEMBER
from tsx_archiver.monitor.config import MonitorConfig
from tsx_archiver.monitor.recording import RecordingConfig
from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.registry.model_parts import configured_part
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.core.scheduling.job import Job, ObservedAnswer, ObservedJob
from tsx_runtime.errors import Conflict
from tsx_runtime.features.monitor.channel import MonitorChannel
from tsx_runtime.features.monitor.messages import (
    STORE_VARIABLE,
    RawSample,
    VersionState,
    encode_frame,
)
from tsx_runtime.features.monitor.settings import MonitorSettings, store_location
from tsx_runtime.settings.fields import POSTGRES
from tsx_runtime.shared.safe_path import run_module

COMMAND = (sys.executable, *run_module("tsx_runtime.features.monitor.process.main"))
MAX_SAMPLE_BYTES = 4 << 20  # limit of a sample's body, and of its answer
EXPLANATION = b"\r\nexplain: True\r\n"  # the header of a request whose answer is an explanation

logger = logging.getLogger("tsx.monitor")


class RequestSampler:
    """Takes samples of one model's requests; the splitter calls it."""

    def __init__(self, name: str, config: MonitorConfig, channel: MonitorChannel) -> None:
        self.config = config
        self.dropped = channel.dropped[name] = Counter[str]()
        self._channel = channel

    def should_observe(self, draw: float) -> bool:
        return draw * 100 < self.config.share

    def wrap_job(self, job: Job, version: ModelVersion) -> Job:
        if EXPLANATION in job.meta:
            return job
        if len(job.body) > MAX_SAMPLE_BYTES:
            self.dropped["size"] += 1
            return job
        return ObservedJob(job, partial(self._on_answer, job, version), MAX_SAMPLE_BYTES)

    def _on_answer(self, job: Job, version: ModelVersion, answer: ObservedAnswer) -> None:
        if answer.error is not None:
            return
        if answer.body is None:
            self.dropped["size"] += 1
            return
        seconds = time.monotonic() - job.arrived
        sample = RawSample(
            time.time() - seconds,
            seconds,
            answer.status,
            job.meta,
            job.body,
            answer.headers,
            answer.body,
        )
        self._channel.send_sample(version.name, version.version, sample)


class MonitorManager:
    """The monitored models of a server; used only in the event loop."""

    def __init__(self, registry: Registry) -> None:
        settings = MonitorSettings.of(registry.settings)
        self.registry = registry
        self.samplers: dict[str, RequestSampler] = {}  # keys: names of monitored models
        self.states: dict[tuple[str, str], VersionState] = {}  # keys: model and version
        self._is_enabled = False
        # What the process was told about each version, without and with the baseline.
        self._announced: dict[tuple[str, str], tuple[dict[str, Any], bytes]] = {}
        self._store = store = store_location(settings.monitor_store, registry.state.directory)
        self._is_file = store is not None and not store.startswith(POSTGRES)
        # Servers that share a database have different addresses.
        instance = f"{socket.gethostname()} {registry.settings.inference_address}"
        command = [*COMMAND, "--retention", str(settings.monitor_retention), "--instance", instance]
        if settings.monitor_events_url is not None:
            command += ["--events", settings.monitor_events_url]
        self.channel = MonitorChannel(
            command,
            os.environ | ({} if store is None else {STORE_VARIABLE: store}),
            Path(f"{store}.lock") if self._is_file else None,
            lambda: [frame for _, frame in self._announced.values()],
            self._on_states,
        )

    def enable(self) -> None:
        """Monitor models from now on; a function on Lambda and commands never do."""
        if not self._is_enabled:
            self._is_enabled = True
            self.registry.traffic_manager.on_traffic.append(self._update)
            self.registry.on_readiness.append(self._announce)
            for name in self.registry.models:
                self._update(name)

    def find(self, name: str) -> RequestSampler | None:
        """Return the sampler of a model, or None if it is not monitored.

        Raises:
            ModelNotFound: No model has this name.
        """
        self.registry.find(name)
        return self.samplers.get(name)

    def set(self, name: str, config: MonitorConfig | None) -> None:
        """Turn the monitoring of a model on, or with None off, and save that.

        Raises:
            ModelNotFound: No model has this name.
        """
        self.registry.find(name)
        saved = False if config is None else config.model_dump(mode="json")
        self.registry.state.save(name, monitor=saved)
        self._update(name)

    def check_store(self, name: str) -> None:
        """Check that answers of a model can be stored.

        Raises:
            ModelNotFound: No model has this name.
            Conflict: There is no store, or no model has been monitored.
        """
        sampler = self.find(name)
        if self._store is None:
            raise Conflict(
                "There is no place for answers. Set monitor_store, or set state_dir to a directory."
            )
        if sampler is None and self._is_file and not Path(self._store).exists():
            raise Conflict(
                f"Model {name} is not monitored, so no answers are stored. Turn it on: tsx models"
                f" monitor {name}, or PUT /models/{name}/monitor"
            )

    def end(self) -> None:
        """Stop monitoring; the process then stores everything and ends."""
        self._is_enabled = False
        for name in list(self.samplers):
            self._update(name)
        self.channel.close()

    def _update(self, name: str) -> None:
        """Start or stop to monitor a model after it, its configuration or its versions changed."""
        config = self._is_enabled and configured_part(self.registry, name, "monitor", MonitorConfig)
        sampler, traffic = self.samplers.get(name), self.registry.traffic_manager
        if sampler is not None and not config:
            traffic.unobserve(name, self.samplers.pop(name))
        elif config and sampler is None:
            self.samplers[name] = RequestSampler(name, config, self.channel)
            traffic.observe(name, self.samplers[name])
            self.channel.start()
            logger.info("model %s: %g %% of its requests are monitored", name, config.share)
        elif sampler is not None and config:
            sampler.config = config
            self._announce()

    def _announce(self) -> None:
        """Tell the process what has changed in the monitored versions.

        This is called after each change of versions and of observers of requests.
        """
        registry, directory = self.registry, self.registry.state.directory
        ended = set(self._announced)
        for name, sampler in self.samplers.items():
            config, model = sampler.config, registry.models.get(name)
            versions = model.versions if model is not None else {}
            recording = configured_part(registry, name, "record", RecordingConfig)
            recordings = directory and str((directory / "recordings" / name).absolute())
            for number, version in versions.items():
                announced, _ = self._announced.get((name, number), ({}, b""))
                head = {
                    "kind": "version",
                    "model": name,
                    "version": number,
                    "config": config.model_dump(mode="json"),
                    "fields": version.monitor_fields,
                    "signature": version.signature and version.signature.input,
                    "registered": announced.get("registered") or time.time(),
                    "recording": recording is not None,
                    "recordings": recordings,
                }
                ended.discard((name, number))
                if announced != head:
                    frame = encode_frame(head, _read_baseline(version))
                    self._announced[name, number] = head, frame
                    self.channel.send(frame, can_drop=False)
        for name, number in ended:
            del self._announced[name, number]
            self.states.pop((name, number), None)
            frame = encode_frame({"kind": "end", "model": name, "version": number})
            self.channel.send(frame, can_drop=False)

    def _on_states(self, states: list[VersionState]) -> None:
        by_key = {(state.model, state.version): state for state in states}
        self.states = {key: state for key, state in by_key.items() if key in self._announced}


def _read_baseline(version: ModelVersion) -> bytes:
    """Return the file of a baseline; the process refuses one that is too large."""
    try:
        with (version.archive.directory / MEMBER).open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except OSError:
        return b""
