"""The monitored models of this server, and the samples of their requests."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from pydantic import ValidationError

from tsx_archiver.monitor.baseline import MAX_BYTES, MEMBER
from tsx_archiver.monitor.config import HEADER_PREFIX, MonitorConfig
from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.core.scheduling.job import Job, ObservedAnswer, ObservedJob
from tsx_runtime.errors import Conflict
from tsx_runtime.features.monitor.channel import MonitorChannel
from tsx_runtime.features.monitor.messages import VersionState, encode_frame
from tsx_runtime.features.monitor.settings import (
    POSTGRES,
    MonitorModelSettings,
    MonitorSettings,
    store_location,
)
from tsx_runtime.shared.redaction import is_secret_header
from tsx_runtime.shared.safe_path import run_module
from tsx_runtime.wire import TENSORS_HEAD, Parts, content_type_of

COMMAND = (sys.executable, *run_module("tsx_runtime.features.monitor.process.main"))
STORE_VARIABLE = "TSX_MONITOR_STORE"  # Other users can read the arguments of a process.
MAX_SAMPLE_BYTES = 4 << 20  # limit of a sample's body, and of its answer
EXPLANATION = b"\r\nexplain: True\r\n"  # the header of a request whose answer is an explanation

logger = logging.getLogger("tsx.monitor")


class RequestSampler:
    """Takes samples of one model's requests; the splitter calls it."""

    def __init__(self, config: MonitorConfig, channel: MonitorChannel) -> None:
        self.config = config
        self.header = header_pattern(())
        self.dropped: Counter[str] = Counter()
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
        body = b"".join(job.body.pieces) if isinstance(job.body, Parts) else bytes(job.body)
        head = {
            "kind": "sample",
            "model": version.name,
            "version": version.version,
            "request_id": job.request_id.decode("latin-1"),
            "at": time.time() - seconds,
            "seconds": seconds,
            "status": answer.status,
            "headers": {
                name.decode("latin-1").lower(): value.decode("latin-1")
                for name, value in self.header.findall(job.meta)
            },
            "answer_type": content_type_of(answer.headers),
            "sizes": (len(body), len(answer.body)),
        }
        if reason := self._channel.send(encode_frame(head, body, answer.body)):
            self.dropped[reason] += 1


class MonitorManager:
    """The monitored models of a server; used only in the event loop."""

    def __init__(self, registry: Registry) -> None:
        settings = MonitorSettings.of(registry.settings)
        store = store_location(settings.monitor_store, registry.state.directory)
        self.registry = registry
        self.samplers: dict[str, RequestSampler] = {}  # by the names of the monitored models
        self.states: dict[tuple[str, str], VersionState] = {}  # by model and version
        self._is_enabled = False
        # What the process was told about each version, without and with the baseline.
        self._announced: dict[tuple[str, str], tuple[dict[str, Any], bytes]] = {}
        self._registered: WeakKeyDictionary[ModelVersion, float] = WeakKeyDictionary()
        self._has_store = store is not None
        self._file = None if store is None or store.startswith(POSTGRES) else Path(store)
        command = [*COMMAND, "--retention", str(settings.monitor_retention)]
        if settings.monitor_events_url is not None:
            command += ["--events", settings.monitor_events_url]
        self.channel = MonitorChannel(
            command,
            os.environ | ({} if store is None else {STORE_VARIABLE: store}),
            None if self._file is None else self._file.with_name(f"{self._file.name}.lock"),
            lambda: [frame for _, frame in self._announced.values()],
            self._on_states,
        )

    def enable(self) -> None:
        """Monitor models from now on; a function on Lambda and commands never do."""
        if not self._is_enabled:
            self._is_enabled = True
            self.registry.traffic_manager.on_traffic.append(self._update)
            self.registry.on_readiness.append(self._announce_all)
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
        """Monitor a model, or with None do not; this is saved.

        Raises:
            ModelNotFound: No model has this name.
        """
        self.registry.find(name)
        saved = False if config is None else config.model_dump(mode="json")
        self.registry.state.save(name, monitor=saved)
        self._update(name)

    def check_store(self, name: str) -> None:
        """Check that there may be stored answers of a model.

        Raises:
            ModelNotFound: No model has this name.
            Conflict: There are none.
        """
        sampler = self.find(name)
        if not self._has_store:
            raise Conflict(
                "There is no place for answers. Set monitor_store, or set state_dir to a directory."
            )
        if sampler is None and self._file is not None and not self._file.exists():
            raise Conflict(
                f"Model {name} is not monitored, so no answers are stored. Turn it on: tsx models"
                f" monitor {name}, or PUT /models/{name}/monitor"
            )

    def end(self) -> asyncio.Task[None]:
        """Stop monitoring; the task ends once the process has stored everything."""
        self._is_enabled = False
        for name in list(self.samplers):
            self._stop(name)
        return asyncio.get_running_loop().create_task(self.channel.close())

    def _config_of(self, name: str) -> MonitorConfig | None:
        model = self.registry.models.get(name)
        if model is None or not self._is_enabled:
            return None
        saved = self.registry.state.load(name).get("monitor")
        if saved is not None:
            try:
                return MonitorConfig.model_validate(saved) if saved else None
            except ValidationError as error:
                logger.warning("model %s: its saved monitoring cannot be used: %s", name, error)
        setting = MonitorModelSettings.of(self.registry.settings.models, name).monitor
        if setting is not None:
            return setting or None
        versions = [model.versions[model.default], *model.versions.values()]
        return next(filter(None, (version.config.monitor for version in versions)), None)

    def _update(self, name: str) -> None:
        """Start or stop to monitor a model after it, its configuration or its versions changed."""
        config, sampler = self._config_of(name), self.samplers.get(name)
        if sampler is not None and sampler.config != config:
            self._stop(name)
        if config is not None and name not in self.samplers:
            sampler = self.samplers[name] = RequestSampler(config, self.channel)
            self.registry.traffic_manager.observe(name, sampler)
            self.channel.start()
            logger.info("model %s: %g %% of its requests are monitored", name, config.share)
        self._announce(name)

    def _stop(self, name: str) -> None:
        self.registry.traffic_manager.unobserve(name, self.samplers.pop(name))
        self._announce(name)

    def _announce_all(self) -> None:
        for name in self.samplers:
            self._announce(name)

    def _announce(self, name: str) -> None:
        """Tell the process what has changed in the versions of a model."""
        sampler, model = self.samplers.get(name), self.registry.models.get(name)
        versions = model.versions if sampler is not None and model is not None else {}
        for key in [key for key in self._announced if key[0] == name and key[1] not in versions]:
            del self._announced[key]
            self.states.pop(key, None)
            self.channel.send(encode_frame({"kind": "end", "model": name, "version": key[1]}))
        if sampler is None:
            return
        config, state = sampler.config, self.registry.state
        fields = [path for version in versions.values() for path in version.monitor_fields]
        sampler.header = header_pattern(
            [*fields, *(config.fields or ()), *config.groups, config.key or ""]
        )
        recordings = state.directory and str((state.directory / "recordings" / name).absolute())
        for number, version in versions.items():
            head = {
                "kind": "version",
                "model": name,
                "version": number,
                "config": config.model_dump(mode="json"),
                "fields": version.monitor_fields,
                "signature": version.signature and version.signature.input,
                "registered": self._registered.setdefault(version, time.time()),
                "recording": self._is_recorded(name),
                "recordings": recordings,
            }
            if self._announced.get((name, number), ({}, b""))[0] != head:
                frame = encode_frame(head, _read_baseline(version))
                if self.channel.send(frame) != "slow":
                    self._announced[name, number] = head, frame

    def _is_recorded(self, name: str) -> bool:
        """Tell whether requests are recorded, by the API, the settings, or else an archive."""
        saved = self.registry.state.load(name).get("record")
        if saved is not None:
            return bool(saved)
        versions = self.registry.models[name].versions.values()
        setting = getattr(self.registry.settings.models.get(name), "record", None)
        return setting is not None or any(version.config.record for version in versions)

    def _on_states(self, states: list[VersionState]) -> None:
        by_key = {(state.model, state.version): state for state in states}
        self.states = {key: state for key, state in by_key.items() if key in self._announced}
        self._announce_all()  # A recording may have begun or ended.


def header_pattern(paths: Iterable[str]) -> re.Pattern[bytes]:
    """Return the pattern of the headers that a sample needs, in the meta of a request.

    An archive may name any header; those with credentials are left out.
    """
    names = {b"content-type", TENSORS_HEAD}
    for path in paths:
        name = path.removeprefix(HEADER_PREFIX)
        if name != path and not is_secret_header(name):
            names.add(name.encode("latin-1", "replace"))
    return re.compile(
        rb"\r\n(%b): ([^\r\n]*)" % b"|".join(sorted(map(re.escape, names))), re.IGNORECASE
    )


def _read_baseline(version: ModelVersion) -> bytes:
    """Return the file of a baseline; the process refuses one that is too large."""
    try:
        with (version.archive.directory / MEMBER).open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except OSError:
        return b""
