"""The feature `environments`, which gives models packages of their own."""

from __future__ import annotations

import asyncio
import logging

from tsx_archiver import OpenArchive
from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.models.packages import INSTALL_HINT
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.core.workers.launch import ModelEnvironment
from tsx_runtime.errors import LoadFailed
from tsx_runtime.feature import Feature
from tsx_runtime.features.environments.settings import EnvironmentsSettings
from tsx_runtime.features.environments.venvs import Environments

logger = logging.getLogger("tsx.registry")


class EnvironmentsFeature(Feature):
    def __init__(self, registry: Registry) -> None:
        super().__init__(registry)
        settings = EnvironmentsSettings.of(registry.settings)
        self._installs = settings.install_py_dep_per_model
        self._environments = Environments(
            registry.settings.cache_dir,
            timeout=settings.install_timeout,
            age=registry.settings.max_cache_age,
            hidden=registry.resources.starter.hidden,
        )

    async def open_environment(
        self, model: str, archive: OpenArchive, url: str
    ) -> ModelEnvironment | None:
        requirements = archive.manifest.requirements_file
        if requirements and not self._installs:
            text = (
                "%s: the packages of %s are not installed, since install_py_dep_per_model is false"
            )
            logger.warning(text, url, requirements)
            requirements = None
        if requirements:
            for feature in self.registry.features:
                feature.check_installation(model, requirements)
        use_venv = bool(archive.config.use_venv)
        if not requirements and not use_venv:
            return None
        return await self._environments.open(
            model, archive.directory, requirements, use_venv=use_venv
        )

    def explain(self, version: ModelVersion, error: LoadFailed) -> None:
        requirements = version.archive.manifest.requirements_file
        if requirements and not self._installs and "No module named" in error.message:
            error.message += f" {INSTALL_HINT}"

    async def close(self) -> None:
        await asyncio.to_thread(self._environments.close)
