"""Snapshots: the registered models and their settings, in files from which the next server can
start (contract 4.4).
"""

from __future__ import annotations

import errno
import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta
from pathlib import Path

from tsx_archiver.metadata.model_limits import SAVED
from tsx_archiver.storage.atomic_file import write_atomically
from tsx_archiver.storage.private_directory import check_file, private_directory
from tsx_runtime.core.models.model import Model, ModelVersion
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.errors import SettingError
from tsx_runtime.settings.properties import format_properties
from tsx_runtime.settings.torchserve import SNAPSHOT, Versions, VersionSettings
from tsx_runtime.settings.torchserve import Snapshot as Saved
from tsx_runtime.sources import is_hub

KINDS = ("startup", "snapshot", "shutdown")
STAMP = "%Y%m%d%H%M%S%f"  # a file's name begins with it, without the microseconds
KEPT = 100  # of the kind `snapshot`, of which every change makes one

logger = logging.getLogger("tsx.snapshots")


class Snapshots:
    """Writes snapshots into `directory`, in TorchServe's format.

    `base` is the server's configuration.
    """

    def __init__(
        self,
        directory: Path,
        base: Mapping[str, str],
        store: Path | None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._directory = directory
        self._base = {key: text for key, text in base.items() if key != SNAPSHOT}
        self._store = store
        self._clock = clock

    def begin(self, registry: Registry) -> None:
        """From now on each change writes a snapshot."""
        self.write("startup", registry)
        registry.on_managed.append(lambda: self.write("snapshot", registry))

    def end(self, registry: Registry) -> None:
        """Before anything is removed."""
        registry.on_managed.clear()
        self.write("shutdown", registry)

    def write(self, kind: str, registry: Registry) -> None:
        """A failure is logged and has no other effect: the change itself stays."""
        created = int(self._clock() * 1000)
        try:
            private_directory(self._directory)
            path = self._directory / f"{self._time().strftime(STAMP)[:-3]}-{kind}.cfg"
            described = describe(
                registry.models.values(), path.name, created, self._store, _unloaded(registry)
            )
            text = format_properties(self._base | {SNAPSHOT: described})
            with write_atomically(
                path, mode=0o600, durable=False
            ) as file:  # only this user's: a configuration may hold passwords
                file.write(f"#Saving snapshot\n{text}".encode("ascii"))
            for old in _in_order(self._directory, ["snapshot"])[:-KEPT]:
                old.unlink()
        except (OSError, ValueError) as error:  # ValueError: a name with a date that does not exist
            logger.error("no snapshot was written into %s: %s", self._directory, error)

    def _time(self) -> datetime:
        """Later than that of any other, also of one in the same millisecond, or when the clock went
        back.
        """
        now = datetime.fromtimestamp(self._clock())
        last = last_snapshot(self._directory)
        return (
            now
            if last is None
            else max(
                now,
                datetime.strptime(last.name.partition("-")[0], STAMP) + timedelta(milliseconds=1),
            )
        )


def last_snapshot(directory: Path) -> Path | None:
    """The last by its name, which begins with its time, by this server or by TorchServe."""
    return next(iter(reversed(_in_order(directory, KINDS))), None)


def snapshot_to_start_from(directory: Path) -> Path | None:
    """Return the last one.

    Raises:
        SettingError: Another user could have written it (it names models, whose code is run), or it
        is damaged.
    """
    last = last_snapshot(directory)
    if last is not None:
        try:
            check_file(last)
            if SNAPSHOT.encode() not in last.read_bytes():
                raise OSError(errno.EINVAL, f"it has no {SNAPSHOT}, so its models would be lost")
        except OSError as error:
            advice = (
                "Remove it, start without snapshots (--ncs), or set LOG_LOCATION to a directory of"
                " your own"
            )
            raise SettingError(
                f"The last snapshot, {last}, is not used: {error.strerror}. {advice}"
            ) from error
    return last


def describe(
    models: Iterable[Model], name: str, created: int, store: Path | None, unloaded: Versions
) -> str:
    """Return the snapshot's text.

    Nodes of workflows are left out: their workflow registers them, and could not beside others of
    their names. `unloaded` is kept as it is, so that a file that is away for a while costs no
    model.
    """
    missing_defaults = {
        name
        for name, absent in unloaded.items()
        if any(version.default_version for version in absent.values())
    }
    versions = {
        model.name: {
            version.version: _saved(
                version,
                version.version == model.default and model.name not in missing_defaults,
                store,
            )
            for version in own
        }
        for model in models
        if (own := [version for version in model.versions.values() if not version.workflow])
    }
    for model_name, absent in unloaded.items():
        versions.setdefault(model_name, {}).update(absent)
    count = sum(map(len, versions.values()))
    saved = Saved(name=name, model_count=count, created=created, models=versions)
    return json.dumps(saved.model_dump(by_alias=True, exclude_none=True), indent=2)


def _unloaded(registry: Registry) -> Versions:
    """Return the settings of what could not be loaded, which keep a default version until another
    is chosen.
    """
    restored, versions = registry.settings.model_snapshot or Saved(), Versions()
    for name, number in registry.unloaded:
        saved, chosen = (
            restored.models[name][number],
            registry.state.load(name).get("default", number),
        )
        is_default = saved.default_version and chosen == number
        versions.setdefault(name, {})[number] = saved.model_copy(
            update={"default_version": is_default}
        )
    return versions


def _saved(version: ModelVersion, is_default: bool, store: Path | None) -> VersionSettings:
    return VersionSettings(
        default_version=is_default,
        mar_name=_place(version, store),
        min_workers=version.min_workers,
        max_workers=version.max_workers,
        runtime_type=version.runtime,
        slo=version.plan.slo,
        **{name: getattr(version.plan, name) for name in SAVED},
    )


def _place(version: ModelVersion, store: Path | None) -> str:
    """Where the next server finds it: a model of the Hub, a file of the model store, else its whole
    path.
    """
    if is_hub(version.url):
        return version.url
    source = version.archive.source.absolute()
    if store is not None and source.is_relative_to(store.absolute()):
        return source.relative_to(store.absolute()).as_posix()
    return str(source)


def _in_order(directory: Path, kinds: Iterable[str]) -> list[Path]:
    found = [path for kind in kinds for path in directory.glob(f"{'[0-9]' * 17}-{kind}.cfg")]
    return sorted(found, key=lambda path: path.name)
