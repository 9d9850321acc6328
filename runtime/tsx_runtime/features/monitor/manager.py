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
from typing import Any, NamedTuple

from pydantic import ValidationError

from tsx_archiver.monitor.baseline import MAX_BYTES, MEMBER
from tsx_archiver.monitor.config import HEADER_PREFIX, MonitorConfig
from tsx_runtime.core.hidden_credentials import hidden_variables
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
from tsx_runtime.shared.safe_path import run_module
from tsx_runtime.wire import TENSORS_HEAD, Parts, content_type_of

MAX_SAMPLE_BYTES = 4 << 20  # limit of a sample's body, and of its answer
STORE_VARIABLE = "TSX_MONITOR_STORE"  # Other users can read the arguments of a process.
PACKAGES = ("scipy", "sqlalchemy")
INSTALL = "needs the extra monitor, which is not installed: pip install 'tsx-serve[monitor]'"
NO_STORE = "There is no place for answers. Set monitor_store, or set state_dir to a directory."
EXPLANATION = b"\r\nexplain: True\r\n"  # the header of a request whose answer is an explanation

COMMAND = (sys.executable, *run_module("tsx_runtime.features.monitor.process.main"))

logger = logging.getLogger("tsx.monitor")


class Announcement(NamedTuple):
    """What the monitor process was told about a version."""

    version: ModelVersion
    head: dict[str, Any]
    baseline: bytes


class RequestSampler:
    """Takes samples of one model's requests; the splitter calls it."""

    def __init__(self, config: MonitorConfig, channel: MonitorChannel) -> None:
        self.config = config
        self.dropped: Counter[str] = Counter()
        self._channel = channel
        self._header = re.compile(b"")
        self.set_fields(())

    def set_fields(self, paths: Iterable[str]) -> None:
        """Send the headers that the configuration or these paths name, and the content type."""
        config = self.config
        paths = [*paths, *(config.fields or ()), *config.groups, config.key or ""]
        names = {
            path.removeprefix(HEADER_PREFIX).encode("latin-1", "replace")
            for path in paths
            if path.startswith(HEADER_PREFIX)
        }
        names |= {b"content-type", TENSORS_HEAD}
        self._header = re.compile(
            rb"\r\n(%b): ([^\r\n]*)" % b"|".join(sorted(map(re.escape, names))), re.IGNORECASE
        )

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
                for name, value in self._header.findall(job.meta)
            },
            "answer_type": content_type_of(answer.headers),
            "sizes": (len(body), len(answer.body)),
        }
        reason = self._channel.send(encode_frame(head, body, answer.body))
        if reason is not None:
            self.dropped[reason] += 1


class MonitorManager:
    """The monitored models of a server; used only in the event loop."""

    def __init__(self, registry: Registry) -> None:
        settings = MonitorSettings.of(registry.settings)
        self._registry = registry
        self._is_enabled = False
        self.samplers: dict[str, RequestSampler] = {}
        self._announced: dict[tuple[str, str], Announcement] = {}
        # By the name and number of a version.
        self.states: dict[tuple[str, str], VersionState] = {}
        self.store = store = store_location(settings.monitor_store, registry.state.directory)
        hidden = hidden_variables(registry.settings, os.environ)
        variables = {
            name: value
            for name, value in os.environ.items()
            if name not in hidden or name.startswith("PG")  # such as PGPASSWORD
        }
        command = [*COMMAND, "--retention", str(settings.monitor_retention)]
        if settings.monitor_events_url is not None:
            command += ["--events", settings.monitor_events_url]
        self._file = None if store is None or store.startswith(POSTGRES) else Path(store)
        self.channel = MonitorChannel(
            command,
            variables | ({} if store is None else {STORE_VARIABLE: store}),
            None if self._file is None else self._file.with_name(f"{self._file.name}.lock"),
            lambda: [_frame(announcement) for announcement in self._announced.values()],
            self._on_states,
        )

    def enable(self) -> None:
        """Monitor models from now on; a function on Lambda and commands never do."""
        if not self._is_enabled:
            self._is_enabled = True
            self._registry.traffic_manager.on_traffic.append(self._update)
            self._registry.on_readiness.append(self._announce_all)
            for name in list(self._registry.models):
                self._update(name)

    def find(self, name: str) -> RequestSampler | None:
        """Return the sampler of a model, or None if it is not monitored.

        Raises:
            ModelNotFound: No model has this name.
        """
        self._registry.find(name)
        return self.samplers.get(name)

    def set(self, name: str, config: MonitorConfig | None) -> None:
        """Monitor a model, or with None do not; this is saved.

        Raises:
            ModelNotFound: No model has this name.
            Conflict: The server has no place for the answers.
        """
        self._registry.find(name)
        if config is not None and self.store is None:
            raise Conflict(NO_STORE)
        saved = False if config is None else config.model_dump(mode="json")
        self._registry.state.save(name, monitor=saved)
        self._update(name)

    def check_store(self, name: str) -> None:
        """Check that there may be answers of a model that clients can give feedback on.

        Raises:
            ModelNotFound: No model has this name.
            Conflict: There are none.
        """
        sampler = self.find(name)
        if self.store is None:
            raise Conflict(NO_STORE)
        if sampler is None and self._file is not None and not self._file.exists():
            raise Conflict(
                f"Model {name} is not monitored, so feedback has no answers to join. Turn it on:"
                f" tsx models monitor {name}, or PUT /models/{name}/monitor"
            )

    def version_of(self, name: str, version: str | None) -> str:
        """Return the number of a version or label, or of the default version.

        Raises:
            ModelNotFound, ModelVersionNotFound: It does not exist.
        """
        return self._registry.find(name, version).version

    def hand_over(self) -> asyncio.Task[None]:
        """Stop monitoring, because another server replaces this one and its monitor process."""
        self._is_enabled = False
        for name in list(self.samplers):
            self._stop(name)
        return asyncio.get_running_loop().create_task(self.channel.close())

    def _config_of(self, name: str) -> MonitorConfig | None:
        model = self._registry.models.get(name)
        if model is None:
            return None
        saved = self._registry.state.load(name).get("monitor")
        if saved is False:
            return None
        if saved is not None:
            try:
                return MonitorConfig.model_validate(saved)
            except ValidationError as error:
                logger.warning("model %s: its saved monitoring cannot be used: %s", name, error)
        setting = MonitorModelSettings.of(self._registry.settings.models, name).monitor
        if setting is not None:
            return setting or None
        versions = [model.versions[model.default], *model.versions.values()]
        return next(filter(None, (version.config.monitor for version in versions)), None)

    def _update(self, name: str) -> None:
        """Start or stop to monitor a model after it, its configuration or its versions changed."""
        config = self._config_of(name) if self._is_enabled else None
        if config is not None and self.store is None:
            logger.warning("model %s is not monitored: %s", name, NO_STORE)
            config = None
        sampler = self.samplers.get(name)
        if sampler is not None and sampler.config != config:
            self._stop(name)
        if config is None:
            return
        if name not in self.samplers:
            sampler = self.samplers[name] = RequestSampler(config, self.channel)
            self._registry.traffic_manager.observe(name, sampler)
            self.channel.start()
            logger.info("model %s: %g %% of its requests are monitored", name, config.share)
        self._announce(name)

    def _stop(self, name: str) -> None:
        self._registry.traffic_manager.unobserve(name, self.samplers.pop(name))
        self._announce(name)

    def _announce_all(self) -> None:
        for name in list(self.samplers):
            self._announce(name)

    def _announce(self, name: str) -> None:
        """Tell the process what has changed in the versions of a model."""
        sampler, model = self.samplers.get(name), self._registry.models.get(name)
        versions = model.versions if model is not None and sampler is not None else {}
        for key in [key for key in self._announced if key[0] == name and key[1] not in versions]:
            del self._announced[key]
            self.states.pop(key, None)
            end = {"kind": "end", "model": name, "version": key[1]}
            self.channel.tell(encode_frame(end))
        if sampler is None:
            return
        sampler.set_fields(
            [path for version in versions.values() for path in version.monitor_fields]
        )
        for number, version in versions.items():
            old = self._announced.get((name, number))
            is_new = old is None or old.version is not version
            head = {
                "kind": "version",
                "model": name,
                "version": number,
                "config": sampler.config.model_dump(mode="json"),
                "fields": version.monitor_fields,
                "signature": None if version.signature is None else version.signature.input,
                "registered": time.time() if old is None or is_new else old.head["registered"],
                **self._recording(name),
            }
            if old is None or is_new or old.head != head:
                baseline = _read_baseline(version) if old is None or is_new else old.baseline
                announcement = self._announced[name, number] = Announcement(version, head, baseline)
                self.channel.tell(_frame(announcement))

    def _recording(self, name: str) -> dict[str, Any]:
        state = self._registry.state
        directory = None if state.directory is None else state.directory / "recordings" / name
        return {
            "recording": "record" in state.load(name),
            "recordings": None if directory is None else str(directory.absolute()),
        }

    def _on_states(self, states: list[VersionState]) -> None:
        self.states = {
            (state.model, state.version): state
            for state in states
            if (state.model, state.version) in self._announced
        }
        # A recording may have begun or ended.
        self._announce_all()


def _frame(announcement: Announcement) -> bytes:
    return encode_frame(announcement.head, announcement.baseline)


def _read_baseline(version: ModelVersion) -> bytes:
    """Return the file of a baseline; the process refuses one that is too large."""
    try:
        with (version.archive.directory / MEMBER).open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return b""
    except OSError as error:
        logger.warning("%s: its baseline cannot be read: %s", version.label, error.strerror)
        return b""
