"""Registration of a URL, a path or an open archive as a version with workers.

After a failure, everything is as before.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from tsx_archiver import ArchiveError, ArchiveNotFound, OpenArchive, is_model_name, open_archive
from tsx_runtime.core.models.handlers import chosen_handler
from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.models.packages import check_packages
from tsx_runtime.core.models.plan import (
    NO_DEFAULTS,
    NO_VERSION_SETTINGS,
    RegisterOrder,
    VersionPlan,
    has_workers,
    plan,
    with_model_settings,
)
from tsx_runtime.core.models.resources import ServerResources
from tsx_runtime.core.registry.downloads import Downloads
from tsx_runtime.core.registry.model_table import ModelTable
from tsx_runtime.core.registry.replacement import Replacer, inherit_settings
from tsx_runtime.core.workers.launch import ModelEnvironment
from tsx_runtime.errors import BadRequest, Conflict, LoadFailed, ModelNotFound
from tsx_runtime.plugins import BatchPolicy
from tsx_runtime.shared.suggestions import suggestion
from tsx_runtime.sources import Trust, in_store, is_url, store_hint

# Versions with these names would clash with paths below /models/NAME/.
RESERVED_VERSIONS = frozenset({"labels", "record", "rollback", "rollout", "shadow", "traffic"})

logger = logging.getLogger("tsx.registry")


class Registrar:
    """Registers versions; `Registry.register` documents the errors."""

    def __init__(self, table: ModelTable, host: ServerResources, downloads: Downloads) -> None:
        self._table = table
        self._settings = host.settings
        self._host = host
        self._downloads = downloads
        self._replacer = Replacer(table, host.background)
        # Archives that are being opened: the step, the bytes so far, and all bytes.
        self.opening: dict[Path, tuple[str, int, int]] = {}

    async def from_url(
        self, order: RegisterOrder, *, wait: bool = True, trust: Trust = Trust.CLIENT
    ) -> ModelVersion:
        """Register an archive of the model store, or download it there from a URL first."""
        if not is_url(order.url):
            return await self.from_path(self._in_store(order.url), order, wait=wait)
        opened = await self._open_by_feature(order, trust)
        if opened is not None:
            return await self.from_archive(*opened, wait=wait)
        local_file = await self._downloads.local_file(order, trust)
        if local_file is not None:
            return await self.from_path(
                local_file, replace(order, url=order.url.partition("#")[0]), wait=wait
            )
        downloaded_file = await self._downloads.fetch(order, trust)
        try:
            version = await self.from_path(downloaded_file, order, wait=wait)
        except BaseException:
            downloaded_file.unlink(missing_ok=True)
            raise
        self._downloads.assign(version, downloaded_file)
        return version

    async def _open_by_feature(
        self, order: RegisterOrder, trust: Trust
    ) -> tuple[OpenArchive, RegisterOrder] | None:
        url_path = Path(order.url)

        def set_progress(done_bytes: int, total_bytes: int) -> None:
            self.opening[url_path] = "downloading", done_bytes, total_bytes

        try:
            for feature in self._host.features:
                opened = await feature.open_url(order, trust, self._downloads, set_progress)
                if opened is not None:
                    return opened
        finally:
            self.opening.pop(url_path, None)
        return None

    async def from_path(
        self, path: Path, order: RegisterOrder, *, wait: bool = True
    ) -> ModelVersion:
        """Register an archive or directory at any path, for example from the command line."""
        if order.loaded_at_startup:
            self._downloads.serve(path)
        try:
            archive = await asyncio.to_thread(self._open, path)
        except ArchiveNotFound as error:
            hint = "" if order.loaded_at_startup else f" {store_hint(self._settings.model_store)}"
            raise ModelNotFound(f"Model not found at: {order.url}. {error}{hint}") from error
        except ArchiveError as error:
            raise BadRequest(str(error)) from error
        return await self.from_archive(archive, order, wait=wait)

    async def from_archive(
        self, archive: OpenArchive, order: RegisterOrder, *, wait: bool = True
    ) -> ModelVersion:
        """Register an open archive; it is closed with its version, or after a failure."""
        version, old = await self._prepare(archive, order)
        for problem in archive.problems:
            logger.warning("%s: %s", order.url, problem)
        if version.benchmark_record is not None:
            logger.info("%s %s: %s", version.name, version.version, version.benchmark_record)
        starting = version.scale(version.min_workers, version.max_workers)
        if old is not None:
            starting = self._replacer.replace_version(old, version, starting)
        if not wait:
            self._host.background.load(starting)
            return version
        try:
            await starting
        except BaseException as error:  # The cancellation by a client that leaves is one.
            await self._table.discard(version)
            if isinstance(error, LoadFailed):
                error.model, error.version = version.name, version.version
                for feature in self._host.features:
                    feature.explain(version, error)
            raise
        return version

    async def _prepare(
        self, archive: OpenArchive, order: RegisterOrder
    ) -> tuple[ModelVersion, ModelVersion | None]:
        """Add a version without workers to the table; return it and the one to replace, if any."""
        name, number = (
            order.model_name or archive.manifest.model_name,
            order.version or archive.manifest.version,
        )
        environment, old = None, None
        try:
            if order.replaces:
                old = self._replacer.begin(name, number)
            self._check(name, number, old)  # early, since packages may take minutes
            for feature in self._host.features:
                environment = environment or await feature.open_environment(
                    name, archive, order.url
                )
            self._check(name, number, old)  # Another registration may have come meanwhile.
            version = self._version(name, number, archive, order, old, environment)
            self._table.add(version, is_replacement=old is not None)
        except BaseException:
            archive.close()
            if environment is not None:
                environment.close()
            if old is not None:
                self._replacer.end(old)
            raise
        return version, old

    def _check(self, name: str, number: str, old: ModelVersion | None) -> None:
        for kind, value in (("model name", name), ("version", number)):
            if not is_model_name(value):
                raise BadRequest(
                    f"The {kind} {value!r} cannot be used: letters, digits, '_', '-' and '.' only,"
                    " a letter or digit first."
                )
        if number in RESERVED_VERSIONS:
            raise BadRequest(
                f"The version {number!r} cannot be used: it is a reserved word in the paths of the"
                " management API."
            )
        if self._table.is_taken(name, number) and (old is None or old.version != number):
            raise Conflict(f"Model version {number} is already registered for model {name}")

    def _version(
        self,
        name: str,
        number: str,
        archive: OpenArchive,
        order: RegisterOrder,
        old: ModelVersion | None,
        environment: ModelEnvironment | None,
    ) -> ModelVersion:
        if order.archive_first and has_workers(archive.config):
            order = replace(order, initial_workers=None, max_workers=None)
        is_scaled_by_client = order.initial_workers is not None or (
            old is not None and old.is_scaled_by_client
        )
        if old is not None:
            order = inherit_settings(old, order, archive.config)
        order = with_model_settings(order, self._settings.models.get(name))
        version_settings = self._settings.model_versions.get(name, {}).get(
            number, NO_VERSION_SETTINGS
        )
        handler = chosen_handler(archive, order.handler, self._settings.default_service_handler)
        all_defaults = (
            feature.handler_defaults(name, handler, archive) for feature in self._host.features
        )
        defaults = next(filter(None, all_defaults), NO_DEFAULTS)
        if order.default_workers is None:
            order = replace(order, default_workers=defaults.workers)
        if environment is None:
            check_packages(archive, handler, defaults.package)
        config = (
            replace(archive.config, async_communication=True)
            if defaults.is_async
            else archive.config
        )
        version_plan = plan(
            order, config, self._settings, self._host.gpus, version_settings, defaults
        )
        version_plan = _with_policy(
            version_plan, name, archive.config.batch_policy, self._host.plugins.batch_policies
        )
        version = ModelVersion(name, number, archive, order, version_plan, self._host, environment)
        if old is not None:  # Inherited numbers of workers are not a client's.
            version.is_scaled_by_client = is_scaled_by_client
        return version

    def _open(self, path: Path) -> OpenArchive:
        """Open an archive; this blocks."""

        def set_progress(step: str, done: int, total: int) -> None:
            self.opening[path] = step, done, total

        try:
            archive = open_archive(
                path,
                cache=self._settings.archive_cache(),
                limits=self._settings.archive_limits(),
                progress=set_progress,
            )
        finally:
            self.opening.pop(path, None)
        # Parsing a large configuration takes half a second: do it here, not in the event loop.
        _ = archive.config.text
        return archive

    def _in_store(self, url: str) -> Path:
        if not url:
            raise BadRequest("Parameter url is required.")
        return in_store(url, self._settings.model_store)


def _with_policy(
    version_plan: VersionPlan,
    model: str,
    policy_name: str | None,
    policies: Mapping[str, BatchPolicy],
) -> VersionPlan:
    """Return the plan with the batch policy that model-config.yaml names, if a plugin has it."""
    if policy_name is None or policy_name == "wait":
        return version_plan
    policy = policies.get(policy_name)
    if policy is None:
        hint = suggestion(policy_name, ["wait", *policies])
        logger.warning(
            "%s: batchPolicy %r is neither 'wait' nor a plugin that is loaded%s; it is served"
            " without a batch policy",
            model,
            policy_name,
            hint,
        )
        return version_plan
    return replace(version_plan, wait=True, policy=policy)
