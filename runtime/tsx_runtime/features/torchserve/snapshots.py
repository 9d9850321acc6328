"""Snapshots: files with the registered models and settings, from which the next server starts."""

from __future__ import annotations

import errno
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
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
TIME_FORMAT = "%Y%m%d%H%M%S%f"  # beginning of a file's name, without the last three digits
MAX_SNAPSHOTS = 100  # limit for files of the kind `snapshot`, which every change writes

logger = logging.getLogger("tsx.snapshots")


class Snapshots:
    """A writer of snapshots in TorchServe's format.

    Each snapshot also contains `base`, the server's configuration.
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

    @asynccontextmanager
    async def written(self, registry: Registry) -> AsyncIterator[None]:
        """Write snapshots while the context is open."""
        self.begin(registry)
        yield
        self.end(registry)

    def begin(self, registry: Registry) -> None:
        """Write a snapshot now and after each change."""
        self.write("startup", registry)
        registry.on_managed.append(lambda: self.write("snapshot", registry))

    def end(self, registry: Registry) -> None:
        """Write the last snapshot, before any model is removed."""
        registry.on_managed.clear()
        self.write("shutdown", registry)

    def write(self, kind: str, registry: Registry) -> None:
        """Write a snapshot; a failure is only logged, because the change itself succeeded."""
        created = int(self._clock() * 1000)
        try:
            private_directory(self._directory)
            path = self._directory / f"{self._time().strftime(TIME_FORMAT)[:-3]}-{kind}.cfg"
            snapshot = describe(
                registry.models.values(), path.name, created, self._store, _not_loaded(registry)
            )
            text = format_properties(self._base | {SNAPSHOT: snapshot})
            # Only this user can read the file, because a configuration may contain passwords.
            with write_atomically(path, mode=0o600, durable=False) as file:
                file.write(f"#Saving snapshot\n{text}".encode("ascii"))
            for old_snapshot in _sorted_files(self._directory, ["snapshot"])[:-MAX_SNAPSHOTS]:
                old_snapshot.unlink()
        except (OSError, ValueError) as error:  # The date in a file's name may be invalid.
            logger.error("no snapshot was written into %s: %s", self._directory, error)

    def _time(self) -> datetime:
        """Return a time that is later than the times of all other snapshots.

        The clock may have been set back, or the last snapshot may have the same millisecond.
        """
        now = datetime.fromtimestamp(self._clock())
        last_path = last_snapshot(self._directory)
        return (
            now
            if last_path is None
            else max(
                now,
                datetime.strptime(last_path.name.partition("-")[0], TIME_FORMAT)
                + timedelta(milliseconds=1),
            )
        )


def last_snapshot(directory: Path) -> Path | None:
    """Return the last snapshot in the order of names, which begin with the time."""
    return next(iter(reversed(_sorted_files(directory, KINDS))), None)


def snapshot_to_start_from(directory: Path) -> Path | None:
    """Return the last snapshot, or None.

    Raises:
        SettingError: The snapshot is damaged, or another user could have written it. That would
            be dangerous, because the code of its models is run.
    """
    last_path = last_snapshot(directory)
    if last_path is not None:
        try:
            check_file(last_path)
            if SNAPSHOT.encode() not in last_path.read_bytes():
                raise OSError(errno.EINVAL, f"it has no {SNAPSHOT}, so its models would be lost")
        except OSError as error:
            advice = (
                "Remove it, start without snapshots (--ncs), or set LOG_LOCATION to a directory of"
                " your own"
            )
            raise SettingError(
                f"The last snapshot, {last_path}, is not used: {error.strerror}. {advice}"
            ) from error
    return last_path


def describe(
    models: Iterable[Model], name: str, created: int, store: Path | None, not_loaded: Versions
) -> str:
    """Return the text of a snapshot.

    Nodes of workflows are omitted, because their workflow registers them. `not_loaded` is copied
    unchanged, so that a model is not lost if its file is missing for a while.
    """
    missing_defaults = {
        name
        for name, missing_versions in not_loaded.items()
        if any(version.default_version for version in missing_versions.values())
    }
    versions = {
        model.name: {
            version.version: _version_settings(
                version,
                version.version == model.default and model.name not in missing_defaults,
                store,
            )
            for version in archive_versions
        }
        for model in models
        if (
            archive_versions := [
                version for version in model.versions.values() if not version.workflow
            ]
        )
    }
    for model_name, missing_versions in not_loaded.items():
        versions.setdefault(model_name, {}).update(missing_versions)
    count = sum(map(len, versions.values()))
    saved = Saved(name=name, model_count=count, created=created, models=versions)
    return json.dumps(saved.model_dump(by_alias=True, exclude_none=True), indent=2)


def _not_loaded(registry: Registry) -> Versions:
    """Return the settings of versions that could not be loaded.

    If such a version was the default of its model, it stays so until another one is chosen.
    """
    restored, versions = registry.settings.model_snapshot or Saved(), Versions()
    for name, number in registry.not_loaded:
        saved = restored.models[name][number]
        default = registry.state.load(name).get("default", number)
        is_default = saved.default_version and default == number
        versions.setdefault(name, {})[number] = saved.model_copy(
            update={"default_version": is_default}
        )
    return versions


def _version_settings(
    version: ModelVersion, is_default: bool, store: Path | None
) -> VersionSettings:
    return VersionSettings(
        default_version=is_default,
        mar_name=_source_name(version, store),
        min_workers=version.min_workers,
        max_workers=version.max_workers,
        runtime_type=version.runtime,
        slo=version.plan.slo,
        **{name: getattr(version.plan, name) for name in SAVED},
    )


def _source_name(version: ModelVersion, store: Path | None) -> str:
    """Return the source from which the next server can load the version.

    It is a URL of the Hub, a path in the model store, or else an absolute path.
    """
    if is_hub(version.url):
        return version.url
    source = version.archive.source.absolute()
    if store is not None and source.is_relative_to(store.absolute()):
        return source.relative_to(store.absolute()).as_posix()
    return str(source)


def _sorted_files(directory: Path, kinds: Iterable[str]) -> list[Path]:
    paths = [path for kind in kinds for path in directory.glob(f"{'[0-9]' * 17}-{kind}.cfg")]
    return sorted(paths, key=lambda path: path.name)
